"""The service: each address, every kind of bad input, tokens, metrics; nothing of seeds or paths is told."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import re
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("fastapi", reason="the service is an optional extra")
pytest.importorskip("prometheus_client", reason="the service is an optional extra")
pytest.importorskip("httpx", reason="the client of the tests")

import diffpure as dp
from diffpure.cli import app as commands
from diffpure.cli.serve import read_token
from diffpure.errors import InputError
from diffpure.experiments.spec import ModelSpec
from diffpure.serve import load
from diffpure.serve.app import make_app
from diffpure.serve.limits import Limits, Refusal
from diffpure.serve.load import Even, Plan
from diffpure.serve.model import Model
from diffpure.serve.service import Service
from pictures import encoded, noisy, smooth
from serving import PNG, Slow, asked, posted, service
from test_files import damaged_files, odd_images

MEDIA = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "BMP": "image/bmp", "TIFF": "image/tiff",
         "GIF": "image/gif", "PPM": "image/x-portable-anymap"}  # fmt: skip
COLOUR = np.broadcast_to(np.array([51, 102, 204], np.uint8), (16, 16, 3))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def one_sentence(response) -> str:
    """The sentence of a refusal, which is all that it says."""
    (key,) = response.json()
    sentence = response.json()[key]
    assert key == "error"
    assert re.fullmatch(r"[^\n]+\.", sentence)
    assert not re.search(r"\. [A-Z]", sentence)
    return sentence


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


# -------------------------------------------------------------------------------------------------------- addresses


def test_a_purified_image_has_its_size_and_its_pixels():
    answer = posted(service(), "/purify", encoded(smooth(16, 16)))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png")
    np.testing.assert_array_equal(pixels(answer.content), smooth(16, 16))


def test_two_purifications_differ_and_larger_images_go_in_tiles():
    async def ask(client):
        data = encoded(smooth(40, 40))
        return [await client.post("/purify", content=data, headers=PNG) for _ in range(2)]

    one, two = (pixels(answer.content) for answer in asked(service(noisy()), ask))
    assert one.shape == (40, 40, 3)
    assert (one != two).any()  # seeds are the system's entropy


def test_every_kind_of_image_comes_back_as_the_format_it_was():
    files = {}
    for name, image in odd_images().items():
        out = io.BytesIO()
        image.save(out, {"jpg": "JPEG", "tif": "TIFF"}.get(name.rpartition(".")[2], name.rpartition(".")[2].upper()))
        files[name] = out.getvalue()

    async def ask(client):
        kinds = {name: MEDIA[Image.open(io.BytesIO(data)).format] for name, data in files.items()}
        return {
            name: await client.post("/purify", content=data, headers={"Content-Type": kinds[name]})
            for name, data in files.items()
        }

    for name, answer in asked(service(), ask).items():
        before, after = Image.open(io.BytesIO(files[name])), Image.open(io.BytesIO(answer.content))
        assert answer.status_code == 200, (name, answer.text)
        assert answer.headers["content-type"] == MEDIA[before.format]
        assert (after.format, after.size) == (before.format, before.size)
        grey = {"1": "L", "I;16": "L", "F": "L"}.get(before.mode, before.mode)
        assert after.mode == {"P": "P" if before.format == "GIF" else "RGB", "CMYK": "RGB"}.get(grey, grey), name


def test_a_classification_averages_logits_over_draws():
    answer = posted(service(names=("r", "g", "b"), draws=4), "/classify", encoded(COLOUR)).json()
    logits = torch.tensor([0.2, 0.4, 0.8], dtype=torch.float64)
    assert (answer["label"], answer["name"], answer["draws"], answer["agreement"]) == (2, "b", 4, 1.0)
    torch.testing.assert_close(torch.tensor(answer["logits"]).double(), logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(answer["probabilities"]).double(), logits.softmax(0), atol=1e-5, rtol=0)
    assert answer["spread"] == pytest.approx([0, 0, 0])


def test_a_defence_that_votes_decides_itself_and_no_draw_is_taken_twice():
    sizes = []

    def noted(images):
        sizes.append(len(images))
        return torch.stack([images.mean((1, 2, 3)) - 0.5, torch.zeros(len(images))], 1)

    model = dp.Defense(noisy(), noted, draws=3, rule="majority")
    answer = posted(Service(Model(model), Limits(decoders=1)), "/classify", encoded(COLOUR)).json()
    assert (answer["draws"], sizes) == (3, [3])
    assert max(answer["logits"]) >= np.log(2 / 4)  # two of three draws, and one vote more that is split
    assert answer["probabilities"][answer["label"]] == max(answer["probabilities"])
    assert sum(answer["probabilities"]) == pytest.approx(1)
    with pytest.raises(InputError, match="votes over 3 draws itself, so leave draws out, got 8"):
        Model(model, draws=8)
    table = ModelSpec(classifier="cifar10-resnet", score="cifar10-small", sampler="one-shot")
    for own, given, wanted in ((1, None, load.DRAWS), (1, 4, 4), (3, None, 3), (3, 3, 3)):
        assert Plan(model=replace(table, draws=own), draws=given).computer().draws == wanted


def test_the_spread_is_that_of_the_logits_of_the_draws():
    seen = []

    def noted(images):
        logits = images.mean((2, 3)) * 50
        seen.append(logits)
        return logits

    answer = posted(service(noisy(), noted, draws=6, limits={"batch": 4}), "/classify", encoded(COLOUR)).json()
    logits = torch.cat(seen)
    assert [len(part) for part in seen] == [4, 2]  # draws beyond a batch are computed in several
    assert answer["logits"] == pytest.approx(logits.mean(0).tolist(), rel=1e-5)
    assert answer["spread"] == pytest.approx(logits.std(0).tolist(), rel=1e-3)
    assert answer["agreement"] == pytest.approx((logits.argmax(1) == answer["label"]).float().mean().item())
    assert min(answer["spread"]) > 0
    assert answer["names"] == []  # no names are better than names of something else


def test_one_draw_has_no_spread_and_other_sizes_are_resized_and_cut():
    handler = service(draws=1, size=16)
    answer = posted(handler, "/classify", encoded(np.ascontiguousarray(COLOUR.repeat(3, 0).repeat(2, 1))))
    assert answer.json()["spread"] is None
    assert answer.json()["logits"] == pytest.approx([0.2, 0.4, 0.8], abs=1e-5)


def test_a_batch_answers_each_image_in_its_order():
    good, bad = base64.b64encode(encoded(COLOUR)).decode(), base64.b64encode(b"no image").decode()
    body = json.dumps({"images": [good, bad, "no base64!", good]}).encode()

    async def ask(client):
        headers = {"Content-Type": "application/json"}
        return [(await client.post(f"/{kind}/batch", content=body, headers=headers)).json()["results"]
                for kind in ("purify", "classify")]  # fmt: skip

    purified, classified = asked(service(), ask)
    for results in (purified, classified):
        assert [result.get("status") for result in results] == [None, 422, 422, None]
        assert results[2]["error"] == "The image is not in base64."
    assert purified[0]["type"] == "image/png"
    np.testing.assert_array_equal(pixels(base64.b64decode(purified[3]["image"])), COLOUR)
    assert classified[3]["label"] == 2


def test_health_and_metrics():
    async def ask(client):
        await client.post("/purify", content=encoded(), headers=PNG)
        await client.post("/purify", content=b"text", headers=PNG)
        await client.get("/nowhere")
        return await client.get("/healthz"), (await client.get("/metrics"))

    health, metrics = asked(service(), ask)
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert metrics.headers["content-type"].startswith("text/plain")
    for line in (
        'diffpure_requests_total{endpoint="/purify",status="200"} 1.0',
        'diffpure_requests_total{endpoint="/purify",status="422"} 1.0',
        'diffpure_requests_total{endpoint="other",status="404"} 1.0',
        'diffpure_images_total{kind="purify",status="200"} 1.0',
        'diffpure_batch_images_bucket{le="1.0"} 1.0',
        "diffpure_images_in_house 0.0",
        "diffpure_decoder_restarts 0.0",
    ):
        assert line in metrics.text.splitlines()


def test_a_service_whose_model_is_gone_is_not_healthy():
    async def ask(client):
        handler._batcher._task.cancel()
        await asyncio.sleep(0.01)
        return await client.get("/healthz")

    handler = service()
    assert asked(handler, ask).status_code == 503


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("name", sorted(name for name in damaged_files() if not name.endswith(("npz", "tar"))))
def test_damaged_files_are_refused_in_one_sentence(name):
    answer = posted(service(), "/purify", damaged_files()[name])
    assert answer.status_code == (400 if name == "empty.png" else 422)
    one_sentence(answer)


def test_what_is_refused_before_it_is_decoded():
    async def ask(client):
        return {
            "type": await client.post("/purify", content=b"x", headers={"Content-Type": "text/plain"}),
            "no type": await client.post("/purify", content=b"x"),
            "svg": await client.post("/purify", content=b"<svg/>", headers={"Content-Type": "image/svg+xml"}),
            "bytes": await client.post("/purify", content=bytes(2000), headers=PNG),
            "far more bytes": await client.post("/purify", content=bytes(9000), headers=PNG),
            "method": await client.get("/purify"),
            "address": await client.post("/purified", content=b"x", headers=PNG),
        }

    answers = asked(service(limits={"bytes": 1000}), ask)
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "type": 415, "no type": 415, "svg": 415, "bytes": 413, "far more bytes": 413, "method": 405, "address": 404,
    }  # fmt: skip
    for answer in answers.values():
        one_sentence(answer)


def test_an_image_is_refused_by_the_pixels_and_tiles_that_it_claims():
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", bytes(10))

    async def ask(client):
        tiles = encoded(smooth(64, 64))
        return [await client.post("/purify", content=data, headers=PNG) for data in (bomb, tiles)]

    pixels, tiles = asked(service(limits={"tiles": 20}), ask)
    assert pixels.status_code == tiles.status_code == 413
    assert one_sentence(pixels) == "The image says it is 3,600,000,000 pixels; at most 4,000,000 are accepted."
    assert re.fullmatch(r"An image of 64×64 pixels is \d+ tiles; at most 20 are accepted.", one_sentence(tiles))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b'\xff{"images": []}', 400),
        (b"[]", 422),
        (b'{"images": []}', 422),
        (b'{"images": [1]}', 422),
        (b'{"images": ["eA=="], "seed": 1}', 422),
        (b'{"images": ["a", "b", "c"]}', 422),
    ],
)
def test_batches_that_are_none(body, status):
    answer = posted(service(limits={"images": 2}), "/purify/batch", body, {"Content-Type": "application/json"})
    assert answer.status_code == status
    one_sentence(answer)


def test_a_bomb_takes_a_worker_and_not_the_service():
    # Four thousand pixels on each side of one value: a few kilobytes that unpack to 64 MB of floats.
    zeros = zlib.compressobj(9)
    rows = b"".join(zeros.compress(bytes(1 + 2 * 4000)) for _ in range(4000)) + zeros.flush()
    header = struct.pack(">IIBBBBB", 4000, 4000, 16, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")

    async def ask(client):
        refused = await client.post("/purify", content=bomb, headers=PNG)
        return refused, await client.post("/purify", content=encoded(), headers=PNG)

    limits = {"pixels": 64_000_000, "decoder_memory": 40 << 20}
    refused, after = asked(service(limits=limits), ask)
    assert (refused.status_code, after.status_code) == (422, 200)
    one_sentence(refused)


def test_a_worker_that_dies_is_replaced():
    async def ask(client):
        pool = handler._decoders
        pool._workers[0].process.kill()
        died = await client.post("/purify", content=encoded(), headers=PNG)
        return died, await client.post("/purify", content=encoded(), headers=PNG), pool.restarts

    handler = service()
    died, after, restarts = asked(handler, ask)
    assert (died.status_code, after.status_code, restarts) == (422, 200, 1)


def test_values_that_are_not_finite_fail_closed_and_alone():
    def poisoned(images):
        bright = images.amax((1, 2, 3), keepdim=True) == 1
        return torch.where(bright, torch.nan, images)

    async def ask(client):
        files = [encoded(COLOUR), encoded(np.full((16, 16, 3), 255, np.uint8)), encoded(COLOUR)]
        return await asyncio.gather(*(client.post("/purify", content=data, headers=PNG) for data in files))

    answers = asked(service(poisoned, limits={"wait": 0.3}), ask)
    assert [answer.status_code for answer in answers] == [200, 422, 200]
    assert "not finite" in one_sentence(answers[1])
    broken = posted(service(classifier=lambda x: x.mean((2, 3)) * torch.nan), "/classify", encoded())
    assert broken.status_code == 422
    assert "NaN" in one_sentence(broken)


def test_a_model_that_fails_is_no_500_and_tells_nothing(caplog):
    def failing(images):
        raise RuntimeError("/home/somebody/secret.py")

    answer = posted(service(failing), "/purify", encoded())
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "secret" not in one_sentence(answer) + caplog.text
    assert "RuntimeError" in caplog.text


def test_neither_seeds_nor_paths_are_told(caplog, monkeypatch):
    import secrets

    drawn = []
    monkeypatch.setattr(secrets, "randbits", lambda bits: drawn.append(1234567890123456789 + len(drawn)) or drawn[-1])
    caplog.set_level(logging.DEBUG)

    async def ask(client):
        image = encoded()
        return [
            *[await client.post(path, content=image, headers=PNG) for path in ("/purify", "/classify")],
            await client.post("/purify", content=b"damaged", headers=PNG),
            await client.get("/metrics"),
            await client.get("/openapi.json"),
        ]

    answers = asked(service(noisy(), draws=2), ask)
    assert len(drawn) == 3  # one of the purified image, one per draw
    log = "\n".join(record.getMessage() for record in caplog.records if not record.name.startswith("httpx"))
    told = b"\n".join([str(answer.headers).encode() + answer.content for answer in answers] + [log.encode()])
    assert b"12345678901234" not in told
    assert b"site-packages" not in told
    assert not re.search(rb"/(home|usr|tmp|work)/|\.py\b", told)


# --------------------------------------------------------------------------------------------------- tokens, options


def test_a_token_is_asked_for():
    token = "a-token-of-24-characters"

    async def ask(client):
        found = {}
        for name, header in {
            "none": {},
            "wrong": {"Authorization": "Bearer a-token-of-24-characterz"},
            "scheme": {"Authorization": f"Basic {token}"},
            "odd": {"Authorization": "Bearer é".encode("latin-1")},
            "right": {"Authorization": f"Bearer {token}"},
        }.items():
            found[name] = await client.post("/purify", content=encoded(), headers={**PNG, **header})
        open_ = [(await client.get(path)).status_code for path in ("/healthz", "/metrics", "/openapi.json")]
        return found, open_

    found, open_ = asked(service(), ask, token)
    codes = {name: answer.status_code for name, answer in found.items()}
    assert codes == {"none": 401, "wrong": 401, "scheme": 401, "odd": 401, "right": 200}
    assert found["none"].headers["www-authenticate"] == "Bearer"
    assert open_ == [200, 401, 200]
    assert token not in one_sentence(found["wrong"])


def test_tokens_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("DIFFPURE_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("DIFFPURE_TOKEN", "0123456789abcdef")
    assert read_token(None) == "0123456789abcdef"
    (tmp_path / "token").write_text("fedcba9876543210\n")
    assert read_token(tmp_path / "token") == "fedcba9876543210"
    for text in ("", "short", "with a space in between"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(InputError, match="16 or more"):
            read_token(tmp_path / "token")
    with pytest.raises(InputError, match="cannot be read"):
        read_token(tmp_path / "nothing")


def test_the_schema_declares_what_is_answered():
    routes = make_app(service()).openapi()["paths"]
    for path in ("/purify", "/classify", "/purify/batch", "/classify/batch"):
        said = routes[path]["post"]
        assert set(said["responses"]) == {"200", "400", "401", "408", "413", "415", "422", "503", "504"}
        assert all("application/json" in said["responses"][code]["content"] for code in ("422", "503"))
    assert set(routes["/purify"]["post"]["requestBody"]["content"]) == set(MEDIA.values())


def test_options_and_limits_that_make_no_sense():
    invoke = CliRunner().invoke
    for words, sentence in {
        ("--spec", "cifar10-small-linf", "--t-star", "0.2"): "leave out --t-star",
        ("--spec", "cifar10-bare-linf"): "needs a score or a purifier",
        ("--spec", "nothing.toml"): "cannot be read",
        ("--sampler", "tricks"): "Unknown sampler 'tricks'",
        ("--host", "256.0.0.1"): "There is no listening on 256.0.0.1:8000",
        ("--port", "99999"): "There is no listening",
    }.items():
        assert sentence in str(invoke(commands, ["serve", *words]).exception), words
    with pytest.raises(InputError, match="queue is a number above 0"):
        Limits(queue=0)
    with pytest.raises(InputError, match="does not fit"):
        Limits(bytes=1 << 30)


def test_a_plan_loads_the_models_of_a_spec_with_the_names_of_its_classes():
    from diffpure.data.sources import DataSpec

    model = ModelSpec(classifier="cifar10-resnet", score="cifar10-small", sampler="one-shot")
    handler = Plan(model=model, data=DataSpec(), draws=2).service()
    image, _ = dp.samples(1)
    answer = posted(handler, "/classify", encoded((image[0] * 255).byte().permute(1, 2, 0).numpy())).json()
    assert answer["names"] == list(dp.class_names())
    assert len(answer["logits"]) == 10
    assert sum(answer["probabilities"]) == pytest.approx(1)


@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_another_runtime_computes_the_score_of_the_same_purifier(backend, monkeypatch):
    asked_for = []
    monkeypatch.setattr(load, "backend_score", lambda score, name: asked_for.append(name) or score)
    model = ModelSpec(classifier="cifar10-resnet", score="cifar10-small", sampler="one-shot", rounds=2)
    ours, theirs = (Plan(model=model, backend=name).defense().purifier for name in ("torch", backend))
    images = dp.samples(3)[0]
    with torch.no_grad():
        torch.testing.assert_close(theirs(images, [1, 2, 3]), ours(images, [1, 2, 3]), atol=1e-4, rtol=0)
    assert asked_for == [backend]
    with pytest.raises(InputError, match="leave --backend out"):
        Plan(model=ModelSpec(classifier="cifar10-resnet", purifier="blur"), backend=backend).defense()


def test_a_score_is_called_with_powers_of_two():
    score = Slow(0)
    even, x = Even(score), torch.rand(5, 3, 16, 16)
    t = torch.full((5,), 0.1, dtype=torch.float64)
    torch.testing.assert_close(even(x, t), score(x, t))
    assert even.epsilon_step(x[:1], torch.tensor([5])).shape == (1, 3, 16, 16)
    assert score.calls == [8, 5, 1]


def test_a_refusal_survives_a_pickle():
    import pickle

    refusal = pickle.loads(pickle.dumps(Refusal(503, "Busy.", 1)))
    assert (refusal.status, refusal.sentence, refusal.retry_after) == (503, "Busy.", 1)

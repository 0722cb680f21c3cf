"""Exported scores and purifiers compute what torch computes, refuse gradients, and say what is wrong with a file."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import diffpure as dp
from diffpure.cli import app
from diffpure.diffusion.score import EpsilonScore, GaussianScore
from diffpure.errors import InputError
from diffpure.models.checkpoints import frozen
from diffpure.models.identity import identify
from diffpure.models.runtime import Compiled
from diffpure.purifiers.exported import ExportedPurifier, load_purifier
from diffpure.scores.exported import ExportedScore, schedule_of, schedule_table
from diffpure.scores.load import load_score
from diffpure.scores.photos import PhotoUNet
from diffpure.scores.small import SmallUNet

for name in ("onnxruntime", "onnxscript", "openvino"):
    pytest.importorskip(name)

from diffpure.exporting import graphs, int8, make  # noqa: E402

MAKE = """
import torch
from diffpure.scores.small import SmallUNet

def make():
    network = SmallUNet(widths=(8, 16), embedding=16, size=16)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=random))
    return network
"""
RUNTIMES = ("onnx", "openvino")
SAMPLER = dp.FewStep(t_star=0.1, steps=1, order=1)


def random_weights(network: EpsilonScore) -> EpsilonScore:
    """The network with weights none of which is zero, so that every branch is heard."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=random))
    return frozen(network)


@pytest.fixture(scope="module")
def small() -> EpsilonScore:
    return random_weights(SmallUNet(widths=(8, 16), embedding=16, size=16))


@pytest.fixture(scope="module")
def photo() -> EpsilonScore:
    return random_weights(PhotoUNet(widths=(8, 8), blocks=(1, 1), embedding=8))


@pytest.fixture(scope="module")
def small_file(small: EpsilonScore) -> bytes:
    return graphs.score_graph(small)


@pytest.fixture(scope="module")
def photo_file(photo: EpsilonScore) -> bytes:
    return graphs.score_graph(photo)


@pytest.fixture(scope="module")
def purifier_file(small: EpsilonScore) -> bytes:
    return graphs.purifier_graph(dp.Purifier(small, SAMPLER, rounds=2))


@pytest.fixture
def cached(small: EpsilonScore, small_file: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the exported small network."""
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path / "cache"))
    file = make.cache_file(small)
    file.parent.mkdir(parents=True)
    file.write_bytes(small_file)
    return file


def exported(data: bytes, runtime: str = "onnx") -> ExportedScore:
    return ExportedScore(Compiled(runtime, data, origin="a file"))  # type: ignore[arg-type]


def images(batch: int = 2, height: int = 16, width: int = 16) -> Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_score_of_one_size_is_torchs_at_every_time_and_batch_size(runtime, small, small_file):
    score = exported(small_file, runtime)
    assert make.check_score(small, score) < 1e-5
    assert (score.sde, score.size, score.channels) == (small.sde, 16, 3)
    x, t = 2 * images(7) - 1, torch.linspace(1e-5, 1, 7, dtype=torch.float64)
    torch.testing.assert_close(score.epsilon(x, t), small.epsilon(x, t), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(score(x, t), small(x, t), atol=0.01, rtol=1e-5)  # up to 1/std = 1,000 times as large


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_score_of_any_size_takes_any_size(runtime, photo, photo_file):
    score = exported(photo_file, runtime)
    assert make.check_score(photo, score) < 1e-5
    assert (score.size, score.stride, score.receptive_field) == (None, photo.stride, photo.receptive_field)
    for height, width in ((16, 24), (13, 30), (3, 5)):
        x, t = 2 * images(2, height, width) - 1, torch.tensor([0.1, 0.2], dtype=torch.float64)
        torch.testing.assert_close(score.epsilon(x, t), photo.epsilon(x, t), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_whole_purifier_gives_the_images_of_the_purifier_with_the_same_seeds(runtime, small, purifier_file):
    whole = ExportedPurifier(Compiled(runtime, purifier_file, origin="a file"))
    purifier = dp.Purifier(small, SAMPLER, rounds=2)
    assert whole.stochastic
    assert whole.draws == [0, 2]  # the start and the step
    for batch in (1, 5):
        seeds = list(range(batch))
        torch.testing.assert_close(whole(images(batch), seeds), purifier(images(batch), seeds), atol=1e-5, rtol=0)
    assert not torch.equal(whole(images()), whole(images()))  # without seeds: entropy
    with pytest.raises(InputError, match=r"takes images of 16×16, got \(8, 8\)"):
        whole(images(1, 8, 8))


def test_purifying_by_an_exported_score_is_purifying(small, small_file):
    for sampler in (dp.OneShot(), dp.DDIM(steps=2), SAMPLER):
        ours, torchs = (dp.Purifier(each, sampler)(images(), [3, 4]) for each in (exported(small_file), small))
        torch.testing.assert_close(ours, torchs, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("gradient", ["exact", "backprop", "surrogate"])
def test_a_gradient_is_refused(gradient, small_file):
    purifier = dp.Purifier(exported(small_file), SAMPLER, gradient=gradient)
    x = images().requires_grad_()
    with pytest.raises(
        InputError, match="a file gives no gradients; only black-box attacks can be run on it, and BPDA"
    ):
        purifier(x, [0, 1]).sum().backward()
    assert x.grad is None


def test_a_gradient_of_a_whole_purifier_is_refused(purifier_file):
    x = images().requires_grad_()
    with pytest.raises(InputError, match="a file gives no gradients"):
        ExportedPurifier(Compiled("onnx", purifier_file, origin="a file"))(x, [0, 1]).sum().backward()


def test_bpda_and_black_box_attacks_need_none(small, small_file):
    x = images().requires_grad_()
    dp.Purifier(exported(small_file), dp.OneShot(), gradient="bpda")(x, [0, 1]).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3))
    model = dp.Defense(dp.Purifier(exported(small_file), dp.OneShot()), linear)
    attack = dp.Square(queries=3)
    assert dp.evaluate(model, images(), torch.tensor([0, 1]), "linf 8/255", attack, rules="one-shot").complete


# ----------------------------------------------------------------------------------------------------- identity


def test_an_exported_score_is_named_by_its_bytes_and_its_runtime(small_file, photo_file):
    names = [identify(exported(data, runtime)) for data in (small_file, photo_file) for runtime in RUNTIMES]
    assert len(set(names)) == 4
    assert identify(exported(small_file)) == names[0]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_copies_compute_the_same(runtime, small_file):
    score, t = exported(small_file, runtime), torch.full((2,), 0.1, dtype=torch.float64)
    for other in (copy.deepcopy(score), pickle.loads(pickle.dumps(score))):
        assert torch.equal(score(images(), t), other(images(), t))
        assert identify(other) == identify(score)


def test_threads_follow_torch(small_file):
    score, t, before = exported(small_file), torch.full((2,), 0.1, dtype=torch.float64), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            score(images(), t)
    finally:
        torch.set_num_threads(before)
    assert [key[0] for key in score.network._sessions] == [1, 2]


def test_a_file_says_nothing_of_the_machine_that_wrote_it(small_file):
    assert b"site-packages" not in small_file
    assert b".py" not in small_file


# -------------------------------------------------------------------------------------------------- what is refused


def test_a_network_that_differs_from_torch_is_refused(small, small_file):
    other = copy.deepcopy(small)
    other.exit.weight.data *= 1.01
    with pytest.raises(InputError, match=r"a file on onnx differs from torch by .*, and up to 0.0001 is accepted"):
        make.check_score(other, exported(small_file))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("data", [b"", b"nonsense", "cut"], ids=["empty", "nonsense", "cut"])
def test_a_damaged_file_is_one_sentence(runtime, data, small_file):
    with pytest.raises(InputError, match="a file is damaged or no file of ONNX"):
        exported(small_file[:2000] if data == "cut" else data, runtime)


def test_a_file_of_something_else_is_one_sentence(small_file, purifier_file):
    import onnx

    with pytest.raises(InputError, match="a file holds a purifier, where a score is wanted"):
        exported(purifier_file)
    with pytest.raises(InputError, match="a file holds a score, where a purifier is wanted"):
        ExportedPurifier(Compiled("onnx", small_file, origin="a file"))
    stranger = onnx.load_from_string(small_file)
    del stranger.metadata_props[:]
    with pytest.raises(InputError, match="does not say what it computes"):
        exported(stranger.SerializeToString())
    onnx.helper.set_model_props(stranger, {"diffpure": '{"version": 1, "what": "score", "schedule": 3}'})
    with pytest.raises(InputError, match="does not say which schedule and size"):
        exported(stranger.SerializeToString())


def test_files_are_programs_and_are_loaded_only_with_leave(small, small_file, purifier_file, tmp_path):
    file, whole = tmp_path / "score.onnx", tmp_path / "purifier.onnx"
    file.write_bytes(small_file)
    whole.write_bytes(purifier_file)
    for load in (load_score, load_purifier):
        with pytest.raises(InputError, match="runs code when it is loaded, which is done only with --allow-code"):
            load(file)
    assert make.check_score(small, load_score(file, allow_code=True)) < 1e-5
    assert load_purifier(whole, allow_code=True).rounds == 2
    xml = make.write(make.to_openvino(Compiled("openvino", small_file, origin="x")), tmp_path / "score.xml")[-1]
    assert make.check_score(small, load_score(xml, allow_code=True)) < 1e-5
    xml.with_suffix(".bin").unlink()
    with pytest.raises(InputError, match=r"There is no file .*score\.bin; OpenVINO writes"):
        load_score(xml, allow_code=True)


def test_what_cannot_be_exported_is_one_sentence(small):
    class Odd(EpsilonScore):
        def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
            return x * len(x.unique())

    with pytest.raises(InputError, match="not GaussianScore"):
        graphs.score_graph(GaussianScore())
    with pytest.raises(InputError, match="torch's exporter cannot write Odd as ONNX"):
        graphs.score_graph(Odd(dp.VPSDE(), 8))
    with pytest.raises(InputError, match="A random t\\* cannot be exported"):
        graphs.purifier_graph(dp.Purifier(small, dp.OneShot(jitter=0.01)))
    with pytest.raises(InputError, match="without tiles"):
        graphs.purifier_graph(dp.Purifier(small, fit="tiles"))
    with pytest.raises(InputError, match="A backend is torch, onnx or openvino"):
        make.backend_score(small, "tensorrt")


def test_a_schedule_survives_the_file():
    for sde in (dp.VPSDE(0.2, 15.0), dp.VPSDE().discrete()):
        assert schedule_of(schedule_table(sde)) == sde


# --------------------------------------------------------------------------------------------------- cache, int8, CLI


def test_a_backend_comes_from_the_cache_unless_that_is_damaged(cached, small, small_file, monkeypatch):
    made = []
    monkeypatch.setattr(make, "score_graph", lambda score: made.append(1) or small_file)
    assert make.backend_score(small, "torch") is small
    assert make.backend_score(small, "openvino").runtime == "openvino"
    assert not made
    cached.write_bytes(small_file[:3000])
    make.backend_score(small, "onnx")
    assert made == [1]
    assert cached.read_bytes() == small_file


def test_int8_runs_and_its_error_is_bounded(small, small_file, monkeypatch, tmp_path):
    pytest.importorskip("nncf")
    monkeypatch.setattr(int8, "export_score", lambda score, runtime: (exported(small_file, runtime), 0.0))
    states = int8.path_states(small, SAMPLER, images(4), range(4))
    assert len({t[0].item() for _, t in states}) == 2  # t*, and the last denoising
    quantised = int8.quantise(small, SAMPLER, images(4), range(4))
    assert b"FakeQuantize" in quantised.network.data
    found = int8.compare(small, quantised, SAMPLER, images(6), range(6), lambda x: x.mean((2, 3)), torch.zeros(6))
    assert 0 < found.mean < 0.02
    assert found.images == 6
    assert re.match(r"6 purified images differ by .*/255 on average and .* at most; the same class for", str(found))
    file = make.write(quantised.network, tmp_path / "int8.xml")[-1]
    assert identify(load_score(file, allow_code=True)) == identify(quantised)


def test_purify_by_a_backend_writes_the_same_images(cached, small_file, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MAKE)
    monkeypatch.setattr(make, "score_graph", lambda score: small_file)
    (tmp_path / "in").mkdir()
    for k in range(2):
        pixels = np.random.default_rng(k).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "in" / f"{k}.png")
    model = ["--model", f"python:{tmp_path / 'mine.py'}:make", "--allow-code", "--steps", "1", "--seed", "1"]
    for backend in ("torch", *RUNTIMES):
        out = ["-o", str(tmp_path / backend), "--backend", backend, "--quiet"]
        result = CliRunner().invoke(app, ["purify", str(tmp_path / "in"), *model, *out])
        assert result.exit_code == 0, result.output
    for k in range(2):
        ours = [np.asarray(Image.open(tmp_path / b / f"{k}.png")).astype(int) for b in ("torch", *RUNTIMES)]
        assert max(np.abs(each - ours[0]).max() for each in ours) <= 1


def test_export_writes_what_it_checked(small, small_file, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MAKE)
    monkeypatch.setattr(make, "score_graph", lambda score: small_file)
    model = ["--score", f"python:{tmp_path / 'mine.py'}:make", "--allow-code"]
    for file in ("score.onnx", "score.xml"):
        result = CliRunner().invoke(app, ["export", *model, "-o", str(tmp_path / file)])
        assert result.exit_code == 0, result.output
        assert "Inputs: x, log_snr. The noise differs from torch's by" in result.output
        assert make.check_score(small, load_score(tmp_path / file, allow_code=True)) < 1e-5
    for wrong, sentence in (
        (["-o", "score.txt"], "ends in .onnx"),
        (["-o", "score.onnx", "--int8"], "int8 is a score for OpenVINO"),
        (["-o", "score.onnx", "--sampler", "one-shot", "--steps", "2"], "takes no --steps"),
    ):
        assert re.search(sentence, str(CliRunner().invoke(app, ["export", *model, *wrong]).exception))

"""Bad files give one clear sentence and load nothing; every layout opens; cards verify, record, fetch and resume."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from diffpure.classifiers.load import CLASSIFIERS
from diffpure.errors import InputError
from diffpure.models import cards as cards_module
from diffpure.models.cards import Card, card, cards, local_file, verify
from diffpure.models.checkpoints import LAYOUTS, check_hash, load_state, read
from diffpure.models.fetch import fetch, import_file
from diffpure.scores.load import SCORES

GOLDEN = Path(__file__).parent / "golden"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


class Malicious:
    """An object whose unpickling would run a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch should-not-exist",)


def malicious(path: Path) -> None:
    torch.save({"state_dict": network().state_dict(), "extra": Malicious()}, path)


def malicious_bare(path: Path) -> None:
    path.write_bytes(pickle.dumps(Malicious()))


def truncated(path: Path) -> None:
    torch.save(network().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-100])


def truncated_safetensors(path: Path) -> None:
    save_file(network().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-3])


def huge_header(path: Path) -> None:
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")


def text(path: Path) -> None:
    path.write_text("<!DOCTYPE html><html>Sign in to download</html>")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def tensor_only(path: Path) -> None:
    torch.save(torch.zeros(3), path)


BAD_FILES: dict[Callable[[Path], None], str] = {
    malicious: r"bad\.pt is refused because it holds more than tensors \(posix\.system\), which could run code",
    malicious_bare: r"bad\.pt is refused because it holds more than tensors",
    truncated: r"bad\.pt is damaged, cut short or no checkpoint",
    truncated_safetensors: r"bad\.pt is damaged",
    huge_header: r"bad\.pt is damaged",
    text: r"bad\.pt is damaged, cut short or no checkpoint",
    empty: r"bad\.pt is damaged",
    tensor_only: r"bad\.pt holds a Tensor, but a checkpoint is a dict of tensors",
}


@pytest.mark.parametrize("write", BAD_FILES, ids=lambda write: write.__name__)
def test_a_bad_file_gives_one_sentence_and_runs_nothing(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "bad.pt")
    with pytest.raises(InputError, match=BAD_FILES[write]) as error:
        read(tmp_path / "bad.pt")
    one_sentence(error.value)
    assert not (tmp_path / "should-not-exist").exists()


def one_sentence(error: InputError) -> None:
    message = str(error)
    assert message.endswith(".")
    assert ". " not in message
    assert "\n" not in message


def wrong_architecture(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"other.{key}": value for key, value in state.items()}


def missing_key(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != "1.bias"}


def extra_key(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "2.bias": torch.zeros(1)}


def wrong_shape(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "1.bias": torch.zeros(7)}


def not_a_tensor(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "1.bias": 3}


BAD_STATES: dict[Callable[[Any], Any], str] = {
    wrong_architecture: r"^x\.pt belongs to another architecture: 4 of the 4 keys of Sequential are missing",
    missing_key: r"^x\.pt lacks 1 keys of Sequential: '1\.bias'\.$",
    extra_key: r"^x\.pt has 1 keys that Sequential lacks: '2\.bias'\.$",
    wrong_shape: r"^x\.pt has '1\.bias' of shape \(7,\), but \(1,\) is expected\.$",
    not_a_tensor: r"^x\.pt has '1\.bias' of shape int, but \(1,\) is expected\.$",
}


@pytest.mark.parametrize("spoil", BAD_STATES, ids=lambda spoil: spoil.__name__)
def test_a_state_that_does_not_fit_loads_nothing(spoil: Callable[[Any], Any]) -> None:
    target = network()
    before = {key: value.clone() for key, value in target.state_dict().items()}
    other = spoil({key: value + 1 for key, value in before.items()})
    with pytest.raises(InputError, match=BAD_STATES[spoil]) as error:
        load_state(target, other, "x.pt")
    one_sentence(error.value)
    assert all(torch.equal(before[key], value) for key, value in target.state_dict().items())


def test_a_hash_that_differs_is_refused_and_a_published_prefix_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    file.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    check_hash(file, digest)
    check_hash(file, digest[:8])
    with pytest.raises(InputError, match="but 00000000 is expected; fetch the file again") as error:
        check_hash(file, "00000000")
    one_sentence(error.value)


def test_numbers_of_numpy_beside_the_tensors_are_harmless(tmp_path: Path) -> None:
    content = {"state_dict": network().state_dict(), "epoch": 3, "valacc": np.float64(0.5), "best": np.float32(1)}
    torch.save(content, tmp_path / "net.pth")
    assert read(tmp_path / "net.pth")["valacc"] == 0.5


def containers() -> dict[str, dict[str, Any]]:
    """The same weights in every layout."""
    state = network().state_dict()
    prefixed = {f"module.{key}": value for key, value in state.items()}
    return {
        "plain": dict(state),
        "score-sde": {
            "optimizer": {}, "model": {key: value * 0 for key, value in prefixed.items()}, "step": 1,
            "ema": {"decay": 0.9999, "num_updates": 1, "shadow_params": list(state.values())},
        },
        "robustbench": {"state_dict": {f"module.model.{key}": value for key, value in state.items()}},
        "nvlabs-wrn": {"model_state_dict": {f"module.0.{key}": value for key, value in state.items()}},
        "nvlabs": prefixed,
        "attribute": {"state_dict": state, "epoch": 1},
        "deit": {"model": state},
        "diffusers": dict(state),
    }  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_weights(layout: str) -> None:
    target = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    load_state(target, LAYOUTS[layout](containers()[layout], target), layout)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), network().parameters(), strict=True))


@pytest.mark.parametrize("layout", ["score-sde", "nvlabs-wrn", "attribute", "deit"])
def test_a_container_without_its_section_says_which(layout: str) -> None:
    with pytest.raises(InputError, match=r"has no entry '[a-z_.]+', where its layout keeps the weights"):
        LAYOUTS[layout]({"step": 3}, network())


def test_too_few_averaged_parameters_are_refused() -> None:
    short = {"ema": {"shadow_params": [torch.zeros(1)]}}
    with pytest.raises(InputError, match="has 1 averaged parameters, but 4 are expected"):
        LAYOUTS["score-sde"](short, network())


# Cards.

FULL = {
    "cifar10-ddpmpp": "ncsnpp", "imagenet-guided": "guided_unet", "celebahq-ddpm": "ddpm_celebahq",
    "cifar10-wrn-28-10": "wrn28_10", "cifar10-wrn-70-16-dropout": "wrn70_16_dropout",
    "cifar10-wrn-70-16": "dm_wrn70_16", "cifar10-resnet-50": "cifar_resnet50", "imagenet-resnet-50": "tv_resnet50",
    "imagenet-wrn-50-2": "tv_wide_resnet50_2", "imagenet-deit-s": "deit_small", "celebahq-eyeglasses": "attribute_net",
    "celebahq-smiling": "attribute_net",
}  # fmt: skip


@pytest.mark.parametrize("name", cards())
def test_every_card_is_complete_and_builds_its_full_size_network(name: str) -> None:
    about = card(name)
    assert about.layout in LAYOUTS
    assert about.sha256 == "unknown" or len(about.sha256) in (8, 64)
    with torch.device("meta"):
        built: Any = (SCORES if about.kind == "score" else CLASSIFIERS).build(about)
    if name in FULL:
        network = getattr(built, "network", built)
        keys = [[key, list(value.shape)] for key, value in network.state_dict().items()]
        expected = json.loads((GOLDEN / f"{FULL[name]}.full.json").read_text())["state_dict"]
        assert keys == [[key, shape] for key, shape, _ in expected]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path / "home"))
    return tmp_path / "home"


def checkpoint(path: Path, value: float = 0.0) -> bytes:
    save_file({"w": torch.full((64,), value)}, path)
    return path.read_bytes()


def a_card(**changes: Any) -> Card:
    return replace(card("cifar10-wrn-28-10"), **{"file": "a.safetensors", "url": "", "sha256": "unknown", **changes})


def fits(about: Card, path: Path) -> None:
    """The network that these tests are for has one parameter of 64 numbers."""
    if read(path)["w"].shape != (64,):
        raise InputError(f"{path.name} does not fit.")


def test_an_unknown_hash_is_recorded_and_a_change_warned_about(home: Path, tmp_path: Path) -> None:
    file, about = tmp_path / "a.safetensors", a_card()
    checkpoint(file)
    verify(about, file)
    verify(about, file)
    checkpoint(file, 1.0)
    with pytest.warns(UserWarning, match=r"a\.safetensors changed since it was first loaded"):
        verify(about, file)


def test_import_puts_a_good_file_in_place_and_refuses_others(home: Path, tmp_path: Path) -> None:
    file, about = tmp_path / "mine.safetensors", a_card()
    checkpoint(file)
    with pytest.raises(InputError, match="is not on this machine"):
        local_file(about)
    assert import_file(about, file, fits) == about.path == local_file(about)
    with pytest.raises(InputError, match="SHA-256"):
        import_file(replace(about, sha256="0" * 64), file, fits)
    file.write_text("no")
    with pytest.raises(InputError, match="damaged"):
        import_file(about, file, fits)


def test_a_file_of_unknown_hash_must_at_least_fit_its_network(home: Path, tmp_path: Path) -> None:
    about = card("celebahq-smiling")
    assert about.sha256 == "unknown"
    file = tmp_path / "net_best.pth"
    torch.save({"state_dict": {}}, file)
    with pytest.raises(InputError, match="belongs to another architecture"):
        import_file(about, file, CLASSIFIERS.check)
    file.write_bytes(pickle.dumps({}, protocol=2))  # a few bytes that are a checkpoint of nothing
    with pytest.raises(InputError, match=r"has no entry 'state_dict'|damaged"):
        import_file(about, file, CLASSIFIERS.check)
    assert not list(home.rglob("*.pth"))


def test_a_copy_that_does_not_fit_on_the_disk_leaves_what_was_there(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, about = tmp_path / "mine.safetensors", a_card()
    before = checkpoint(file)
    import_file(about, file, fits)
    checkpoint(file, 1.0)

    def half(source: Any, target: Any, *_: object) -> None:
        target.write(source.read(20))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("diffpure.models.fetch.shutil.copyfileobj", half)
    with pytest.raises(InputError, match="No space left on device") as error:
        import_file(about, file, fits)
    one_sentence(error.value)
    assert about.path.read_bytes() == before
    assert [path.name for path in about.path.parent.iterdir()] == [about.file]


def test_a_cache_that_is_no_folder_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Any
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "mine.safetensors"
    checkpoint(file)
    for get in (lambda: import_file(a_card(), file, fits), lambda: fetch(a_card(url=f"{server[0]}/a"), fits)):
        with pytest.raises(InputError, match="cannot be written or read") as error:
            get()
        one_sentence(error.value)


def test_a_register_of_hashes_is_written_whole_and_its_damage_survived(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.safetensors"
    checkpoint(file)
    verify(a_card(), file)
    register = home / "hashes.json"
    whole = register.read_text()
    monkeypatch.setattr("diffpure.disk.os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.warns(UserWarning, match="cannot be recorded"):
        verify(replace(a_card(), name="other"), file)
    assert register.read_text() == whole
    monkeypatch.undo()
    monkeypatch.setenv("DIFFPURE_CACHE", str(home))
    for damage in ("", "[1]", whole[:9]):
        register.write_text(damage)
        with pytest.warns(UserWarning, match=r"hashes\.json is damaged"):
            verify(a_card(), file)
        assert register.read_text() == whole


def test_without_a_home_embedded_models_load_and_the_rest_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIFFPURE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert local_file(card("cifar10-small")).is_file()
    assert not card("imagenet-guided").present
    with pytest.raises(InputError, match="name a folder in DIFFPURE_CACHE") as error:
        fetch(card("cifar10-wrn-28-10"), fits)
    one_sentence(error.value)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, dict[str, bytes], list[str | None]]]:
    """A web server that honours ranges, its files, and the ranges it was asked for."""
    files: dict[str, bytes] = {}
    asked: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("Range"))
            body = files.get(self.path)
            if body is None:
                self.send_error(404)
                return
            start = int(asked[-1].removeprefix("bytes=").rstrip("-")) if asked[-1] else 0
            if self.path == "/cut":  # chunks that end in the middle
                self.protocol_version = "HTTP/1.1"
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"ff\r\n" + body[:20])
                return
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            self.wfile.write(body[start:])

        def log_message(self, *args: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", files, asked
    httpd.shutdown()


def test_fetch_resumes_verifies_and_keeps(home: Path, tmp_path: Path, server: Any) -> None:
    url, files, asked = server
    body = files["/a"] = checkpoint(tmp_path / "x.safetensors")
    about = replace(a_card(), url=f"{url}/a", sha256=hashlib.sha256(body).hexdigest())
    part = about.path.with_name(about.file + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(body[:100])
    seen: list[tuple[int, int | None]] = []
    assert fetch(about, fits, lambda done, total: seen.append((done, total))).read_bytes() == body
    assert asked == ["bytes=100-"]
    assert seen[-1] == (len(body), len(body))
    fetch(about, fits)
    assert len(asked) == 1  # it is there already


def test_fetch_finishes_a_part_that_was_complete(home: Path, tmp_path: Path, server: Any) -> None:
    url, files, _ = server
    body = files["/a"] = checkpoint(tmp_path / "x.safetensors")
    about = replace(a_card(), url=f"{url}/a")
    part = about.path.with_name(about.file + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(body)
    assert fetch(about, fits).read_bytes() == body


def test_fetch_refuses_a_wrong_file_and_leaves_nothing(home: Path, tmp_path: Path, server: Any) -> None:
    url, files, _ = server
    files["/a"] = checkpoint(tmp_path / "x.safetensors")
    files["/html"] = b"<html>Google Drive can't scan this file for viruses</html>"
    with pytest.raises(InputError, match="SHA-256"):
        fetch(replace(a_card(), url=f"{url}/a", sha256="0" * 64), fits)
    with pytest.raises(InputError, match="damaged, cut short or no checkpoint"):
        fetch(replace(a_card(), url=f"{url}/html"), fits)
    with pytest.raises(InputError, match="could not be downloaded"):
        fetch(replace(a_card(), url=f"{url}/gone"), fits)
    with pytest.raises(InputError, match=r"has no direct link; get a\.safetensors from .* --from FILE`\.$"):
        fetch(a_card(), fits)
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_a_transfer_in_chunks_that_is_cut_is_told_and_resumed(home: Path, tmp_path: Path, server: Any) -> None:
    url, files, _ = server
    body = files["/cut"] = files["/a"] = checkpoint(tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=r"the connection ended after .* run it again to resume") as error:
        fetch(a_card(url=f"{url}/cut"), fits)
    one_sentence(error.value)
    assert fetch(a_card(url=f"{url}/a"), fits).read_bytes() == body


def test_an_unknown_card_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'imagenet-deit-s'"):
        cards_module.card("imagenet-deit")

"""What a stranger's files can do here: nothing is run, nothing is written, and what cannot be checked is said."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import diffpure as dp
from diffpure import cli
from diffpure.attacks import PGD, Square
from diffpure.diffusion.score import GaussianScore
from diffpure.disk import locked
from diffpure.errors import InputError
from diffpure.evaluation.engine import Ray, _knock
from diffpure.experiments.load import Loader, gallery_of, verify_run
from diffpure.experiments.spec import EvaluationSpec
from diffpure.models.checkpoints import read
from diffpure.purify import Defense
from diffpure.training.loop import Run, cosine, train
from diffpure.verification.files import verify_files
from problems import images, tiny_classifier, tiny_unet

SPEC = """
name = "stranger"
rules = ["one-shot"]
batch = 2

[model]
classifier = {{ name = "{classifier}" }}

[data]
images = "0-1"

[[attacks]]
kind = "pgd"
iterations = 1
"""
PROGRAM = """
import pathlib, torch
pathlib.Path({marker!r}).write_text("ran")

class Halves(torch.nn.Module):
    stochastic = False

    def forward(self, x, seeds=None):
        left, right = x.tensor_split(2, dim=-1)
        return torch.stack([left.mean((1, 2, 3)), right.mean((1, 2, 3)), *[x.mean((1, 2, 3)) - 9] * 8], 1)

def make(): return Halves()
def purifier(): return lambda x: x
"""


class Writing(nn.Module):
    """TorchScript that makes a file when it is loaded."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker, self.size = marker, 0
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.mean((1, 2, 3)) * k for k in range(10)], 1)

    @torch.jit.export
    def __getstate__(self) -> str:
        return self.marker

    @torch.jit.export
    def __setstate__(self, marker: str) -> None:
        self.marker = marker
        self.training = False
        self.size = torch.from_file(marker, True, 8).numel()  # what is not used would not be run


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def said(result) -> str:
    """What a command told, on the terminal or as its one sentence."""
    return " ".join(f"{result.output} {result.exception or ''}".split())


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> dict[str, tuple[Path, Path, Path]]:
    """By kind of program: a spec that names one, the finished run of it, and the file that it makes when it is run."""
    found = {}
    for kind in ("python:", "TorchScript"):
        folder = tmp_path_factory.mktemp("hostile")
        marker = folder / "marker"
        if kind == "python:":
            program = folder / "program.py"
            program.write_text(PROGRAM.format(marker=str(marker)))
            name = f"python:{program}:make"
        else:
            program = folder / "program.pt"
            torch.jit.script(Writing(str(marker))).save(program)
            name = str(program)
        spec = folder / "spec.toml"
        spec.write_text(SPEC.format(classifier=name))
        defended = spec.read_text().replace("[data]", 'score = "cifar10-small"\n\n[data]')
        spec.with_name("defended.toml").write_text(defended)
        result = invoke("evaluate", spec, "--out", folder / "runs", "--allow-code")
        assert result.exit_code == 0, said(result)
        assert marker.exists(), "the program does nothing, so the test proves nothing"
        marker.unlink()
        (run,) = (folder / "runs").iterdir()
        found[kind] = spec, run, marker
    return found


COMMANDS = {
    "evaluate": lambda spec, run, out: ("evaluate", spec, "--out", out),
    "evaluate --estimate": lambda spec, run, out: ("evaluate", spec, "--estimate"),
    "attack": lambda spec, run, out: ("attack", spec, "--out", out),
    "audit": lambda spec, run, out: ("audit", spec),
    "suggest-t": lambda spec, run, out: ("suggest-t", spec.with_name("defended.toml")),
    "certify": lambda spec, run, out: ("certify", spec.with_name("defended.toml"), "--out", out),
    "verify": lambda spec, run, out: ("verify", run),
    "verify --again": lambda spec, run, out: ("verify", run, "--again", 1),
}


@pytest.mark.parametrize("kind", ["python:", "TorchScript"])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_that_a_file_names(hostile, tmp_path, kind, command):
    spec, run, marker = hostile[kind]
    result = invoke(*COMMANDS[command](spec, run, tmp_path / "out"))
    assert result.exit_code != 0
    assert isinstance(result.exception, InputError), said(result)
    assert "only with --allow-code" in said(result)
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["python:", "TorchScript"])
def test_a_table_runs_no_code_either(hostile, tmp_path, kind):
    spec, _, marker = hostile[kind]
    base = spec.read_text().replace("[model]", "[base.model]").replace("[data]", "[base.data]")
    base = base.replace("[[attacks]]", "[[base.attacks]]").partition("[base.model]")
    table = tmp_path / "table.toml"
    table.write_text(f'title = "mine"\n{base[1]}{base[2]}\n[[rows]]\nname = "one"\n')
    result = invoke("table", table, "--out", tmp_path / "runs")
    assert isinstance(result.exception, InputError), said(result)
    assert "only with --allow-code" in said(result)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["python:", "TorchScript"])
def test_a_report_on_a_strangers_run_shows_what_files_show_and_says_why(hostile, tmp_path, kind):
    _, run, marker = hostile[kind]
    with pytest.raises(InputError, match="only with --allow-code"):
        gallery_of(run)
    out = tmp_path / "report.html"
    assert invoke("report", run, "-o", out).exit_code == 0
    assert not marker.exists()
    page = " ".join(out.read_text().split())
    assert "There are no pictures of the diffused and purified images" in page
    assert "only with --allow-code" in page
    assert "<img" in page  # the adversarial images of the files are there


def test_allowing_code_for_one_call_allows_it_for_that_call_alone(hostile):
    _, run, marker = hostile["python:"]
    assert verify_run(run, Loader(allow_code=True)).passed
    assert marker.exists()
    marker.unlink()
    with pytest.raises(InputError, match="only with --allow-code"):
        verify_run(run)
    assert not marker.exists()


def test_a_purifier_of_a_spec_is_no_way_around(hostile, tmp_path):
    spec, _, marker = hostile["python:"]
    kind = f"python:{spec.parent / 'program.py'}:purifier"
    named = EvaluationSpec.of({"model": {"classifier": "cifar10-resnet", "purifier": {"kind": kind}}})
    with pytest.raises(InputError, match="only with --allow-code"):
        Loader().model(named.model)
    scored = EvaluationSpec.of({"model": {"classifier": "cifar10-resnet", "score": kind}})
    with pytest.raises(InputError, match="only with --allow-code"):
        Loader().model(scored.model)
    assert not marker.exists()


def test_a_checkpoint_that_would_unpack_to_more_than_it_holds_is_refused(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(1 << 20)}, path)
    assert read(path)["weight"].numel() == 1 << 20
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.namelist():
            target.writestr(entry, source.read(entry))
    assert packed.stat().st_size < path.stat().st_size / 100
    with pytest.raises(InputError, match=r"packed\.pt is compressed"):
        read(packed)


# ------------------------------------------------------------------------------------------------- a second machine


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    """A small run of the embedded classifier."""
    folder = tmp_path_factory.mktemp("honest")
    (folder / "spec.toml").write_text(SPEC.format(classifier="cifar10-vit-tiny"))
    assert invoke("evaluate", folder / "spec.toml", "--out", folder / "runs").exit_code == 0
    (run,) = (folder / "runs").iterdir()
    return run


def edited(run: Path, to: Path, change) -> Path:
    """A copy of a run with another header."""
    shutil.copytree(run, to)
    first, *rest = (to / "rows.jsonl").read_text().splitlines(keepends=True)
    header = json.loads(first)["header"]
    change(header)
    (to / "rows.jsonl").write_text("".join([json.dumps({"header": header}) + "\n", *rest]))
    return to


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda h: h["spec"]["model"].update(classifier="cifar10-wrn-28-10"), "cifar10-wrn-28-10"),
        (lambda h: h["spec"]["model"].update(classifier="gone.safetensors"), "There is no file gone.safetensors"),
        (lambda h: h["spec"].update(data={"source": "npz", "path": "gone.npz"}), "gone.npz"),
        (lambda h: h["spec"].update(data={"source": "cifar10"}), "CIFAR-10"),
    ],
)
def test_a_run_without_its_weights_or_data_says_what_is_missing_and_what_can_be_checked(
    honest, tmp_path, monkeypatch, change, sentence
):
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path / "empty"))
    run = edited(honest, tmp_path / "run", change)
    result = invoke("verify", run)
    assert isinstance(result.exception, InputError), said(result)
    assert sentence in said(result)
    assert "`--rows-only` checks what the files alone can show." in said(result)
    alone = invoke("verify", run, "--rows-only")
    assert alone.exit_code == 0, said(alone)
    assert "claimed that the model is the one that the header names, and gave these predictions" in said(alone)
    assert "claimed that the images and labels are those of the data" in said(alone)
    assert not (tmp_path / "empty").exists()


def test_other_versions_are_told_and_prove_nothing(honest, tmp_path):
    run = edited(honest, tmp_path / "run", lambda h: h.update(versions={"torch": "1.0"}, machine={"device": "cuda:0"}))
    result = invoke("verify", run, "--device", "cpu")
    assert result.exit_code == 0, said(result)
    assert "note the run was made with torch 1.0, this check with diffpure" in said(result)
    assert "note the run was made with device cuda:0, this check with device cpu" in said(result)
    assert "claimed seconds, dates, versions and the machine" in said(result)


def test_rows_only_goes_without_a_spec_and_without_anything_else(tmp_path):
    x = images(4)
    dp.evaluate(
        tiny_classifier(), x, torch.zeros(4).long(), "l2 0.123456789", [PGD(iterations=2)], out=tmp_path / "r", batch=3
    )
    found = verify_files(tmp_path / "r")
    assert found.passed, str(found)
    assert (found.rows, found.images) == (8, 4)
    with pytest.raises(InputError, match="nothing to do with it"):
        raise invoke("verify", tmp_path / "r", "--rows-only", "--again", 1).exception


def test_rows_only_finds_what_files_can_show(honest, tmp_path):
    from safetensors.torch import load_file, save_file

    run = Path(shutil.copytree(honest, tmp_path / "run"))
    (file,) = (run / "adversarial").iterdir()
    tensors = load_file(file)
    save_file({**tensors, "z": 3 * tensors["z"]}, file)
    problems = "\n".join(verify_files(run).problems)
    assert "image 0, attack pgd-ce, seed 0 lies outside the budget" in problems
    assert "but the perturbation has" in problems
    save_file({**tensors, "labels": tensors["labels"] + 1}, file)
    assert any("names other images or labels than the rows" in text for text in verify_files(run).problems)
    save_file({**tensors, "images": tensors["images"] + 1}, file)
    assert any("values outside [0, 1]" in text for text in verify_files(run).problems)
    save_file({"z": tensors["z"]}, file)
    assert any("does not hold the adversarial images" in text for text in verify_files(run).problems)
    file.unlink()
    assert any("is missing" in text for text in verify_files(run).problems)
    lines = (run / "rows.jsonl").read_text().splitlines(keepends=True)
    (run / "rows.jsonl").write_text("".join([*lines[:-1], lines[1]]))
    problems = "\n".join(verify_files(run).problems)
    assert "There are 2 rows of image 0, attack clean" in problems
    assert "1 rows are missing, that of image 1, attack pgd-ce, seed 0 first" in problems
    assert "rates" in problems or "cannot be compared" in problems


def test_a_header_that_promises_more_rows_than_memory_holds_is_answered_at_once(honest, tmp_path):
    many = list(range(20_000))
    run = edited(honest, tmp_path / "run", lambda h: h.update(indices=many, seeds=many))
    (text, *_) = verify_files(run).problems
    assert text.startswith("799999996 rows are missing, that of image 2, attack clean, seed 0 first")


# ------------------------------------------------------------------------------------------- one writer, one folder


def hold(folder: Path, ready, over) -> None:
    with locked(folder):
        ready.set()
        over.wait(60)


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, over = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / "r", ready, over))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(InputError, match=r"Another process is writing to .*; wait for it or give a new folder"):
            run_toy(tmp_path / "r")
        assert list((tmp_path / "r").iterdir()) == []
    finally:
        over.set()
        other.join()
    run_toy(tmp_path / "r")
    assert (tmp_path / "r" / "checkpoint.pt").is_file()
    with locked(tmp_path / "r"):  # the training let it go
        pass


def run_toy(folder: Path) -> None:
    model = nn.Linear(2, 1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = lambda step: (torch.ones(4, 2),)  # noqa: E731
    train(model, optimiser, batch, lambda m, x: m(x).square().mean(), cosine(), Run(steps=2, folder=folder, threads=1))


# ------------------------------------------------------------------------------------------------ a deployed defence


def defense(score=None) -> Defense:
    return Defense(dp.Purifier(score or tiny_unet(8), dp.ReverseSDE(t_star=0.05, steps=3)), tiny_classifier())


class Broken(nn.Module):
    """A score that fails on purpose."""

    sde, size, channels = GaussianScore().sde, None, None

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.change(GaussianScore()(x, t))

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        return self.change(GaussianScore().epsilon_step(x, i))


def test_a_defence_fails_closed_where_a_score_is_not_a_number():
    with pytest.raises(InputError, match="NaN or infinite"):
        defense(Broken(lambda s: s * float("nan")))(images(2))
    alone = defense(Broken(lambda s: s * float("nan"))).purifier  # says what its network says, as documented
    assert alone(images(2)).isnan().all()


@pytest.mark.parametrize("wrong", [lambda s: s[:1], lambda s: s[:, :1], lambda s: s.mean((2, 3), keepdim=True)])
def test_a_score_of_another_shape_is_refused_and_never_broadcast(wrong):
    with pytest.raises(InputError, match="A score has the shape of its images"):
        defense(Broken(wrong))(images(2))


def test_a_traced_defence_is_refused_since_its_noise_would_be_known():
    with pytest.raises(InputError, match="a predictable defence is none"):
        torch.jit.trace(defense(), images(2))


def test_another_gradient_mode_shares_weights_and_nothing_that_can_be_changed():
    first = defense()
    other = first.with_gradient("bpda")
    assert next(other.parameters()) is next(first.parameters())
    other.purifier.extra = nn.Linear(1, 1)
    other.purifier.register_buffer("more", torch.zeros(1))
    other.purifier.register_forward_hook(lambda *_: None)
    assert not hasattr(first.purifier, "extra")
    assert "more" not in dict(first.named_buffers())
    assert not first.purifier._forward_hooks
    assert first.purifier.gradient.name == "exact"


def test_an_evaluation_gives_the_same_rows_where_the_caller_turned_gradients_off():
    x = images(2)
    y = tiny_classifier()(x).argmax(1)
    run = partial(dp.evaluate, tiny_classifier(), threat="linf 8/255", rules=["one-shot"])
    wanted = run(images=x, labels=y, attacks=[PGD(iterations=2), Square(queries=3)])
    with torch.no_grad():
        found = run(images=x, labels=y, attacks=[PGD(iterations=2), Square(queries=3)])
    assert [(row.predictions, row.size) for row in found.rows] == [(row.predictions, row.size) for row in wanted.rows]
    with torch.inference_mode():
        made, black_box = x.clone(), run(images=x, labels=y, attacks=[Square(queries=3)])
        with pytest.raises(InputError, match=r"gradients, which torch.inference_mode\(\) forbids; use torch.no_grad"):
            run(images=x, labels=y, attacks=[PGD(iterations=2)])
    assert len(black_box.rows) == 4
    found = run(images=made, labels=y, attacks=[PGD(iterations=2), Square(queries=3)])
    assert [row.size for row in found.rows] == [row.size for row in wanted.rows]


# -------------------------------------------------------------------------------------------------------------- Ray


def test_a_listener_that_says_nothing_is_no_ray_cluster():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(InputError, match=f"no way to reach a Ray cluster at {address} .*answer"):
            _knock(address, seconds=0.2)


def test_a_listener_that_answers_is_left_to_ray():
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=lambda: server.accept()[0].sendall(b"\0\0\0\4\0\0\0\0\0"))
        answering.start()
        _knock(f"ray://127.0.0.1:{server.getsockname()[1]}")
        answering.join()
    _knock("auto")
    assert Ray(address="auto").device == "cpu"


HEADLESS = r"""
import os, signal, sys, threading, time
from pathlib import Path
import torch
import diffpure as dp
from diffpure.evaluation.engine import Ray

DRIVER, BEGUN = os.getpid(), Path(sys.argv[1])

class Slow(torch.nn.Module):
    def forward(self, x):
        if os.getpid() != DRIVER:
            BEGUN.touch()
            time.sleep(600)
        return torch.stack([x.mean((1, 2, 3)), x.amax((1, 2, 3))], 1)

def children(name):
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if name in words[0] and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == DRIVER:
                yield int(entry.name)
        except OSError:
            continue

def behead():
    while not BEGUN.exists():
        time.sleep(0.1)
    for pid in children(b"gcs_server"):
        os.kill(pid, signal.SIGKILL)

threading.Thread(target=behead, daemon=True).start()
x = torch.rand(4, 3, 8, 8)
try:
    dp.evaluate(Slow(), x, torch.zeros(4).long(), "linf 0.1", (), rules=["one-shot"], batch=2, engine=Ray(workers=2))
except dp.InputError as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
def test_the_death_of_the_head_of_a_ray_cluster_ends_in_one_sentence(tmp_path):
    pytest.importorskip("ray", reason="Ray is an optional extra")
    script = tmp_path / "headless.py"
    script.write_text(HEADLESS)
    command = [sys.executable, script, tmp_path / "begun"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(
        r"The head of the Ray cluster at .* is gone; start one and run the same command again, .*\n", done.stdout
    )

"""Runs on the command line: init, sweeps, runs list/show/rm, compare, JSON that is pure, and signals that save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diffpure import cli
from diffpure.cli.base import app
from diffpure.errors import InputError
from diffpure.experiments import load
from diffpure.experiments.load import shipped_specs
from diffpure.experiments.overrides import setting
from diffpure.experiments.spec import EvaluationSpec
from diffpure.results.catalogue import describe
from problems import tiny_unet

SPEC = """
name = "tiny [/b] \\u001b[31m"
rules = ["one-shot"]
batch = 2

[model]
classifier = "cifar10-resnet"
score = "cifar10-small"
sampler = {kind = "few-step", t_star = 0.05, steps = 1, order = 1}

[data]
images = "0-1"

[[attacks]]
kind = "pgd"
label = "[/x]"
iterations = 2
eot = 2
"""
runner = CliRunner()


@pytest.fixture
def spec(tmp_path, monkeypatch):
    torch.manual_seed(0)
    classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)).eval()
    monkeypatch.setattr(load, "load_classifier", lambda **_: classifier)
    monkeypatch.setattr(load, "load_score", lambda **_: tiny_unet())
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(SPEC)
    return path


def invoke(*arguments: object, **options: object):
    return runner.invoke(app, [str(a) for a in arguments], catch_exceptions=False, **options)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------------- init


def test_init_writes_a_spec_that_is_read_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("init").exit_code == 0
    made = EvaluationSpec.read(tmp_path / "evaluation.toml")
    assert made.name == "My defence"
    assert list(made.make_attacks()) == ["strong", "square"]
    before = (tmp_path / "evaluation.toml").read_bytes()
    with pytest.raises(InputError, match="is there already"):
        invoke("init")
    assert (tmp_path / "evaluation.toml").read_bytes() == before
    for name, path in shipped_specs().items():
        assert invoke("init", f"{name}.toml", "--like", name).exit_code == 0
        assert EvaluationSpec.read(f"{name}.toml") == EvaluationSpec.read(path)
    with pytest.raises(InputError, match="did you mean 'cifar10-bare-linf'"):
        invoke("init", "x.toml", "--like", "cifar10-bare-lin")
    assert not (tmp_path / "x.toml").exists()


def test_every_commented_key_of_the_new_spec_is_a_key():
    """Lines that begin with "# key = value" are keys of the table that they stand in."""
    text = (Path(load.__file__).parent / "new.toml").read_text()
    lines = [line.removeprefix("# ") if " = " in line.partition("  #")[0] else line for line in text.splitlines()]
    whole = "\n".join(line for line in lines if not line.startswith(("score", "sampler", "path", "{name")))
    assert EvaluationSpec.of(tomllib.loads(whole)).model.purifier == {"kind": "blur", "sigma": 1.0}


# ------------------------------------------------------------------------------------------------------------- sweeps


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=0.05,0.1", [0.05, 0.1]),
        ("a.b=few-step", ["few-step"]),
        ("a.b=4/255, 8/255", ["4/255", "8/255"]),
        ("a.b=[0, 1]", [[0, 1]]),
        ("a.b=[0],[1, 2]", [[0], [1, 2]]),
        ('a.b="0-9, 20-29"', ["0-9, 20-29"]),
        ("a.b=true,2", [True, 2]),
        ("a.b={kind = 'sde', t_star = 0.1}", [{"kind": "sde", "t_star": 0.1}]),
    ],
)
def test_values_of_settings(text, values):
    assert setting(text) == ("a.b", values)


@pytest.mark.parametrize("text", ["a.b", "=1", "a.b="])
def test_settings_that_are_none(text):
    with pytest.raises(InputError, match="KEY=VALUE"):
        setting(text)


def test_a_sweep_then_runs_then_compare(spec, tmp_path):
    home = Path("a[/b]c")
    found = invoke("evaluate", spec, "--set", "model.sampler.t_star=0.05,0.1", "--out", home)
    assert found.exit_code == 0
    assert "\x1b" not in found.output
    assert "t_star" in found.output
    folders = sorted(home.iterdir(), key=lambda p: describe(p).name)
    assert [EvaluationSpec.of(describe(p).result.header["spec"]).model.sampler["t_star"] for p in folders] == [
        0.05,
        0.1,
    ]
    again = invoke("evaluate", spec, "--set", "model.sampler.t_star=0.05,0.1", "--out", home, "--json")
    assert [line["images"] for line in json.loads(again.stdout)] == ["2", "2"]
    # The first run is the plain evaluation itself.
    one = invoke("evaluate", spec, "--out", home, "--json")
    assert json.loads(one.stdout)["folder"] == str(folders[0])

    listed = invoke("runs", "list", home)
    assert listed.output.count("finished") == 2
    assert "[/x]@" not in listed.output
    assert "[/x]" in listed.output
    assert "\x1b" not in listed.output
    about = json.loads(invoke("runs", "list", home, "--json").stdout)
    assert [entry["finished"] for entry in about] == [True, True]
    assert {entry["rows"] for entry in about} == {4}
    shown = invoke("runs", "show", folders[0])
    assert "worst case per image" in shown.output
    assert json.loads(invoke("runs", "show", folders[0], "--json").stdout)["rates"]["clean"]["one-shot"]

    compared = invoke("compare", *folders)
    assert "McNemar" in compared.output
    plain = json.loads(invoke("compare", *folders, "--json", "--rule", "one-shot").stdout)
    assert set(plain["pairs"]) == {"clean", "[/x]", "worst case"}
    assert sum(plain["pairs"]["clean"][key] for key in ("both", "only_a", "only_b", "neither")) == 2


def test_settings_on_the_command_line_that_cannot_be(spec):
    with pytest.raises(InputError, match="set once"):
        invoke("evaluate", spec, "--set", "batch=1", "--set", "batch=2")
    with pytest.raises(InputError, match="did you mean 't_star'"):
        invoke("evaluate", spec, "--set", "model.sampler.t_sta=1")
    with pytest.raises(InputError, match="leave --set or --png out"):
        invoke("evaluate", spec, "--set", "batch=1", "--png", "x")


# --------------------------------------------------------------------------------------------------------------- runs


def test_unfinished_runs_and_what_is_no_run(spec, tmp_path):
    assert invoke("attack", spec, "--out", "runs").exit_code == 0
    (folder,) = Path("runs").iterdir()
    assert "unfinished, 2 of 4 rows" in invoke("runs", "list").output
    (entry,) = json.loads(invoke("runs", "list", "--json").stdout)
    assert (entry["finished"], entry["rows"], entry["total"], entry["robust"]) == (False, 2, 4, None)
    assert "unfinished" in invoke("runs", "show", folder).output
    damaged = Path("runs/damaged")
    damaged.mkdir()
    (damaged / "rows.jsonl").write_text("{}\n")
    assert "unreadable" in invoke("runs", "list").output

    asked = invoke("runs", "rm", folder, input="n\n")
    assert asked.exit_code == 1
    assert folder.is_dir()
    for path, match in ((tmp_path, "no run"), (damaged, "header"), (spec, "A run is a folder")):
        with pytest.raises(InputError, match=match):
            invoke("runs", "rm", path, "--yes")
        assert path.exists()
    (folder / "thesis.tex").touch()
    with pytest.raises(InputError, match="other files"):
        invoke("runs", "rm", folder, "--yes")
    (folder / "thesis.tex").unlink()
    assert invoke("runs", "rm", folder, input="y\n").exit_code == 0
    assert not folder.exists()
    with pytest.raises(InputError, match="There is no folder nowhere"):
        invoke("runs", "list", "nowhere")
    Path("empty").mkdir()
    assert "no runs in empty" in invoke("runs", "list", "empty").output


def test_listing_and_comparing_do_not_wait_for_torch(tmp_path):
    code = (
        "import sys; from diffpure.cli import app\n"
        f"app(['runs', 'list', {str(tmp_path)!r}], standalone_mode=False)\n"
        "import diffpure.results.compare\nprint('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == "False", found.stderr


# --------------------------------------------------------------------------------------------------------------- JSON


def test_json_is_alone_on_standard_output(spec, tmp_path):
    found = invoke("evaluate", spec, "--out", "runs", "--json")
    summary = json.loads(found.stdout)
    assert isinstance(summary["rates"]["clean"]["one-shot"]["value"], float)
    assert json.loads(invoke("evaluate", spec, "--estimate", "--json").stdout)["images"] == 2
    checked = json.loads(invoke("verify", "runs", "--json").stdout)
    assert checked[summary["folder"]]["passed"] is True
    audit = json.loads(invoke("audit", spec, "--images", 1, "--json").stdout)
    assert isinstance(audit["differences"]["cosine"], float)
    assert audit["passed"] is True
    advice = json.loads(invoke("suggest-t", spec, "--images", 2, "--json").stdout)
    assert isinstance(advice["suggestion"], float | None)
    assert isinstance(advice["rows"][0]["t_star"], float)


def test_the_doctor_gives_numbers(monkeypatch):
    from diffpure.cli import machine

    monkeypatch.setattr(machine, "_speed", lambda: {"score_call_seconds": 0.0123, "first_image_seconds": 2.0})
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["score_call_seconds"] == 0.0123
    assert isinstance(found["accelerators"], list)
    assert all(found[name] is None or isinstance(found[name], str) for name in machine.EXTRAS)
    assert "12 ms" in invoke("doctor").output


def test_json_has_no_numbers_that_are_none(capsys):
    from diffpure.cli.output import print_json

    print_json({"a": float("nan"), "b": [float("inf"), 1], "c": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1], "c": "x"}


# ------------------------------------------------------------------------------------------------------------- signals

CHILD = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
import sys, time
sys.argv = ["diffpure", "evaluate", "slow.toml", "--out", "runs", "--allow-code", "--threads", "1"]
from diffpure.evaluation.store import Store
save = Store.save_run

def slow_save(self, unit, run):
    print("saving", flush=True)
    time.sleep(1.0)
    save(self, unit, run)

Store.save_run = slow_save
from diffpure.cli import main
main()
"""
SLOW_MODEL = """
import time, torch
class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, 30720).reshape(3072, 10), requires_grad=False)
    def forward(self, x):
        time.sleep(0.02)
        self.calls += 1
        if self.calls == 40:  # the estimate, the clean images and the first steps of the attack are done
            open("under-way", "w").close()
        return x.flatten(1) @ self.w
def make():
    return Slow()
"""
SLOW_SPEC = """
rules = ["one-shot"]
[model]
classifier = "python:slow.py:make"
[data]
images = "0-1"
[[attacks]]
kind = "pgd"
iterations = 2000
"""


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGTERM, None, 143), (signal.SIGINT, None, 130), (signal.SIGINT, signal.SIGINT, 130)],
    ids=["sigterm", "ctrl-c", "ctrl-c twice"],
)
def test_signals_save_the_attack_under_way(tmp_path, first, second, code):
    (tmp_path / "slow.py").write_text(SLOW_MODEL)
    (tmp_path / "slow.toml").write_text(SLOW_SPEC)
    source = str(Path(cli.__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / "under-way").exists():
            assert child.poll() is None, child.communicate()
            time.sleep(0.1)
        child.send_signal(first)
        assert child.stdout is not None
        assert "saving\n" in iter(child.stdout.readline, "")
        if second is not None:
            child.send_signal(second)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "state.safetensors").is_file(), said
    assert child.returncode == code, said
    assert "The same command goes on" in said

"""The command line: help that fits and teaches, one sentence for errors, and commands that do what they say."""

from __future__ import annotations

import ctypes
import glob
import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

import diffpure as dp
from diffpure import cli
from diffpure.errors import InputError
from diffpure.experiments import demo as demonstration
from diffpure.experiments import load as experiments
from diffpure.experiments.load import run_spec, shipped_specs
from diffpure.experiments.spec import EvaluationSpec
from diffpure.models.cards import cards
from diffpure.results.rows import Rate

runner = CliRunner()


def walk(command, path=()):
    """Every command below a group, with the words that call it."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from walk(inner, (*path, name))
    else:
        yield path, command


COMMANDS = dict(walk(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("command", [(), ("models",), ("data",), ("train",), ("runs",), *COMMANDS], ids=" ".join)
def test_help_fits_a_screen(command):
    found = runner.invoke(cli.app, [*command, "--help"], env={"COLUMNS": "100", "LINES": "40"})
    assert found.exit_code == 0
    assert len(found.output.splitlines()) <= 40
    if command in COMMANDS:
        assert "Example: diffpure " + " ".join(command) in found.output


TAKEN_AGAIN = """
import resource, sys, torch
from diffpure.cli.base import keep_memory
if sys.argv[1] == "keep":
    keep_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    torch.empty(2**24).fill_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_is_freed_is_not_asked_of_the_system_again():
    try:
        ctypes.CDLL(None).mallopt  # noqa: B018
    except (AttributeError, OSError, TypeError):
        pytest.skip("this C library has no mallopt")

    def pages(how):
        command = [sys.executable, "-c", TAKEN_AGAIN, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert pages("keep") < pages("return") / 2


def test_help_does_not_wait_for_torch():
    every = [[*command, "--help"] for command in [(), *COMMANDS]]
    code = f"import sys; from diffpure.cli import app\nfor words in {every}: app(words, standalone_mode=False)\n"
    code += "print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == "False", found.stderr


@pytest.fixture
def cheap_world(tmp_path, monkeypatch):
    """An empty folder to work in, with cheap models in place of the embedded ones and nothing fetched or trained."""
    import diffpure.models.fetch
    import diffpure.scores.load
    from diffpure.data import cifar10
    from diffpure.exporting import make
    from diffpure.training import recipes

    torch.manual_seed(0)
    classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)).eval()
    score = dp.GaussianScore(variance=0.25)
    monkeypatch.setattr(experiments, "load_classifier", lambda name, **_: classifier)
    monkeypatch.setattr(experiments, "load_score", lambda name, **_: score)
    monkeypatch.setattr(diffpure.scores.load, "load_score", lambda name, **_: score)
    monkeypatch.setattr(diffpure.models.fetch, "fetch", lambda card, check, progress: tmp_path / card.file)
    monkeypatch.setattr(cifar10, "fetch", lambda say: say("fetched"))
    monkeypatch.setattr(cifar10, "load", lambda *_: None)
    network = SimpleNamespace(data=b"a network", weights=b"", inputs=["x"])
    monkeypatch.setattr(make, "export_score", lambda *_: (SimpleNamespace(network=network), 0.0))
    monkeypatch.setattr(recipes, "photographs", lambda _: None)
    monkeypatch.setattr(recipes, "follow", lambda *_, **__: classifier)
    monkeypatch.setattr(recipes, "harden", lambda *_: {"score": classifier, "classifier": classifier})
    monkeypatch.setattr(recipes, "export", lambda *_: {"file": "x", "sha256": "0"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_example_in_the_help_works_as_typed(command, cheap_world, monkeypatch):
    if command == ("play",):
        gradio = pytest.importorskip("gradio", reason="gradio is not installed")
        monkeypatch.setattr(gradio.Blocks, "launch", lambda *_, **__: (None, "http://here", None))
        monkeypatch.setattr(gradio.Blocks, "block_thread", lambda _: None)
    if command == ("purify",):
        (cheap_world / "photos").mkdir()
        Image.new("RGB", (40, 30), "teal").save(cheap_world / "photos" / "teal.png")
    if command[0] in ("verify", "report", "runs", "compare"):
        spec = EvaluationSpec.read(shipped_specs()["cifar10-bare-linf"]).tiny()
        run_spec(spec, cheap_world / "runs" / "mine")
        for name in ("a", "b"):
            shutil.copytree(cheap_world / "runs" / "mine", cheap_world / "runs" / name)
    if command == ("serve",):
        server = pytest.importorskip("diffpure.serve.server", reason="the service is an optional extra")
        bind = server.bind
        monkeypatch.setattr(server, "bind", lambda host, port: bind(host, 0))
        monkeypatch.setattr(server, "listen", lambda app, at, limits: at.close())
    words = shlex.split(COMMANDS[command].epilog.removeprefix("Example: diffpure "))
    typed = [part for word in words for part in (sorted(glob.glob(word)) if "*" in word else [word])]
    found = runner.invoke(cli.app, typed, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    assert found.output.strip()
    made = {
        "purify": "clean/teal.png",
        "report": "report.html",
        "demo": "out/report.html",
        "init": "mine.toml",
        "export": "score.onnx",
    }
    assert (cheap_world / made.get(command[0], ".")).exists()
    if command == ("doctor",):
        assert json.loads(found.stdout)["first_image_seconds"] > 0


def test_the_shell_completes_commands(monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # no shell need be around the tests
    script = runner.invoke(cli.app, ["--show-completion", "bash"], prog_name="diffpure")
    assert script.exit_code == 0
    assert "complete -o default -F _diffpure_completion diffpure" in script.output
    asked = {"_DIFFPURE_COMPLETE": "complete_bash", "COMP_WORDS": "diffpure models s", "COMP_CWORD": "2"}
    assert runner.invoke(cli.app, [], prog_name="diffpure", env=asked).output.split() == ["show"]


def test_version():
    assert "diffpure 0" in runner.invoke(cli.app, ["--version"]).output


def test_errors_are_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["diffpure", "data", "fetch", "cifar-10"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert message == "Error: Unknown data set 'cifar-10'; did you mean 'cifar10'? known: cifar10."


def test_the_demo_writes_a_report_a_picture_and_runs(cheap_world):
    arguments = ["demo", "--out", "here", "--images", "8", "--adaptive", "2"]
    found = runner.invoke(cli.app, arguments, catch_exceptions=False)
    assert found.exit_code == 0
    said = " ".join(found.output.split())
    assert "not the paper's numbers" in said
    assert "exact gradient" in said
    assert said.endswith(f"(open it in a browser: {(cheap_world / 'here' / 'report.html').as_uri()})")
    page = (cheap_world / "here" / "report.html").read_text()
    assert "not the paper's numbers" in html.unescape(page)
    assert page.count("<figcaption>purified <span") == 8 + 8 + 2
    with Image.open(cheap_world / "here" / "demo.png") as picture:
        assert picture.width > picture.height > 100
    rows = {file: file.read_bytes() for file in (cheap_world / "here" / "runs").rglob("rows.jsonl")}
    assert len(rows) == 4
    again = runner.invoke(cli.app, arguments, catch_exceptions=False)
    assert again.output == found.output
    assert all(file.read_bytes() == content for file, content in rows.items())  # read, not computed again


def test_the_runs_of_the_demo_verify(cheap_world, monkeypatch):
    config = demonstration.DemoConfig(images=8, adaptive_images=2, gradients=2, shown=2)
    demo = demonstration.run_demo(config, Path("runs"))
    (cheap_world / "elsewhere").mkdir()
    monkeypatch.chdir(cheap_world / "elsewhere")  # a demo is checked from any folder
    assert [row.rate.total for row in demo.rows] == [8, 8, 8, 8, 2]
    for folder in demo.folders:
        assert experiments.verify_run(cheap_world / folder).passed
    bare, brought = demo.galleries[0], demo.galleries[2]
    assert np.array_equal(bare.pictures[1], brought.pictures[0])  # what was attacked is what is purified


def test_errors_keep_their_brackets(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["diffpure", "data", "fetch", "[/red]"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "'[/red]'" in capsys.readouterr().err


def test_unknown_recipes_are_named(tmp_path, monkeypatch):
    from diffpure.data import cifar10

    monkeypatch.setattr(cifar10, "load", lambda *_: None)
    with pytest.raises(InputError, match="did you mean 'cifar10-small'"):
        runner.invoke(
            cli.app, ["train", "score", "--recipe", "cifar10-smal", "--out", str(tmp_path)], catch_exceptions=False
        )


def test_models_are_listed_shown_and_verified():
    found = json.loads(runner.invoke(cli.app, ["models", "list", "--json"]).output)
    assert found["imagenet-guided"]["kind"] == "score"
    shown = runner.invoke(cli.app, ["models", "show", "imagenet-guided"], env={"COLUMNS": "200"}).output
    assert "256x256_diffusion_uncond.pt" in shown
    assert re.search(r"num_res_blocks +2\b", shown)  # a table in the card
    assert runner.invoke(cli.app, ["models", "verify"]).exit_code == 0
    with pytest.raises(InputError, match="did you mean 'imagenet-guided'"):
        runner.invoke(cli.app, ["models", "show", "imagenet-guide"], catch_exceptions=False)


@pytest.mark.parametrize("name", [name for name, card in cards().items() if card.embedded])
def test_what_was_measured_is_shown_in_words(name):
    """The rates of a card in one line each, nothing cut off, and every interval the one its counts give."""
    shown = runner.invoke(cli.app, ["models", "show", name], env={"COLUMNS": "100"}).output
    assert not set("{}…") & set(shown)
    said = " ".join(shown.split())
    found = cards()[name].measured
    measured = [
        v for v in (*found.values(), *found.get("purified", {}).values()) if isinstance(v, dict) and "correct" in v
    ]
    psnr = [entry["mean"] for entry in found.get("psnr", {}).values() if isinstance(entry, dict)]
    errors = [entry for entry in found.get("epsilon_error", {}).values() if isinstance(entry, float)]
    assert measured or psnr or errors
    assert all(f"{number:g}" in said for number in (*psnr, *errors))
    for each in measured:
        rate = Rate(each["correct"], each["total"])
        assert each["interval"] == pytest.approx(rate.interval, abs=6e-5)
        assert f"{rate}, {each['correct']:,} of {each['total']:,}" in said


@pytest.mark.parametrize("name", ["cifar10-small", "cifar10-resnet-at"])
def test_a_terminal_without_greek_letters_shows_the_card(name):
    words = [sys.executable, "-c", "from diffpure.cli import main; main()", "models", "show", name]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(words, capture_output=True, env=environment)
    assert shown.returncode == 0, shown.stderr
    assert b"Apache-2.0" in shown.stdout


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "256x256_diffusion_uncond.pt"
    file.write_bytes(b"nothing")
    with pytest.raises(InputError):
        runner.invoke(cli.app, ["models", "fetch", "imagenet-guided", "--from", str(file)], catch_exceptions=False)
    assert not (tmp_path / "cache").exists()

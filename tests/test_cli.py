"""The command line: help that fits and teaches, one sentence for errors, and commands that do what they say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from diffpure import cli
from diffpure.errors import InputError
from diffpure.experiments import demo as demonstration
from problems import tiny_unet

COMMANDS = [
    ["demo"],
    ["data", "fetch"],
    ["data", "where"],
    ["train", "score"],
    ["train", "classifier"],
    ["models", "list"],
    ["models", "show"],
    ["models", "verify"],
    ["models", "fetch"],
    ["doctor"],
    ["purify"],
    ["report"],
    ["evaluate"],
    ["verify"],
    ["attack"],
    ["audit"],
    ["suggest-t"],
]
runner = CliRunner()


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_help_fits_a_screen_and_holds_an_example(command):
    found = runner.invoke(cli.app, [*command, "--help"], env={"COLUMNS": "100", "LINES": "40"})
    assert found.exit_code == 0
    assert len(found.output.splitlines()) <= 40
    assert ("Example: diffpure " + " ".join(command) if command else "diffpure demo") in found.output


def test_help_does_not_wait_for_torch():
    code = "import sys, diffpure.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_version():
    assert "diffpure 0" in runner.invoke(cli.app, ["--version"]).output


def test_errors_are_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["diffpure", "data", "fetch", "cifar-10"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert message == "Error: Unknown data set 'cifar-10'; did you mean 'cifar10'? known: cifar10."


@pytest.fixture
def tiny_models(monkeypatch):
    """The demo with untrained tiny models in place of the embedded ones."""
    torch.manual_seed(0)
    classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)).eval()
    monkeypatch.setattr(demonstration, "load_classifier", lambda name: classifier)
    monkeypatch.setattr(demonstration, "load_score", lambda name: tiny_unet())


def test_the_demo_prints_a_table_and_writes_a_picture(tiny_models, tmp_path):
    arguments = ["demo", "--out", str(tmp_path / "out"), "--images", "8", "--adaptive", "2"]
    found = runner.invoke(cli.app, arguments, env={"COLUMNS": "120"}, catch_exceptions=False)
    assert found.exit_code == 0
    assert "not the paper's numbers" in " ".join(found.output.split())
    assert "exact" in found.output
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000


def test_the_demo_is_a_function_of_its_seed(tiny_models):
    config = demonstration.DemoConfig(images=8, adaptive_images=2, iterations=2, draws=2, shown=2)
    first, second = (demonstration.run_demo(config) for _ in range(2))
    assert first.rows == second.rows
    assert [row.rate.total for row in first.rows] == [8, 8, 8, 8, 2]
    assert set(first.strips) == {"clean", "attacked", "diffused", "purified"}


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
    assert runner.invoke(cli.app, ["models", "verify"]).exit_code == 0
    with pytest.raises(InputError, match="did you mean 'imagenet-guided'"):
        runner.invoke(cli.app, ["models", "show", "imagenet-guide"], catch_exceptions=False)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "256x256_diffusion_uncond.pt"
    file.write_bytes(b"nothing")
    with pytest.raises(InputError):
        runner.invoke(cli.app, ["models", "fetch", "imagenet-guided", "--from", str(file)], catch_exceptions=False)
    assert not (tmp_path / "cache").exists()

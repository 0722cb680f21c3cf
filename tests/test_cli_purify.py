"""`diffpure purify`, and what all commands share: progress on standard error, names that do nothing, devices, -h."""

from __future__ import annotations

import io
import json
import os
import sys
import time

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import diffpure as dp
import diffpure.scores.load
from diffpure import cli
from diffpure.cli import base
from diffpure.cli import images as image_commands
from diffpure.errors import InputError
from pictures import Silent, encoded, smooth, tree

runner = CliRunner()


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder to work in, and a score of 0 at 16 pixels in place of the embedded one."""
    monkeypatch.setattr(diffpure.scores.load, "load_score", lambda name, like=None, **_: Silent())
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words):
    return runner.invoke(cli.app, ["purify", *map(str, words)], catch_exceptions=False)


def test_every_file_is_purified_or_named(world):
    (world / "photo.png").write_bytes(encoded(smooth(40, 30)))
    (world / "small.png").write_bytes(encoded(smooth(20, 16)))
    (world / "bad.png").write_bytes(b"no image")
    found = call("*.png", "-o", "out", "--sampler", "one-shot", "--seed", 3)
    assert found.exit_code == 1  # one file failed
    assert found.stdout.splitlines() == [
        "2 purified, 0 already there, 1 failed.",
        "1 image purified in 9 overlapping tiles of 16×16; 1 image resized to 16×16 and back, which loses detail.",
        "failed  bad.png: bad.png is not an image that can be read; JPEG, PNG, WebP, BMP and TIFF are.",
    ]
    again = call("*.png", "-o", "out", "--sampler", "one-shot", "--seed", 3)
    assert "0 purified, 2 already there, 1 failed." in again.stdout


def test_the_folder_records_its_settings_and_refuses_others(world):
    (world / "a.png").write_bytes(encoded())
    model = ["--model", "cifar10-small"]
    assert call("a.png", "-o", "out", *model).exit_code == 0
    recorded = json.loads((world / "out" / ".diffpure.json").read_text())["settings"]
    assert (recorded["sampler"], recorded["t_star"], recorded["model"]) == ("few-step", 0.1, "cifar10-small")
    assert "seed" not in recorded
    for words, said in (
        (["--t-star", "0.2"], "with t_star 0.1, and this call has 0.2"),
        (["--steps", "3"], "with steps 10, and this call has 3"),
        (["--seed", "3"], "with seed not given, and this call has 3"),
    ):
        with pytest.raises(InputError, match=said):
            call("a.png", "-o", "out", *model, *words)
    with pytest.raises(InputError, match="with model cifar10-small, and this call has cifar10-small at 32x32, photos"):
        call("a.png", "-o", "out")
    assert "1 purified" in call("a.png", "-o", "out", "--t-star", "0.2", "--overwrite").stdout


def test_other_weights_of_the_same_name_do_not_continue_a_folder(world, monkeypatch):
    (world / "a.png").write_bytes(encoded())
    words = ["a.png", "-o", "out", "--model", "cifar10-small"]
    assert call(*words).exit_code == 0

    class Trained(Silent):
        pass

    monkeypatch.setattr(diffpure.scores.load, "load_score", lambda name, like=None, **_: Trained())
    with pytest.raises(InputError, match="with weights"):
        call(*words)


def test_without_a_model_the_size_of_an_image_chooses_it(world, monkeypatch):
    """A stand-in score returns its own colour: 0 for cifar10-small, 1 for photos-small."""
    asked = []

    class Colour(dp.EpsilonScore):
        def __init__(self, name):
            super().__init__(dp.VPSDE(), size=32 if name == "cifar10-small" else None)
            self.value = -1.0 if self.size else 1.0

        def epsilon(self, x, t):
            asked.append((self.size, round(float(t[0]), 3)))
            alpha = self.sde.alpha(t)[0]
            return ((x - alpha.sqrt() * self.value) / (1 - alpha).sqrt()).float()

    monkeypatch.setattr(diffpure.scores.load, "load_score", lambda name, like=None, **_: Colour(name))
    for name, size in (("icon.png", (32, 32)), ("photo.png", (40, 33)), ("wide.png", (32, 48))):
        (world / name).write_bytes(encoded(smooth(*size)))
    np.savez(world / "set.npz", icons=np.zeros((2, 32, 32), np.uint8), photos=np.zeros((2, 20, 20), np.uint8))
    assert call("*.*", "-o", "out", "--sampler", "one-shot", "--trajectory", "strip").exit_code == 0
    colours = {name: np.asarray(Image.open(world / "out" / name)) for name in ("icon.png", "photo.png", "wide.png")}
    assert [int(colours[name].min()) for name in colours] == [0, 255, 255]
    with np.load(world / "out" / "set.npz") as arrays:
        assert (arrays["icons"].max(), arrays["photos"].min()) == (0, 255)
    assert set(asked) == {(32, 0.1), (None, 0.05)}
    recorded = json.loads((world / "out" / ".diffpure.json").read_text())["settings"]
    assert recorded["model"] == "cifar10-small at 32x32, photos-small at other sizes"
    assert recorded["t_star"] == {"cifar10-small": 0.1, "photos-small": 0.05}
    assert call("icon.png", "-o", "ld", "--sampler", "ld", "--steps", 1).exit_code == 0  # which has no t*


def test_an_option_that_the_sampler_ignores_is_refused(world):
    assert image_commands.make_sampler("sde", 0.05, 3) == dp.ReverseSDE(t_star=0.05, steps=3)
    assert image_commands.make_sampler("ld", None, None) == dp.Langevin()
    for name, t_star, steps, said in (
        ("fewstep", 0.1, None, "did you mean 'few-step'"),
        ("one-shot", None, 3, "The sampler 'one-shot' takes no --steps, got 3; leave it out."),
        ("ld", 0.1, None, "The sampler 'ld' takes no --t-star, got 0.1; leave it out."),
    ):
        with pytest.raises(InputError, match=said):
            image_commands.make_sampler(name, t_star, steps)


def test_each_image_has_a_strip_of_its_own(world):
    (world / "in").mkdir()
    (world / "in" / "a.png").write_bytes(encoded())
    (world / "in" / "a.jpg").write_bytes(encoded(kind="JPEG"))
    Image.fromarray(smooth(16, 16, 1)[:, :, 0]).save(world / "in" / "grey.png")
    (world / "in" / "large.png").write_bytes(encoded(smooth(40, 40)))
    for kind, ending in (("strip", "png"), ("gif", "gif")):
        found = call("in", "-o", kind, "--sampler", "one-shot", "--trajectory", kind)
        assert found.exit_code == 0
        drawn = {f"{name}.trajectory.{ending}" for name in ("a.png", "a.jpg", "grey.png")}
        assert tree(world / kind) == {"a.png", "a.jpg", "grey.png", "large.png"} | drawn
        assert "large.png: no way back is drawn of tiles" in found.stdout
    assert call("strip", "-o", "again").stdout.startswith("4 purified")  # a drawing is no photograph


def test_names_are_shown_and_do_nothing(world):
    folder = world / "in" / "x[" / "y]"
    folder.mkdir(parents=True)
    for name in ("c[red].png", "esc\x1b[31m\x07.png", "line\nfailed.png", "raw\udcff.png", "right\u202eto left.png"):
        (folder / name).write_bytes(b"no image")
    (folder / "good[b].png").write_bytes(encoded())
    found = call("in", "-o", "out[/b]c", "--trajectory", "strip", "--fit", "resize")
    assert found.exit_code == 1
    assert "1 purified, 0 already there, 5 failed." in found.stdout
    assert len(found.stdout.splitlines()) == 6
    assert all(c.isprintable() or c == "\n" for c in found.stdout)
    assert "\\x1b[31m\\x07.png" in found.stdout


def test_errors_do_not_reach_the_terminals_controls(world, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["diffpure", "purify", "no\x1b[2J[/red].png", "-o", "out"])
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "[/red].png" in said


def test_a_device_that_the_machine_lacks_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert base.use_device("auto") == base.use_device("cpu") == "cpu"
    with pytest.raises(InputError, match=r"^Torch finds no device 'cuda' on this machine; it finds cpu\.$"):
        base.use_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert base.use_device("auto") == base.use_device("cuda") == "cuda"


def words(command, path=()):
    """The words that call a group, every command below it, and the groups between."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from words(inner, (*path, name))


@pytest.mark.parametrize("command", words(typer.main.get_command(cli.app)), ids=" ".join)
def test_h_is_help(command):
    short, long = (runner.invoke(cli.app, [*command, word], env={"COLUMNS": "100"}) for word in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.output == long.output


# ---------------------------------------------------------------------------------------------------------- progress


@pytest.fixture
def stream(monkeypatch):
    """What progress is written to, and how to make it a terminal."""
    out = io.StringIO()

    def use(terminal: bool) -> io.StringIO:
        monkeypatch.setattr(base, "errors", Console(file=out, force_terminal=terminal, width=100, highlight=False))
        return out

    return use


def wait_for(found, *, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not found() and time.monotonic() < end:
        time.sleep(0.01)


def test_without_a_terminal_there_is_a_line_now_and_then(stream):
    out = stream(terminal=False)
    with base.Bars(every=0.01) as bars:
        bars("images", 3, 1200)
        bars("tiles of a[/b]\x1b.png", 4, 9)
        bars("run", 0.25, 1.0, shown="pgd on images 0–9", left="3 minutes")
        bars("members", 5, None)
        wait_for(lambda: "members" in out.getvalue())
    assert out.getvalue().splitlines()[-1] == (
        "images 3/1,200; tiles of a[/b]\\x1b.png 4/9; pgd on images 0–9 25 %, 3 minutes left; members 5"
    )


def test_work_that_is_done_is_shown_no_more(stream):
    out = stream(terminal=False)
    with base.Bars(every=0.01) as bars:
        bars("tiles of a", 8, 9)
        bars("tiles of a", 9, 9)
        bars("tiles of b", 1, 4)
        wait_for(out.getvalue)
    assert "tiles of b 1/4" in out.getvalue()
    assert "tiles of a" not in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_nothing(stream, terminal):
    out = stream(terminal)
    with base.Bars(quiet=True, every=0.001) as bars:
        bars("images", 1, 3)
        time.sleep(0.05)
    assert out.getvalue() == ""


def test_on_a_terminal_there_are_bars_whatever_the_work_is_called(stream):
    out = stream(terminal=True)
    with base.Bars() as bars:
        bars("tiles of a[/b]c.png", 2, 9)
        bars("run", 0.5, 1.0, shown="pgd", left="3 minutes")
        bars._bars.refresh()
        shown = out.getvalue()
    assert "tiles of a[/b]c.png" in shown
    assert "2/9" in shown
    assert "50 %" in shown
    assert "3 minutes left" in shown


def test_the_time_that_is_left_is_that_of_the_speed_so_far():
    assert base._left(10, 2, 4) == "20 s"
    assert base._left(10, 1, 30) == "5 min 00 s"
    assert base._left(60, 1, 125) == "2 h 05 min"
    assert base._left(10, 0, 4) == base._left(10, 2, None) == ""


def test_progress_goes_to_standard_error_and_results_to_standard_output(world, monkeypatch):
    monkeypatch.setattr(base.Bars.__init__, "__defaults__", (False, 0.001))
    np.savez(world / "set.npz", x=np.zeros((40, 16, 16), np.uint8), y=np.arange(40))
    found = call("set.npz", "-o", "out", "--batch", 1)
    assert "set.npz: x" in found.stderr
    assert found.stdout.splitlines() == [
        "1 purified, 0 already there, 0 failed.",
        "note    set.npz: images purified: 40 in x (40, 16, 16); kept as they are: y",
    ]
    assert call("set.npz", "-o", "quiet", "--batch", 1, "--quiet").stderr == ""


def test_saying_keeps_lines_and_shows_markup():
    console = Console(file=io.StringIO(), width=40)
    base.say("[red]a[/red]\n\x1b[2J" + "b" * 60, console)
    assert console.file.getvalue() == "[red]a[/red]\n\\x1b[2J" + "b" * 60 + "\n"

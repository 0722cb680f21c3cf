"""Recipes and the command that trains them: every recipe trains and exports, every option reaches its training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from diffpure import cli
from diffpure.data import cifar10
from diffpure.data.cifar10 import Images
from diffpure.diffusion.samplers import OneShot
from diffpure.errors import InputError
from diffpure.threats import L2, Linf
from diffpure.training import recipes
from diffpure.training.adversarial import FAST_LINF, Adversary
from diffpure.training.classifier import ClassifierConfig
from diffpure.training.loop import generator
from diffpure.training.recipes import RECIPES, export, follow
from diffpure.training.score import ScoreConfig


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_and_exports(name, tmp_path, monkeypatch):
    """Two steps of each recipe on noise: the exported weights are those of the model, in half precision."""
    monkeypatch.setattr(recipes, "HELD_OUT", 12)
    pixels = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=generator(0, 0))
    images = Images(pixels, torch.arange(40) % 10)
    size = {"examples": 8} if isinstance(RECIPES[name].config, ScoreConfig) else {"epochs": 2 / 10}
    model = follow(name, images, tmp_path / "run", batch=4, threads=1, **size)
    assert "step 2/2" in (tmp_path / "run" / "log.txt").read_text()
    card = export(name, model, tmp_path)
    stored = load_file(tmp_path / card["file"])
    assert stored.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.allclose(stored[key].float(), value.float(), rtol=1e-3, atol=1e-6)
    assert card["parameters"] < 4_000_000
    assert card["multiply_adds"] < 500_000_000


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`diffpure train` on forty images of noise: returns the configuration that was trained."""
    pixels = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=generator(0, 0))
    monkeypatch.setattr(cifar10, "load", lambda *_: Images(pixels, torch.arange(40) % 10))
    monkeypatch.setattr(recipes, "HELD_OUT", 12)
    trained: list[ScoreConfig | ClassifierConfig] = []
    for name in ("train_score", "train_classifier"):
        train_ = getattr(recipes, name)

        def remember(model, images, config, *rest, train_=train_):
            trained.append(config)
            return train_(model, images, config, *rest)

        monkeypatch.setattr(recipes, name, remember)

    def run(*arguments: str) -> ScoreConfig | ClassifierConfig:
        command = ["train", *arguments, "--out", str(tmp_path / "run"), "--threads", "1"]
        found = CliRunner().invoke(cli.app, command, catch_exceptions=False)
        assert found.exit_code == 0
        assert "sha256" in found.output
        return trained.pop()

    return run


def test_the_command_trains_a_score_as_its_options_say(command):
    options = {"examples": 8, "batch": 4, "rate": 1e-4, "decay": 0.9, "weighting": "likelihood", "t_max": 0.2}
    options |= {"power": 1.0, "precision": "float32", "seed": 3}
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    assert command("score", *words) == replace(ScoreConfig(), threads=1, **options)


CLASSIFIER = ("classifier", "--epochs", "0.1", "--batch", "4")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--adversary pgd --iterations 1 --step-size 10/255", FAST_LINF),
        ("--adversary pgd --norm l2 --eps 0.5 --iterations 2", Adversary(threat=L2(0.5), iterations=2)),
        ("--adversary trades --iterations 2", Adversary(threat=Linf(8 / 255), iterations=2, trades=6.0)),
        ("--adversary trades --iterations 1 --beta 3", Adversary(threat=Linf(8 / 255), iterations=1, trades=3.0)),
        ("--rate 5 --decay 0.5", None),
    ],
)
def test_the_command_trains_against_the_adversary_of_its_options(command, options, expected):
    assert command(*CLASSIFIER, *options.split()).adversary == expected


def test_the_command_trains_on_purified_images(command):
    config = command(*CLASSIFIER, "--purify", "0.05")
    assert config.purify.sampler == OneShot(0.05)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--adversary pdg", "did you mean 'pgd'"),
        ("--eps 4/255", "name one"),
        ("--adversary pgd --beta 6", "trades"),
        ("--adversary pgd --eps 8/0", "8/255 is wanted"),
        ("--adversary pgd --norm l3", "threat 'l3'"),
        ("--adversary pgd --step-size 0", "a positive size"),
        ("--adversary trades --beta 0", "β of TRADES is positive"),
        ("--purify 0", r"t\* is a time"),
    ],
)
def test_the_command_refuses_what_it_cannot_train(command, options, says):
    with pytest.raises(InputError, match=says):
        command(*CLASSIFIER, *options.split())

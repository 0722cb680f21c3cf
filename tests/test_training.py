"""Trainings: what their batches show, what they refuse, and what they learn of scikit-learn's digits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.attacks.pgd import PGD
from diffpure.data.cifar10 import Images
from diffpure.errors import InputError
from diffpure.scores.small import SmallUNet
from diffpure.threats import L2, Linf
from diffpure.training.adversarial import FAST_LINF, Adversary
from diffpure.training.classifier import Augmented, ClassifierConfig, train_classifier
from diffpure.training.loop import Run, averaged, generator
from diffpure.training.recipes import follow
from diffpure.training.score import ScoreConfig, drawn, epsilon_error, picture, train_score

# ------------------------------------------------------------------------------------------------------------ batches


def test_two_epochs_show_each_image_from_both_sides():
    pixels = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8, generator=generator(0, 0))
    images = Images(pixels, torch.arange(6))
    source = Augmented(images, ClassifierConfig(batch=6, translate=0))
    shown = {}
    for step in range(2):
        x, y = source(step)
        assert x.is_contiguous(memory_format=torch.channels_last)
        for image, label in zip(x, y.tolist(), strict=True):
            shown.setdefault(label, []).append(image)
    for label, (first, second) in shown.items():
        assert torch.equal(first, second.flip(2))
        assert any(torch.equal(view, images.float()[label]) for view in (first, second))


def test_translations_move_the_image_and_nothing_else():
    pixels = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8).expand(5, 3, 8, 8).contiguous()
    x, _ = Augmented(Images(pixels, torch.zeros(5, dtype=torch.int64)), ClassifierConfig(batch=5, flip=False))(0)
    padded = F.pad(pixels[:1].float(), (2, 2, 2, 2), mode="reflect") / 255
    places = [padded[0, :, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
    assert all(any(torch.equal(image, place) for place in places) for image in x)


def test_the_times_of_a_batch_are_spread_evenly():
    images = Images(torch.zeros(64, 1, 8, 8, dtype=torch.uint8), torch.zeros(64))
    _, t, eps = drawn(images, ScoreConfig(batch=64, t_max=0.3, power=2.0), 5)
    u = (t / 0.3).sqrt().sort().values
    assert (u > 0).all()
    assert (u <= 1).all()
    assert torch.allclose(u.diff(), torch.full((63,), 1 / 64, dtype=torch.float64))
    assert eps.std().item() == pytest.approx(1, abs=0.05)


def test_a_run_refuses_impossible_numbers():
    with pytest.raises(InputError, match="steps >= 1"):
        Run(steps=0)
    with pytest.raises(InputError, match="precision"):
        Run(steps=1, precision="float16")
    with pytest.raises(InputError, match="weighting"):
        ScoreConfig(weighting="epsilom")
    with pytest.raises(InputError, match="t_max"):
        ScoreConfig(t_max=0)
    for config, name in ((ClassifierConfig, "adam"), (ScoreConfig, "sgd")):
        with pytest.raises(InputError, match="optimiser"):
            config(optimiser=name)
    with pytest.raises(InputError, match="recipe"):
        follow("cifar10-smal", Images(torch.zeros(0), torch.zeros(0)), None)
    with pytest.raises(InputError, match="TRADES"):
        replace(FAST_LINF, trades=0)
    with pytest.raises(InputError, match="one move"):
        replace(FAST_LINF, iterations=0)


# ------------------------------------------------------------------------------------------------------------- digits


@pytest.fixture(scope="module")
def digits() -> Images:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    pixels = (torch.from_numpy(data.images) * (255 / 16)).round().to(torch.uint8)[:, None]
    return Images(pixels, torch.from_numpy(data.target).long())


@pytest.mark.parametrize(("optimiser", "rate", "examples"), [("adam", 3e-3, 30_000), ("muon", 1e-2, 12_000)])
def test_a_score_learns_the_digits(digits, tmp_path, optimiser, rate, examples):
    """The stated loss: less than half of the ε-error of the best Gaussian, which is the network before training."""
    torch.manual_seed(0)
    model = SmallUNet(widths=(32, 48), embedding=32, channels=1, size=8)
    training, rest = digits[:1500], digits[1500:]
    before = epsilon_error(model, rest, (0.1, 0.2))
    how = {"optimiser": optimiser, "rate": rate, "examples": examples}
    config = ScoreConfig(**how, batch=100, decay=0.98, flip=False, threads=1)
    state = train_score(model, training, config, rest, tmp_path)
    with averaged(model, state):
        after = epsilon_error(model, rest, (0.1, 0.2))
        assert picture(model, rest).size == (12 * 8, 7 * 8)
    assert after[0.1] < 0.5 * before[0.1]
    assert after[0.2] < 0.5 * before[0.2]
    assert (tmp_path / "denoised.png").is_file()
    assert "ε-error 0.01:" in (tmp_path / "log.txt").read_text()


class DigitNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10),
        )  # fmt: skip


DIGITS = {"batch": 100, "rate": 2.0, "bias_factor": 1.0, "translate": 1, "flip": False, "decay": 0.9, "threads": 1}


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def test_a_classifier_learns_the_digits(digits):
    torch.manual_seed(0)
    model = DigitNet()
    state = train_classifier(model, digits[:1500], ClassifierConfig(epochs=5, **DIGITS))
    with averaged(model, state):
        assert accuracy(model, digits[1500:].float(), digits[1500:].labels) > 0.9


def test_a_classifier_can_be_trained_on_purified_images(digits):
    torch.manual_seed(0)
    seen = []

    def purify(x: Tensor, seeds: Tensor) -> Tensor:
        seen.append(tuple(seeds.tolist()))
        return 1 - x

    model = DigitNet()
    state = train_classifier(model, digits[:1500], ClassifierConfig(epochs=3, purify=purify, **DIGITS))
    with averaged(model, state):
        assert accuracy(model, 1 - digits[1500:].float(), digits[1500:].labels) > 0.85
    assert len(set(seen)) == len(seen) == 45


@pytest.mark.parametrize(
    "adversary",
    [
        Adversary(threat=Linf(0.1), iterations=1, step_size=0.125),
        Adversary(threat=Linf(0.1), iterations=2, trades=4.0),
        Adversary(threat=L2(0.5), iterations=2),
    ],
    ids=["fast", "trades", "l2"],
)
def test_adversarial_training_makes_robust(digits, adversary):
    """Attacked by more steps than it was trained with, it beats plain training by a tenth of the images."""
    x, y = digits[1600:].float(), digits[1600:].labels
    robust = []
    for against in (None, adversary):
        torch.manual_seed(0)
        model = DigitNet()
        state = train_classifier(model, digits[:1500], ClassifierConfig(epochs=6, adversary=against, **DIGITS))
        with averaged(model, state):
            z = PGD(iterations=10)(model, x, y, adversary.threat, seeds=range(len(x)))
            robust.append(accuracy(model, adversary.threat.apply(x, z), y))
    assert robust[1] > robust[0] + 0.1

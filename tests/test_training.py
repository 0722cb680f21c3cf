"""Training: batches and resumption as pure functions of the step, and real trainings on scikit-learn's digits."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from diffpure import cli
from diffpure.attacks.pgd import PGD
from diffpure.classifiers.small import ARCHITECTURES
from diffpure.data import cifar10
from diffpure.data.cifar10 import Images
from diffpure.errors import InputError
from diffpure.purify import Purifier
from diffpure.samplers import OneShot
from diffpure.scores.base import GaussianScore
from diffpure.scores.small import SmallUNet
from diffpure.threats import L2, Linf
from diffpure.training import precision, recipes
from diffpure.training.adversarial import FAST_LINF, Adversary
from diffpure.training.classifier import Augmented, ClassifierConfig, train_classifier
from diffpure.training.loop import Run, Workers, averaged, batch_indices, cosine, generator, train, triangular
from diffpure.training.precision import bfloat16_speedup, settle
from diffpure.training.recipes import RECIPES, export, follow
from diffpure.training.score import ScoreConfig, _draw, epsilon_error, picture, train_score
from test_small import shaken


def toy() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def toy_batch(step: int, stop: int | None = None) -> tuple[Tensor]:
    """Rows of the step alone; at step `stop`, an interrupt from the keyboard."""
    if step == stop:
        signal.raise_signal(signal.SIGINT)
    return (torch.randn(9, 1, 8, 8, generator=generator(7, step)),)


def toy_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x.flatten(1)[:, :3])


def run_toy(folder: Path | None, stop: int | None = None, precision: str = "float32") -> dict[str, Tensor]:
    """The averaged weights of a toy run; with `stop`, interrupted from the keyboard at that step."""
    model, optimiser = toy()
    run = Run(steps=30, folder=folder, decay=0.9, clip=1.0, log_steps=5, threads=2, precision=precision)
    return train(model, optimiser, partial(toy_batch, stop=stop), toy_loss, cosine(), run)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("stop", [0, 13, 28])
def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path, stop):
    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path, stop)
    assert same(run_toy(tmp_path), run_toy(None))


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = run_toy(tmp_path)
    assert same(first, run_toy(tmp_path, stop=0))
    assert "step 30/30 loss" in (tmp_path / "log.txt").read_text()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run_toy(tmp_path)
    model = nn.Linear(3, 3)
    optimiser = torch.optim.Adam(model.parameters())
    with pytest.raises(InputError, match="another model"):
        train(model, optimiser, toy_batch, toy_loss, cosine(), Run(steps=1, folder=tmp_path))


PURIFY = {t: Purifier(GaussianScore(), OneShot(t)) for t in (0.1, 0.2)}


def train_briefly(folder: Path, shade: int = 0, **changes: Any) -> None:
    """Two steps of a linear classifier on four images of one shade."""
    images = Images(torch.full((4, 3, 8, 8), shade, dtype=torch.uint8), torch.arange(4) % 2)
    options = {"epochs": 1, "batch": 2, "translate": 0, "rate": 0.1, "purify": PURIFY[0.1], "threads": 1, **changes}
    train_classifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), images, ClassifierConfig(**options), folder)


@pytest.mark.parametrize(
    "changes",
    [{"rate": 0.3}, {"batch": 4}, {"optimiser": "adamw"}, {"adversary": FAST_LINF}, {"purify": PURIFY[0.2]}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_training_goes_on_with_its_own_options_only(tmp_path, changes):
    train_briefly(tmp_path)
    with pytest.raises(InputError, match=f"begun with another {next(iter(changes))}; give the same options"):
        train_briefly(tmp_path, **changes)


def test_a_training_goes_on_with_its_own_data_only(tmp_path):
    train_briefly(tmp_path)
    with pytest.raises(InputError, match="begun with another data; give the same"):
        train_briefly(tmp_path, shade=9)


def test_a_training_goes_on_in_another_manner_and_from_an_older_checkpoint(tmp_path):
    train_briefly(tmp_path)
    train_briefly(tmp_path, threads=2, checkpoint_seconds=1.0, precision="auto")
    file = tmp_path / "checkpoint.pt"
    state = torch.load(file, weights_only=True)
    del state["options"]
    torch.save(state, file)
    train_briefly(tmp_path, rate=0.3)


def test_the_probe_of_bfloat16_survives_any_machine():
    """Here it may work, be slow, or kill the child; this process goes on, and "auto" is the faster of the two."""
    speedup = bfloat16_speedup()
    assert speedup is None or speedup > 0
    assert settle("auto") == ("bfloat16" if (speedup or 0) > 1 else "float32")


@pytest.mark.parametrize("death", ["import os, signal; os.kill(os.getpid(), signal.SIGILL)", "print('no number')"])
def test_a_probe_that_dies_means_no_bfloat16(monkeypatch, death):
    monkeypatch.setattr(precision, "_PROBE", death)
    monkeypatch.setattr(precision, "bfloat16_speedup", bfloat16_speedup.__wrapped__)
    assert settle("auto") == "float32"
    with pytest.raises(InputError, match="cannot train in bfloat16"):
        settle("bfloat16")


@pytest.fixture
def half(monkeypatch):
    """A machine with low precision: float16 stands for bfloat16, which may kill the process."""
    monkeypatch.setattr(precision, "bfloat16_speedup", lambda: 2.0)
    monkeypatch.setitem(precision.DTYPES, "bfloat16", torch.float16)


def test_low_precision_is_used_and_kept_when_a_run_goes_on(tmp_path, half):
    assert not same(run_toy(None, precision="bfloat16"), run_toy(None))
    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path, 13, "auto")
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["precision"] == "bfloat16"
    with pytest.raises(InputError, match="begun in bfloat16"):
        run_toy(tmp_path, precision="float32")
    weights = run_toy(tmp_path, precision="auto")
    assert same(weights, run_toy(None, precision="bfloat16"))
    assert all(value.dtype != torch.float16 for value in weights.values())


def test_threads_in_low_precision_give_the_gradient_of_the_whole(half):
    gradients = []
    for threads in (1, 3):
        model = toy()[0].eval()
        seen = []

        def loss(replica: nn.Module, x: Tensor, seen: list[torch.dtype] = seen) -> Tensor:
            seen.append(replica(x).dtype)
            return toy_loss(replica, x)

        with Workers(model, loss, threads, "bfloat16") as workers:
            workers.gradient(torch.randn(10, 1, 8, 8, generator=generator(1, 1)))
        assert seen == [torch.float16] * threads
        gradients.append([p.grad for p in model.parameters()])
    for one, three in zip(*gradients, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one, three, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", ["score", "small_vit"])  # the others are slow where float16 is emulated
def test_small_networks_can_be_trained_in_low_precision(half, name):
    """The gradient is that of float32 but for rounding."""
    torch.manual_seed(0)
    score = name == "score"
    model = shaken(SmallUNet(widths=(16, 24), embedding=16) if score else ARCHITECTURES[name]()).eval()
    x, t = torch.rand(2, 3, 32, 32), torch.tensor([0.1, 0.2], dtype=torch.float64)

    def loss(replica: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        return replica.epsilon(x, t).square().mean() if score else F.cross_entropy(replica(x), torch.tensor([3]))

    gradients = []
    for kind in ("float32", "bfloat16"):
        with Workers(model, loss, 2, kind) as workers:
            workers.gradient(x, t)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    assert F.cosine_similarity(*gradients, dim=0) > 0.99
    assert not torch.equal(*gradients)


def test_a_run_begun_in_float32_goes_on_in_it_where_bfloat16_is_faster(tmp_path, half):
    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path, 13)
    assert same(run_toy(tmp_path, precision="auto"), run_toy(None))


KILLED = """
import sys, torch
from functools import partial
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_training as t
from diffpure.training.loop import Run, cosine, train
model, optimiser = t.toy()
run = Run(steps=100_000, folder=Path(sys.argv[1]), checkpoint_seconds=0.05, threads=2)
train(model, optimiser, t.toy_batch, t.toy_loss, cosine(), run)
"""


def test_a_run_killed_with_sigkill_goes_on_to_the_same_weights(tmp_path):
    """The process dies at no chosen moment; its last checkpoint goes on to what an unbroken run gives."""
    folder = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parent)])
    file = folder / "checkpoint.pt"
    while not file.is_file() and child.poll() is None:
        time.sleep(0.02)
    time.sleep(0.3)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    step = torch.load(file, weights_only=True)["step"]
    weights = []
    for where in (folder, None):
        model, optimiser = toy()
        run = Run(steps=100_000, folder=where, threads=2)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimiser, partial(toy_batch, stop=step + 5), toy_loss, cosine(), run)
        weights.append(model.state_dict())
    assert same(*weights)


def test_the_parts_of_a_batch_give_the_gradient_of_the_whole():
    """Without batch statistics three threads compute what one does, also where the rows cannot be divided evenly."""
    gradients = []
    for threads in (1, 3):
        model = toy()[0].eval()
        with Workers(model, toy_loss, threads) as workers:
            value = workers.gradient(torch.randn(10, 1, 8, 8, generator=generator(1, 1)))
        gradients.append([torch.tensor([value]), *(p.grad for p in model.parameters())])
    for one, three in zip(*gradients, strict=True):
        assert torch.allclose(one, three, rtol=1e-4, atol=1e-6)


def test_replicas_share_weights_and_the_mean_of_their_statistics():
    model = toy()[0].train()
    x = torch.randn(8, 1, 8, 8, generator=generator(1, 1))
    with Workers(model, toy_loss, 2) as workers:
        workers.gradient(x)
        other = workers.replicas[1]
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    means = model[0](x).mean((0, 2, 3)).detach()
    assert torch.allclose(model[1].running_mean, 0.1 * means, atol=1e-6)
    assert torch.equal(model[1].running_mean, other[1].running_mean)


def test_schedules_begin_peak_and_end_where_they_say():
    rise = triangular(peak=0.25, start=0.2, end=0.1)
    assert [rise(p) for p in (0.0, 0.25, 1.0)] == pytest.approx([0.2, 1.0, 0.1])
    assert rise(0.125) == pytest.approx(0.6)
    fall = cosine(warmup=0.1, end=0.02)
    assert [fall(p) for p in (0.0, 0.1, 0.55, 1.0)] == pytest.approx([0.0, 1.0, 0.51, 0.02])


def test_every_epoch_shows_every_image_once():
    for epoch in range(2):
        seen = torch.cat([batch_indices(3, 4 * epoch + place, 20, 5)[1] for place in range(4)])
        assert sorted(seen.tolist()) == list(range(20))
    assert not torch.equal(batch_indices(3, 0, 20, 5)[1], batch_indices(3, 4, 20, 5)[1])
    with pytest.raises(InputError, match="batch of 21"):
        batch_indices(0, 0, 20, 21)


def test_a_run_refuses_impossible_numbers():
    with pytest.raises(InputError, match="steps >= 1"):
        Run(steps=0)
    with pytest.raises(InputError, match="precision"):
        Run(steps=1, precision="float16")
    with pytest.raises(InputError, match="weighting"):
        ScoreConfig(weighting="epsilom")
    with pytest.raises(InputError, match="t_max"):
        ScoreConfig(t_max=0)
    with pytest.raises(InputError, match="optimiser"):
        ClassifierConfig(optimiser="adam")
    with pytest.raises(InputError, match="recipe"):
        follow("cifar10-smal", Images(torch.zeros(0), torch.zeros(0)), None)
    with pytest.raises(InputError, match="TRADES"):
        replace(FAST_LINF, trades=0)
    with pytest.raises(InputError, match="one move"):
        replace(FAST_LINF, iterations=0)


def test_a_loss_that_is_not_finite_stops_the_training():
    model, optimiser = toy()
    with pytest.raises(FloatingPointError, match="not finite"):
        train(model, optimiser, toy_batch, lambda m, x: math.nan * toy_loss(m, x), cosine(), Run(steps=1))


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
    _, t, eps = _draw(images, ScoreConfig(batch=64, t_max=0.3, power=2.0), 5)
    u = (t / 0.3).sqrt().sort().values
    assert (u > 0).all()
    assert (u <= 1).all()
    assert torch.allclose(u.diff(), torch.full((63,), 1 / 64, dtype=torch.float64))
    assert eps.std().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_and_exports(name, tmp_path, monkeypatch):
    """Two steps of each recipe on noise: the exported weights are those of the model, in half precision."""
    monkeypatch.setattr(recipes, "HELD_OUT", 12)
    pixels = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=generator(0, 0))
    images = Images(pixels, torch.arange(40) % 10)
    size = {"examples": 8} if name == "cifar10-small" else {"epochs": 2 / 10}
    model = follow(name, images, tmp_path / "run", batch=4, threads=1, **size)
    assert "step 2/2" in (tmp_path / "run" / "log.txt").read_text()
    card = export(name, model, tmp_path)
    stored = load_file(tmp_path / card["file"])
    assert stored.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.allclose(stored[key].float(), value.float(), rtol=1e-3, atol=1e-6)
    assert card["parameters"] < 3_000_000
    assert card["multiply_adds"] < 200_000_000


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


@pytest.fixture(scope="module")
def digits() -> Images:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    pixels = (torch.from_numpy(data.images) * (255 / 16)).round().to(torch.uint8)[:, None]
    return Images(pixels, torch.from_numpy(data.target).long())


def test_a_score_learns_the_digits(digits, tmp_path):
    """The stated loss: less than half of the ε-error of the best Gaussian, which is the network before training."""
    torch.manual_seed(0)
    model = SmallUNet(widths=(32, 48), embedding=32, channels=1, size=8)
    training, rest = digits[:1500], digits[1500:]
    before = epsilon_error(model, rest, (0.1, 0.2))
    config = ScoreConfig(examples=30_000, batch=100, rate=3e-3, decay=0.98, flip=False, threads=1)
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

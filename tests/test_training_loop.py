"""The training loop: resumption as a pure function of the step, parts of a batch in threads, and low precision."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.classifiers.small import ARCHITECTURES
from diffpure.data.cifar10 import Images
from diffpure.diffusion.samplers import OneShot
from diffpure.diffusion.score import GaussianScore
from diffpure.errors import InputError
from diffpure.purifiers.diffusion import Purifier
from diffpure.scores.small import SmallUNet
from diffpure.training import precision
from diffpure.training.adversarial import FAST_LINF
from diffpure.training.classifier import ClassifierConfig, train_classifier
from diffpure.training.loop import Run, Workers, batch_indices, cosine, generator, train, triangular
from diffpure.training.precision import bfloat16_speedup, settle
from problems import shaken


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


# ----------------------------------------------------------------------------------------------------------- resuming


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


KILLED = """
import sys, torch
from functools import partial
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_training_loop as t
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


# -------------------------------------------------------------------------------------------------- steps and batches


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


def test_a_loss_that_is_not_finite_stops_the_training():
    model, optimiser = toy()
    with pytest.raises(FloatingPointError, match="not finite"):
        train(model, optimiser, toy_batch, lambda m, x: math.nan * toy_loss(m, x), cosine(), Run(steps=1))


# ------------------------------------------------------------------------------------------------------ low precision


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

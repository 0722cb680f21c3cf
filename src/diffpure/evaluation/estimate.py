"""What an evaluation will cost, from a short calibration: score calls, time, peak memory, and a batch that fits.

One forward pass and one gradient are run on one image and on two. The live bytes of all tensors on the way have a peak
m(B) = a + b B, so that b is what one more image takes; the model's own weights are in a.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffpure.attacks import Attack, Suite, Transfer
from diffpure.attacks.losses import Model, call, check_logits
from diffpure.attacks.pgd import RestartedAttack
from diffpure.errors import InputError
from diffpure.evaluation.units import Job
from diffpure.purify import Defense, Purifier
from diffpure.scores.base import EpsilonScore, ScoreModel
from diffpure.sde import Schedule

_SHORT: Final = 1.0  # seconds
_TIMED: Final = 16  # images in the largest call that is timed
MOST_ROWS: Final = 256  # images in one call of the model: beyond it nothing gets faster


@final
@dataclass(frozen=True)
class Calibration:
    """What one image costs: seconds and score calls, (without, with) a gradient; bytes of a call of B images as
    base + each · B; and how many classes the model has. Without a gradient (None), only queries are possible."""

    classes: int
    seconds: tuple[float, float | None]
    calls: tuple[int, int]
    base: int
    each: int

    def rows(self, memory: int) -> int:
        """How many images one call of the model may hold within so many bytes."""
        return max(1, min(MOST_ROWS, (memory - self.base) // max(self.each, 1)))


@final
@dataclass(frozen=True)
class Estimate:
    """What an evaluation will cost on this machine."""

    images: int
    gradients: int
    queries: int
    score_calls: int
    seconds: float
    memory: int
    rows: int

    def __str__(self) -> str:
        return (
            f"{self.images} images: about {self.score_calls:,} score calls ({self.gradients:,} gradients and "
            f"{self.queries:,} queries of the model), {_duration(self.seconds)}, {self.memory / 2**20:,.0f} MiB with "
            f"{self.rows} images a call"
        )


def estimate(job: Job, calibration: Calibration, images: int, seeds: int = 1) -> Estimate:
    """The cost of a whole evaluation at most; attacks that stop at broken images take less."""
    gradients, queries = 0, job.draws
    for attack in job.attacks.values():
        own = spending(attack, calibration.classes)
        gradients, queries = gradients + own[0], queries + own[1] + job.draws
    forward, backward = calibration.seconds
    count = images * seeds
    return Estimate(
        images=images,
        gradients=count * gradients,
        queries=count * queries,
        score_calls=count * (gradients * calibration.calls[1] + queries * calibration.calls[0]),
        seconds=count * (gradients * (backward or 0.0) + queries * forward),
        memory=calibration.base + calibration.each * min(job.rows, _largest_call(job, images)),
        rows=job.rows,
    )


def _largest_call(job: Job, images: int) -> int:
    return images * max([job.draws, *(attack.ranking.draws for attack in job.attacks.values())])


def weight(job: Job, calibration: Calibration, attack: Attack | None) -> float:
    """How long one image takes under an attack (None: unperturbed), in seconds: the measure of progress."""
    forward, backward = calibration.seconds
    gradients, queries = (0, 0) if attack is None else spending(attack, calibration.classes)
    return gradients * (backward or 0.0) + (queries + job.draws) * forward


def spending(attack: Attack, classes: int) -> tuple[int, int]:
    """Gradients and queries of one image, sharper than the attack's own bound where its kind allows it."""
    if isinstance(attack, Suite):
        parts = [spending(inner, classes) for inner in attack.attacks]
        return sum(g for g, _ in parts), sum(q for _, q in parts)
    if isinstance(attack, Transfer) and attack.part == "classifier":
        return 0, 2 * attack.eot.draws  # what it asks of the bare classifier is little beside a purification
    if isinstance(attack, RestartedAttack):  # every look has a gradient but the first and the last of each run
        runs = attack.steps(classes) // attack.length
        return runs * attack.iterations * attack.eot.draws, (runs + 1) * attack.eot.draws
    cost = attack.cost(classes)
    return cost.gradients or 0, cost.queries or 0


def calibrate(model: Model, images: Tensor, *, gradient: bool = True) -> Calibration:
    """Measure the model on the first image and the first two; images (B, C, H, W) in [0, 1] where the model is."""
    counted, counter = counting(model)
    two = images[:1].repeat(2, 1, 1, 1)
    low, high = (_peak_bytes(model, batch, gradient) for batch in (images[:1], two))
    seconds, calls, classes = zip(*(_timed(counted, counter, two, wanted) for wanted in (False, gradient)), strict=True)
    weights = sum(t.numel() * t.element_size() for t in _tensors(model))
    return Calibration(
        classes=classes[0],
        seconds=(seconds[0], seconds[1] if gradient else None),
        calls=(calls[0], calls[1]),
        base=weights + max(0, 2 * low - high),
        each=max(0, high - low),
    )


def available_memory(device: torch.device) -> int:
    """Half of what is free on the device: the default limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def bytes_of(text: str | int) -> int:
    """A memory limit as "8 GB" or as a number of bytes."""
    if isinstance(text, int):
        return text
    number, unit = text.strip().rstrip("iBb").strip(), 1.0
    for power, letter in enumerate("KMGT", 1):
        if number.upper().endswith(letter):
            number, unit = number[:-1].strip(), 1024.0**power
    try:
        return int(float(number) * unit)
    except ValueError as error:
        raise InputError(f'A memory limit is a number of bytes or "8 GB", got {text!r}.') from error


def _timed(model: Model, counter: _Counter, images: Tensor, gradient: bool) -> tuple[float, int, int]:
    """Seconds and score calls of one image in one call of the model, and the number of classes.

    The first call of a kind also prepares kernels, and small batches waste time: while a call is short, larger ones
    follow, and the best time an image counts.
    """
    best, batch = float("inf"), images
    while True:
        counter.calls = 0
        began = time.perf_counter()
        classes = _ask(model, batch, gradient)
        seconds = time.perf_counter() - began
        best = min(best, seconds / len(batch))
        if seconds > _SHORT or len(batch) >= _TIMED:
            return best, counter.calls // len(batch), classes
        batch = batch.repeat(2, 1, 1, 1)


def _peak_bytes(model: Model, images: Tensor, gradient: bool) -> int:
    counter = _Peak()
    with counter:
        _ask(model, images, gradient)
    return counter.peak


def _ask(model: Model, images: Tensor, gradient: bool) -> int:
    """One call of the model, with the gradient of its logits if wanted; how many classes it has."""
    with torch.set_grad_enabled(gradient):
        x = images.clone().requires_grad_(gradient)
        logits = check_logits(call(model, x, range(len(x))), len(x))
        if gradient and logits.requires_grad:
            torch.autograd.grad(logits.sum(), x)
    return logits.shape[1]


class _Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest number of bytes that tensors made under it held at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class _Counter:
    calls = 0


@final
class _CountedScore(EpsilonScore):
    """A score network that counts the images it is called with."""

    def __init__(self, score: EpsilonScore, counter: _Counter) -> None:
        super().__init__(score.sde, score.size, score.channels)
        self.inner, self.counter = score, counter

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        self.counter.calls += len(x)
        return self.inner.epsilon(x, t)

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        self.counter.calls += len(x)
        return self.inner.epsilon_step(x, i)


@final
@dataclass(frozen=True)
class _CountedCall:
    """Any other score model, counted in the same way."""

    score: ScoreModel
    counter: _Counter

    @property
    def sde(self) -> Schedule:
        return self.score.sde

    @property
    def size(self) -> int | None:
        return self.score.size

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.counter.calls += len(x)
        return self.score(x, t)


def counting(model: Model) -> tuple[Model, _Counter]:
    """The same model whose score calls are counted; a model without a purifier of ours counts none."""
    counter = _Counter()
    if not isinstance(model, Defense):
        return model, counter
    old = model.purifier
    score = old.score
    counted = _CountedScore(score, counter) if isinstance(score, EpsilonScore) else _CountedCall(score, counter)
    purifier = Purifier(counted, old.sampler, old.gradient, rounds=old.rounds, autocast=old.autocast)
    return Defense(purifier, model.classifier), counter


def _tensors(model: Model | Callable[..., Any]) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{math.ceil(seconds)} s"

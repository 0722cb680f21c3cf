"""What an evaluation will spend, exactly, and how long that takes on this machine.

The account follows from the attacks (evaluations per image) and from the purifier's path (network calls per
evaluation, for each gradient mode); it equals what a run counts, but for attacks that stop early and for `exact` with
a budget of memory, which fits fewer graphs where a call holds more images. The time is the account times the seconds of
one call, measured forward and with a gradient, in calls as large as the run will make.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor

from diffpure.attacks.base import Attack, SampledAttack, Spending
from diffpure.attacks.losses import Model, call
from diffpure.diffusion.gradients import Backprop, Exact, GradientMode, graph_bytes
from diffpure.diffusion.memory import saved_bytes
from diffpure.evaluation.units import Job, Seeded, Unit, device_of
from diffpure.meter import CALLS
from diffpure.noise import Noise
from diffpure.purify import Defense, PurifierBase

MOST: int = 256  # images in one call of the model


@final
@dataclass(frozen=True)
class Estimate:
    """What an evaluation will cost on this machine; seconds: None where they were not measured."""

    images: int
    gradients: int
    queries: int
    calls: dict[str, int]
    per_call: int
    seconds: float

    def __str__(self) -> str:
        network = self.calls["network"] + self.calls["network_gradient"]
        return (
            f"{self.images} images: {network:,} network calls ({self.gradients:,} gradients and {self.queries:,} "
            f"queries of the model), about {duration(self.seconds)} with {self.per_call} images per call"
        )


def account(job: Job, unit: Unit, classes: int, one: Tensor) -> Counter[str]:
    """What a unit spends: evaluations of the model (gradients, queries) and calls, as the rows count them."""
    per_image: Counter[str] = Counter(dict.fromkeys(("gradients", "queries", *CALLS), 0))
    attack = job.attacks.get(unit.attack)
    attacked = () if attack is None else attack.with_per_call(job.per_call).account(classes)
    for spending in attacked:
        per_image.update(gradients=spending.gradients, queries=spending.queries)
        per_image.update(_calls(job.model, spending, one))
    per_image.update(_calls(job.model, Spending(0, job.samples), one))  # the evaluation samples
    return Counter({key: (unit.stop - unit.start) * value for key, value in per_image.items()})


def _calls(model: Model, spending: Spending, one: Tensor) -> dict[str, int]:
    """The calls that evaluations of a model, or of a part of it, make; a part is asked about single draws."""
    purifier, draws = _purifier(model, spending.mode), 1 if spending.part else _draws(model)
    total = Counter(dict.fromkeys(CALLS, 0))
    for number, gradient in ((draws * spending.queries, False), (draws * spending.gradients, True)):
        if not number:
            continue
        if spending.part != "purifier":
            total["classifier_gradient" if gradient else "classifier"] += number
        if purifier is not None and spending.part != "classifier":
            plain, graph = purifier.calls(one, gradient=gradient)
            total.update(network=number * plain, network_gradient=number * graph)
    return dict(total)


def _draws(model: Model) -> int:
    """How often a model purifies each image of one evaluation."""
    inner = model.model if isinstance(model, Seeded) else model
    return inner.draws if isinstance(inner, Defense) else 1


def _purifier(model: Model, mode: GradientMode | None = None) -> PurifierBase | None:
    inner: Any = model.model if isinstance(model, Seeded) else model
    purifier = getattr(inner, "purifier", None)
    if not isinstance(purifier, PurifierBase):
        return None
    return purifier if mode is None else purifier.with_gradient(mode)


def estimate(job: Job, units: Sequence[Unit], images: Tensor, classes: int) -> Estimate:
    """The cost of units; an attack that stops at misclassified images takes less."""
    one = images[:1].to(device_of(job.model))
    timed, total, seconds = cache(partial(_seconds, job.model, one)), Counter[str](), 0.0
    for unit in units:
        spent = account(job, unit, classes, one)
        plain, graph = (size * _draws(job.model) for size in _call_sizes(job, unit))
        each = {**timed(plain, gradient=False), **timed(graph, gradient=True)}
        seconds += sum(spent[key] * each[key] for key in CALLS)
        total.update(spent)
    return Estimate(
        images=len({i for unit in units for i in range(unit.start, unit.stop)}),
        gradients=total["gradients"],
        queries=total["queries"],
        calls={key: total[key] for key in CALLS},
        per_call=job.per_call,
        seconds=seconds,
    )


def _call_sizes(job: Job, unit: Unit) -> tuple[int, int]:
    """Images in one call of a unit, without and with a gradient: an attack keeps an image's samples whole where it can,
    and ranks with more samples than it follows."""
    count, attack = unit.stop - unit.start, job.attacks.get(unit.attack)
    if attack is None:
        return (min(job.per_call, count * job.samples),) * 2
    followed = [a.eot.samples for a in attack.walk() if isinstance(a, SampledAttack) and a.price().gradients]

    def whole(samples: int) -> int:
        return min(job.per_call, samples * min(count, max(1, job.per_call // samples)))

    return whole(attack.ranking.samples), whole(max(followed, default=1))


def _seconds(model: Model, one: Tensor, size: int, *, gradient: bool) -> dict[str, float]:
    """Seconds per image of one call of each kind, with or without a gradient, in calls of `size` images."""
    images, suffix = one.repeat(size, 1, 1, 1), "_gradient" if gradient else ""
    purifier, classifier = _purifier(model), getattr(model, "classifier", model)
    asked = _timed(lambda x: call(classifier, x, range(len(x))), images, gradient)
    found = {f"classifier{suffix}": asked / size, f"network{suffix}": 0.0}
    if purifier is not None:
        with torch.no_grad():
            state, path = purifier.begin(images, Noise.of(0, size).child(0))
        with purifier.precision(images):
            step = _timed(partial(path.step, i=0), state, gradient)
        found[f"network{suffix}"] = step / size / max(1, path.calls(0))
    return found


def _timed(work: Callable[[Tensor], Tensor], x: Tensor, gradient: bool) -> float:
    """The seconds of a call, with the gradient of its output if wanted and there is one; the quicker of two."""
    taken = []
    for _ in range(2):  # the first may prepare kernels
        began = time.perf_counter()
        with torch.set_grad_enabled(gradient):
            leaf = x.detach().clone().requires_grad_(gradient)
            out = work(leaf)
            result = torch.autograd.grad(out.sum(), leaf)[0] if out.requires_grad else out
            result.flatten()[0].item()  # wait for the device
        taken.append(time.perf_counter() - began)
    return min(taken)


def images_per_call(model: Model, attacks: Sequence[Attack], one: Tensor, memory: int | None) -> int:
    """How many images one call of the model may hold within so many bytes (half of what is free by default); every draw
    of a vote takes as much as an image."""
    wanted = any(attack.uses_gradients for attack in attacks)
    modes = [part.mode for attack in attacks for part in attack.walk() if part.mode is not None]
    need = max(_bytes(model, mode, one, wanted) for mode in (None, *modes))
    free = _free(one.device) if memory is None else memory
    return max(1, min(MOST, int(free // max(1, need))) // _draws(model))


def _bytes(model: Model, mode: GradientMode | None, one: Tensor, gradient: bool) -> int:
    """About how many bytes one image takes: the graphs that live at once, the states and the classifier's graph."""
    purifier, classifier = _purifier(model, mode), getattr(model, "classifier", model)
    leaf = one.detach().clone().requires_grad_()
    total = 2 * saved_bytes(lambda: call(classifier, leaf, range(1)))
    if purifier is not None:
        with torch.no_grad():
            state, path = purifier.begin(one, Noise.of(0, 1).child(0))
        whole = isinstance(purifier.gradient, Backprop) or purifier.gradient == Exact(memory=None)
        graphs = (len(path) if whole and gradient else 1) + 1
        total += graphs * graph_bytes(path, state) + len(path) * state.nelement() * state.element_size()
    return total


def _free(device: torch.device) -> int:
    """Half of what is free on the device: the default limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def duration(seconds: float) -> str:
    """A time in the largest unit of which there are two."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{math.ceil(seconds)} s"

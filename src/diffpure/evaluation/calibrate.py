"""What one call of a model costs on this machine: score calls, bytes, and seconds as a line in the number of images.

A purification can take minutes, and all its steps are alike. So the whole model is asked about one image only, to count
its score calls (p of them plain, g with a graph for the backward pass) and the bytes that live at its peak; the time of
a call of B images is put together from one step of the path and the classifier,

    seconds(B) = p · plain(B) + g · graph(B) + classifier(B),

each a line through the times of a call of one image and of a call as large as the run will make, or as is still quick.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffpure.attacks.losses import Model, call, check_logits
from diffpure.errors import InputError
from diffpure.purify import Defense, Purifier
from diffpure.scores.base import EpsilonScore, ScoreModel
from diffpure.sde import Noise, Schedule

_SHORT: Final = 0.25  # seconds: while a call takes less, one of four times the images is tried
_TIMED: Final = 64  # images in the largest call that is timed: beyond it an image gets no cheaper
MOST_ROWS: Final = 256  # images in one call of the model


@final
@dataclass(frozen=True)
class Line:
    """A cost base + each · B of a call of B images."""

    base: float = 0.0
    each: float = 0.0

    def __call__(self, images: int) -> float:
        """The cost of a call of so many images."""
        return self.base + self.each * images

    def __add__(self, other: Line) -> Line:
        return Line(self.base + other.base, self.each + other.each)

    def times(self, count: float) -> Line:
        """The cost of so many such calls."""
        return Line(count * self.base, count * self.each)

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Self:
        """The line through two measurements (B, cost); no cost is negative, so no slope is steeper than cost/B."""
        (b, y), (c, z) = small, large
        each = min(max(0.0, (z - y) / (c - b)), z / c) if c > b else z / c
        return cls(z - each * c, each)


@final
@dataclass(frozen=True)
class Calibration:
    """What a call costs: score calls of one image (without, with) a gradient; bytes; seconds without and with a
    gradient (None: only queries are possible). classes: the model's.   rows: images in one call that fit the memory."""

    classes: int
    calls: tuple[int, int]
    memory: Line
    forward: Line
    gradient: Line | None
    rows: int


def calibrate(
    model: Model,
    images: Tensor,
    *,
    gradient: bool = True,
    largest: int = _TIMED,
    rows: int | None = None,
    memory: int | None = None,
) -> Calibration:
    """Measure a model on its first image, in calls of at most `largest` images; images (B, C, H, W) in [0, 1] where
    the model is.   rows: images in one call, else what fits `memory` bytes (half of what is free)."""
    one = images[:1]
    counted, counter = counting(model)
    classes = _ask(counted, one, gradient=False)
    forward = counter.taken()
    weights = _tensors(model)
    with (peak := _Peak(weights)):
        _ask(counted, one, gradient)
    backward = counter.taken()
    need = Line(sum(t.numel() * t.element_size() for t in weights), peak.peak)
    free = available_memory(one.device) if memory is None else memory
    fitting = rows_that_fit(need, free) if rows is None else rows
    most = min(_TIMED, largest, fitting)
    parts = _parts(model, most, one)
    return Calibration(
        classes=classes,
        calls=(sum(forward), sum(backward)),
        memory=need,
        forward=parts.seconds(*forward, gradient=False),
        gradient=parts.seconds(*backward, gradient=True) if gradient else None,
        rows=fitting,
    )


def rows_that_fit(need: Line, memory: int) -> int:
    """How many images one call of the model may hold within so many bytes."""
    return max(1, min(MOST_ROWS, int((memory - need.base) // max(need.each, 1))))


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


# ------------------------------------------------------------------------------------------------------------ time


@final
@dataclass(frozen=True)
class _Parts:
    """What the calls of a model are made of, each timed when it is asked for: `step` of a path (None: there is no
    purifier) and the `head`, functions of the images and of whether a gradient is wanted."""

    step: Callable[[Tensor, bool], None] | None
    calls_a_step: int
    head: Callable[[Tensor, bool], object]
    one: Tensor
    most: int

    def seconds(self, plain: int, graph: int, *, gradient: bool) -> Line:
        """A call of the model with so many score calls without and with a graph."""
        line = self._timed(self.head, gradient)
        for count, kind in ((plain, False), (graph, True)):
            if count and self.step is not None:
                line += self._timed(self.step, kind).times(count / self.calls_a_step)
        return line

    def _timed(self, work: Callable[[Tensor, bool], object], gradient: bool) -> Line:
        """The first call prepares kernels, larger ones follow while they are quick, and the better of two counts."""

        def seconds(images: Tensor) -> float:
            began = time.perf_counter()
            work(images, gradient)
            return time.perf_counter() - began

        images, taken = self.one, seconds(self.one)
        while taken < _SHORT and len(images) < self.most:
            images = self.one.repeat(min(4 * len(images), self.most), 1, 1, 1)
            taken = seconds(images)
        small, large = (
            (len(batch), min(seconds(batch) for _ in range(2 if taken < _SHORT else 1))) for batch in (self.one, images)
        )
        return Line.through(small, large)


def _parts(model: Model, most: int, one: Tensor) -> _Parts:
    if not isinstance(model, Defense):
        return _Parts(None, 1, lambda x, gradient: _ask(model, x, gradient), one, most)
    counted, counter = counting(model)
    purifier = counted.purifier

    def step(images: Tensor, gradient: bool) -> None:
        with torch.set_grad_enabled(gradient), purifier._precision(images):
            x, path = purifier.sampler(purifier.score, purifier._enter(images), Noise(tuple(range(len(images)))))
            if not len(path):
                return
            x = x.detach().requires_grad_(gradient)
            out = path.step(x, 0)
            _wait(torch.autograd.grad(out.sum(), x)[0] if gradient else out)

    step(one, False)
    calls_a_step = max(1, sum(counter.taken()))
    return _Parts(step, calls_a_step, lambda x, gradient: _ask(model.classifier, x, gradient), one, most)


def _ask(model: Model, images: Tensor, gradient: bool) -> int:
    """One call of the model, with the gradient of its logits if wanted; how many classes it has."""
    with torch.set_grad_enabled(gradient):
        x = images.clone().requires_grad_(gradient)
        logits = check_logits(call(model, x, range(len(x))), len(x))
        _wait(torch.autograd.grad(logits.sum(), x)[0] if gradient and logits.requires_grad else logits)
    return logits.shape[1]


def _wait(result: Tensor) -> None:
    """Until a device has computed: one number of the result is fetched."""
    result.detach().flatten()[0].item()


# ---------------------------------------------------------------------------------------------------------- memory


class _Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest number of bytes that tensors made under it, and no views of `others`, held at once."""

    def __init__(self, others: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in others}

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


def _tensors(model: Model | Callable[..., Any]) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []


# ----------------------------------------------------------------------------------------------------- score calls


class _Counter:
    """Images a score was called with, without and with a graph for a backward pass."""

    plain = graph = 0

    def see(self, x: Tensor) -> None:
        """Count one call."""
        if torch.is_grad_enabled() and x.requires_grad:
            self.graph += len(x)
        else:
            self.plain += len(x)

    def taken(self) -> tuple[int, int]:
        """What was counted since the last time."""
        found, self.plain, self.graph = (self.plain, self.graph), 0, 0
        return found


@final
class _CountedScore(EpsilonScore):
    """A score network that counts the images it is called with."""

    def __init__(self, score: EpsilonScore, counter: _Counter) -> None:
        super().__init__(score.sde, score.size, score.channels)
        self.inner, self.counter = score, counter

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        self.counter.see(x)
        return self.inner.epsilon(x, t)

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        self.counter.see(x)
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
        self.counter.see(x)
        return self.score(x, t)


def counting(model: Model) -> tuple[Any, _Counter]:
    """The same model whose score calls are counted; a model without a purifier of ours counts none."""
    counter = _Counter()
    if not isinstance(model, Defense):
        return model, counter
    old = model.purifier
    score = old.score
    counted = _CountedScore(score, counter) if isinstance(score, EpsilonScore) else _CountedCall(score, counter)
    purifier = Purifier(counted, old.sampler, old.gradient, rounds=old.rounds, autocast=old.autocast)
    return Defense(purifier, model.classifier), counter

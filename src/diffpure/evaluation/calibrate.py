"""What one call of a model costs on this machine: score calls, bytes, and seconds as a line in the number of images.

A purification can take minutes, and is mostly calls of one network that are all alike. So that network is asked a few
times only, for its bytes and seconds; a hollow one, which takes the bytes and computes nothing, walks the whole path in
its place, to count the calls (p of them plain, g with a graph for the backward pass) and the bytes that live at the
peak. The time of a call of B images is then

    seconds(B) = p · plain(B) + g · graph(B) + classifier(B),

each a line through the times of a call of one image and of a call as large as the run will make, or as is still quick.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Self, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffpure.attacks.losses import Model, call, check_logits
from diffpure.diffusion.paths import per_image
from diffpure.diffusion.score import EpsilonScore, ScoreModel
from diffpure.purify import Defense, Purifier

_SHORT: Final = 0.1  # seconds: while a call takes less, one of four times the images is timed
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
    light, count = _hollow(model, one, gradient) if isinstance(model, Defense) else (model, _Count())
    classes = _ask(light, one, gradient=False)
    forward = count.taken()
    weights = _tensors(model)
    with (peak := _Peak(weights)):
        _ask(light, one, gradient)
    backward = count.taken()
    need = Line(sum(t.numel() * t.element_size() for t in weights), peak.peak)
    free = available_memory(one.device) if memory is None else memory
    fitting = rows_that_fit(need, free) if rows is None else rows
    seconds = _pricer(model, one, min(_TIMED, largest, fitting))
    return Calibration(
        classes=classes,
        calls=(sum(forward), sum(backward)),
        memory=need,
        forward=seconds(forward, False),
        gradient=seconds(backward, True) if gradient else None,
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


# ------------------------------------------------------------------------------------------------------------ time


Work = Callable[[Tensor, bool], object]  # a part of the model: images, and whether a gradient is wanted


def _pricer(model: Model, one: Tensor, most: int) -> Callable[[tuple[int, int], bool], Line]:
    """What gives the seconds of a call of the model, without or with a gradient, that makes so many score calls
    (plain, with a graph)."""
    timed = cache(partial(_timed, one, most))
    head = partial(_ask, model.classifier if isinstance(model, Defense) else model)
    score = partial(_ask_score, model.purifier) if isinstance(model, Defense) else None

    def seconds(calls: tuple[int, int], gradient: bool) -> Line:
        line = timed(head, gradient)
        for number, graph in zip(calls, (False, True), strict=True):
            if number:
                line += timed(score, graph).times(number)
        return line

    return seconds


def _timed(one: Tensor, most: int, work: Work, gradient: bool) -> Line:
    """The seconds of a part, from calls of 1, 4, 16, … images up to `most`, as long as they are quick."""

    def seconds(count: int) -> float:
        images, taken = one.repeat(count, 1, 1, 1), []
        for _ in range(2):  # the first may prepare kernels
            began = time.perf_counter()
            work(images, gradient)
            taken.append(time.perf_counter() - began)
        return min(taken)

    count, small = 1, seconds(1)
    large = small
    while large < _SHORT and count < most:
        count = min(4 * count, most)
        large = seconds(count)
    return Line.through((1, small), (count, large))


def _ask(model: Model, images: Tensor, gradient: bool) -> int:
    """One call of the model, with the gradient of its logits if wanted; how many classes it has."""
    with torch.set_grad_enabled(gradient):
        x = images.clone().requires_grad_(gradient)
        logits = check_logits(call(model, x, range(len(x))), len(x))
        _finish(x, logits)
    return logits.shape[1]


def _ask_score(purifier: Purifier, images: Tensor, gradient: bool) -> None:
    """One call of a purifier's score, with its gradient if wanted."""
    _finish(*_score(purifier, images, gradient))


def _score(purifier: Purifier, images: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """The images as a purifier's score sees them, and what it gives, with a graph if wanted."""
    with torch.set_grad_enabled(gradient), purifier._precision(images):
        x = purifier._enter(images).detach().requires_grad_(gradient)
        return x, purifier.score(x, per_image(torch.tensor(0.1, dtype=torch.float64), x))


def _finish(x: Tensor, out: Tensor) -> None:
    """Take the gradient, if there is a graph, and wait for the device: one number of the result is fetched."""
    result = torch.autograd.grad(out.sum(), x)[0] if out.requires_grad else out
    result.flatten()[0].item()


# ---------------------------------------------------------------------------------------------------------- memory


class _Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest number of bytes that tensors made under it, and no views of `others`, held at once."""

    def __init__(self, others: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in others}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping would import the compiler: seconds, for nothing

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


# ---------------------------------------------------------------------------------------------------- a hollow score


class _Count:
    """Images a score was called with, without and with a graph for a backward pass."""

    plain = graph = 0

    def taken(self) -> tuple[int, int]:
        """What was counted since the last time."""
        found, self.plain, self.graph = (self.plain, self.graph), 0, 0
        return found


class _Bytes(torch.autograd.Function):
    """Zeros like x that take the memory of a network: `held` bytes an image in the graph, `passing` ones on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: int, passing: int) -> Tensor:
        ctx.passing = passing
        ctx.save_for_backward(_bytes(x, held))
        _bytes(x, passing)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _bytes(grad, ctx.passing)
        return torch.zeros_like(grad), None, None


def _bytes(x: Tensor, each: int) -> Tensor:
    """Memory that is taken but not touched."""
    return torch.empty(len(x) * each, dtype=torch.uint8, device=x.device)


@final
class _HollowScore(EpsilonScore):
    """A score that counts the images it is called with and takes the memory of another, but computes nothing.

    plain, graph: the bytes an image that a call of the other one (holds, needs on the way), without and with a graph.
    """

    def __init__(self, score: ScoreModel, count: _Count, plain: tuple[int, int], graph: tuple[int, int]) -> None:
        super().__init__(score.sde, score.size, getattr(score, "channels", None))
        self.count, self.plain, self.graph = count, plain, graph

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        with_graph = torch.is_grad_enabled() and x.requires_grad
        if with_graph:
            self.count.graph += len(x)
        else:
            self.count.plain += len(x)
        out: Tensor = _Bytes.apply(x, *(self.graph if with_graph else self.plain))  # type: ignore[no-untyped-call]
        return out


def _hollow(model: Defense, one: Tensor, gradient: bool) -> tuple[Defense, _Count]:
    """The same defence around a hollow score, and its count."""
    old, count = model.purifier, _Count()
    plain = _score_bytes(old, one, gradient=False)
    score = _HollowScore(old.score, count, plain, _score_bytes(old, one, gradient=True) if gradient else plain)
    purifier = Purifier(score, old.sampler, old.gradient, rounds=old.rounds, autocast=old.autocast)
    return Defense(purifier, model.classifier), count


def _score_bytes(purifier: Purifier, one: Tensor, gradient: bool) -> tuple[int, int]:
    """The bytes that one call of the score holds, in a graph if wanted, and those it needs for a while beside them."""
    with (peak := _Peak(_tensors(purifier))):
        x, out = _score(purifier, one, gradient)
        held = peak.live if gradient else 0
        _finish(x, out)
    return held, peak.peak - held

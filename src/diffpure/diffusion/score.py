"""What a score model is, and how networks become one.

A score model gives ∇ log p_t(x) of the diffused data, for x in [-1, 1] and continuous t in (0, 1], on the schedule it
was trained with. A network that predicts ε becomes one by

    ∇ log p_t(x) = -ε(x, t) / std(t),

and all its own conventions of time (999·t, ⌊1000·t⌋, a DDPM index), of extra output channels and of scaling stay
inside its `epsilon`. `as_score` is the door: behind it every score has the whole contract, and a wrapper that forwards
the whole contract (`ScoreWrapper`) never changes the defence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from diffpure.diffusion.sde import STEPS, VPSDE, Schedule, over
from diffpure.errors import InputError
from diffpure.meter import NETWORK, count


@runtime_checkable
class ScoreModel(Protocol):
    """∇ log p_t(x), with the schedule and the images that belong to it."""

    @property
    def sde(self) -> Schedule:
        """The schedule it was trained on, so that nobody can pair them wrongly."""

    @property
    def size(self) -> int | None:
        """The resolution it wants, or None for any."""

    @property
    def channels(self) -> int | None:
        """The channels of its images, or None for any."""

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """∇ log p_t(x); x (B, C, H, W) in [-1, 1], t (B,)."""

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        """ε̂ at the discrete training steps i (B,), which end at t = (i+1)/N."""


@runtime_checkable
class ConvolutionalScore(ScoreModel, Protocol):
    """A score that sees no further than its receptive field, and so may be computed in tiles (`scores.tiled`).

    Both attributes are optional in a score. A wrapper does not inherit them, since it may see further than what it
    wraps; it is then called on whole images.
    """

    @property
    def receptive_field(self) -> int:
        """How many pixels an output pixel sees in each direction, at most."""

    @property
    def stride(self) -> int:
        """Windows that start at multiples of it give the values of the whole image."""


class EpsilonScore(nn.Module, ABC):
    """A network that predicts ε, as a score model; subclasses implement `epsilon`."""

    def __init__(self, sde: Schedule, size: int | None, channels: int | None = 3) -> None:
        super().__init__()
        self.sde = sde
        self.size = size
        self.channels = channels

    @abstractmethod
    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        """ε̂(x, t), the noise predicted in x (B, C, H, W) at times t (B,) float64."""

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        """ε̂ at the discrete training steps i (B,), which end at t = (i+1)/N; networks with an index override it."""
        return self.epsilon(x, (i.to(torch.float64) + 1) / STEPS)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return -self.epsilon(x, t) / over(self.sde.std(t), x)


class ScoreWrapper(nn.Module):
    """A score around a score that forwards the whole contract; subclasses change what they mean to change."""

    def __init__(self, inner: ScoreModel) -> None:
        super().__init__()
        self.inner = inner
        self.sde, self.size, self.channels = inner.sde, inner.size, inner.channels

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.inner(x, t)

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        """ε̂ of the inner score at discrete steps."""
        return self.inner.epsilon_step(x, i)


@final
class FunctionScore(nn.Module):
    """Any callable score(x, t) with a schedule `sde` as a whole score model: ε̂ = -std(t)·score at t = (i+1)/N."""

    def __init__(self, score: Callable[[Tensor, Tensor], Tensor], sde: Schedule) -> None:
        super().__init__()
        self.score, self.sde = score, sde
        self.size: int | None = getattr(score, "size", None)
        self.channels: int | None = getattr(score, "channels", None)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.score(x, t)

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        """-std(t)·score at t = (i+1)/N."""
        return epsilon_of(self.score, self.sde, x, i)


def epsilon_of(score: Callable[[Tensor, Tensor], Tensor], sde: Schedule, x: Tensor, i: Tensor) -> Tensor:
    """ε̂ = -std(t)·score at the times t = (i+1)/N at which the discrete steps i (B,) end."""
    t = (i.to(torch.float64) + 1) / STEPS
    return -over(sde.std(t), x) * score(x, t)


def as_score(score: Any) -> ScoreModel:
    """The score with the whole contract: as it is, or, where it gives score(x, t) and a schedule only, completed."""
    if isinstance(score, ScoreModel):
        return score
    if callable(score) and isinstance(getattr(score, "sde", None), Schedule):
        return FunctionScore(score, score.sde)
    raise InputError(
        f"A score model has a schedule `sde` and is called as score(x, t), got {type(score).__name__}; "
        "`load_score` gives one."
    )


@final
class Metered:
    """A score that reports its calls to the meter, and refuses what is not shaped like its input."""

    def __init__(self, score: ScoreModel) -> None:
        self.score = score
        self.sde, self.size, self.channels = score.sde, score.size, score.channels

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        count(NETWORK, x)
        return _like(self.score(x, t), x)

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        """ε̂ at discrete steps."""
        count(NETWORK, x)
        return _like(self.score.epsilon_step(x, i), x)


def _like(out: Tensor, x: Tensor) -> Tensor:
    if out.shape != x.shape:
        raise InputError(f"A score has the shape of its images: got {tuple(out.shape)} for {tuple(x.shape)}.")
    return out


@final
@dataclass(frozen=True)
class GaussianScore:
    """The exact score of Gaussian data N(μ0, σ0² I): p_t = N(√α μ0, 1 - (1 - σ0²) α) (appendix B.5)."""

    mean: float = 0.0
    variance: float = 1.0
    sde: Schedule = VPSDE()
    size: int | None = None
    channels: int | None = None

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        """-std(t)·score at t = (i+1)/N."""
        return epsilon_of(self, self.sde, x, i)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        alpha = self.sde.alpha(t)
        one_minus_alpha = self.sde.std(t) ** 2
        return (over(alpha.sqrt() * self.mean, x) - x) / over(one_minus_alpha + self.variance * alpha, x)

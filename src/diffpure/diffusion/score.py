"""What a score model is, and how networks become one.

A score model gives ∇ log p_t(x) of the diffused data, for x in [-1, 1] and continuous t in (0, 1], on the schedule it
was trained with. A network that predicts ε becomes one by

    ∇ log p_t(x) = -ε(x, t) / std(t),

and all its own conventions of time (999·t, ⌊1000·t⌋, a DDPM index), of extra output channels and of scaling stay
inside its `epsilon`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from diffpure.diffusion.sde import STEPS, VPSDE, Schedule, over


@runtime_checkable
class ScoreModel(Protocol):
    """∇ log p_t(x), with the schedule and the resolution that belong to it."""

    @property
    def sde(self) -> Schedule:
        """The schedule it was trained on, so that nobody can pair them wrongly."""

    @property
    def size(self) -> int | None:
        """The resolution it wants, or None for any."""

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """∇ log p_t(x); x (B, C, H, W) in [-1, 1], t (B,)."""


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


def discrete_epsilon(score: ScoreModel, x: Tensor, i: Tensor) -> Tensor:
    """ε̂ at discrete steps i (B,) of any score model: the network's own, or -std(t)·score at t = (i+1)/N."""
    if isinstance(score, EpsilonScore):
        return score.epsilon_step(x, i)
    t = (i.to(torch.float64) + 1) / STEPS
    return -over(score.sde.std(t), x) * score(x, t)


@final
@dataclass(frozen=True)
class GaussianScore:
    """The exact score of Gaussian data N(μ0, σ0² I): p_t = N(√α μ0, 1 - (1 - σ0²) α) (appendix B.5)."""

    mean: float = 0.0
    variance: float = 1.0
    sde: Schedule = VPSDE()
    size: int | None = None

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        alpha = self.sde.alpha(t)
        one_minus_alpha = self.sde.std(t) ** 2
        return (over(alpha.sqrt() * self.mean, x) - x) / over(one_minus_alpha + self.variance * alpha, x)

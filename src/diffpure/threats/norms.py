"""Additive perturbations bounded in a norm: x' = x + z with ‖z‖ ≤ ε and x' in [0, 1]."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor

from diffpure.errors import InputError
from diffpure.noise import NoiseSource
from diffpure.threats.base import LEVELS, ThreatModel, per_image, towards, wide


class Norm(ThreatModel):
    """An additive perturbation bounded in a norm."""

    def zeros(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def apply(self, x: Tensor, z: Tensor) -> Tensor:
        return (x + z).clamp(0, 1)

    def pullback(self, x: Tensor, z: Tensor, g: Tensor) -> Tensor:
        # Projection keeps x + z in the box up to rounding: going through the clamp would only lose pixels on a wall.
        return g

    def quantise(self, x: Tensor, z: Tensor) -> Tensor:
        """z whose image lies on the 8-bit grid, every pixel rounded towards the clean image, so that it keeps the
        budget (a thousandth of a level is taken as rounding)."""
        return (towards(x, self.apply(x, z)) / LEVELS).to(x.dtype) - x

    @abstractmethod
    def rate(self, w: Tensor) -> Tensor:
        """How fast each coordinate moves along the shortest way to a hyperplane with normal w (B, D)."""

    def to_hyperplane(self, x: Tensor, w: Tensor, c: Tensor) -> Tensor:
        """The smallest d with ⟨w, d⟩ = c and x + d in the box; the furthest the box allows where none reaches c.

        d_i = ± min(λ rate_i, room_i) with the λ at which Σ |w_i| min(λ rate_i, room_i) = |c|. x, w (B, ...), c (B,).
        """
        flat, normal, c = wide(x.flatten(1)), wide(w.flatten(1)), wide(c)[:, None]
        direction = torch.sign(normal) * torch.sign(c)
        room = torch.where(direction > 0, 1 - flat, flat).clamp_min(0)
        rate = self.rate(normal)
        lam = fill(room, rate, normal.abs() * room, normal.abs() * rate, c.abs(), 1)
        return (direction * torch.minimum(lam * rate, room)).to(x.dtype).view_as(x)


def fill(room: Tensor, rate: Tensor, full: Tensor, growth: Tensor, level: Tensor, power: int) -> Tensor:
    """The λ at which Σ_i (full_i where λ rate_i ≥ room_i, else λ^power growth_i) reaches a level: (B, 1).

    The sum grows with λ, piece by piece: sort the λ at which coordinates fill their room, find the piece that holds
    the level, solve it. Where no λ reaches the level, the one that fills every room. All (B, D) and wide, level (B, 1).
    """
    walls, order = torch.where(rate > 0, room / rate, torch.inf).sort(dim=1)
    full, growth = (full * (rate > 0)).gather(1, order), (growth * (rate > 0)).gather(1, order)
    filled = full.cumsum(1) - full  # by the coordinates that stand at their wall before piece j
    growing = growth.flip(1).cumsum(1).flip(1)  # by those that still move in it
    ends = torch.where(torch.isfinite(walls), filled + walls**power * growing, torch.inf)
    piece = torch.searchsorted(ends, level).clamp_max(ends.shape[1] - 1)
    lam = (
        (level - filled.gather(1, piece)).clamp_min(0)
        / growing.gather(1, piece).clamp_min(torch.finfo(level.dtype).tiny)
    ) ** (1 / power)
    last = torch.where(torch.isfinite(walls), walls, 0).amax(1, keepdim=True)  # nothing moves any more beyond it
    return torch.minimum(lam, last)


@final
@dataclass(frozen=True)
class Linf(Norm):
    """No pixel changes by more than eps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps > 1:
            meant = f"did you mean {self.eps:g}/255?"
            raise InputError(f"An ℓ∞ budget of images in [0, 1] is at most 1, got {self.eps:g}; {meant}")

    def random(self, x: Tensor, noise: NoiseSource, step: int = 0) -> Tensor:
        uniform = torch.erf(noise(step, x) / math.sqrt(2))  # the normal distribution's own quantile: uniform in (-1, 1)
        return self.project(x, self.eps * uniform / per_image(self.size(uniform).clamp_min(1e-12), uniform))

    def ascend(self, g: Tensor) -> Tensor:
        return torch.sign(g)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(z, (-x).clamp_min(-self.eps)), (1 - x).clamp_max(self.eps))

    def size(self, z: Tensor) -> Tensor:
        return wide(z.flatten(1).abs().amax(1))

    def rate(self, w: Tensor) -> Tensor:
        return (w != 0).to(w.dtype)

    def unbounded(self, x: Tensor) -> Self:
        return replace(self, eps=1.0)


@final
@dataclass(frozen=True)
class L2(Norm):
    """The change of all pixels has Euclidean length at most eps."""

    def random(self, x: Tensor, noise: NoiseSource, step: int = 0) -> Tensor:
        return self.project(x, self.eps * self.ascend(noise(step, x)))

    def ascend(self, g: Tensor) -> Tensor:
        # The largest component first: squares of very small gradients would vanish.
        peak = g.flatten(1).abs().amax(1)
        g = g / per_image(torch.where(peak > 0, peak, 1.0), g)
        return g / per_image(self.size(g).clamp_min(1e-12), g)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        # The nearest point of ball and box together is clamp(λ z), λ ≤ 1 (scaling first and clamping then gives
        # away the length that the clamp cuts off).
        flat, length = wide(x.flatten(1)), wide(z.flatten(1)).abs()
        room = torch.where(z.flatten(1) > 0, 1 - flat, flat).clamp_min(0)
        budget = torch.full_like(room[:, :1], self.eps**2)
        lam = fill(room, length, room.square(), length.square(), budget, 2)
        lam = torch.where(torch.minimum(length, room).square().sum(1, keepdim=True) <= budget, 1.0, lam)
        moved = torch.minimum(lam * length, room)
        # The running sums behind λ round a thousand times in a large image, the sum of squares hardly.
        moved = moved * (self.eps / self.size(moved)[:, None].clamp_min(self.eps))
        return (torch.sign(z).flatten(1) * moved).to(z.dtype).view_as(z)

    def size(self, z: Tensor) -> Tensor:
        return wide(z.flatten(1)).square().sum(1).sqrt()

    def rate(self, w: Tensor) -> Tensor:
        return w.abs()

    def unbounded(self, x: Tensor) -> Self:
        return replace(self, eps=math.sqrt(x[0].numel()))

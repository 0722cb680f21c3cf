"""The contract of a threat: a set of perturbations of bounded size, and how to take steps in it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from diffpure.errors import InputError
from diffpure.named import number
from diffpure.noise import NoiseSource

LEVELS: Final = 255  # an 8-bit image counts in 1/255


def wide(x: Tensor) -> Tensor:
    """x in the widest floats of its device, for sums and comparisons whose rounding must not show."""
    return x.float() if x.device.type == "mps" else x.double()


def per_image(values: Tensor, like: Tensor) -> Tensor:
    """One number per image (B,), shaped and cast to multiply `like` (B, ...)."""
    return values.to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True)
class ThreatModel(ABC):
    """A set of perturbations of size at most eps, and how to take steps in it."""

    eps: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", number(self.eps))
        if isinstance(self.eps, bool) or not isinstance(self.eps, int | float) or not 0 < self.eps < math.inf:
            raise InputError(f"{type(self).__name__} needs a finite eps > 0, got {self.eps!r}.")

    @abstractmethod
    def zeros(self, x: Tensor) -> Tensor:
        """The perturbation that leaves every image of x (B, C, H, W) as it is."""

    @abstractmethod
    def random(self, x: Tensor, noise: NoiseSource, step: int = 0) -> Tensor:
        """A random start of full size, inside the budget and the box, from the noise of one step."""

    @abstractmethod
    def apply(self, x: Tensor, z: Tensor) -> Tensor:
        """The perturbed images in [0, 1]."""

    @abstractmethod
    def pullback(self, x: Tensor, z: Tensor, g: Tensor) -> Tensor:
        """The gradient with respect to z, from the gradient g with respect to the perturbed image."""

    @abstractmethod
    def ascend(self, g: Tensor) -> Tensor:
        """The steepest ascent: the direction of size 1 that gains most along the gradient g, zero where g is."""

    @abstractmethod
    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """z moved back into the budget and the image into the box."""

    @abstractmethod
    def size(self, z: Tensor) -> Tensor:
        """How much of the budget each perturbation takes: (B,), wide."""

    @abstractmethod
    def unbounded(self, x: Tensor) -> Self:
        """The same threat with a budget so large that any image can be reached."""

    def within(self, x: Tensor, z: Tensor, *, eight_bit: bool = False) -> Tensor:
        """Whether each perturbation keeps the budget: (B,) bool.

        The only tolerance is the rounding of z's own dtype, at most that of float32; with `eight_bit` the saved 8-bit
        images are compared in whole levels, without any.
        """
        size = self._levels(x, z) / LEVELS if eight_bit else self.size(z)
        slack = 1e-9 if eight_bit else 4 * min(torch.finfo(z.dtype).eps, torch.finfo(torch.float32).eps)
        return torch.isfinite(size) & (size <= self.eps * (1 + slack))

    def _levels(self, x: Tensor, z: Tensor) -> Tensor:
        """The size of the difference between the two saved images, in 8-bit levels."""
        return self.size(levels(self.apply(x, z)) - levels(x))


def levels(x: Tensor) -> Tensor:
    """Images in [0, 1] as whole 8-bit levels 0 … 255, wide."""
    return (wide(x) * LEVELS).round()


def towards(x: Tensor, perturbed: Tensor) -> Tensor:
    """The 8-bit levels 0 … 255 of perturbed images, every pixel rounded towards the clean image x."""
    steps = wide(perturbed - x) * LEVELS
    return levels(x) + torch.sign(steps) * torch.floor(steps.abs() + 1e-3)

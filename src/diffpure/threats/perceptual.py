"""Perturbations bounded by how far they look to a network: x' = x + z with d(x, x') ≤ ε and x' in [0, 1]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor

from diffpure.noise import NoiseSource
from diffpure.threats.base import LEVELS, ThreatModel, levels, per_image, wide


@final
@dataclass(frozen=True)
class Perceptual(ThreatModel):
    """Any change that looks at most eps away to a network (`features`, a classifier by name); no ℓp bound.

    z (B, 2 C, H, W) is the change and, as a distance is one of two images, the image that it is a change of.
    """

    features: str = "cifar10-resnet-at"

    def zeros(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), x], 1)

    def change(self, x: Tensor, perturbed: Tensor) -> Tensor:
        """The z that makes perturbed images of x."""
        return torch.cat([perturbed - x, x], 1)

    def random(self, x: Tensor, noise: NoiseSource, step: int = 0) -> Tensor:
        return self.project(x, self.change(x, x + 0.1 * noise(step, x)))

    def apply(self, x: Tensor, z: Tensor) -> Tensor:
        return (x + z.chunk(2, 1)[0]).clamp(0, 1)

    def pullback(self, x: Tensor, z: Tensor, g: Tensor) -> Tensor:
        return torch.cat([g, torch.zeros_like(g)], 1)

    def ascend(self, g: Tensor) -> Tensor:
        return g / per_image(wide(g).flatten(1).norm(dim=1).clamp_min(1e-12), g)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """The change, scaled down by bisection where it looks too far."""
        whole = self.apply(x, z) - x
        low, high = wide(x).new_zeros(len(x)), wide(x).new_ones(len(x))
        inside = self.within(x, torch.cat([whole, x], 1))
        for _ in range(12 if not inside.all() else 0):
            middle = (low + high) / 2
            kept = self.within(x, torch.cat([per_image(middle, x) * whole, x], 1))
            low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
        return torch.cat([per_image(torch.where(inside, 1.0, low), x) * whole, x], 1)

    @torch.no_grad()
    def size(self, z: Tensor) -> Tensor:
        x = z.chunk(2, 1)[1]
        return wide(self.distance(x, self.apply(x, z)))

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """How far apart images (B, C, H, W) look: (B,), differentiable."""
        from diffpure.classifiers.features import distance

        return distance(self.features, x, y)

    def within(self, x: Tensor, z: Tensor, *, eight_bit: bool = False) -> Tensor:
        same = (z.chunk(2, 1)[1] == x).flatten(1).all(1)
        return super().within(x, z, eight_bit=eight_bit) & same

    def unbounded(self, x: Tensor) -> Self:
        return replace(self, eps=1e3)

    def _levels(self, x: Tensor, z: Tensor) -> Tensor:
        saved = (levels(self.apply(x, z)) / LEVELS).to(x.dtype)
        return self.size(self.change(x, saved)) * LEVELS

    def norms(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The ℓ∞ and ℓ2 size of the changes, which nothing bounds, to be reported: (B,) each."""
        change = wide(z.chunk(2, 1)[0].flatten(1))
        return change.abs().amax(1), change.norm(dim=1)

    @classmethod
    def like(cls, threat: ThreatModel, x: Tensor, noise: NoiseSource, features: str = "cifar10-resnet-at") -> Self:
        """The bound that the median random perturbation of full size of another threat has on images x."""
        made = cls(1.0, features)
        return replace(made, eps=float(made.size(made.change(x, threat.apply(x, threat.random(x, noise)))).median()))

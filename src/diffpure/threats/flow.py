"""Spatial perturbations (StAdv, Xiao et al. 2018): x'(p) = x(p + z(p)), bilinear sampling.

The flow is counted in the units of `grid_sample`: an image is 2 wide, so one pixel of W is 2/W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from diffpure.noise import NoiseSource
from diffpure.threats.base import LEVELS, ThreatModel, wide


@final
@dataclass(frozen=True)
class Flow(ThreatModel):
    """Every pixel is fetched from at most eps away (StAdv's spatial flow field, Xiao et al. 2018)."""

    def zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), *x.shape[-2:], 2)

    def random(self, x: Tensor, noise: NoiseSource, step: int = 0) -> Tensor:
        return self.eps * torch.erf(noise(step, self.zeros(x)) / math.sqrt(2))

    def apply(self, x: Tensor, z: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        ys = (2 * torch.arange(h, device=x.device, dtype=x.dtype) + 1) / h - 1
        xs = (2 * torch.arange(w, device=x.device, dtype=x.dtype) + 1) / w - 1
        identity = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), dim=-1)
        moved = F.grid_sample(x, identity + z, mode="bilinear", padding_mode="border", align_corners=False)
        return moved.clamp(0, 1)

    def pullback(self, x: Tensor, z: Tensor, g: Tensor) -> Tensor:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.apply(x, z), z, g)
        return g

    def ascend(self, g: Tensor) -> Tensor:
        return torch.sign(g)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return z.clamp(-self.eps, self.eps)

    def size(self, z: Tensor) -> Tensor:
        return wide(z.flatten(1).abs().amax(1))

    def unbounded(self, x: Tensor) -> Self:
        return replace(self, eps=2.0)

    def _levels(self, x: Tensor, z: Tensor) -> Tensor:
        return self.size(z) * LEVELS  # the budget bounds the flow: how the image is saved does not change it

    @staticmethod
    def roughness(z: Tensor) -> Tensor:
        """StAdv's regulariser Σ_p Σ_{q next to p} √(‖z(p) - z(q)‖²), over the four neighbours: (B,)."""
        tiny = 1e-12  # keeps the derivative of the root finite where the flow is constant
        down = ((z[:, 1:] - z[:, :-1]).square().sum(-1) + tiny).sqrt().flatten(1).sum(1)
        right = ((z[:, :, 1:] - z[:, :, :-1]).square().sum(-1) + tiny).sqrt().flatten(1).sum(1)
        return 2 * (down + right)  # every pair is seen from both ends

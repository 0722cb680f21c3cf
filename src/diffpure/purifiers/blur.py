"""A Gaussian blur as a purifier: the simplest baseline, deterministic and exactly differentiable.

x' = (g ⊗ g) * x,      g_k ∝ exp(-k²/2σ²),      borders by reflection
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from diffpure.diffusion.gradients import Gradient
from diffpure.diffusion.paths import Path
from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.purify import CallPath, PurifierBase


@final
class Blur(PurifierBase):
    """A Gaussian blur.

    sigma: its deviation in pixels.
    """

    def __init__(self, sigma: float = 1.0, gradient: Gradient = "exact", *, rounds: int = 1) -> None:
        super().__init__(gradient, rounds=rounds)
        if not isinstance(sigma, int | float) or not 0 < sigma < math.inf:
            raise InputError(f"A blur needs a sigma above 0, in pixels, got {sigma!r}.")
        self.sigma = float(sigma)
        reach = math.ceil(3 * sigma)
        weights = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
        self.register_buffer("kernel", weights / weights.sum())

    kernel: Tensor

    @property
    def stochastic(self) -> bool:
        return False

    @property
    def title(self) -> str:
        return self.titled(f"Blur(sigma={self.sigma:g})")

    def begin(self, images: Tensor, noise: Noise) -> tuple[Tensor, Path]:
        return images, CallPath(self._blurred, (self.kernel,))

    def finish(self, state: Tensor, images: Tensor) -> Tensor:
        return state

    def _blurred(self, x: Tensor) -> Tensor:
        reach, channels, kernel = len(self.kernel) // 2, x.shape[1], self.kernel.to(x.dtype)
        mode = "reflect" if reach < min(x.shape[-2:]) else "replicate"
        x = F.pad(x, (reach,) * 4, mode=mode)
        x = F.conv2d(x, kernel.reshape(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
        return F.conv2d(x, kernel.reshape(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)

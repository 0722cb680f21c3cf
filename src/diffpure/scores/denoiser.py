"""Any Gaussian denoiser as a score model, by Tweedie's formula (Robbins 1956, Miyasawa 1961).

A denoiser D(y, σ) estimates E[x0 | y] from y = x0 + σ n. The VP marginal x(t) = √α x0 + std ε is, divided by √α, such
a y with σ = std/√α; then

    ε̂(x, t) = (y - D(y, σ)) / σ,        ∇ log p_t(x) = -ε̂ / std(t).

A blind denoiser D(y) finds σ by itself. Convolutional denoisers work at any resolution, and so does their score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import VPSDE, Schedule, over


@final
class DenoiserScore(EpsilonScore):
    """The score of a denoiser; `unit_range` says that it works on images in [0, 1], with σ on that scale too."""

    def __init__(
        self,
        denoise: Callable[..., Any],
        *,
        blind: bool = False,
        unit_range: bool = False,
        sde: Schedule = VPSDE(),
        size: int | None = None,
        channels: int | None = None,
    ) -> None:
        super().__init__(sde, size, channels)
        self.denoise = denoise  # an nn.Module becomes a submodule: its weights move and freeze with the score
        self.blind = blind
        self.unit_range = unit_range

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        sigma = (self.sde.std(t) / self.sde.alpha(t).sqrt()).expand(len(x))
        y = x / over(self.sde.alpha(t).sqrt(), x)
        return (y - self._clean(y, sigma)) / over(sigma, x)

    def _clean(self, y: Tensor, sigma: Tensor) -> Tensor:
        """D(y, σ) in the range [-1, 1]; σ (B,)."""
        sigma = sigma.to(device=y.device, dtype=y.dtype)
        if self.unit_range:
            y, sigma = (y + 1) / 2, sigma / 2
        clean: Tensor = self.denoise(y) if self.blind else self.denoise(y, sigma)
        return 2 * clean - 1 if self.unit_range else clean

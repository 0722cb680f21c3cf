"""Any Gaussian denoiser as a score model, by Tweedie's formula (Robbins 1956, Miyasawa 1961).

A denoiser D(y, σ) estimates E[x0 | y] from y = x0 + σ n. The VP marginal x(t) = √α x0 + std ε is, divided by √α, such
a y with σ = std/√α; then

    ε̂(x, t) = (y - D(y, σ)) / σ,        ∇ log p_t(x) = -ε̂ / std(t).

A blind denoiser D(y) finds σ by itself. Convolutional denoisers work at any resolution, and so does their score.

Published denoisers differ in their range and in the shape of σ, and a wrong one raises no error: so the first call also
denoises a picture of dead leaves (discs that hide each other, whose statistics are those of photographs) with the usual
noise of σ = 25/255, and warns if that makes it worse or if the other range is far better.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Final, Literal, final

import torch
from torch import Tensor

from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import VPSDE, Schedule, over
from diffpure.errors import InputError, unknown

SigmaShape = Literal["batch", "image", "map"]

TRIAL: Final = 2 * 25 / 255  # the noise of the trial, of images in [-1, 1]
MARGIN: Final = 3.0  # dB by which the other range must be better to be suspected
SMALLEST: Final = 24  # a picture of fewer pixels has no neighbourhoods to denoise by


@final
class DenoiserScore(EpsilonScore):
    """The score of a denoiser: denoise(y, σ), or denoise(y) if it is blind.

    unit_range: it works on images in [0, 1], with σ on that scale too.   sigma_shape: "batch" gives it σ as (B,),
    "image" as (B, 1, 1, 1), "map" as (B, 1, H, W).   sigma_max: the largest σ that it was trained for, on its own
    scale; beyond it a warning is given once.
    """

    def __init__(
        self,
        denoise: Callable[..., Any],
        *,
        blind: bool = False,
        unit_range: bool = False,
        sigma_shape: SigmaShape = "batch",
        sigma_max: float | None = None,
        sde: Schedule = VPSDE(),
        size: int | None = None,
        channels: int | None = None,
    ) -> None:
        super().__init__(sde, size, channels)
        if not callable(denoise):
            raise InputError(f"A denoiser is called with noisy images and σ, got {type(denoise).__name__}.")
        if sigma_shape not in SHAPES:
            raise unknown("sigma_shape", sigma_shape, SHAPES)
        if sigma_max is not None and not sigma_max > 0:
            raise InputError(f"sigma_max is positive, got {sigma_max}.")
        self.denoise = denoise  # an nn.Module becomes a submodule: its weights move and freeze with the score
        self.blind = blind
        self.unit_range = unit_range
        self.sigma_shape = sigma_shape
        self.sigma_max = sigma_max
        self._tried = self._exceeded = False

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        sigma = self.sde.sigma(t).expand(x.shape[0])
        if not self._tried:
            self._tried = True
            self._try(x.detach())
        self._check_range(sigma)
        y = x / over(self.sde.alpha(t).sqrt(), x)
        return (y - self._clean(y, sigma, self.unit_range)) / over(sigma, x)

    def _clean(self, y: Tensor, sigma: Tensor, unit_range: bool) -> Tensor:
        """D(y, σ) in the range [-1, 1]; σ (B,)."""
        sigma = sigma.to(device=y.device, dtype=y.dtype)
        if unit_range:
            y, sigma = (y + 1) / 2, sigma / 2
        clean = self.denoise(y) if self.blind else self.denoise(y, SHAPES[self.sigma_shape](sigma, y))
        if not isinstance(clean, Tensor) or clean.shape != y.shape:
            got = tuple(clean.shape) if isinstance(clean, Tensor) else type(clean).__name__
            raise InputError(f"A denoiser returns images of the shape that it was given, {tuple(y.shape)}, got {got}.")
        return 2 * clean - 1 if unit_range else clean

    def _check_range(self, sigma: Tensor) -> None:
        """Warn, once, of a σ that the denoiser was not trained for."""
        if self.sigma_max is None or self._exceeded:
            return
        scale = 2 if self.unit_range else 1
        found = sigma.max().item() / scale
        if found > self.sigma_max * (1 + 1e-6):
            self._exceeded = True
            limit = self.sde.time_of_log_snr(-torch.tensor(scale * self.sigma_max).log()).item()
            warnings.warn(
                f"The denoiser is asked for σ = {found:.3g}, beyond its sigma_max = {self.sigma_max:.3g}; "
                f"t* up to {math.floor(1000 * limit) / 1000:g} keeps within it.",
                stacklevel=2,
            )

    @torch.no_grad()
    def _try(self, like: Tensor) -> None:
        """Denoise a noisy picture shaped like the images, and warn if that fails."""
        if min(like.shape[-2:]) < SMALLEST:
            return
        sigma = TRIAL if self.sigma_max is None else min(TRIAL, self.sigma_max * (2 if self.unit_range else 1))
        picture = dead_leaves(*like.shape[-3:]).to(like).expand_as(like)
        noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        noisy = picture + sigma * noise.to(like)
        sigmas = torch.full((len(like),), sigma, dtype=torch.float64)
        before, after, other = (
            _psnr(seen, picture)
            for seen in (noisy, *(self._clean(noisy, sigmas, r) for r in (self.unit_range, not self.unit_range)))
        )
        if after >= before and other < after + MARGIN:
            return
        cause = "check its range (unit_range), the scale and shape of σ, and that it returns the image, not the noise"
        if other > max(before, after + MARGIN):
            cause = f"with unit_range={not self.unit_range} it reaches {other:.1f} dB, so that is probably its range"
        change = f"from {before:.1f} dB to {after:.1f} dB (σ = {sigma:.3g} in [-1, 1])"
        warnings.warn(f"The denoiser takes a noisy picture {change}; {cause}.", stacklevel=2)


def dead_leaves(channels: int, height: int, width: int, discs: int = 100) -> Tensor:
    """A picture (channels, height, width) in [-0.8, 0.8] of discs that hide each other, always the same."""
    random = torch.Generator().manual_seed(0)
    rows, columns = torch.arange(height)[:, None] / height, torch.arange(width)[None] / width
    picture = torch.zeros(channels, height, width)
    for _ in range(discs):
        row, column, size, grey = torch.rand(4, generator=random).tolist()
        colour = (1.6 * (grey - 0.5) + 0.2 * (2 * torch.rand(channels, generator=random) - 1)).clamp(-0.8, 0.8)
        radius = 0.1 / math.sqrt(0.02 + size)  # few large ones, many small ones
        inside = (rows - row) ** 2 + (columns - column) ** 2 < radius**2
        picture = torch.where(inside, colour[:, None, None], picture)
    return picture


def _psnr(found: Tensor, picture: Tensor) -> float:
    """The peak signal-to-noise ratio of images in [-1, 1], in dB."""
    return -10 * math.log10((found - picture).square().mean().item() / 4 + 1e-12)


# σ (B,) as a denoiser wants it.
SHAPES: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "batch": lambda sigma, y: sigma,
    "image": lambda sigma, y: sigma[:, None, None, None],
    "map": lambda sigma, y: sigma[:, None, None, None].expand(-1, 1, *y.shape[-2:]),
}

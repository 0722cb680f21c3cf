"""What the score networks of this package share: the preconditioning of EDM and the embedding of the noise level.

With σ(t) = std(t)/√α(t) and z = x/√α = x₀ + σ ε, a network F sees an input of unit variance and the log
signal-to-noise ratio λ, and the denoised image is preconditioned as in EDM (Karras et al. 2022, σ_d = ½),

    D(z) = σ_d²/(σ²+σ_d²) z + σ σ_d/√(σ²+σ_d²) F(z/√(σ²+σ_d²), λ),

so that D(z) → z as t → 0 whatever F says. In terms of the noise, ε̂ = (z - D(z))/σ is

    ε̂(x, t) = σ/(σ²+σ_d²) z - σ_d/√(σ²+σ_d²) F.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import over

SIGMA_DATA: Final = 0.5  # standard deviation of natural images in [-1, 1]
M = TypeVar("M", bound=nn.Module)


class PreconditionedScore(EpsilonScore):
    """ε̂(x, t) from a network F of the noise level; subclasses implement `network`."""

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        level = self.sde.log_snr(t)
        sigma = torch.exp(-level)
        power = sigma**2 + SIGMA_DATA**2
        z = x * over(torch.exp(self.sde.gamma(t)), x)
        residual = self.network(z * over(power.rsqrt(), x), level)
        return over(sigma / power, x) * z - over(SIGMA_DATA * power.rsqrt(), x) * residual

    @abstractmethod
    def network(self, x: Tensor, level: Tensor) -> Tensor:
        """F on x (B, C, H, W) of unit variance at log signal-to-noise ratios `level` (B,)."""


class LevelEmbedding(nn.Module):
    """Sines and cosines of λ, then a small network: (B,) -> (B, D)."""

    frequencies: Tensor

    def __init__(self, width: int, waves: int = 16, shortest: float = 0.1) -> None:
        super().__init__()
        # λ runs over about ten units: periods from 20 units down to the shortest.
        periods = torch.logspace(math.log10(20), math.log10(shortest), waves)
        self.register_buffer("frequencies", 2 * math.pi / periods, persistent=False)
        self.layers = nn.Sequential(nn.Linear(2 * waves, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, level: Tensor) -> Tensor:
        phase = level[:, None] * self.frequencies
        embedded: Tensor = self.layers(torch.cat([phase.sin(), phase.cos()], 1))
        return embedded


def zero(module: M) -> M:
    """The module with all weights zero, so that its branch is silent at the start."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module

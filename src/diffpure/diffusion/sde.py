"""The variance-preserving diffusion in continuous time and as DDPM's discrete chain.

The forward VP-SDE of the paper (section 2) is

    dx = -½ β(t) x dt + √β(t) dw,        β(t) = β_min + (β_max - β_min) t,        t in [0, 1],

so with B(t) = ∫₀ᵗ β(s) ds everything has a closed form (Eq. 3):

    α(t) = exp(-B(t)),    γ(t) = B(t)/2,    std(t) = √(1 - α(t)),    x(t) = √α(t) x(0) + std(t) ε.

1 - α(t) is computed as -expm1(-B(t)) in float64, so it keeps all its digits where a float32 subtraction has none
(at t = 1e-5 it is 1e-6). `DiscreteVP` is the same diffusion as DDPM counts it, in N steps.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Final, final

import torch
from torch import Tensor

from diffpure.errors import InputError

Time = float | Tensor  # one time for the whole batch, or one per image: (B,) float64

STEPS: Final = 1000  # N of every discrete diffusion in the paper


def as_time(t: Time) -> Tensor:
    """t as a float64 tensor, so that no coefficient is computed in less; on the CPU where a device has no float64."""
    t = t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64)
    return t.to("cpu" if t.device.type == "mps" else t.device, torch.float64)


def over(coefficient: Tensor, x: Tensor) -> Tensor:
    """A float64 coefficient, one for all or one per image, shaped and cast to multiply x (B, ...)."""
    coefficient = coefficient.to(device=x.device, dtype=x.dtype)
    return coefficient if coefficient.ndim == 0 else coefficient.reshape(-1, *[1] * (x.ndim - 1))


class Schedule(ABC):
    """A variance-preserving diffusion, given by β(t) and its integral B(t)."""

    @abstractmethod
    def beta(self, t: Time) -> Tensor:
        """β(t), the noise scale; float64."""

    @abstractmethod
    def integral(self, t: Time) -> Tensor:
        """B(t) = ∫₀ᵗ β(s) ds; float64."""

    @abstractmethod
    def time_of_integral(self, B: Tensor) -> Tensor:
        """The t at which the integral of β is B: the inverse of `integral`."""

    def alpha(self, t: Time) -> Tensor:
        """α(t) = exp(-B(t)), the squared signal scale."""
        return torch.exp(-self.integral(t))

    def gamma(self, t: Time) -> Tensor:
        """γ(t) = ½ B(t), so that √α(t) = exp(-γ(t)) (Theorem 2)."""
        return self.integral(t) / 2

    def std(self, t: Time) -> Tensor:
        """√(1 - α(t)), the noise scale of the marginal, exact also at t → 0."""
        return torch.sqrt(-torch.expm1(-self.integral(t)))

    def sigma(self, t: Time) -> Tensor:
        """σ(t) = std(t)/√α(t): the noise in x(t)/√α(t), which is x(0) + σ(t) ε."""
        return torch.sqrt(torch.expm1(self.integral(t)))

    def log_snr(self, t: Time) -> Tensor:
        """λ(t) = log(√α(t) / std(t)) = -log σ(t), the half log signal-to-noise ratio."""
        return -torch.log(self.sigma(t))

    def time_of_log_snr(self, lam: Tensor) -> Tensor:
        """The t at which `log_snr` is λ: B = log(1 + exp(-2λ))."""
        return self.time_of_integral(torch.nn.functional.softplus(-2 * lam.to(torch.float64)))

    def diffuse(self, x: Tensor, t: Time, eps: Tensor) -> Tensor:
        """x(t) = √α(t) x + √(1 - α(t)) ε, Eq. 3; x and ε (B, ...)."""
        return over(torch.exp(-self.gamma(t)), x) * x + over(self.std(t), x) * eps

    def denoised(self, x: Tensor, t: Time, score: Tensor) -> Tensor:
        """E[x(0) | x(t)] = (x(t) + (1 - α(t)) ∇log p_t(x)) / √α(t), Tweedie's formula."""
        return over(torch.exp(self.gamma(t)), x) * (x + over(self.std(t) ** 2, x) * score)


@final
@dataclass(frozen=True)
class VPSDE(Schedule):
    """The paper's linear schedule: β(t) = β_min + (β_max - β_min) t."""

    beta_min: float = 0.1
    beta_max: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.beta_min <= self.beta_max < math.inf:
            raise InputError(f"VPSDE needs 0 < beta_min <= beta_max, got {self.beta_min} and {self.beta_max}.")

    def beta(self, t: Time) -> Tensor:
        return self.beta_min + (self.beta_max - self.beta_min) * as_time(t)

    def integral(self, t: Time) -> Tensor:
        t = as_time(t)
        return self.beta_min * t + (self.beta_max - self.beta_min) / 2 * t**2

    def time_of_integral(self, B: Tensor) -> Tensor:
        # The positive root of ½ (β_max - β_min) t² + β_min t = B, in the form that does not cancel for small B.
        B = B.to(torch.float64)
        root = torch.sqrt(self.beta_min**2 + 2 * (self.beta_max - self.beta_min) * B)
        return 2 * B / (self.beta_min + root)

    def discrete(self, steps: int = STEPS) -> DiscreteVP:
        """The DDPM chain of this SDE: β_i = β(i/(N-1))/N, i = 0 … N-1.

        The relation between the two is exact in the limit only: step i ends at t = (i+1)/N, where
        -log ᾱ_i = -Σ log(1 - β_j) = B(t) + O(1/N); at N = 1000, t = 0.1: ᾱ = 0.89702, α = 0.89628.
        """
        return _discrete(self, steps)


@final
@dataclass(frozen=True)
class DiscreteVP(Schedule):
    """A DDPM chain of N steps, x_i = √(1 - β_i) x_{i-1} + √β_i ε, and the continuous time that runs through it.

    ᾱ_i = Π_{j≤i} (1 - β_j). Step i ends at t = (i+1)/N, and B(t) = -log ᾱ is linear in between: the SDE with
    piecewise constant β(t) = -N log(1 - β_i) has exactly the marginals of the chain at those times.
    """

    betas: tuple[float, ...]
    _nodes: Tensor = field(init=False, repr=False, compare=False)  # B at t = 0, 1/N, …, 1

    def __post_init__(self) -> None:
        if not self.betas or not all(0 < b < 1 for b in self.betas):
            raise InputError("A discrete schedule needs at least one step and every beta in (0, 1).")
        rates = -torch.log1p(-torch.tensor(self.betas, dtype=torch.float64))
        object.__setattr__(self, "_nodes", torch.cat([torch.zeros(1, dtype=torch.float64), rates.cumsum(0)]))

    def __len__(self) -> int:
        return len(self.betas)

    def alpha_bar(self, i: int | Tensor) -> Tensor:
        """ᾱ_i = Π_{j≤i} (1 - β_j); ᾱ_{-1} = 1."""
        return torch.exp(-self._nodes[torch.as_tensor(i) + 1])

    def one_minus_alpha_bar(self, i: int | Tensor) -> Tensor:
        """1 - ᾱ_i without cancellation; 0 at i = -1."""
        return -torch.expm1(-self._nodes[torch.as_tensor(i) + 1])

    def beta_of_step(self, i: int | Tensor) -> Tensor:
        """β_i of the chain."""
        return torch.tensor(self.betas, dtype=torch.float64)[torch.as_tensor(i)]

    def _segment(self, t: Time) -> tuple[Tensor, Tensor, Tensor]:
        """Where t lies: the fraction of its interval that has passed, B at its start, and the rise of B over it."""
        scaled = as_time(t) * len(self)
        i = scaled.floor().clamp(0, len(self) - 1).long()
        nodes = self._nodes.to(i.device)
        return scaled - i, nodes[i], nodes[i + 1] - nodes[i]

    def beta(self, t: Time) -> Tensor:
        _, _, rise = self._segment(t)
        return rise * len(self)

    def integral(self, t: Time) -> Tensor:
        fraction, start, rise = self._segment(t)
        return start + fraction * rise

    def time_of_integral(self, B: Tensor) -> Tensor:
        B, nodes = B.to(torch.float64), self._nodes.to(B.device)
        i = (torch.searchsorted(nodes, B, right=True) - 1).clamp(0, len(self) - 1)
        return (i + (B - nodes[i]) / (nodes[i + 1] - nodes[i])) / len(self)


@functools.cache
def _discrete(sde: VPSDE, steps: int) -> DiscreteVP:
    grid = torch.linspace(0, 1, steps, dtype=torch.float64)
    return DiscreteVP(tuple((sde.beta(grid) / steps).tolist()))

"""The paper's theory as functions: how fast diffusion washes a perturbation out, and how far purification may stray.

Theorem 1: KL(p_t ‖ q_t) never grows with t; its rate is -½ β(t) times the Fisher divergence. Theorem 2: with
probability at least 1 - δ,

    ‖x̂(0) - x‖ ≤ ‖ε_a‖ + √(e^{2γ(t*)} - 1) C_δ + γ(t*) C_s,      C_δ = √(2d + 4√(d log 1/δ) + 4 log 1/δ),

for a score bounded by ½ C_s. Distances are those of images in [-1, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from diffpure.diffusion.sde import Schedule
from diffpure.errors import InputError


@final
@dataclass(frozen=True)
class Mixture:
    """A Gaussian mixture on the line; one component is a Gaussian."""

    weights: tuple[float, ...]
    means: tuple[float, ...]
    variances: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.weights) == len(self.means) == len(self.variances) > 0:
            raise InputError("A mixture has one weight, mean and variance for each component.")
        if min(self.weights) < 0 or not math.isclose(sum(self.weights), 1) or min(self.variances) <= 0:
            raise InputError("A mixture has weights that sum to 1 and positive variances.")

    def diffused(self, sde: Schedule, t: float) -> Mixture:
        """p_t: every component N(μ, v) becomes N(√α μ, 1 - α + α v)."""
        alpha, noise = sde.alpha(t).item(), sde.std(t).item() ** 2
        means = tuple(math.sqrt(alpha) * m for m in self.means)
        return Mixture(self.weights, means, tuple(noise + alpha * v for v in self.variances))

    def log_density(self, x: Tensor) -> Tensor:
        """log p(x) for x of any shape."""
        w, m, v = (torch.tensor(a, dtype=torch.float64) for a in (self.weights, self.means, self.variances))
        log_parts = w.log() - (x[..., None] - m) ** 2 / (2 * v) - (2 * math.pi * v).log() / 2
        return torch.logsumexp(log_parts, dim=-1)


def kl_gaussians(mean_p: float, var_p: float, mean_q: float, var_q: float) -> float:
    """KL(N(μ_p, v_p) ‖ N(μ_q, v_q)) in closed form."""
    return (math.log(var_q / var_p) + (var_p + (mean_p - mean_q) ** 2) / var_q - 1) / 2


def kl_mixtures(p: Mixture, q: Mixture, points: int = 20_001) -> float:
    """KL(p ‖ q) of mixtures on the line, by the trapezoidal rule over 12 deviations around every component of p."""
    spread = [12 * math.sqrt(v) for v in p.variances]
    low = min(m - s for m, s in zip(p.means, spread, strict=True))
    high = max(m + s for m, s in zip(p.means, spread, strict=True))
    x = torch.linspace(low, high, points, dtype=torch.float64)
    log_p = p.log_density(x)
    return torch.trapezoid(log_p.exp() * (log_p - q.log_density(x)), x).item()


def kl_diffused(sde: Schedule, t: float, p: Mixture, q: Mixture) -> float:
    """KL(p_t ‖ q_t), which Theorem 1 says falls with t."""
    return kl_mixtures(p.diffused(sde, t), q.diffused(sde, t))


def kl_bound_of_perturbation(sde: Schedule, t: float, perturbation: float) -> float:
    """An upper bound on KL(p_t ‖ q_t) when q is p moved by at most ‖ε_a‖: α ‖ε_a‖² / (2 (1 - α)), by convexity."""
    return (sde.alpha(t) * perturbation**2 / (2 * sde.std(t) ** 2)).item()


def c_delta(dimension: int, delta: float) -> float:
    """C_δ of Theorem 2, from the concentration of χ²(d)."""
    if not 0 < delta < 1 or dimension < 1:
        raise InputError(f"C_δ needs delta in (0, 1) and a dimension of at least 1, got {delta} and {dimension}.")
    log = math.log(1 / delta)
    return math.sqrt(2 * dimension + 4 * math.sqrt(dimension * log) + 4 * log)


def distance_bound(
    sde: Schedule, t_star: float, dimension: int, perturbation: float = 0.0, c_s: float = 0.0, delta: float = 0.05
) -> float:
    """Theorem 2's bound on ‖x̂(0) - x‖, for a perturbation ‖ε_a‖ and a score bounded by ½ c_s."""
    gamma = sde.gamma(t_star).item()
    return perturbation + math.sqrt(math.expm1(2 * gamma)) * c_delta(dimension, delta) + gamma * c_s

"""The variance-preserving diffusion, its noise, and one equation on one time grid.

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
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from diffpure.errors import InputError

Time = float | Tensor  # one time for the whole batch, or one an image: (B,) float64
NoiseSource = Callable[[int, Tensor], Tensor]  # (step, like) -> standard normal numbers shaped like `like`

STEPS: Final = 1000  # N of every discrete diffusion in the paper


def as_time(t: Time) -> Tensor:
    """t as a float64 tensor, so that no coefficient is computed in less; on the CPU where a device has no float64."""
    t = t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64)
    return t.to("cpu" if t.device.type == "mps" else t.device, torch.float64)


def over(coefficient: Tensor, x: Tensor) -> Tensor:
    """A float64 coefficient, one for all or one an image, shaped and cast to multiply x (B, ...)."""
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


_MASK: Final = (1 << 64) - 1


def mix(seed: int, tag: int) -> int:
    """A 64-bit child of (seed, tag), by two rounds of the SplitMix64 finaliser: equal inputs, equal child."""
    z = (seed ^ (tag * 0x9E3779B97F4A7C15)) & _MASK
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


@final
@dataclass(frozen=True)
class Noise:
    """Gaussian noise as a pure function of (seed of the image, step).

    Each image draws from its own Philox stream whose 128-bit key is (seed, step): an image gets the same noise in
    any batch, order, shard or process, a backward pass can draw it again, and no two keys share a stream. (torch's
    CPU generator keeps only 32 bits of a seed.) The numbers are drawn on the CPU, so every device sees the same.
    """

    seeds: tuple[int, ...]

    @classmethod
    def of(cls, seeds: Sequence[int] | Tensor | None, batch: int) -> Noise:
        """The noise of a batch: from explicit seeds, one an image, or from the operating system's entropy."""
        if seeds is None:
            return cls(tuple(secrets.randbits(64) for _ in range(batch)))
        values = tuple(int(s) & _MASK for s in (seeds.tolist() if isinstance(seeds, Tensor) else seeds))
        if len(values) != batch:
            raise InputError(f"Seeds are one an image: got {len(values)} seeds for {batch} images.")
        return cls(values)

    def __call__(self, step: int, like: Tensor) -> Tensor:
        """Standard normal numbers shaped like `like` (B, ...), for one step."""
        out = np.empty(like.shape, dtype=np.float64 if like.dtype == torch.float64 else np.float32)
        for row, seed in zip(out, self.seeds, strict=True):
            self._stream(seed, step).standard_normal(out=row, dtype=row.dtype)
        return torch.from_numpy(out).to(device=like.device, dtype=like.dtype)

    def uniform(self, step: int) -> Tensor:
        """One number in [0, 1) an image: (B,) float64."""
        return torch.tensor([self._stream(seed, step).random() for seed in self.seeds], dtype=torch.float64)

    def child(self, tag: int) -> Noise:
        """An independent noise for a part of the work (a round, a draw), again one stream an image."""
        return Noise(tuple(mix(seed, tag) for seed in self.seeds))

    @staticmethod
    def _stream(seed: int, step: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=np.array([seed, step & _MASK], dtype=np.uint64)))


class Path(ABC):
    """One equation, on one time grid, with one noise: it knows ONE step, and a gradient mode owns the loop.

    `score` is what every step calls. `context` is a tensor that every step reads beside the state (the attacked image
    in LD-SDE): gradient modes differentiate with respect to it too.
    """

    score: Callable[[Tensor, Tensor], Tensor]
    context: Tensor | None

    @abstractmethod
    def __len__(self) -> int:
        """The number of steps."""

    @abstractmethod
    def step(self, x: Tensor, i: int) -> Tensor:
        """The state after step i from the state x (B, C, H, W) before it; differentiable in x and `context`."""

    @abstractmethod
    def time(self, i: int) -> Tensor:
        """The time of the state before step i (after the last step for i = len(path)); () or (B,) float64."""

    @abstractmethod
    def coarser(self, steps: int) -> Path:
        """The same equation on a grid of about `steps` steps."""

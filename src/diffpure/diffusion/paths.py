"""One equation on one time grid: the paths that samplers hand to gradient modes.

A path knows a single step (`Path`); who runs the steps, and what is kept for a gradient, is not its business.
Noise is a function of (seed of the image, step number), so that a backward pass can take the same step again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor, nn

from diffpure.diffusion.score import ScoreModel
from diffpure.diffusion.sde import DiscreteVP, over
from diffpure.errors import InputError
from diffpure.noise import NoiseSource

Drift = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, t (B,), context) -> dx/dt


def for_batch(t: Tensor, x: Tensor) -> Tensor:
    """A time or index, one for all or one per image, as (B,) on the device of x (in float32 where that has no more)."""
    if x.device.type == "mps" and t.is_floating_point():
        t = t.to(torch.float32)
    return t.to(x.device).expand(x.shape[0])


def thin(times: Tensor, steps: int) -> Tensor:
    """About `steps` intervals of a grid, always with its first and last time."""
    if steps < 1:
        raise InputError(f"A coarser path needs at least one step, got {steps}.")
    last = len(times) - 1
    keep = torch.linspace(0, last, min(steps, last) + 1, dtype=torch.float64).round().long()
    return times[keep]


class Path(ABC):
    """A purification as steps of one state, with one noise: it knows ONE step, and a gradient mode owns the loop.

    The state is any tensor with one row per image: pixels, latents. `context` is a tensor that every step reads beside
    the state (the attacked image in LD-SDE): gradient modes differentiate with respect to it too.
    """

    context: Tensor | None

    @abstractmethod
    def __len__(self) -> int:
        """The number of steps."""

    @abstractmethod
    def step(self, x: Tensor, i: int) -> Tensor:
        """The state after step i from the state x (B, ...) before it; differentiable in x and `context`."""

    def calls(self, i: int) -> int:
        """How often step i calls the network, per image."""
        return 1

    def weights(self) -> Iterable[Tensor]:
        """The weights of the network, which no graph of a step holds a copy of."""
        return ()

    def time(self, i: int) -> Tensor:
        """The time of the state before step i (after the last step for i = len(path)); () or (B,) float64."""
        return torch.tensor(1 - i / max(1, len(self)), dtype=torch.float64)

    def coarser(self, steps: int) -> Path:
        """The same equation on a grid of about `steps` steps."""
        raise InputError(f"{type(self).__name__} has no coarser form; use the exact gradient, backprop or BPDA.")


@final
@dataclass(frozen=True)
class Segment(Path):
    """The steps first … last - 1 of a path, as a path."""

    path: Path
    first: int
    last: int
    context: Tensor | None = None

    def __len__(self) -> int:
        return self.last - self.first

    def step(self, x: Tensor, i: int) -> Tensor:
        return reading(self.path, self.context).step(x, self.first + i)

    def calls(self, i: int) -> int:
        return self.path.calls(self.first + i)

    def weights(self) -> Iterable[Tensor]:
        return self.path.weights()

    def time(self, i: int) -> Tensor:
        return self.path.time(self.first + i)


def reading(path: Path, context: Tensor | None) -> Path:
    """The path reading another context tensor (paths are frozen dataclasses)."""
    return path if context is None else replace(path, context=context)  # type: ignore[type-var]


def weights_of(score: object) -> Iterable[Tensor]:
    """The weights of a score, where it is a module or wraps one."""
    inner = getattr(score, "score", score)
    return (*inner.parameters(), *inner.buffers()) if isinstance(inner, nn.Module) else ()


@dataclass(frozen=True, kw_only=True)
class GridPath(Path, ABC):
    """A path over continuous times; with `denoise`, one last step replaces the end state by E[x(0) | x]."""

    score: ScoreModel
    times: Tensor  # (N+1,) or (N+1, B), float64
    noise: NoiseSource
    denoise: bool
    context: Tensor | None = None

    def __len__(self) -> int:
        return len(self.times) - 1 + self.denoise

    def time(self, i: int) -> Tensor:
        return self.times[i] if i < len(self.times) else torch.zeros_like(self.times[-1])

    def step(self, x: Tensor, i: int) -> Tensor:
        if i < len(self.times) - 1:
            return self._step(x, i)
        t = self.times[-1]
        return self.score.sde.denoised(x, t, self.score(x, for_batch(t, x)))

    @abstractmethod
    def _step(self, x: Tensor, i: int) -> Tensor:
        """From times[i] to times[i + 1]."""

    def weights(self) -> Iterable[Tensor]:
        return weights_of(self.score)

    def coarser(self, steps: int) -> Self:
        return replace(self, times=thin(self.times, steps))


@final
@dataclass(frozen=True, kw_only=True)
class EulerPath(GridPath):
    """x ← x + h f(x, t) + √|h| g(t) z over the grid `times`, h = t_{i+1} - t_i: Euler–Maruyama (Euler, without g).

    The coefficients are taken where a step starts, as the paper's solver does.
    """

    drift: Drift
    diffusion: Callable[[Tensor], Tensor] | None

    def _step(self, x: Tensor, i: int) -> Tensor:
        t = self.times[i]
        h = self.times[i + 1] - t
        x = x + over(h, x) * self.drift(x, for_batch(t, x), self.context)
        if self.diffusion is None:
            return x
        return x + over(h.abs().sqrt() * self.diffusion(t), x) * self.noise(i + 1, x)


@final
@dataclass(frozen=True, kw_only=True)
class ExponentialPath(GridPath):
    """The reverse SDE with its linear part solved exactly: only ε̂ = -std·s is discretised.

    In y = x/√α, with σ = std/√α, the reverse SDE is dy = 2 ε̂ dσ + √(2σ) dw̄ with σ falling, so from σ_t to σ_s

        order 1:  y_s = y + 2 (σ_s - σ_t) ε̂(y, σ_t) + √(σ_t² - σ_s²) z
        order 2:  the same with ε̂ at the middle σ_m = (σ_t + σ_s)/2, at the state to which order 1 comes there with
                  the first part of the step's own noise, √(σ_t² - σ_m²) z₁ + √(σ_m² - σ_s²) z₂.

    SDE-DPM-Solver++ discretises D = E[x(0) | x] instead, with e^{-2h} on y. Where D ≈ y, which is most of the way for
    small t*, both of its terms are large and cancel, and the samples lose variance: on Gaussian data, t* = 0.1, its
    first order (which is `Ancestral`) misses the posterior by 16 to 28 % (Wasserstein distance over the posterior's
    deviation, σ0² from 0.01 to 1) in ten steps and its second by 1.4 to 2.1 %; this one by 4 to 10 % and 0.1 to 1.1 %;
    a hundred Euler–Maruyama steps by 0.5 to 1.2 %.
    """

    order: int

    def calls(self, i: int) -> int:
        return self.order if i < len(self.times) - 1 else 1

    def _step(self, x: Tensor, i: int) -> Tensor:
        sde, t, s = self.score.sde, self.times[i], self.times[i + 1]
        sigma_t, sigma_s = sde.sigma(t), sde.sigma(s)
        y = over(sde.alpha(t).rsqrt(), x) * x
        eps, noise, sigma_z = self._epsilon(x, t), torch.zeros_like(x), sigma_t
        if self.order == 2:
            sigma_z = (sigma_t + sigma_s) / 2
            middle = sde.time_of_log_snr(-torch.log(sigma_z))
            noise = over(torch.sqrt(sigma_t**2 - sigma_z**2), x) * self.noise(2 * i + 1, x)
            y_middle = y + over(2 * (sigma_z - sigma_t), x) * eps + noise
            eps = self._epsilon(over(sde.alpha(middle).sqrt(), x) * y_middle, middle)
        noise = noise + over(torch.sqrt(sigma_z**2 - sigma_s**2), x) * self.noise(2 * i + 2, x)
        return over(sde.alpha(s).sqrt(), x) * (y + over(2 * (sigma_s - sigma_t), x) * eps + noise)

    def _epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        return over(-self.score.sde.std(t), x) * self.score(x, for_batch(t, x))


@final
@dataclass(frozen=True, kw_only=True)
class ChainPath(Path):
    """From step n to step m of the DDPM chain, with x̂₀ = (x - √(1-ᾱ_n) ε̂)/√ᾱ_n (DDIM, Eq. 12):

        x_m = √ᾱ_m x̂₀ + √(1 - ᾱ_m - σ²) ε̂ + σ z,    σ = η √((1-ᾱ_m)/(1-ᾱ_n)) √(1 - ᾱ_n/ᾱ_m).

    η = 1 is DDPM's ancestral step with the posterior variance ("fixedsmall"), η = 0 is deterministic.
    An image whose own t* has fewer steps than the path waits, unchanged, where two of its indices are equal.
    """

    score: ScoreModel
    chain: DiscreteVP
    indices: Tensor  # (N+1,) or (N+1, B), falling to -1, which is the image itself
    noise: NoiseSource
    eta: float
    clip: bool
    context: Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices) - 1

    def time(self, i: int) -> Tensor:
        return (self.indices[i].to(torch.float64) + 1) / len(self.chain)

    def step(self, x: Tensor, i: int) -> Tensor:
        n, m = self.indices[i], self.indices[i + 1]
        eps = self.score.epsilon_step(x, for_batch(n, x))
        noise_n, noise_m = self.chain.one_minus_alpha_bar(n), self.chain.one_minus_alpha_bar(m)
        signal_n, signal_m = self.chain.alpha_bar(n), self.chain.alpha_bar(m)
        x0 = (x - over(noise_n.sqrt(), x) * eps) / over(signal_n.sqrt(), x)
        if self.clip:
            x0 = x0.clamp(-1, 1)
            eps = (x - over(signal_n.sqrt(), x) * x0) / over(noise_n.sqrt(), x)
        variance = self.eta**2 * noise_m / noise_n * (1 - signal_n / signal_m)
        out = over(signal_m.sqrt(), x) * x0 + over((noise_m - variance).clamp(min=0).sqrt(), x) * eps
        if self.eta > 0:
            out = out + over(variance.sqrt(), x) * self.noise(i + 1, x)
        return out if n.ndim == 0 else torch.where(over((n == m).to(torch.float64), x) > 0, x, out)

    def weights(self) -> Iterable[Tensor]:
        return weights_of(self.score)

    def coarser(self, steps: int) -> ChainPath:
        return replace(self, indices=thin(self.indices, steps))

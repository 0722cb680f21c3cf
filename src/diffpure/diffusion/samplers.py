"""The ways back from a diffused image: each sampler gives a start and a `Path`, and nothing else.

All of them work over any `ScoreModel` s(x, t). With the time running backwards from t* (paper sections 3.1 and B.4):

    ReverseSDE        dx = -½ β(t) [x + 2 s(x, t)] dt + √β(t) dw̄         Euler–Maruyama, the paper's defence
    ProbabilityFlow   dx = -½ β(t) [x + s(x, t)] dt                      VP-ODE: the same marginals, no noise
    Langevin          dx = -½ λ [-s(x, t_s) + (x - x_a)/σ²] dt + η √λ dw   LD-SDE: no diffusion, one noise level
    FewStep           the reverse SDE again, by an exponential integrator: ten steps, not a hundred
    Ancestral, DDIM   the discrete chain of DDPM; DDIM with η = 1 is Ancestral
    OneShot           E[x(0) | x(t*)], one call

Noise is drawn from (seed of the image, step): the start takes step 0, step i of a path takes 1 + i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from diffpure.diffusion.grids import SPACINGS, Spacing, fixed_grid, time_grid
from diffpure.diffusion.langevin import Langevin
from diffpure.diffusion.paths import ChainPath, Drift, EulerPath, ExponentialPath, Path
from diffpure.diffusion.score import ScoreModel
from diffpure.diffusion.sde import STEPS, VPSDE, DiscreteVP, Schedule, over
from diffpure.errors import InputError, unknown
from diffpure.named import check_fields, make
from diffpure.noise import Noise, NoiseSource

START: Final = 0  # the noise step of the forward diffusion
JITTER: Final = -1  # the noise step that draws a random t*


@runtime_checkable
class Sampler(Protocol):
    """How to purify: from an image in [-1, 1] to the state at t*, and the path back."""

    @property
    def stochastic(self) -> bool:
        """Whether two runs on one image differ."""

    def __call__(self, score: ScoreModel, x: Tensor, noise: Noise) -> tuple[Tensor, Path]:
        """The start x(t*) (B, C, H, W) and the path from it."""


# -------------------------------------------------------------------------------------------- continuous samplers


@dataclass(frozen=True)
class _Continuous(ABC):
    """What samplers in continuous time share: diffuse to t*, then a path over a grid from t* to `end`.

    t_star: how far to diffuse, in (0, 1].   dt: the size of a step; 1e-3 if neither it nor `steps` is given.
    steps: the number of steps, instead of their size.
    spacing: grid uniform in "t", "log_snr" or "root_sigma" (√σ, σ = std/√α).   end: the time at which the path ends.
    denoise: one last denoising step there.
    jitter: Δ of a random t*, uniform in [t* - Δ, t* + Δ] for each image, for the whole process.
    forward: "continuous" diffuses with α(t*), "discrete" with the chain's ᾱ, as the authors' code does.
    """

    t_star: float = 0.1
    dt: float | None = None
    steps: int | None = None
    spacing: Spacing = "t"
    end: float = 1e-5
    denoise: bool = False
    jitter: float = 0.0
    forward: Literal["continuous", "discrete"] = "continuous"

    def __post_init__(self) -> None:
        check_fields(self)
        _check_t_star(self.t_star, self.jitter)
        if self.dt is not None and self.steps is not None:
            raise InputError("Give dt or steps, not both.")
        if self.dt is not None and not 0 < self.dt <= self.t_star - self.jitter:
            raise InputError(f"dt is a step inside (0, t*], got dt={self.dt} with t*={self.t_star}.")
        if self.dt is not None and self.spacing != "t":
            raise InputError(f"A fixed dt is a grid uniform in t; for spacing={self.spacing!r} give steps.")
        if self.steps is not None and self.steps < 1:
            raise InputError(f"steps is at least 1, got {self.steps}.")
        if self.spacing not in SPACINGS:
            raise unknown("spacing", self.spacing, SPACINGS)
        if self.forward not in ("continuous", "discrete"):
            raise unknown("forward", self.forward, ("continuous", "discrete"))
        if not 0 < self.end < self.t_star - self.jitter:
            raise InputError(f"end is a time in (0, t*), got end={self.end} with t*={self.t_star}.")

    @property
    def stochastic(self) -> bool:
        return True  # the forward diffusion always is, even where the way back is not

    def __call__(self, score: ScoreModel, x: Tensor, noise: Noise) -> tuple[Tensor, Path]:
        sde = score.sde
        t_star = _start_time(self.t_star, self.jitter, noise)
        eps = noise(START, x)
        if self.forward == "discrete":
            chain, n = _chain(sde), _last_step(t_star)
            start = over(chain.alpha_bar(n).sqrt(), x) * x + over(chain.one_minus_alpha_bar(n).sqrt(), x) * eps
        else:
            start = sde.diffuse(x, t_star, eps)
        return start, self.path(score, self._grid(sde, t_star), noise)

    def _grid(self, sde: Schedule, t_star: Tensor) -> Tensor:
        if self.steps is None and t_star.ndim == 0:
            return fixed_grid(self.t_star, self.end, self._dt)
        # With a random t* every image takes the same number of steps, each of its own length.
        steps = self.steps or len(fixed_grid(self.t_star, self.end, self._dt)) - 1
        return time_grid(sde, t_star, self.end, steps, self.spacing)

    @property
    def _dt(self) -> float:
        return self.dt if self.dt is not None else min(1e-3, self.t_star)

    @abstractmethod
    def path(self, score: ScoreModel, times: Tensor, noise: NoiseSource) -> Path:
        """The path over the given grid."""


@final
@dataclass(frozen=True)
class ReverseSDE(_Continuous):
    """The paper's purifier: the reverse VP-SDE (Eq. 2, 4, 5) by Euler–Maruyama."""

    def path(self, score: ScoreModel, times: Tensor, noise: NoiseSource) -> EulerPath:
        return EulerPath(
            score=score,
            times=times,
            noise=noise,
            denoise=self.denoise,
            drift=reverse_drift(score),
            diffusion=lambda t: score.sde.beta(t).sqrt(),
        )


@final
@dataclass(frozen=True)
class ProbabilityFlow(_Continuous):
    """VP-ODE: the deterministic equation with the marginals of the reverse SDE, by Euler (appendix B.4)."""

    def path(self, score: ScoreModel, times: Tensor, noise: NoiseSource) -> EulerPath:
        drift = reverse_drift(score, noise_free=True)
        return EulerPath(score=score, times=times, noise=noise, denoise=self.denoise, drift=drift, diffusion=None)


def reverse_drift(score: ScoreModel, noise_free: bool = False) -> Drift:
    """f_rev(x, t) = -½ β(t) [x + 2 s(x, t)] (Eq. 5), or with a single s(x, t) for the probability flow."""
    weight = 1.0 if noise_free else 2.0

    def drift(x: Tensor, t: Tensor, context: Tensor | None) -> Tensor:
        return over(-score.sde.beta(t) / 2, x) * (x + weight * score(x, t))

    return drift


@final
@dataclass(frozen=True)
class FewStep(_Continuous):
    """The reverse SDE in few steps, by an exponential integrator of first or second order (see `ExponentialPath`).

    Arguments as for `ReverseSDE`, with 10 steps uniform in √σ down to end = 1e-3 and a last denoising call there as
    defaults: 21 calls in all.

    order: 1 calls the score once per step, 2 calls it twice.
    """

    steps: int | None = 10
    spacing: Spacing = "root_sigma"
    end: float = 1e-3
    denoise: bool = True
    order: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in (1, 2):
            raise InputError(f"order is 1 or 2, got {self.order}.")

    def path(self, score: ScoreModel, times: Tensor, noise: NoiseSource) -> ExponentialPath:
        return ExponentialPath(score=score, times=times, noise=noise, denoise=self.denoise, order=self.order)


@final
@dataclass(frozen=True)
class OneShot:
    """Diffuse to t*, then E[x(0) | x(t*)] in one call of the score."""

    t_star: float = 0.1  # how far to diffuse, in (0, 1]
    jitter: float = 0.0  # Δ of a random t*, as for `ReverseSDE`

    def __post_init__(self) -> None:
        check_fields(self)
        _check_t_star(self.t_star, self.jitter)

    @property
    def stochastic(self) -> bool:
        return True

    def __call__(self, score: ScoreModel, x: Tensor, noise: Noise) -> tuple[Tensor, Path]:
        t_star = _start_time(self.t_star, self.jitter, noise)
        start = score.sde.diffuse(x, t_star, noise(START, x))
        drift = reverse_drift(score)  # never asked: the grid has no interval, only the final denoising
        return start, EulerPath(score=score, times=t_star[None], noise=noise, denoise=True, drift=drift, diffusion=None)


# ---------------------------------------------------------------------------------------------- discrete samplers


@dataclass(frozen=True)
class _Discrete(ABC):
    """What samplers on the DDPM chain share: diffuse with ᾱ of step n = 1000 t* - 1, then walk the chain back.

    t_star: how far to diffuse, in (0, 1].   steps: how many of the n + 1 steps to take, evenly; all if not given.
    clip: clamp x̂₀ to [-1, 1] at every step.   jitter: Δ of a random t*, as for `ReverseSDE`.
    """

    t_star: float = 0.1
    steps: int | None = None
    clip: bool = False
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        _check_t_star(self.t_star, self.jitter)
        if round(STEPS * (self.t_star - self.jitter)) < 1:
            raise InputError(f"A discrete sampler needs t* of at least 1/{STEPS}, got {self.t_star - self.jitter}.")
        if self.steps is not None and self.steps < 1:
            raise InputError(f"steps is at least 1, got {self.steps}.")

    @property
    def stochastic(self) -> bool:
        return True

    def __call__(self, score: ScoreModel, x: Tensor, noise: Noise) -> tuple[Tensor, Path]:
        chain = _chain(score.sde)
        first = _last_step(_start_time(self.t_star, self.jitter, noise))
        start = over(chain.alpha_bar(first).sqrt(), x) * x
        start = start + over(chain.one_minus_alpha_bar(first).sqrt(), x) * noise(START, x)
        return start, ChainPath(
            score=score, chain=chain, indices=self._indices(first), noise=noise, eta=self._eta, clip=self.clip
        )

    def _indices(self, first: Tensor) -> Tensor:
        """Evenly from first (() or (B,)) down to -1; how many does not depend on the batch."""
        longest = round(STEPS * (self.t_star + self.jitter))
        steps = min(self.steps or longest, longest)
        fraction = torch.linspace(0, 1, steps + 1, dtype=torch.float64).reshape(-1, *[1] * first.ndim)
        indices = (first - fraction * (first + 1)).round().long().clamp(min=0)
        indices[-1] = -1
        return indices

    @property
    @abstractmethod
    def _eta(self) -> float: ...


@final
@dataclass(frozen=True)
class Ancestral(_Discrete):
    """DDPM's ancestral sampling with the posterior variance: the purifier of the paper's CelebA-HQ tables."""

    @property
    def _eta(self) -> float:
        return 1.0


@final
@dataclass(frozen=True)
class DDIM(_Discrete):
    """DDIM: deterministic at eta = 0, the ancestral sampler at eta = 1."""

    eta: float = 0.0  # the share of the ancestral noise

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eta <= 1:
            raise InputError(f"eta is in [0, 1], got {self.eta}.")

    @property
    def _eta(self) -> float:
        return self.eta


def _check_t_star(t_star: float, jitter: float) -> None:
    if not 0 < t_star <= 1:
        raise InputError(f"t* is a time in (0, 1], got {t_star}.")
    if not (jitter >= 0 and t_star - jitter > 0 and t_star + jitter <= 1):
        raise InputError(f"A random t* stays in (0, 1], got {t_star} ± {jitter}.")


def _start_time(t_star: float, jitter: float, noise: Noise) -> Tensor:
    """t*, () for a fixed one, (B,) for a random one."""
    fixed = torch.tensor(t_star, dtype=torch.float64)
    return fixed + jitter * (2 * noise.uniform(JITTER) - 1) if jitter > 0 else fixed


def _chain(sde: Schedule) -> DiscreteVP:
    """The discrete chain of a schedule."""
    if isinstance(sde, VPSDE):
        return sde.discrete()
    if isinstance(sde, DiscreteVP):
        return sde
    raise InputError(f"{type(sde).__name__} has no discrete chain; use a sampler in continuous time.")


def _last_step(t: Tensor) -> Tensor:
    """n = 1000 t - 1, the index of the chain's step that ends at t."""
    return torch.round(t * STEPS).long() - 1


AnySampler = str | Mapping[str, Any] | Sampler  # a name, a table such as {kind = "few-step", steps = 5}, or a sampler


def sampler_of(sampler: AnySampler) -> Sampler:
    """A sampler by name or table, or the given one."""
    made: Sampler = make(sampler, Sampler, SAMPLERS, "sampler")
    return made


SAMPLERS: Final[dict[str, type[Sampler]]] = {
    "sde": ReverseSDE,
    "ode": ProbabilityFlow,
    "ld": Langevin,
    "few-step": FewStep,
    "ancestral": Ancestral,
    "ddim": DDIM,
    "one-shot": OneShot,
}

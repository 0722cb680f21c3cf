"""Worlds with known answers, and small real networks, for the tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffpure.diffusion.paths import ChainPath, GridPath, Path
from diffpure.diffusion.samplers import (
    DDIM,
    Ancestral,
    FewStep,
    Langevin,
    OneShot,
    ProbabilityFlow,
    ReverseSDE,
    Sampler,
)
from diffpure.diffusion.sde import VPSDE, over
from diffpure.noise import Noise
from diffpure.scores import EpsilonScore, GaussianScore

# Every sampler with few steps: the table that contract tests run over. Adding a sampler means adding a line.
SAMPLERS: dict[str, Sampler] = {
    "sde": ReverseSDE(t_star=0.05, steps=6),
    "sde-dt-denoise": ReverseSDE(t_star=0.05, dt=0.008, denoise=True),
    "sde-jitter": ReverseSDE(t_star=0.05, steps=6, jitter=0.02),
    "sde-discrete-start": ReverseSDE(t_star=0.05, steps=6, forward="discrete"),
    "ode": ProbabilityFlow(t_star=0.05, steps=6),
    "ld": Langevin(variance=0.02, steps=6),
    "few-1": FewStep(t_star=0.1, steps=4, order=1),
    "few-2": FewStep(t_star=0.1, steps=4, order=2),
    "few-2-jitter": FewStep(t_star=0.1, steps=4, order=2, spacing="log_snr", jitter=0.03),
    "ancestral": Ancestral(t_star=0.006),
    "ancestral-strided-jitter": Ancestral(t_star=0.1, steps=5, jitter=0.05, clip=True),
    "ddim": DDIM(t_star=0.1, steps=5),
    "ddim-half": DDIM(t_star=0.1, steps=5, eta=0.5),
    "one-shot": OneShot(t_star=0.1),
}
EULER = ("sde", "sde-dt-denoise", "sde-jitter", "sde-discrete-start", "ode", "ld", "one-shot")


class TinyUNet(EpsilonScore):
    """A real convolutional network with two resolutions, GroupNorm, attention and a noise level: ε̂(x, t)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(VPSDE(), size=None, channels=3)
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.level = nn.Linear(2, width)
        self.norm = nn.GroupNorm(4, width)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        level = torch.stack([t, self.sde.log_snr(t) / 5], dim=1).to(x.dtype)
        h = F.silu(self.norm(self.enter(x) + self.level(level)[:, :, None, None]))
        low = F.silu(self.down(h))
        b, c, rows, columns = low.shape
        q, k, v = self.qkv(low).reshape(b, 3, 1, c, rows * columns).transpose(-1, -2).unbind(1)
        low = low + F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(b, c, rows, columns)
        h = F.silu(self.up(torch.cat([h, F.interpolate(low, scale_factor=2)], dim=1)))
        return over(self.sde.std(t), x) * x + 0.3 * self.leave(h)


def tiny_unet(width: int = 16, dtype: torch.dtype = torch.float32) -> TinyUNet:
    """The network with reproducible weights, frozen."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TinyUNet(width).to(dtype).requires_grad_(False).eval()


def tiny_classifier(classes: int = 5, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small smooth classifier with reproducible weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.SiLU(), nn.Flatten(), nn.LazyLinear(classes))
        layers(torch.zeros(1, 3, 8, 8))
    return layers.to(dtype).requires_grad_(False).eval()


def images(batch: int = 4, size: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Reproducible images in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, 3, size, size, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class GaussianWorld:
    """Data N(0, v0) on the line: everything about x(0) given x(t*) is known (appendix B.5)."""

    variance: float
    t_star: float = 0.1
    sde: VPSDE = VPSDE()

    @property
    def score(self) -> GaussianScore:
        return GaussianScore(0.0, self.variance, self.sde)

    @property
    def marginal(self) -> float:
        """Var x(t*)."""
        alpha = self.sde.alpha(self.t_star).item()
        return 1 - alpha + alpha * self.variance

    @property
    def phi(self) -> float:
        """∂E[x(0) | x(t*)]/∂x(t*)."""
        return self.variance * math.sqrt(self.sde.alpha(self.t_star).item()) / self.marginal

    @property
    def posterior(self) -> float:
        """Var(x(0) | x(t*))."""
        return self.variance * self.sde.std(self.t_star).item() ** 2 / self.marginal

    def moments(self, sampler: Sampler) -> tuple[float, float]:
        """(a, v): the sampler's x(0) given x(t*) is exactly N(a x(t*), v), as every step is linear."""
        _, path = sampler(self.score, _number(0.0), Noise((0,)))
        a, v = 1.0, 0.0
        for i in range(len(path)):
            gain = _step(path, i, 1.0, None)
            a, v = a * gain, gain**2 * v + sum(_step(path, i, 0.0, k) ** 2 for k in range(2))
        return a, v

    def distance(self, sampler: Sampler) -> float:
        """2-Wasserstein distance from the exact posterior, averaged over x(t*), in its standard deviations."""
        a, v = self.moments(sampler)
        mean = (a - self.phi) ** 2 * self.marginal
        return math.sqrt((mean + (math.sqrt(v) - math.sqrt(self.posterior)) ** 2) / self.posterior)


def _number(value: float) -> Tensor:
    return torch.full((1, 1, 1, 1), value, dtype=torch.float64)


def _step(path: Path, i: int, x: float, unit: int | None) -> float:
    """One step from x with the `unit`-th noise that it samples set to 1 and all others to 0."""
    samples: Iterator[int] = iter(range(9))

    def noise(step: int, like: Tensor) -> Tensor:
        return torch.full_like(like, float(next(samples) == unit))

    assert isinstance(path, GridPath | ChainPath)
    return replace(path, noise=noise).step(_number(x), i).item()


def shaken(model: nn.Module) -> nn.Module:
    """The model with weights none of which is zero, so that every branch speaks."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=random))
    return model

"""Threat models: what an attacker may do to an image. The threat owns the geometry, so that one attack serves all.

A perturbation z is free inside a set and becomes an image by `apply`:

    Linf, L2    x' = x + z,                 ‖z‖ ≤ ε, x' in [0, 1]          z shaped like x
    Flow        x'(p) = x(p + z(p)),        |z| ≤ bound in every component  z (B, H, W, 2), bilinear sampling (StAdv)
    Perceptual  x' = x + z,                 d(x, x') ≤ ε, x' in [0, 1]      z the change and x, d the features' distance

The flow is counted in the units of `grid_sample`: an image is 2 wide, so one pixel of W is 2/W.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from diffpure.errors import InputError
from diffpure.named import make, number
from diffpure.noise import NoiseSource

LEVELS: Final = 255  # an 8-bit image counts in 1/255


def wide(x: Tensor) -> Tensor:
    """x in the widest floats of its device, for sums and comparisons whose rounding must not show."""
    return x.float() if x.device.type == "mps" else x.double()


def per_image(values: Tensor, like: Tensor) -> Tensor:
    """One number per image (B,), shaped and cast to multiply `like` (B, ...)."""
    return values.to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True)
class ThreatModel(ABC):
    """A set of perturbations of size at most eps, and how to take steps in it."""

    eps: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", number(self.eps))
        if isinstance(self.eps, bool) or not isinstance(self.eps, int | float) or not 0 < self.eps < math.inf:
            raise InputError(f"{type(self).__name__} needs a finite eps > 0, got {self.eps!r}.")

    @abstractmethod
    def zeros(self, x: Tensor) -> Tensor:
        """The perturbation that leaves every image of x (B, C, H, W) as it is."""

    @abstractmethod
    def random(self, x: Tensor, noise: NoiseSource, step: int = 0) -> Tensor:
        """A random start of full size, inside the budget and the box, from the noise of one step."""

    @abstractmethod
    def apply(self, x: Tensor, z: Tensor) -> Tensor:
        """The perturbed images in [0, 1]."""

    @abstractmethod
    def pullback(self, x: Tensor, z: Tensor, g: Tensor) -> Tensor:
        """The gradient with respect to z, from the gradient g with respect to the perturbed image."""

    @abstractmethod
    def ascend(self, g: Tensor) -> Tensor:
        """The steepest ascent: the direction of size 1 that gains most along the gradient g, zero where g is."""

    @abstractmethod
    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """z moved back into the budget and the image into the box."""

    @abstractmethod
    def size(self, z: Tensor) -> Tensor:
        """How much of the budget each perturbation takes: (B,), wide."""

    @abstractmethod
    def unbounded(self, x: Tensor) -> Self:
        """The same threat with a budget so large that any image can be reached."""

    def within(self, x: Tensor, z: Tensor, *, eight_bit: bool = False) -> Tensor:
        """Whether each perturbation keeps the budget: (B,) bool.

        The only tolerance is the rounding of z's own dtype, at most that of float32; with `eight_bit` the saved 8-bit
        images are compared in whole levels, without any.
        """
        size = self._levels(x, z) / LEVELS if eight_bit else self.size(z)
        slack = 1e-9 if eight_bit else 4 * min(torch.finfo(z.dtype).eps, torch.finfo(torch.float32).eps)
        return torch.isfinite(size) & (size <= self.eps * (1 + slack))

    def _levels(self, x: Tensor, z: Tensor) -> Tensor:
        """The size of the difference between the two saved images, in 8-bit levels."""
        return self.size(_levels(self.apply(x, z)) - _levels(x))


def _levels(x: Tensor) -> Tensor:
    return (wide(x) * LEVELS).round()


def towards(x: Tensor, perturbed: Tensor) -> Tensor:
    """The 8-bit levels 0 … 255 of perturbed images, every pixel rounded towards the clean image x."""
    steps = wide(perturbed - x) * LEVELS
    return _levels(x) + torch.sign(steps) * torch.floor(steps.abs() + 1e-3)


class Norm(ThreatModel):
    """An additive perturbation bounded in a norm."""

    def zeros(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def apply(self, x: Tensor, z: Tensor) -> Tensor:
        return (x + z).clamp(0, 1)

    def pullback(self, x: Tensor, z: Tensor, g: Tensor) -> Tensor:
        # Projection keeps x + z in the box up to rounding: going through the clamp would only lose pixels on a wall.
        return g

    def quantise(self, x: Tensor, z: Tensor) -> Tensor:
        """z whose image lies on the 8-bit grid, every pixel rounded towards the clean image, so that it keeps the
        budget (a thousandth of a level is taken as rounding)."""
        return (towards(x, self.apply(x, z)) / LEVELS).to(x.dtype) - x

    @abstractmethod
    def rate(self, w: Tensor) -> Tensor:
        """How fast each coordinate moves along the shortest way to a hyperplane with normal w (B, D)."""

    def to_hyperplane(self, x: Tensor, w: Tensor, c: Tensor) -> Tensor:
        """The smallest d with ⟨w, d⟩ = c and x + d in the box; the furthest the box allows where none reaches c.

        d_i = ± min(λ rate_i, room_i) with the λ at which Σ |w_i| min(λ rate_i, room_i) = |c|. x, w (B, ...), c (B,).
        """
        flat, normal, c = wide(x.flatten(1)), wide(w.flatten(1)), wide(c)[:, None]
        direction = torch.sign(normal) * torch.sign(c)
        room = torch.where(direction > 0, 1 - flat, flat).clamp_min(0)
        rate = self.rate(normal)
        lam = fill(room, rate, normal.abs() * room, normal.abs() * rate, c.abs(), 1)
        return (direction * torch.minimum(lam * rate, room)).to(x.dtype).view_as(x)


def fill(room: Tensor, rate: Tensor, full: Tensor, growth: Tensor, level: Tensor, power: int) -> Tensor:
    """The λ at which Σ_i (full_i where λ rate_i ≥ room_i, else λ^power growth_i) reaches a level: (B, 1).

    The sum grows with λ, piece by piece: sort the λ at which coordinates fill their room, find the piece that holds
    the level, solve it. Where no λ reaches the level, the one that fills every room. All (B, D) and wide, level (B, 1).
    """
    walls, order = torch.where(rate > 0, room / rate, torch.inf).sort(dim=1)
    full, growth = (full * (rate > 0)).gather(1, order), (growth * (rate > 0)).gather(1, order)
    filled = full.cumsum(1) - full  # by the coordinates that stand at their wall before piece j
    growing = growth.flip(1).cumsum(1).flip(1)  # by those that still move in it
    ends = torch.where(torch.isfinite(walls), filled + walls**power * growing, torch.inf)
    piece = torch.searchsorted(ends, level).clamp_max(ends.shape[1] - 1)
    lam = (
        (level - filled.gather(1, piece)).clamp_min(0)
        / growing.gather(1, piece).clamp_min(torch.finfo(level.dtype).tiny)
    ) ** (1 / power)
    last = torch.where(torch.isfinite(walls), walls, 0).amax(1, keepdim=True)  # nothing moves any more beyond it
    return torch.minimum(lam, last)


@final
@dataclass(frozen=True)
class Linf(Norm):
    """No pixel changes by more than eps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps > 1:
            raise InputError(f"An ℓ∞ budget of images in [0, 1] is at most 1, got {self.eps:g}; {_in_levels(self.eps)}")

    def random(self, x: Tensor, noise: NoiseSource, step: int = 0) -> Tensor:
        uniform = torch.erf(noise(step, x) / math.sqrt(2))  # the normal distribution's own quantile: uniform in (-1, 1)
        return self.project(x, self.eps * uniform / per_image(self.size(uniform).clamp_min(1e-12), uniform))

    def ascend(self, g: Tensor) -> Tensor:
        return torch.sign(g)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(z, (-x).clamp_min(-self.eps)), (1 - x).clamp_max(self.eps))

    def size(self, z: Tensor) -> Tensor:
        return wide(z.flatten(1).abs().amax(1))

    def rate(self, w: Tensor) -> Tensor:
        return (w != 0).to(w.dtype)

    def unbounded(self, x: Tensor) -> Self:
        return replace(self, eps=1.0)


@final
@dataclass(frozen=True)
class L2(Norm):
    """The change of all pixels has Euclidean length at most eps."""

    def random(self, x: Tensor, noise: NoiseSource, step: int = 0) -> Tensor:
        return self.project(x, self.eps * self.ascend(noise(step, x)))

    def ascend(self, g: Tensor) -> Tensor:
        # The largest component first: squares of very small gradients would vanish.
        peak = g.flatten(1).abs().amax(1)
        g = g / per_image(torch.where(peak > 0, peak, 1.0), g)
        return g / per_image(self.size(g).clamp_min(1e-12), g)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        # The nearest point of ball and box together is clamp(λ z), λ ≤ 1 (scaling first and clamping then gives
        # away the length that the clamp cuts off).
        flat, length = wide(x.flatten(1)), wide(z.flatten(1)).abs()
        room = torch.where(z.flatten(1) > 0, 1 - flat, flat).clamp_min(0)
        budget = torch.full_like(room[:, :1], self.eps**2)
        lam = fill(room, length, room.square(), length.square(), budget, 2)
        lam = torch.where(torch.minimum(length, room).square().sum(1, keepdim=True) <= budget, 1.0, lam)
        moved = torch.minimum(lam * length, room)
        # The running sums behind λ round a thousand times in a large image, the sum of squares hardly.
        moved = moved * (self.eps / self.size(moved)[:, None].clamp_min(self.eps))
        return (torch.sign(z).flatten(1) * moved).to(z.dtype).view_as(z)

    def size(self, z: Tensor) -> Tensor:
        return wide(z.flatten(1)).square().sum(1).sqrt()

    def rate(self, w: Tensor) -> Tensor:
        return w.abs()

    def unbounded(self, x: Tensor) -> Self:
        return replace(self, eps=math.sqrt(x[0].numel()))


@final
@dataclass(frozen=True)
class Flow(ThreatModel):
    """Every pixel is fetched from at most eps away (StAdv's spatial flow field, Xiao et al. 2018)."""

    def zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), *x.shape[-2:], 2)

    def random(self, x: Tensor, noise: NoiseSource, step: int = 0) -> Tensor:
        return self.eps * torch.erf(noise(step, self.zeros(x)) / math.sqrt(2))

    def apply(self, x: Tensor, z: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        ys = (2 * torch.arange(h, device=x.device, dtype=x.dtype) + 1) / h - 1
        xs = (2 * torch.arange(w, device=x.device, dtype=x.dtype) + 1) / w - 1
        identity = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), dim=-1)
        moved = F.grid_sample(x, identity + z, mode="bilinear", padding_mode="border", align_corners=False)
        return moved.clamp(0, 1)

    def pullback(self, x: Tensor, z: Tensor, g: Tensor) -> Tensor:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.apply(x, z), z, g)
        return g

    def ascend(self, g: Tensor) -> Tensor:
        return torch.sign(g)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return z.clamp(-self.eps, self.eps)

    def size(self, z: Tensor) -> Tensor:
        return wide(z.flatten(1).abs().amax(1))

    def unbounded(self, x: Tensor) -> Self:
        return replace(self, eps=2.0)

    def _levels(self, x: Tensor, z: Tensor) -> Tensor:
        return self.size(z) * LEVELS  # the budget bounds the flow: how the image is saved does not change it

    @staticmethod
    def roughness(z: Tensor) -> Tensor:
        """StAdv's regulariser Σ_p Σ_{q next to p} √(‖z(p) - z(q)‖²), over the four neighbours: (B,)."""
        tiny = 1e-12  # keeps the derivative of the root finite where the flow is constant
        down = ((z[:, 1:] - z[:, :-1]).square().sum(-1) + tiny).sqrt().flatten(1).sum(1)
        right = ((z[:, :, 1:] - z[:, :, :-1]).square().sum(-1) + tiny).sqrt().flatten(1).sum(1)
        return 2 * (down + right)  # every pair is seen from both ends


@final
@dataclass(frozen=True)
class Perceptual(ThreatModel):
    """Any change that looks at most eps away to a network (`features`, a classifier by name); no ℓp bound.

    z (B, 2 C, H, W) is the change and, as a distance is one of two images, the image that it is a change of.
    """

    features: str = "cifar10-resnet-at"

    def zeros(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), x], 1)

    def change(self, x: Tensor, perturbed: Tensor) -> Tensor:
        """The z that makes perturbed images of x."""
        return torch.cat([perturbed - x, x], 1)

    def random(self, x: Tensor, noise: NoiseSource, step: int = 0) -> Tensor:
        return self.project(x, self.change(x, x + 0.1 * noise(step, x)))

    def apply(self, x: Tensor, z: Tensor) -> Tensor:
        return (x + z.chunk(2, 1)[0]).clamp(0, 1)

    def pullback(self, x: Tensor, z: Tensor, g: Tensor) -> Tensor:
        return torch.cat([g, torch.zeros_like(g)], 1)

    def ascend(self, g: Tensor) -> Tensor:
        return g / per_image(wide(g).flatten(1).norm(dim=1).clamp_min(1e-12), g)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """The change, scaled down by bisection where it looks too far."""
        whole = self.apply(x, z) - x
        low, high = wide(x).new_zeros(len(x)), wide(x).new_ones(len(x))
        inside = self.within(x, torch.cat([whole, x], 1))
        for _ in range(12 if not inside.all() else 0):
            middle = (low + high) / 2
            kept = self.within(x, torch.cat([per_image(middle, x) * whole, x], 1))
            low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
        return torch.cat([per_image(torch.where(inside, 1.0, low), x) * whole, x], 1)

    @torch.no_grad()
    def size(self, z: Tensor) -> Tensor:
        x = z.chunk(2, 1)[1]
        return wide(self.distance(x, self.apply(x, z)))

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """How far apart images (B, C, H, W) look: (B,), differentiable."""
        from diffpure.classifiers.features import distance

        return distance(self.features, x, y)

    def within(self, x: Tensor, z: Tensor, *, eight_bit: bool = False) -> Tensor:
        same = (z.chunk(2, 1)[1] == x).flatten(1).all(1)
        return super().within(x, z, eight_bit=eight_bit) & same

    def unbounded(self, x: Tensor) -> Self:
        return replace(self, eps=1e3)

    def _levels(self, x: Tensor, z: Tensor) -> Tensor:
        saved = (_levels(self.apply(x, z)) / LEVELS).to(x.dtype)
        return self.size(self.change(x, saved)) * LEVELS

    def norms(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The ℓ∞ and ℓ2 size of the changes, which nothing bounds, to be reported: (B,) each."""
        change = wide(z.chunk(2, 1)[0].flatten(1))
        return change.abs().amax(1), change.norm(dim=1)

    @classmethod
    def like(cls, threat: ThreatModel, x: Tensor, noise: NoiseSource, features: str = "cifar10-resnet-at") -> Self:
        """The bound that the median random perturbation of full size of another threat has on images x."""
        made = cls(1.0, features)
        return replace(made, eps=float(made.size(made.change(x, threat.apply(x, threat.random(x, noise)))).median()))


def _in_levels(eps: float) -> str:
    return f"did you mean {eps:g}/255?"


THREATS: Final[dict[str, type[ThreatModel]]] = {"linf": Linf, "l2": L2, "flow": Flow, "perceptual": Perceptual}


AnyThreat = str | Mapping[str, Any] | ThreatModel  # "linf 8/255", {kind = "linf", eps = "8/255"}, or a threat


def threat_of(value: AnyThreat) -> ThreatModel:
    """A threat in words, by table, or the given one."""
    if isinstance(value, str):
        kind, _, eps = value.strip().partition(" ")
        value = {"kind": kind.lower(), "eps": _float(number(eps), value)}
    made: ThreatModel = make(value, ThreatModel, THREATS, "threat")
    return made


def _float(text: Any, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"A threat is a kind and a budget, such as 'linf 8/255', got {whole!r}.") from None

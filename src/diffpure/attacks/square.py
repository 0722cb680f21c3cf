"""Square attack: random search over square windows, with queries only (Andriushchenko et al. 2020).

ℓ∞: start from vertical stripes of ±ε; a step sets one random window to ±ε, one sign per channel.
ℓ2: start from a tiling of bumps η; a step puts a bump into one window with the mass of that and another window.
A step is kept where it lowers the margin z_y - max_{k≠y} z_k. The windows shrink: a fraction p of the image, from
0.8 down to 0.8/512 over `horizon` queries. Every image has windows of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from diffpure.attacks.base import Cost, SampledAttack, Spending
from diffpure.attacks.fab import norm_of
from diffpure.attacks.losses import MARGIN
from diffpure.attacks.seeds import uniforms
from diffpure.attacks.state import Problem, State, choose, rank, record
from diffpure.errors import InputError
from diffpure.threats import L2

SCHEDULE = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # of a horizon of 10,000: p is halved after each


@final
@dataclass(frozen=True, kw_only=True)
class Square(SampledAttack):
    """queries: evaluations per image, the start included.   horizon: the queries over which the windows shrink.
    p: the first window's fraction of the image.

    AutoAttack stops half way to the horizon, after 5,000 of 10,000 queries; a shorter search wants a shorter horizon.
    """

    queries: int = 5000
    horizon: int = 10_000
    p: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.queries, self.horizon) < 1 or not 0 < self.p <= 1:
            raise InputError(f"Square needs queries and horizon >= 1 and p in (0, 1], got {self}.")

    @property
    def kind(self) -> str:
        return "square"

    @property
    def title(self) -> str:
        return self.titled(f"Square, {self.queries:,} queries")

    def steps_account(self, classes: int) -> tuple[Spending, ...]:
        return (self.spending(0, self.queries),)

    def steps(self, classes: int) -> int:
        return self.queries

    def price(self) -> Cost:
        return Cost(0, self.eot.samples)

    def start(self, problem: Problem, state: State) -> State:
        z = norm_of(problem, "Square").zeros(problem.x)
        return {**state, "z": z, "value": torch.full_like(state["rank"], -torch.inf)}

    def step(self, problem: Problem, state: State, i: int) -> State:
        bumps = isinstance(problem.threat, L2)
        if i == 0:
            z = _tiles(problem) if bumps else _stripes(problem)
        else:
            side = self.side(problem.x, i - 1)
            z = _swap_bump(problem, state["z"], side, i) if bumps else _flip_window(problem, state["z"], side, i)
        seen = problem.expect(z, MARGIN, self.eot, i)
        state = record(problem, state, z, seen)
        value = rank(seen, problem.y)
        better = value > state["value"]
        return {**state, "z": choose(better, z, state["z"]), "value": torch.where(better, value, state["value"])}

    def side(self, x: Tensor, step: int) -> int:
        """The side of the windows at a step, for images like x."""
        h, w = x.shape[-2:]
        p = self.p / 2 ** sum(step * 10_000 // self.horizon > at for at in SCHEDULE)
        return min(max(round(math.sqrt(p * h * w)), 1), h, w)


def _uniforms(problem: Problem, i: int, count: int) -> Tensor:
    """Numbers in [0, 1) for step i, (B, count), where the images are."""
    return uniforms(problem.seeds, i, count).to(problem.x)


def _signs(u: Tensor, like: Tensor) -> Tensor:
    """±1 from uniform numbers."""
    return torch.where(u < 0.5, -1.0, 1.0).to(like)


def _offset(u: Tensor, room: int) -> Tensor:
    """0 … room, from uniform numbers (B,)."""
    return (u * (room + 1)).long().clamp_max(room)


def _window(x: Tensor, u: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The index of one random window an image, for tensors like x: it picks (B, C, side, side); u (B, 2)."""
    b, c, h, w = x.shape
    span = torch.arange(side, device=x.device)
    rows = _offset(u[:, 0], h - side)[:, None, None, None] + span[:, None]
    columns = _offset(u[:, 1], w - side)[:, None, None, None] + span
    images, channels = torch.arange(b, device=x.device), torch.arange(c, device=x.device)
    return images[:, None, None, None], channels[:, None, None], rows, columns


def _stripes(problem: Problem) -> Tensor:
    b, c, _, w = problem.x.shape
    signs = _signs(_uniforms(problem, 0, c * w), problem.x).reshape(b, c, 1, w)
    return problem.threat.project(problem.x, problem.threat.eps * signs.expand_as(problem.x))


def _flip_window(problem: Problem, z: Tensor, side: int, i: int) -> Tensor:
    u = _uniforms(problem, i, 2 + z.shape[1])
    z = z.clone()
    z[_window(z, u, side)] = problem.threat.eps * _signs(u[:, 2:], z)[:, :, None, None]
    return problem.threat.project(problem.x, z)


def bump(side: int, like: Tensor) -> Tensor:
    """η, of length 1: the upper half a pyramid, the lower half one upside down, of equal length."""
    half = side // 2
    return _unit(torch.cat([_unit(_pyramid(half, side)), -_unit(_pyramid(side - half, side))])).to(like)


def _pyramid(h: int, w: int) -> Tensor:
    """Σ_{j>m} 1/j² at the Chebyshev distance m from the centre."""
    away = torch.maximum((torch.arange(h) - h // 2).abs()[:, None], (torch.arange(w) - w // 2).abs())
    tail = (1 / torch.arange(1, max(h // 2, w // 2) + 2) ** 2).flip(0).cumsum(0).flip(0)
    return tail[away]


def _turned(eta: Tensor, u: Tensor) -> Tensor:
    """The bump, upright or on its side: (..., side, side) for uniform numbers (...)."""
    return torch.where(u[..., None, None] < 0.5, eta, eta.T)


def _tiles(problem: Problem) -> Tensor:
    b, c, h, w = problem.x.shape
    side = max(1, h // 5)
    down, right = h // side, w // side
    margin = max(0, (h - 5 * side) // 2)
    down, right = min(down, (h - margin) // side), min(right, (w - margin) // side)
    u = _uniforms(problem, 0, down * right * (c + 1)).reshape(b, c + 1, down, right)
    tiles = _turned(bump(side, problem.x), u[:, :1]) * _signs(u[:, 1:], problem.x)[..., None, None]
    z = torch.zeros_like(problem.x)
    area = tiles.permute(0, 1, 2, 4, 3, 5).reshape(b, c, down * side, right * side)
    z[:, :, margin : margin + down * side, margin : margin + right * side] = area
    return problem.threat.project(problem.x, problem.threat.eps * problem.threat.ascend(z))


def _swap_bump(problem: Problem, z: Tensor, side: int, i: int) -> Tensor:
    c, h, w = z.shape[1:]
    side = min(max(side, 3) | 1, h, w)
    u = _uniforms(problem, i, 5 + c)
    here, there = _window(z, u[:, :2], side), _window(z, u[:, 2:4], side)
    both = torch.zeros_like(z)
    both[here] = both[there] = 1.0
    mass = (z * both).square().sum((-2, -1), keepdim=True)  # of the two windows, per channel
    free = (problem.threat.eps**2 - z.square().sum((1, 2, 3), keepdim=True)).clamp_min(0) / c
    old = z[here]
    new = _turned(bump(side, z), u[:, 4:5]) * _signs(u[:, 5:], z)[:, :, None, None] + _unit(old)
    z = z.clone()
    z[there] = 0.0
    z[here] = _unit(new) * (free + mass).sqrt()
    return problem.threat.project(problem.x, problem.threat.eps * problem.threat.ascend(z))


def _unit(z: Tensor) -> Tensor:
    """Length 1 in every channel's window."""
    return z / z.square().sum((-2, -1), keepdim=True).sqrt().clamp_min(1e-12)

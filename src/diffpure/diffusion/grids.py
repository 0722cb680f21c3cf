"""Time grids: where a sampler's steps stand between t* and its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor

from diffpure.diffusion.sde import Schedule

Spacing = Literal["t", "log_snr", "root_sigma"]


def time_grid(sde: Schedule, start: Tensor, end: float, steps: int, spacing: Spacing) -> Tensor:
    """`steps` intervals from start (() or (B,)) down to end, equal in the spacing's variable: (N+1,) or (N+1, B)."""
    into, back = SPACINGS[spacing]
    u, u_end = into(sde, start), into(sde, torch.tensor(end, dtype=torch.float64))
    fraction = torch.linspace(0, 1, steps + 1, dtype=torch.float64).reshape(-1, *[1] * start.ndim)
    times = back(sde, u + fraction * (u_end - u))
    times[0], times[-1] = start, end
    return times


# Each spacing: the variable in which the grid is uniform, as a function of t, and back.
SPACINGS: Final[dict[str, tuple[Callable[[Schedule, Tensor], Tensor], Callable[[Schedule, Tensor], Tensor]]]] = {
    "t": (lambda sde, t: t, lambda sde, t: t),
    "log_snr": (lambda sde, t: sde.log_snr(t), lambda sde, lam: sde.time_of_log_snr(lam)),
    "root_sigma": (lambda sde, t: sde.sigma(t).sqrt(), lambda sde, u: sde.time_of_log_snr(-2 * torch.log(u))),
}


def fixed_grid(start: float, end: float, dt: float) -> Tensor:
    """start, start - dt, start - 2 dt, …, end: fixed steps of the paper's solver, of which the last may be shorter."""
    steps = max(1, math.ceil((start - end) / dt - 1e-6))
    return torch.cat([start - dt * torch.arange(steps, dtype=torch.float64), torch.tensor([end], dtype=torch.float64)])

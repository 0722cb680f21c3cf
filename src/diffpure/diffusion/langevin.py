"""LD-SDE: Langevin dynamics around the input, the paper's third sampler (appendix B.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from diffpure.diffusion.paths import Drift, EulerPath, Path
from diffpure.diffusion.score import ScoreModel
from diffpure.errors import Diverging, InputError
from diffpure.named import check_fields
from diffpure.noise import Noise


@final
@dataclass(frozen=True)
class Langevin:
    """LD-SDE (Eq. 23): Langevin dynamics around the input, dx = -½ λ [-s(x, t_s) + (x - x_a)/σ²] dt + η √λ dw.

    It neither diffuses nor denoises: it starts at the input x_a and uses the score at one small time t_s
    (`score_time`; the paper says 0, its code 0.01). Defaults are the best of the paper's search.
    """

    variance: float = 100.0  # σ²: how freely x leaves x_a
    rate: float = 0.1  # λ: the speed of the dynamics
    eta: float = 1.0  # η: the strength of the noise; 0 is deterministic
    score_time: float = 0.01  # t_s: the time at which the score is asked
    steps: int = 100  # Euler steps over one unit of time

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.variance > 0 and self.rate > 0 and self.eta >= 0 and self.steps >= 1):
            raise InputError("Langevin needs variance > 0, rate > 0, eta >= 0 and at least one step.")
        if not 0 < self.score_time <= 1:
            raise InputError(f"score_time is a time in (0, 1], got {self.score_time}.")
        # A step multiplies the distance to x_a by 1 - λ / (2 σ² steps), which must not be below -1.
        if self.steps < (least := self.rate / self.variance / 4):
            raise Diverging(
                f"Langevin's steps diverge with rate {self.rate:g} and variance {self.variance:g}: at least {least:,g} "
                f"steps are needed, got {self.steps:,}."
            )

    @property
    def stochastic(self) -> bool:
        return self.eta > 0

    def __call__(self, score: ScoreModel, x: Tensor, noise: Noise) -> tuple[Tensor, Path]:
        times = torch.linspace(0, 1, self.steps + 1, dtype=torch.float64)
        strength = torch.tensor(self.eta * math.sqrt(self.rate), dtype=torch.float64)
        diffusion = (lambda t: strength) if self.eta > 0 else None
        drift = self._drift(score)
        return x, EulerPath(
            score=score, times=times, noise=noise, denoise=False, context=x, drift=drift, diffusion=diffusion
        )

    def _drift(self, score: ScoreModel) -> Drift:
        def drift(x: Tensor, t: Tensor, context: Tensor | None) -> Tensor:
            pull = 0 if context is None else (x - context) / self.variance
            return -self.rate / 2 * (pull - score(x, torch.full_like(t, self.score_time)))

        return drift

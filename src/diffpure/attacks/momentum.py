"""Gradient ascent with momentum over steps: the most that a gradient buys on a random defence.

    g ← ∇_z loss / mean |∇_z loss|,   m ← μ m + g,   z ← project(z + η_k ascend(m)),    η_k = ½ ε · ½ (1 + cos(π k/K)),

from a random start, with one EOT sample per step, and the last iterate is returned. Momentum averages the defence's
noise over steps for free, where averaging many samples at every step spends gradients at one point. The last iterate is
evaluated once more, with `confirm` fresh samples.

Where a model is not random there is nothing to average: a few steps reach what one direction holds, and the rest of
them find more towards other classes (`per_target`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor

from diffpure.attacks.base import Spending
from diffpure.attacks.expectation import EOT, Expectation
from diffpure.attacks.pgd import RestartedAttack
from diffpure.attacks.seeds import starts
from diffpure.attacks.state import Problem, State, usable
from diffpure.errors import InputError
from diffpure.noise import mirrored
from diffpure.threats import per_image, wide


@final
@dataclass(frozen=True, kw_only=True)
class MomentumPGD(RestartedAttack):
    """Momentum over steps, and a step size that falls to zero.

    momentum: the momentum: μ of `momentum`, a of APGD.   first_step: η_0 as a share of ε.
    confirm: samples with which the last iterate is evaluated.   antithetic: every second step mirrors the noise of the
    one before, so that what is odd in it cancels in the momentum, where the purifier says that it `mirrors`.
    per_target: on a model that is not random, about so many steps towards each of the classes with the highest logits,
    as many classes as the iterations allow; without it, and with fewer steps than for two, the loss is followed.
    """

    iterations: int = 40
    momentum: float = 0.9
    first_step: float = 0.5
    confirm: int = 8
    antithetic: bool = False
    per_target: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_target is not None and self.per_target < 1:
            raise InputError(f"MomentumPGD needs a per_target of at least 1, got {self.per_target}.")
        if not 0 <= self.momentum < 1 or not self.first_step > 0 or self.confirm < 1:
            raise InputError(
                "MomentumPGD needs a momentum in [0, 1), a first_step above 0 and at least one sample to confirm, got "
                f"{self.momentum}, {self.first_step} and {self.confirm}."
            )

    @property
    def kind(self) -> str:
        return f"momentum-{self.loss_name}"

    @property
    def title(self) -> str:
        pairs = "antithetic steps" if self.antithetic else ""
        aim = f"towards {self.targets} classes" if self.objective.targeted else f"on {self.loss_name}"
        return self.titled(f"momentum PGD-{self.iterations} {aim}", pairs)

    @property
    def ranking(self) -> EOT:
        return replace(self.eot, samples=max(self.confirm, self.eot.samples))

    def final_eot(self, problem: Problem) -> EOT:
        return self.ranking

    @property
    def averaged_samples(self) -> int:
        return round(self.eot.samples / (1 - self.momentum))

    def alone(self) -> Self:
        alone = replace(super().alone(), confirm=1, antithetic=False, per_target=None)
        targets = min(self.targets, self.iterations // (self.per_target or self.iterations))
        if targets < 2:
            return alone
        return replace(alone, loss="difference", targets=targets, iterations=self.iterations // targets)

    def runs(self, classes: int) -> int:
        """One run per restart and target; more targets than classes are further starts."""
        return self.restarts * (self.targets if self.objective.targeted else 1)

    def steps_account(self, classes: int) -> tuple[Spending, ...]:
        runs, most = self.runs(classes), self.ranking.samples
        return self.spending(runs * self.iterations, 0), Spending(0, runs * most, self.mode)

    def start(self, problem: Problem, state: State) -> State:
        z = problem.threat.zeros(problem.x)
        return {**state, **dict.fromkeys(("z", "momentum"), z)}

    def begin(self, problem: Problem, state: State, i: int, run: int) -> State:
        z = problem.threat.random(problem.x, starts(problem.seeds), run)
        return self._after(problem, {**state, "momentum": torch.zeros_like(z)}, z, i)

    def iterate(self, problem: Problem, state: State, i: int, k: int) -> State:
        threat = problem.threat
        eta = self.first_step * threat.eps * (1 + math.cos(math.pi * (k - 1) / self.iterations)) / 2
        z = threat.project(problem.x, state["z"] + eta * threat.ascend(state["momentum"]))
        return self._after(problem, state, z, i)

    def ask(self, problem: Problem, z: Tensor, eot: EOT, i: int, target: Tensor, gradient: bool) -> Expectation:
        second = self.antithetic and gradient and not eot.fixed and i % self.length % 2 == 1
        if not (second and getattr(problem.model, "mirrors", False)):
            return super().ask(problem, z, eot, i, target, gradient)
        with mirrored():
            return super().ask(problem, z, eot, i - 1, target, gradient)

    def _after(self, problem: Problem, state: State, z: Tensor, i: int) -> State:
        state, seen = self.evaluate(problem, state, z, i)
        if seen.gradient is None:
            return {**state, "z": z}
        return {**state, "z": z, "momentum": self.momentum * state["momentum"] + _scaled(seen)}


def _scaled(seen: Expectation) -> Tensor:
    """The gradient over its mean absolute value, per image; zero where it is."""
    g = usable(seen)
    mean = wide(g).flatten(1).abs().mean(1)
    return (wide(g) / per_image(torch.where(mean > 0, mean, 1.0), wide(g))).to(g.dtype)

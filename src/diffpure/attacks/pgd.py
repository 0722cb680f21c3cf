"""Projected gradient ascent, in any threat: z ← project(z + η · ascend(∇_z loss)) (Madry et al. 2018).

`RestartedAttack` is the frame of all gradient attacks here: runs of `iterations` moves, one run a restart, and one a
target class where the loss is targeted. Targets are the classes with the highest clean logits beside the label.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from diffpure.attacks.base import Cost, Problem, SampledAttack, State, record, usable
from diffpure.attacks.expectation import EOT, Expectation
from diffpure.attacks.losses import Objective, objective, others
from diffpure.attacks.seeds import starts
from diffpure.errors import InputError


@dataclass(frozen=True, kw_only=True)
class RestartedAttack(SampledAttack):
    """Runs of k = 0 … iterations; k = 0 starts a run, and the last look needs no gradient."""

    iterations: int = 100
    restarts: int = 1
    targets: int = 9
    loss: str | Objective = "ce"

    def __post_init__(self) -> None:
        if min(self.iterations, self.restarts, self.targets) < 1:
            raise InputError(f"{type(self).__name__} needs iterations, restarts and targets of at least 1.")
        objective(self.loss)

    @property
    def objective(self) -> Objective:
        return objective(self.loss)

    @property
    def name(self) -> str:
        loss = self.loss if isinstance(self.loss, str) else type(self.loss).__name__.lower()
        return f"{type(self).__name__.lower()}-{'t' if self.objective.targeted else loss}"

    def steps(self, classes: int) -> int:
        targets = min(self.targets, classes - 1) if self.objective.targeted else 1
        return targets * self.restarts * self.length

    @property
    def length(self) -> int:
        """The steps of one run."""
        return self.iterations + 1

    def price(self) -> Cost:
        return Cost(self.eot.samples, self.eot.samples)

    def step(self, problem: Problem, state: State, i: int) -> State:
        run, k = divmod(i, self.length)
        return self.begin(problem, state, i, run) if k == 0 else self.move(problem, state, i, k)

    @abstractmethod
    def begin(self, problem: Problem, state: State, i: int, run: int) -> State:
        """Step i, the first of a run."""

    @abstractmethod
    def move(self, problem: Problem, state: State, i: int, k: int) -> State:
        """Step i, the k-th move of its run."""

    def aim(self, problem: Problem, state: State, i: int) -> Tensor:
        """The target class of each image at step i, or the label where the loss has no target: (B,)."""
        if not self.objective.targeted:
            return problem.y
        ranked = others(state["clean"][:, None], problem.y)[:, 0].argsort(1, descending=True)
        return ranked[:, i // (self.length * self.restarts)]

    def see(self, problem: Problem, state: State, z: Tensor, i: int) -> tuple[State, Expectation]:
        """Expectation at z, without a gradient at the end of a run, and record it."""
        wanted = i % self.length < self.iterations
        seen = problem.expect(z, self.objective, self.eot, i, target=self.aim(problem, state, i), gradient=wanted)
        return record(problem, state, z, seen, self.eot), seen


@final
@dataclass(frozen=True, kw_only=True)
class PGD(RestartedAttack):
    """Moves of a fixed size, in the units of the threat (2.5 eps / iterations unless given)."""

    step_size: float | None = None
    random_start: bool = True

    def start(self, problem: Problem, state: State) -> State:
        z = problem.threat.zeros(problem.x)
        return {**state, "z": z, "gradient": z}

    def begin(self, problem: Problem, state: State, i: int, run: int) -> State:
        threat = problem.threat
        z = threat.random(problem.x, starts(problem.seeds), run) if self.random_start else threat.zeros(problem.x)
        return self._after(problem, state, z, i)

    def move(self, problem: Problem, state: State, i: int, k: int) -> State:
        threat = problem.threat
        size = self.step_size or 2.5 * threat.eps / self.iterations
        z = threat.project(problem.x, state["z"] + size * threat.ascend(state["gradient"]))
        return self._after(problem, state, z, i)

    def _after(self, problem: Problem, state: State, z: Tensor, i: int) -> State:
        state, seen = self.see(problem, state, z, i)
        return {**state, "z": z, "gradient": torch.zeros_like(z) if seen.gradient is None else usable(seen)}


# Lee & Kim (ICCV 2023): 200 steps of 0.007 (ℓ∞), 20 samples; on a defence whose gradient mode is the surrogate.
PGD_LEE_KIM: Final = PGD(iterations=200, step_size=0.007, eot=EOT(20))

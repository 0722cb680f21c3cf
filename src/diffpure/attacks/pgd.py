"""Projected gradient ascent, in any threat: z ← project(z + η · ascend(∇_z loss)) (Madry et al. 2018).

`RestartedAttack` is the frame of all gradient attacks here: runs of `iterations` steps, one run per restart, and one
per target class where the loss is targeted. Targets are the classes with the highest clean logits beside the label.

Which iterate is returned: of a model that is not random, the one that ranks highest. Of a random one, the iterate that
scored best is mostly the luckiest, so a run gives its last iterate, whose rank comes from samples that did not produce
it; between runs, and against the unperturbed image, that rank decides.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from diffpure.attacks.base import Cost, SampledAttack, Spending
from diffpure.attacks.expectation import EOT, Expectation
from diffpure.attacks.losses import Objective, objective, others
from diffpure.attacks.seeds import starts
from diffpure.attacks.state import Problem, State, choose, record, usable
from diffpure.diffusion.gradients import Surrogate
from diffpure.errors import InputError
from diffpure.named import short


@dataclass(frozen=True, kw_only=True)
class RestartedAttack(SampledAttack):
    """Runs of k = 0 … iterations; k = 0 starts a run, and the last evaluation needs no gradient.

    iterations: steps per run.   restarts: runs, each from another random start.   targets: how many target classes a
    targeted loss tries, one run each.   loss: what is maximised, by name.
    """

    iterations: int = 100
    restarts: int = 1
    targets: int = 9
    loss: str | Objective = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("iterations", "restarts", "targets"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{type(self).__name__} needs {name} as a whole number of at least 1, got {value!r}.")
        objective(self.loss)

    @property
    def objective(self) -> Objective:
        return objective(self.loss)

    @property
    def kind(self) -> str:
        return f"{type(self).__name__.lower()}-{self.loss_name}"

    @property
    def loss_name(self) -> str:
        """The loss in a name: `t` for a targeted one."""
        loss = self.loss if isinstance(self.loss, str) else type(self.loss).__name__.lower()
        return "t" if self.objective.targeted else loss

    @property
    def title(self) -> str:
        restarts = f"{self.restarts} restarts" if self.restarts > 1 else ""
        return self.titled(f"{self.kind.upper()}-{self.iterations}", restarts)

    def steps(self, classes: int) -> int:
        return self.runs(classes) * self.length

    def runs(self, classes: int) -> int:
        """One run per restart and target."""
        return self.restarts * (min(self.targets, classes - 1) if self.objective.targeted else 1)

    @property
    def length(self) -> int:
        """The steps of one run."""
        return self.iterations + 1

    def price(self) -> Cost:
        return Cost(self.eot.samples, self.eot.samples)

    def steps_account(self, classes: int) -> tuple[Spending, ...]:
        return (self.spending(self.runs(classes) * self.iterations, self.runs(classes)),)

    def step(self, problem: Problem, state: State, i: int) -> State:
        run, k = divmod(i, self.length)
        return self.begin(problem, state, i, run) if k == 0 else self.iterate(problem, state, i, k)

    @abstractmethod
    def begin(self, problem: Problem, state: State, i: int, run: int) -> State:
        """Step i, the first of a run."""

    @abstractmethod
    def iterate(self, problem: Problem, state: State, i: int, k: int) -> State:
        """Step i, the k-th iteration of its run."""

    def aim(self, problem: Problem, state: State, i: int) -> Tensor:
        """The target class of each image at step i, or the label where the loss has no target: (B,)."""
        if not self.objective.targeted:
            return problem.y
        ranked = others(state["clean"][:, None], problem.y)[:, 0].argsort(1, descending=True)
        return ranked[:, i // (self.length * self.restarts) % (ranked.shape[1] - 1)]

    def final_eot(self, problem: Problem) -> EOT:
        """The samples with which the last iterate of a run is evaluated."""
        return self.eot

    def ask(self, problem: Problem, z: Tensor, eot: EOT, i: int, target: Tensor, gradient: bool) -> Expectation:
        """What the model says of z, and where its loss rises."""
        return problem.expect(z, self.objective, eot, i, target=target, gradient=gradient)

    def evaluate(self, problem: Problem, state: State, z: Tensor, i: int) -> tuple[State, Expectation]:
        """Evaluate z, without a gradient at the end of a run, and record it."""
        wanted = i % self.length < self.iterations
        eot = self.eot if wanted else self.final_eot(problem)
        seen = self.ask(problem, z, eot, i, self.aim(problem, state, i), wanted)
        recorded = record(problem, state, z, seen)
        if not getattr(problem.model, "stochastic", False):
            return recorded, seen
        return self._honest(state, recorded, first=i % self.length == 0, last=not wanted), seen

    def _honest(self, before: State, recorded: State, *, first: bool, last: bool) -> State:
        """The state with the last iterate as its best, and after a run the better of that and of the earlier runs."""
        kept = ("best", "rank") if first else ("kept", "kept_rank")  # what stood before this run
        earlier, earlier_rank = before[kept[0]], before[kept[1]]
        best, value = recorded["last"], recorded["now"]
        if last:
            better = value > earlier_rank
            best, value = choose(better, best, earlier), torch.where(better, value, earlier_rank)
        return {**recorded, "best": best, "rank": value, "kept": earlier, "kept_rank": earlier_rank}


@final
@dataclass(frozen=True, kw_only=True)
class PGD(RestartedAttack):
    """Steps of a fixed size, in the units of the threat (2.5 eps / iterations unless given)."""

    step_size: float | None = None  # in the units of the threat; 2.5 eps / iterations if not given
    random_start: bool = True  # start at a random perturbation instead of none

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is not None and not self.step_size > 0:
            raise InputError(f"PGD needs a step_size above 0, got {self.step_size}.")

    @property
    def title(self) -> str:
        step = "" if self.step_size is None else f"step {short(self.step_size)}"
        return ", ".join(filter(None, (super().title.replace("-CE-", "-", 1), step)))  # PGD is on the cross-entropy

    def start(self, problem: Problem, state: State) -> State:
        z = problem.threat.zeros(problem.x)
        return {**state, "z": z, "gradient": z}

    def begin(self, problem: Problem, state: State, i: int, run: int) -> State:
        threat = problem.threat
        z = threat.random(problem.x, starts(problem.seeds), run) if self.random_start else threat.zeros(problem.x)
        return self._after(problem, state, z, i)

    def iterate(self, problem: Problem, state: State, i: int, k: int) -> State:
        threat = problem.threat
        size = 2.5 * threat.eps / self.iterations if self.step_size is None else self.step_size
        z = threat.project(problem.x, state["z"] + size * threat.ascend(state["gradient"]))
        return self._after(problem, state, z, i)

    def _after(self, problem: Problem, state: State, z: Tensor, i: int) -> State:
        state, seen = self.evaluate(problem, state, z, i)
        return {**state, "z": z, "gradient": torch.zeros_like(z) if seen.gradient is None else usable(seen)}


# Lee & Kim (ICCV 2023): 200 steps of 0.007 (ℓ∞), 20 EOT samples, through a coarser surrogate of the path.
PGD_LEE_KIM: Final = PGD(label="pgd-lee-kim", iterations=200, step_size=0.007, eot=EOT(20), gradient=Surrogate())

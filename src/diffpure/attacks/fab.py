"""FAB-T: the nearest image that is misclassified, by projections onto the linearised boundary (Croce & Hein 2020).

With f = z_t - z_y the difference of a target's and the label's logits, linear around the iterate x₁ = x + z:

    d₁ = nearest way from x₁ to the plane f(x₁) + ⟨∇f, · - x₁⟩ = 0,     d₂ = nearest way from x to the same plane,
    x₁ ← (1 - α)(x₁ + η d₁) + α (x + η d₂),     α = min(‖d₁‖ / (‖d₁‖ + ‖d₂‖), α_max),

and where x₁ is misclassified it is kept if it is the nearest so far, and drawn back: x₁ ← x + β (x₁ - x).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from diffpure.attacks.base import Spending
from diffpure.attacks.losses import DIFFERENCE, Objective
from diffpure.attacks.pgd import RestartedAttack
from diffpure.attacks.seeds import starts
from diffpure.attacks.state import Problem, State, choose, rank, record, usable
from diffpure.errors import InputError
from diffpure.threats import Norm, per_image, wide


@final
@dataclass(frozen=True, kw_only=True)
class FAB(RestartedAttack):
    """FAB-T with the published constants; a run's state holds the nearest image as "nearest" and its "distance".

    The size of the threat decides only which perturbations count: the search itself knows no budget.
    """

    loss: str | Objective = DIFFERENCE
    alpha_max: float = 0.1  # the largest weight of the step towards the clean image
    eta: float = 1.05  # how far a step goes beyond the boundary
    beta: float = 0.9  # how far a misclassified image is drawn back to the clean one

    @property
    def length(self) -> int:
        return self.iterations

    @property
    def title(self) -> str:
        return self.titled(f"FAB-T-{self.iterations}")

    def steps_account(self, classes: int) -> tuple[Spending, ...]:
        return (self.spending(self.steps(classes), self.steps(classes)),)

    def start(self, problem: Problem, state: State) -> State:
        z = norm_of(problem, "FAB").zeros(problem.x)
        return {**state, "z": z, "nearest": z, "distance": torch.full_like(state["rank"], torch.inf)}

    def begin(self, problem: Problem, state: State, i: int, run: int) -> State:
        threat, restart = problem.threat, run % self.restarts
        z = threat.random(problem.x, starts(problem.seeds), run) / 2 if restart else threat.zeros(problem.x)
        return self.iterate(problem, {**state, "z": z}, i, 0)

    def iterate(self, problem: Problem, state: State, i: int, k: int) -> State:
        threat, z = problem.threat, state["z"]
        target = self.aim(problem, state, i)
        seen = problem.expect(z, self.objective, self.eot, 2 * i, target=target, gradient=True)
        state = record(problem, state, z, seen, threat.within(problem.x, z))
        z = self._towards(problem, z, usable(seen), seen.loss)
        seen = problem.expect(z, self.objective, self.eot, 2 * i + 1, target=target)
        state = record(problem, state, z, seen, threat.within(problem.x, z))
        misclassified, size = rank(seen, problem.y) > 0, threat.size(z)
        nearer = misclassified & (size < state["distance"])
        return {
            **state,
            "z": choose(misclassified, self.beta * z, z),
            "nearest": choose(nearer, z, state["nearest"]),
            "distance": torch.where(nearer, size, state["distance"]),
        }

    def _towards(self, problem: Problem, z: Tensor, w: Tensor, f: Tensor) -> Tensor:
        """The next iterate, from the plane f + ⟨w, · - x₁⟩ = 0."""
        threat, x = norm_of(problem, "FAB"), problem.x
        d1 = threat.to_hyperplane(x + z, w, -f)
        d2 = threat.to_hyperplane(x, w, wide(w * z).flatten(1).sum(1) - f)
        a1, a2 = threat.size(d1).clamp_min(1e-8), threat.size(d2).clamp_min(1e-8)
        alpha = per_image((a1 / (a1 + a2)).clamp_max(self.alpha_max), z)
        z = (1 - alpha) * (z + self.eta * d1) + alpha * self.eta * d2
        return torch.minimum(torch.maximum(z, -x), 1 - x)


def norm_of(problem: Problem, attack: str) -> Norm:
    """The threat, which has to be a norm."""
    if not isinstance(problem.threat, Norm):
        name = type(problem.threat).__name__
        raise InputError(f"{attack} works on the threats Linf and L2, not on {name}; use PGD, APGD or StAdv there.")
    return problem.threat

"""BPDA+EOT with the two-stage rule of Hill et al. 2021, which the paper follows.

The backward pass differentiable approximation is the attack's gradient mode, the attack is PGD on the averaged logits
of 15 EOT samples, and the rule is: an image whose 15-sample mean fails is classified again with 150 fresh samples, and
counts as misclassified only if their mean fails too. `TwoStage` puts that rule around any attack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

import torch

from diffpure.attacks.base import Attack, Cost, Problem, State, around, choose, inside, rank
from diffpure.attacks.expectation import EOT
from diffpure.attacks.losses import MARGIN
from diffpure.attacks.pgd import PGD


@final
@dataclass(frozen=True, kw_only=True)
class TwoStage(Attack):
    """An attack whose successes count only once the mean logits of `defence_samples` samples fail too."""

    attack: Attack
    defence_samples: int = 150

    @property
    def name(self) -> str:
        return f"{self.attack.name}-twostage"

    @property
    def ranking(self) -> EOT:
        return replace(self.attack.ranking, samples=self.defence_samples, average="logits")

    def steps(self, classes: int) -> int:
        return self.attack.steps(classes)

    def price(self) -> Cost:
        price = self.attack.price()
        return Cost(price.gradients, (price.queries or 0) + self.defence_samples)

    def start(self, problem: Problem, state: State) -> State:
        return around(state, self.attack.begin_run(problem).state)

    def step(self, problem: Problem, state: State, i: int) -> State:
        inner = self.attack.advance(problem, inside(state), i)
        state = around(state, inner)
        lost = state["rank"] > 0
        doubtful = (inner["now"] > 0) & ~lost
        if doubtful.any():
            asked = problem.rows(doubtful)
            # -2 - i: samples that no other look takes.
            margin = rank(asked.expect(inner["last"][doubtful], MARGIN, self.ranking, -2 - i), asked.y)
            verdict = torch.full_like(state["rank"], -torch.inf).index_put((doubtful,), margin)
            newly = verdict > 0
            state = {
                **state,
                "best": choose(newly, inner["last"], state["best"]),
                "rank": torch.where(newly, verdict, state["rank"]),
                "queries": state["queries"] + self.defence_samples * doubtful.long(),
            }
        # Until an image is lost, the strongest perturbation of the attack itself stands for it.
        best = choose(state["rank"] > 0, state["best"], inner["best"])
        return {**state, "best": best, "last": inner["last"], "now": inner["now"]}


# The paper's setting: 50 steps of 2/255; on a defence whose gradient mode is "bpda".
BPDA_EOT: Final = TwoStage(attack=PGD(iterations=50, step_size=2 / 255, eot=EOT(15, "logits")), defence_samples=150)

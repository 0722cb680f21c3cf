"""AutoAttack (Croce & Hein 2020) as tuples of attacks, and a suite that runs a tuple as one attack.

Published defaults: 100 iterations, 1 restart, 9 targets, 5,000 queries; the version for random defences has 20 samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

from diffpure.attacks.apgd import APGD
from diffpure.attacks.base import Attack, Cost, Problem, State, common
from diffpure.attacks.expectation import EOT
from diffpure.attacks.fab import FAB
from diffpure.attacks.square import Square
from diffpure.errors import InputError
from diffpure.noise import Noise


@final
@dataclass(frozen=True, kw_only=True)
class Suite(Attack):
    """One attack after the other; each image keeps the strongest perturbation of all.

    With `skip_misclassified`, as in the public AutoAttack, later attacks see only the images that earlier ones left.
    """

    attacks: tuple[Attack, ...]

    def __post_init__(self) -> None:
        if not self.attacks:
            raise InputError("A suite needs at least one attack.")

    @property
    def name(self) -> str:
        return "+".join(attack.name for attack in self.attacks)

    @property
    def ranking(self) -> EOT:
        return max((attack.ranking for attack in self.attacks), key=lambda eot: eot.samples)

    def steps(self, classes: int) -> int:
        return sum(attack.steps(classes) for attack in self.attacks)

    def price(self) -> Cost:
        prices = [attack.price() for attack in self.attacks]
        return Cost(max(p.gradients or 0 for p in prices), max(p.queries or 0 for p in prices))

    def cost(self, classes: int) -> Cost:
        costs = [attack.cost(classes) for attack in self.attacks]
        return Cost(sum(c.gradients or 0 for c in costs), sum(c.queries or 0 for c in costs))

    def start(self, problem: Problem, state: State) -> State:
        return state

    def step(self, problem: Problem, state: State, i: int) -> State:
        tag, i = self._locate(i, state["clean"].shape[1])
        attack = self.attacks[tag]
        # Every attack has its own seeds: a restart of one must not be the start of another.
        problem = replace(problem, seeds=Noise(problem.seeds).child(tag).seeds)
        if i == 0:
            state = attack.start(problem, common(state))
        return attack.advance(problem, state, i)

    def _locate(self, i: int, classes: int) -> tuple[int, int]:
        """Which attack step i belongs to, and which of its steps that is."""
        tag = 0
        while i >= (length := self.attacks[tag].steps(classes)):
            i, tag = i - length, tag + 1
        return tag, i


AUTOATTACK_STANDARD: Final[tuple[Attack, ...]] = (APGD(loss="ce"), APGD(loss="dlr-targeted"), FAB(), Square())
AUTOATTACK_RAND: Final[tuple[Attack, ...]] = (APGD(loss="ce", eot=EOT(20)), APGD(loss="dlr", eot=EOT(20)))

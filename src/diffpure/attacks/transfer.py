"""Attacks on a part of a defence: crafted there, judged on the whole.

TRANSFER crafts AutoAttack on the bare classifier (the paper's "standard attack", appendix C.1); DIFFUSION_ONLY raises
the error with which the purifier gives its input back (appendix C.9, the paper's APGD with 20 samples).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, final

from diffpure.attacks.apgd import APGD
from diffpure.attacks.autoattack import AUTOATTACK_STANDARD, Suite
from diffpure.attacks.base import Attack, Cost, Problem, SampledAttack, State, around, inside, record
from diffpure.attacks.expectation import EOT
from diffpure.attacks.losses import MARGIN, Model
from diffpure.errors import InputError


@final
@dataclass(frozen=True, kw_only=True)
class Transfer(SampledAttack):
    """An attack on a part of the model; the last step judges its result on the model itself, with `eot`.

    part: an attribute of the model, or a function from the model to what is attacked instead.
    """

    attack: Attack
    part: str | Callable[[Any], Model] = "classifier"

    @property
    def name(self) -> str:
        return f"{getattr(self.part, '__name__', self.part)}:{self.attack.name}".lower()

    def steps(self, classes: int) -> int:
        return self.attack.steps(classes) + 1

    def price(self) -> Cost:
        return self.attack.price()

    def start(self, problem: Problem, state: State) -> State:
        return around(state, self.attack.begin_run(self._of_part(problem)).state)

    def step(self, problem: Problem, state: State, i: int) -> State:
        inner = inside(state)
        if i < self.attack.steps(state["clean"].shape[1]):
            return around(state, self.attack.advance(self._of_part(problem), inner, i))
        seen = problem.expect(inner["best"], MARGIN, self.eot, i)
        return record(problem, state, inner["best"], seen, self.eot)

    def _of_part(self, problem: Problem) -> Problem:
        part = getattr(problem.model, self.part, None) if isinstance(self.part, str) else self.part(problem.model)
        if not callable(part):
            raise InputError(f"The model has no part {self.part!r} to attack; a Defense has classifier and purifier.")
        return replace(problem, model=part)


TRANSFER: Final = Transfer(attack=Suite(attacks=AUTOATTACK_STANDARD, skip_misclassified=True), eot=EOT(20))
DIFFUSION_ONLY: Final = Transfer(attack=APGD(loss="reconstruction", eot=EOT(20)), part="purifier", eot=EOT(20))

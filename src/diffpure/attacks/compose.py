"""Attacks made of attacks.

Suite       one attack after the other, each image keeps the strongest perturbation of all; with `stop` = α an image is
            left alone once n fresh samples, n = ⌈log(α/tests) / log 0.9⌉, are all misclassified. An image whose samples
            are right one time in ten or more passes a test with a chance of at most 0.9ⁿ, so it is stopped by mistake
            with a chance of at most α. Samples are taken in looks; one that is right ends the test.
Transfer    crafted on a part of the defence, evaluated on the whole (paper, appendices C.1 and C.7)
TwoStage    a success counts only once many fresh samples confirm it (Hill et al. 2021, which the paper follows)
Several     attacks that are evaluated one by one, and called as one
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Self, final

import torch
from torch import Tensor

from diffpure.attacks.base import Attack, Cost, OnStep, SampledAttack, Spending
from diffpure.attacks.expectation import EOT
from diffpure.attacks.losses import MARGIN, WRONG, Model
from diffpure.attacks.state import Problem, State, around, choose, common, inside, put, rank, record
from diffpure.errors import InputError
from diffpure.noise import Noise, Seeds
from diffpure.threats import AnyThreat

CONFIDENT: Final = 0.9  # an image whose samples are misclassified more often than that may be left alone
LOOK: Final = 8  # samples of a sequential test that are asked for at once


@final
@dataclass(frozen=True, kw_only=True)
class Suite(Attack):
    """One attack after the other; each image keeps the strongest perturbation of all.

    With `skip_misclassified`, as in the public AutoAttack, later attacks see only the images that earlier ones left.
    stop: later attacks leave an image alone once fresh samples confirm that it is misclassified in more than nine of
    ten samples; the number is the chance that this is a mistake (0.05), and 0 never stops.
    """

    attacks: tuple[Attack, ...]
    stop: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attacks or not 0 <= self.stop < 1:
            raise InputError(f"A suite needs at least one attack, and a stop in [0, 1), got {self.stop}.")

    @property
    def kind(self) -> str:
        return "+".join(attack.label or attack.kind for attack in self.attacks)

    @property
    def title(self) -> str:
        stops = f", stops with an error rate of {self.stop:g}" if self.stop else ""
        return " + ".join(attack.title for attack in self.attacks) + stops

    @property
    def ranking(self) -> EOT:
        return max((attack.ranking for attack in self.attacks), key=lambda eot: eot.samples)

    @property
    def confirmations(self) -> int:
        """How many fresh samples, all misclassified, stop an image; before every attack but the first."""
        tests = len(self.attacks) - 1
        return math.ceil(math.log(self.stop / tests) / math.log(CONFIDENT)) if self.stop and tests else 0

    def steps(self, classes: int) -> int:
        return sum(attack.steps(classes) for attack in self.attacks)

    def price(self) -> Cost:
        prices = [attack.price() for attack in self.attacks]
        queries = max(p.queries or 0 for p in prices) + self.confirmations
        return Cost(max(p.gradients or 0 for p in prices), queries)

    def steps_account(self, classes: int) -> tuple[Spending, ...]:
        found = [spending for attack in self.attacks for spending in attack.steps_account(classes)]
        if self.confirmations:
            found.append(Spending(0, (len(self.attacks) - 1) * self.confirmations))
        return tuple(replace(spending, mode=spending.mode or self.mode) for spending in found)

    def start(self, problem: Problem, state: State) -> State:
        return {**state, "stopped": torch.zeros_like(state["rank"], dtype=torch.bool)} if self.stop else state

    def step(self, problem: Problem, state: State, i: int) -> State:
        tag, i = self._locate(i, state["clean"].shape[1])
        attack = self.attacks[tag]
        # Every attack has its own seeds: a restart of one must not be the start of another; a known noise is given.
        if not self.ranking.fixed:
            problem = replace(problem, seeds=Noise(problem.seeds).child(tag).seeds)
        if i == 0 and tag and self.stop:
            state = self._confirm(problem, state)
        stopped = state.get("stopped")
        if i == 0:
            state = attack.start(problem, common(state))
        if stopped is None:
            return attack.advance(problem, state, i)
        if not stopped.all():
            rest = {key: value[~stopped] for key, value in state.items() if key != "stopped"}
            state = put(state, attack.advance(problem.rows(~stopped), rest, i), ~stopped)
        return {**state, "stopped": stopped}

    def _confirm(self, problem: Problem, state: State) -> State:
        """Ask about what is misclassified with fresh samples, look by look, while all of them are misclassified."""
        wrong = (state["rank"] > 0) & ~state["stopped"]
        left = self.confirmations if getattr(problem.model, "stochastic", False) else 1
        for look in range(0, left, LOOK):
            if not wrong.any():
                break
            asked = problem.rows(wrong)
            eot = replace(self.ranking, samples=min(LOOK, left - look), average="gradients")
            seen = asked.expect(state["best"][wrong], WRONG, eot, -2 - look)  # samples that no other evaluation takes
            state = {**state, **{key: state[key] + value * wrong.long() for key, value in seen.spent.items()}}
            wrong = wrong.index_put((wrong,), seen.loss == 1)
        return {**state, "stopped": state["stopped"] | wrong}

    def _locate(self, i: int, classes: int) -> tuple[int, int]:
        """Which attack step i belongs to, and which of its steps that is."""
        tag = 0
        while i >= (length := self.attacks[tag].steps(classes)):
            i, tag = i - length, tag + 1
        return tag, i


@final
class Several(tuple[Attack, ...]):
    """Attacks that an evaluation runs and reports one by one, such as AutoAttack's.

    Called, they are one `Suite` that leaves images alone once they are misclassified, as the public AutoAttack does.
    """

    __slots__ = ()

    def __call__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        threat: AnyThreat,
        *,
        seeds: Seeds = None,
        limit: Cost | None = None,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """The strongest perturbation z that any of them found; x (B, C, H, W) in [0, 1], y (B,)."""
        suite = Suite(attacks=tuple(self), skip_misclassified=True)
        return suite(model, x, y, threat, seeds=seeds, limit=limit, on_step=on_step)


@final
@dataclass(frozen=True, kw_only=True)
class Transfer(SampledAttack):
    """An attack on a part of the model; the last step evaluates its result on the model itself, with `eot`.

    part: an attribute of the model, or a function from the model to what is attacked instead.
    """

    attack: Attack
    part: str | Callable[[Any], Model] = "classifier"

    @property
    def part_name(self) -> str:
        """What is attacked, in a word."""
        return str(getattr(self.part, "__name__", self.part)).lower()

    @property
    def kind(self) -> str:
        return f"{self.part_name}:{self.attack.label or self.attack.kind}"

    @property
    def title(self) -> str:
        # Only a function may have a title of its own: every string has a method of that name.
        own = None if isinstance(self.part, str) else getattr(self.part, "title", None)
        part = own or f"{self.part_name} alone"
        return f"{self.attack.title}, crafted on the {part}"

    def steps(self, classes: int) -> int:
        return self.attack.steps(classes) + 1

    def price(self) -> Cost:
        return self.attack.price()

    def steps_account(self, classes: int) -> tuple[Spending, ...]:
        part = self.part if isinstance(self.part, str) else ""
        crafted = (replace(s, mode=s.mode or self.mode, part=part) for s in self.attack.account(classes))
        return *crafted, self.spending(0, 1)

    def start(self, problem: Problem, state: State) -> State:
        return around(state, self.attack.begin_run(self._of_part(problem)).state)

    def step(self, problem: Problem, state: State, i: int) -> State:
        inner = inside(state)
        if i < self.attack.steps(state["clean"].shape[1]):
            return around(state, self.attack.advance(self._of_part(problem), inner, i))
        return record(problem, state, inner["best"], problem.expect(inner["best"], MARGIN, self.eot, i))

    def _of_part(self, problem: Problem) -> Problem:
        part = getattr(problem.model, self.part, None) if isinstance(self.part, str) else self.part(problem.model)
        if not callable(part):
            raise InputError(f"The model has no part {self.part!r} to attack; a Defense has classifier and purifier.")
        return replace(problem, model=part)


@final
@dataclass(frozen=True, kw_only=True)
class TwoStage(Attack):
    """An attack whose successes count only once the mean logits of `defence_samples` fresh samples fail too.

    defence_samples: fresh samples that must confirm a success.
    """

    attack: Attack
    defence_samples: int = 150

    @property
    def kind(self) -> str:
        return f"{self.attack.label or self.attack.kind}-twostage"

    @property
    def title(self) -> str:
        return f"{self.attack.title}, confirmed by {self.defence_samples} samples"

    @property
    def ranking(self) -> EOT:
        return replace(self.attack.ranking, samples=self.defence_samples, average="logits")

    def alone(self) -> Self:
        return replace(self, defence_samples=1)

    def steps(self, classes: int) -> int:
        return self.attack.steps(classes)

    def price(self) -> Cost:
        price = self.attack.price()
        return Cost(price.gradients, (price.queries or 0) + self.defence_samples)

    def steps_account(self, classes: int) -> tuple[Spending, ...]:
        inner = (replace(s, mode=s.mode or self.mode) for s in self.attack.account(classes))
        return *inner, Spending(0, self.defence_samples * self.steps(classes), self.mode)

    def start(self, problem: Problem, state: State) -> State:
        return around(state, self.attack.begin_run(problem).state)

    def step(self, problem: Problem, state: State, i: int) -> State:
        inner = self.attack.advance(problem, inside(state), i)
        state = around(state, inner)
        doubtful = (inner["now"] > 0) & (state["rank"] <= 0)
        if doubtful.any():
            state = self._confirm(problem, state, inner, doubtful, i)
        # Until an image is misclassified for good, the strongest perturbation of the attack itself stands for it.
        best = choose(state["rank"] > 0, state["best"], inner["best"])
        return {**state, "best": best, "last": inner["last"], "now": inner["now"]}

    def _confirm(self, problem: Problem, state: State, inner: State, doubtful: Tensor, i: int) -> State:
        """Classify the doubtful images again with fresh samples, and keep the perturbations that still succeed."""
        asked = problem.rows(doubtful)
        # -2 - i: samples that no other evaluation takes.
        seen = asked.expect(inner["last"][doubtful], MARGIN, self.ranking, -2 - i)
        margin = torch.full_like(state["rank"], -torch.inf).index_put((doubtful,), rank(seen, asked.y))
        newly = margin > 0
        return {
            **state,
            "best": choose(newly, inner["last"], state["best"]),
            "rank": torch.where(newly, margin, state["rank"]),
            **{key: state[key] + value * doubtful.long() for key, value in seen.spent.items()},
        }

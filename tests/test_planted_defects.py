"""Defects planted into an evaluation: each is found by one of its checks, which is silent on the honest twin.

gradient multiplied by noise, detached step   the gradient audit of `probe`
rounded input                                 a warning of the rows: gradients that are exactly zero
one EOT sample without momentum               a warning of the rows
saturated loss                                a warning of every evaluation
budget cheat                                  a warning of the rows, and the perturbation is moved back inside
known seeds, a model that sees the gradient   `probe`, which asks again with unpredictable seeds and with a gradient
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffpure.attacks import APGD, PGD, Attack, MomentumPGD, SampledAttack
from diffpure.attacks.base import Cost, Spending
from diffpure.attacks.losses import MARGIN, call
from diffpure.attacks.seeds import sample_seeds
from diffpure.attacks.state import Problem, State, record
from diffpure.evaluation.checks import looks_at_seeds
from diffpure.evaluation.evaluate import evaluate
from diffpure.evaluation.units import Job, Unit, attack_seeds, evaluation_seeds
from diffpure.noise import Noise
from diffpure.purify import Defense
from diffpure.results.result import Result
from diffpure.results.rows import DEFAULT_RULES
from diffpure.threats import Linf
from victims import Linear, Noisy, problem

COUNT, THREAT = 8, Linf(0.02)
STEPS = APGD(iterations=10)
MOMENTUM = MomentumPGD(iterations=10, confirm=2)


def evaluated(model: nn.Module, attack: Attack = STEPS) -> Result:
    """With the labels that the model itself gives."""
    x, _ = problem(COUNT)
    y = call(model, x, range(COUNT)).argmax(1)
    return evaluate(model, x, y, THREAT, [attack], probe=COUNT, batch=COUNT)


class _Shaken(torch.autograd.Function):
    """The identity, with a gradient that is multiplied by noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (g,) = grads
        return g * (1 + Noise.of(1, len(g))(0, g))


class Before(nn.Module):
    """A function of the images before a linear classifier."""

    def __init__(self, change: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.change, self.classifier = change, Linear(5, 64, scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.change(x))


class KnowsItsSeeds(Noisy):
    """A random defence that answers otherwise, with the class after the likeliest, to the seeds that it knows."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known

    def forward(self, x: Tensor, seeds: Any = None) -> Tensor:
        logits = super().forward(x, seeds)
        other = torch.tensor([int(seed) in self.known for seed in seeds])
        return torch.where(other[:, None], logits.roll(1, 1), logits)


class SeesTheGradient(Noisy):
    """A random defence with ten times the noise where a gradient is asked for."""

    def forward(self, x: Tensor, seeds: Any = None) -> Tensor:
        shaken = 10 * self.sigma * Noise.of(seeds, len(x))(1, x)
        return super().forward(x + shaken if x.requires_grad else x, seeds)


@dataclass(frozen=True, kw_only=True)
class Overstepping(SampledAttack):
    """One step of so many times the budget."""

    times: float = 2.0
    kind = title = "overstepping"  # type: ignore[assignment]

    def steps(self, classes: int) -> int:
        return 1

    def price(self) -> Cost:
        return Cost(0, 1)

    def steps_account(self, classes: int) -> tuple[Spending, ...]:
        return (self.spending(0, 1),)

    def start(self, problem: Problem, state: State) -> State:
        return state

    def step(self, problem: Problem, state: State, i: int) -> State:
        z = torch.full_like(problem.x, self.times * problem.threat.eps)
        state = record(problem, state, z, problem.expect(z, MARGIN, self.eot, i))
        return {**state, "best": z}


def seeds_of_the(which: str) -> set[int]:
    """All that a defence can know beforehand: seeds follow from the run's own, the dataset index and the attack."""
    unit = Unit(0, MOMENTUM.name, 0, COUNT)
    seeds = attack_seeds(unit, range(COUNT))
    if which == "attack":
        return {seed for step in range(-1, 12) for seed in sample_seeds(seeds, step, 4)}
    return set(evaluation_seeds(Job(Noisy(), THREAT, {MOMENTUM.name: MOMENTUM}, DEFAULT_RULES), unit, seeds))


def plain(x: Tensor) -> Tensor:
    return x


DEFECTS = {
    "gradient times noise": ((Before(_Shaken.apply),), (Before(plain),), "audit disagrees"),
    "detached step": (
        (Defense(lambda x: x + 0.5 * x.square().detach(), Linear(5, 64)),),
        (Defense(lambda x: x + 0.5 * x.square(), Linear(5, 64)),),
        "audit disagrees",
    ),
    "rounded input": ((Before(lambda x: (50 * x).round() / 50),), (Before(plain),), "exactly zero"),
    "one sample": ((Noisy(), PGD(iterations=10)), (Noisy(), MOMENTUM), "one EOT sample per step"),
    "no momentum": ((Noisy(), MomentumPGD(iterations=4, momentum=0.0)), (Noisy(), MOMENTUM), "one EOT sample per step"),
    "saturated loss": ((Before(plain, 1e5),), (Before(plain),), "zero in float32"),
    "budget cheat": (
        (Before(plain), Overstepping()),
        (Before(plain), Overstepping(times=1.0)),
        "8 of 8 perturbations exceeded",
    ),
    "seeds of the attack": (
        (KnowsItsSeeds(seeds_of_the("attack")), MOMENTUM),
        (Noisy(), MOMENTUM),
        "With the seeds of the attack",
    ),
    "seeds of the evaluation": (
        (KnowsItsSeeds(seeds_of_the("evaluation")), MOMENTUM),
        (KnowsItsSeeds(set()), MOMENTUM),
        "With the seeds of the evaluation",
    ),
    "sees the gradient": ((SeesTheGradient(), MOMENTUM), (Noisy(), MOMENTUM), "when a gradient is asked for"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_and_its_honest_twin_is_not_accused(name):
    planted, twin, words = DEFECTS[name]
    assert any(words in text for text in evaluated(*planted).warnings)
    assert not any(words in text for text in evaluated(*twin).warnings)


def test_a_perturbation_outside_the_budget_gains_nothing():
    cheat, honest = (evaluated(Before(plain), Overstepping(times=times)) for times in (2.0, 1.0))
    predictions = [[row.predictions for row in found.rows if row.attack == "overstepping"] for found in (cheat, honest)]
    assert predictions[0] == predictions[1]


def test_an_honest_defence_is_accused_of_knowing_its_seeds_in_less_than_one_of_thousand_runs():
    """10,000 runs of 8 images and 10 samples, each image with its own share of right samples."""
    gen = torch.Generator().manual_seed(0)
    share = torch.rand(10_000, 8, generator=gen)
    known, fresh = ((torch.rand(10_000, 8, 10, generator=gen) < share[..., None]).sum(-1) for _ in range(2))
    runs = zip(known.tolist(), fresh.tolist(), strict=True)
    accused = sum(looks_at_seeds("the attack", a, b, 10) is not None for a, b in runs)
    assert accused <= 3
    assert looks_at_seeds("the attack", [10] * 8, [5] * 8, 10) == (
        "With the seeds of the attack 100 % of samples are right, with unpredictable ones 50 %: it knows its seeds."
    )

"""The state of an attack under way: a dict of tensors with one row per image that holds everything.

    seed, clean        the image's seed, and its logits without perturbation
    best, rank         the strongest perturbation so far, and how it ranks
    last, now          the last iterate, and how it ranks
    gradients …        counters: evaluations of the model, calls of its network and classifier, bad gradients

Perturbations are ranked by the margin of the mean logits over the EOT samples, max_{k≠y} z_k - z_y: positive means
misclassified, larger means misclassified more firmly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

import torch
from torch import Tensor

from diffpure.attacks.expectation import EOT, Expectation, expect
from diffpure.attacks.losses import Model, Objective, margin
from diffpure.diffusion.gradients import GradientMode
from diffpure.errors import InputError
from diffpure.meter import CALLS
from diffpure.noise import Noise
from diffpure.threats import ThreatModel, wide

State = dict[str, Tensor]

SPENT: Final = ("gradients", "queries", *CALLS)  # evaluations of the model, and calls of its network and classifier
COUNTERS: Final = (*SPENT, "zero", "nonfinite")  # zero, nonfinite: how many gradients were
COMMON: Final = ("seed", "clean", "best", "rank", "last", "now", *COUNTERS)


@final
@dataclass(frozen=True)
class Problem:
    """The model, the images x (B, C, H, W), their labels y (B,), the threat, and one seed per image."""

    model: Model
    x: Tensor
    y: Tensor
    threat: ThreatModel
    seeds: tuple[int, ...]

    def under(self, mode: GradientMode | None) -> Problem:
        """The problem with another gradient mode of the model's purifier."""
        if mode is None:
            return self
        if hasattr(self.model, "with_gradient"):
            return replace(self, model=self.model.with_gradient(mode))
        if mode.approximate:
            raise InputError(f"The attack names the gradient {mode.name!r}, but the model has no purifier.")
        return self  # autograd through a plain model is exact

    def rows(self, keep: Tensor) -> Problem:
        """The problem of some of the images; keep (B,) bool."""
        kept = tuple(s for s, k in zip(self.seeds, keep.tolist(), strict=True) if k)
        return replace(self, x=self.x[keep], y=self.y[keep], seeds=kept)

    def expect(
        self,
        z: Tensor,
        objective: Objective,
        eot: EOT,
        step: int,
        *,
        target: Tensor | None = None,
        gradient: bool = False,
    ) -> Expectation:
        """The expectation at the perturbed images; the gradient is with respect to z."""
        images = self.threat.apply(self.x, z)
        seen = expect(self.model, images, self.y, objective, eot, self.seeds, step, target=target, gradient=gradient)
        if seen.gradient is None:
            return seen
        return replace(seen, gradient=self.threat.pullback(self.x, z, seen.gradient))


@final
@dataclass(frozen=True)
class AttackRun:
    """An attack under way, or done: `state` after `step` of `steps` steps."""

    step: int
    steps: int
    state: State

    @property
    def done(self) -> bool:
        """Whether all steps are taken."""
        return self.step >= self.steps

    @property
    def z(self) -> Tensor:
        """The strongest perturbation so far."""
        return self.state["best"]

    @property
    def misclassified(self) -> Tensor:
        """Which images the mean over the attack's own EOT samples misclassifies: (B,) bool."""
        return self.state["rank"] > 0

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each image; every start, step and sample follows from it."""
        return Noise.of(self.state["seed"], len(self.state["seed"])).seeds

    @property
    def spent(self) -> tuple[int, int]:
        """Gradient evaluations and queries, of all images together."""
        return int(self.state["gradients"].sum()), int(self.state["queries"].sum())

    def tensors(self) -> State:
        """Everything as tensors, to be saved."""
        return {**self.state, "at": torch.tensor([self.step, self.steps])}

    @classmethod
    def of(cls, tensors: State) -> AttackRun:
        """The run that was saved."""
        step, steps = tensors["at"].tolist()
        return cls(step, steps, {k: v for k, v in tensors.items() if k != "at"})


def first_state(problem: Problem, seen: Expectation) -> State:
    """The state before the first step, after an evaluation of the unperturbed images."""
    z = problem.threat.zeros(problem.x)
    count = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    signed = [s - (1 << 64) if s >> 63 else s for s in problem.seeds]  # 64 bits, as a tensor holds them
    return {
        "seed": torch.tensor(signed, dtype=torch.int64, device=z.device),
        "clean": seen.loss[:, None] if seen.logits is None else seen.logits,
        **dict.fromkeys(("best", "last"), z),
        **dict.fromkeys(("rank", "now"), rank(seen, problem.y)),
        **{key: count + seen.spent[key] for key in SPENT},
        **dict.fromkeys(("zero", "nonfinite"), count),
    }


def rank(seen: Expectation, y: Tensor) -> Tensor:
    """How good a perturbation is: the margin of the mean logits, or the loss where there are none; (B,), wide."""
    return wide(seen.loss if seen.logits is None else margin(seen.logits, y))


def record(problem: Problem, state: State, z: Tensor, seen: Expectation, valid: Tensor | None = None) -> State:
    """The state with an expectation counted, and z kept where it ranks higher than the best so far (and is valid)."""
    value = rank(seen, problem.y)
    better = value > state["rank"] if valid is None else (value > state["rank"]) & valid
    state = {
        **state,
        "best": choose(better, z, state["best"]),
        "rank": torch.where(better, value, state["rank"]),
        "last": z,
        "now": value,
        **{key: state[key] + seen.spent[key] for key in SPENT},
    }
    if seen.gradient is None:
        return state
    flat = seen.gradient.flatten(1)
    return {
        **state,
        "zero": state["zero"] + (flat == 0).all(1).long(),
        "nonfinite": state["nonfinite"] + (~torch.isfinite(flat)).any(1).long(),
    }


def choose(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where the image's condition (B,) holds, else b; both (B, ...)."""
    return torch.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b)


def usable(seen: Expectation) -> Tensor:
    """The gradient, with zero for what is not finite: one bad number must not spoil the iterate."""
    if seen.gradient is None:
        raise InputError("This expectation was taken without a gradient.")
    return torch.nan_to_num(seen.gradient, nan=0.0, posinf=0.0, neginf=0.0)


def common(state: State) -> State:
    """What one attack of a suite hands to the next."""
    return {k: state[k] for k in COMMON}


def inside(state: State) -> State:
    """The state of the attack that another attack runs."""
    return {k.removeprefix("inner/"): v for k, v in state.items() if k.startswith("inner/")}


def around(state: State, inner: State) -> State:
    """The outer state with the inner one advanced, and what that cost counted."""
    before = inside(state)
    counted = {k: state[k] + inner[k] - (before[k] if before else 0) for k in COUNTERS}
    return {**common(state), **counted, **{f"inner/{k}": v for k, v in inner.items()}}


def put(state: State, changed: State, rows: Tensor) -> State:
    """The state with the rows that changed; the others keep theirs, or zeros where a key is new."""
    out = {}
    for key, value in changed.items():
        old = state[key] if key in state else value.new_zeros(len(rows), *value.shape[1:])
        out[key] = old.index_put((rows,), value)
    return out

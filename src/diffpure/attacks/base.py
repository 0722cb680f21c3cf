"""What an attack is: a small value that moves a state, one step at a time.

    state ← step(problem, state, i),      i = 0 … steps - 1

The state is a dict of tensors with one row an image and holds everything: the iterate, the best perturbation so far,
the counters, the seeds. So an attack can be stopped after any step, saved, and continued to the same result; images
can leave it (misclassified, or out of budget) by leaving their rows out; and a result does not depend on the batch.

Perturbations are ranked by the margin of the mean logits over the samples of a look, max_{k≠y} z_k - z_y: positive
means misclassified, larger means misclassified more firmly. The unperturbed image is the first candidate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from diffpure.attacks.expectation import EOT, ONE_SAMPLE, Expectation, expect
from diffpure.attacks.losses import MARGIN, Model, Objective, margin
from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.threats import ThreatModel, wide
from diffpure.validate import check_images, check_labels

State = dict[str, Tensor]
OnStep = Callable[["AttackRun"], bool | None]

COUNTERS = ("gradients", "queries", "zero", "nonfinite")  # zero, nonfinite: looks whose gradient was
COMMON = ("seed", "clean", "best", "rank", "last", "now", *COUNTERS)  # last, now: the last look's z and its rank


@final
@dataclass(frozen=True)
class Cost:
    """Model evaluations of one image: with a gradient, and without. As a limit, None means as many as it takes."""

    gradients: int | None = None
    queries: int | None = None


@final
@dataclass(frozen=True)
class Problem:
    """The model, the images x (B, C, H, W), their labels y (B,), the threat, and one seed an image."""

    model: Model
    x: Tensor
    y: Tensor
    threat: ThreatModel
    seeds: tuple[int, ...]

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
        """Expectation at the perturbed images; the gradient is with respect to z."""
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
        """Which images the mean over the attack's own samples misclassifies: (B,) bool."""
        return self.state["rank"] > 0

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each image; every start, move and draw follows from it."""
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


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """An attack value; called, it returns the strongest perturbation it found, inside the threat.

    skip_misclassified: leave an image alone once the mean over the EOT samples misclassifies it; by default every
    image is optimised to the end, also those that are misclassified from the start.
    """

    skip_misclassified: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name for tables."""

    @property
    @abstractmethod
    def ranking(self) -> EOT:
        """The samples with which perturbations are ranked."""

    @property
    def objective(self) -> Objective:
        """What the first look, at the unperturbed images, asks."""
        return MARGIN

    @abstractmethod
    def steps(self, classes: int) -> int:
        """How many steps it takes."""

    @abstractmethod
    def price(self) -> Cost:
        """What one step of one image costs at most."""

    @abstractmethod
    def start(self, problem: Problem, state: State) -> State:
        """The state before the first step; given with what all attacks share."""

    @abstractmethod
    def step(self, problem: Problem, state: State, i: int) -> State:
        """The state after step i."""

    def cost(self, classes: int) -> Cost:
        """What one image costs at most, the look at the unperturbed image included."""
        price, steps = self.price(), self.steps(classes)
        return Cost((price.gradients or 0) * steps, (price.queries or 0) * steps + self.ranking.samples)

    def __call__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        *,
        seeds: Sequence[int] | Tensor | None = None,
        limit: Cost | None = None,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """The strongest perturbation z found; x (B, C, H, W) in [0, 1], y (B,), seeds one an image or fresh."""
        return self.run(model, x, y, threat, seeds=seeds, limit=limit, on_step=on_step).z

    def run(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        *,
        seeds: Sequence[int] | Tensor | None = None,
        limit: Cost | None = None,
        on_step: OnStep | None = None,
        resume: AttackRun | None = None,
    ) -> AttackRun:
        """The whole run: called after every step, `on_step` may return True to stop; `resume` continues such a run.

        `limit` bounds what one image may cost: a step that would exceed it is not taken.
        """
        check_images(x)
        check_labels(y, len(x))
        x = x.detach().clamp(0, 1)
        if resume is None:
            problem = Problem(model, x, y, threat, Noise.of(seeds, len(x)).seeds)
            run = self.begin_run(problem)
        else:
            self._check_resume(resume, len(x))
            problem, run = Problem(model, x, y, threat, resume.seeds), resume
        while not run.done:
            run = AttackRun(run.step + 1, run.steps, self.advance(problem, run.state, run.step, limit))
            if on_step is not None and on_step(run):
                break
        return run

    def _check_resume(self, run: AttackRun, images: int) -> None:
        classes = run.state["clean"].shape[1]
        if len(run.z) != images or run.steps != self.steps(classes):
            began = f"{len(run.z)} images and {run.steps} steps"
            raise InputError(f"The run to continue has {began}, this attack {images} and {self.steps(classes)}.")

    def begin_run(self, problem: Problem) -> AttackRun:
        """The run before its first step: one look at the unperturbed images."""
        z = problem.threat.zeros(problem.x)
        seen = problem.expect(z, self.objective, self.ranking, -1)
        count = torch.zeros(len(z), dtype=torch.int64, device=z.device)
        signed = [s - (1 << 64) if s >> 63 else s for s in problem.seeds]  # 64 bits, as a tensor holds them
        state = {
            "seed": torch.tensor(signed, dtype=torch.int64, device=z.device),
            "clean": seen.loss[:, None] if seen.logits is None else seen.logits,
            "best": z,
            "last": z,
            "rank": rank(seen, problem.y),
            "now": rank(seen, problem.y),
            "gradients": count,
            "queries": count + self.ranking.samples,
            "zero": count,
            "nonfinite": count,
        }
        return AttackRun(0, self.steps(state["clean"].shape[1]), self.start(problem, state))

    def advance(self, problem: Problem, state: State, i: int, limit: Cost | None = None) -> State:
        """Step i for the images that still take part; the others keep their rows."""
        rows = self._active(state, limit)
        if not rows.any():
            return state
        if rows.all():
            return self.step(problem, state, i)
        moved = self.step(problem.rows(rows), {k: v[rows] for k, v in state.items()}, i)
        return _put(state, moved, rows)

    def _active(self, state: State, limit: Cost | None) -> Tensor:
        active = torch.ones_like(state["rank"], dtype=torch.bool)
        if self.skip_misclassified and state["clean"].shape[1] > 1:
            active &= state["rank"] <= 0
        price, limit = self.price(), limit or Cost()
        if limit.gradients is not None:
            active &= state["gradients"] + (price.gradients or 0) <= limit.gradients
        if limit.queries is not None:
            active &= state["queries"] + (price.queries or 0) <= limit.queries
        return active


@dataclass(frozen=True, kw_only=True)
class SampledAttack(Attack):
    """An attack that looks at the model itself, with its own samples."""

    eot: EOT = ONE_SAMPLE

    @property
    def ranking(self) -> EOT:
        return self.eot


def rank(seen: Expectation, y: Tensor) -> Tensor:
    """How good a perturbation is: the margin of the mean logits, or the loss where there are none; (B,), wide."""
    return wide(seen.loss if seen.logits is None else margin(seen.logits, y))


def record(
    problem: Problem, state: State, z: Tensor, seen: Expectation, eot: EOT, valid: Tensor | None = None
) -> State:
    """The state with one look counted, and z kept where it ranks higher than the best so far (and is valid)."""
    value = rank(seen, problem.y)
    better = value > state["rank"] if valid is None else (value > state["rank"]) & valid
    best = {"best": choose(better, z, state["best"]), "rank": torch.where(better, value, state["rank"])}
    state = {**state, **best, "last": z, "now": value}
    if seen.gradient is None:
        return {**state, "queries": state["queries"] + eot.samples}
    flat = seen.gradient.flatten(1)
    return {
        **state,
        "gradients": state["gradients"] + eot.samples,
        "zero": state["zero"] + (flat == 0).all(1).long(),
        "nonfinite": state["nonfinite"] + (~torch.isfinite(flat)).any(1).long(),
    }


def choose(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where the image's condition (B,) holds, else b; both (B, ...)."""
    return torch.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b)


def usable(seen: Expectation) -> Tensor:
    """The gradient of a look, with zero for what is not finite: one bad number must not spoil the iterate."""
    if seen.gradient is None:
        raise InputError("This look was taken without a gradient.")
    return torch.nan_to_num(seen.gradient, nan=0.0, posinf=0.0, neginf=0.0)


def common(state: State) -> State:
    """What one attack of a suite hands to the next."""
    return {k: state[k] for k in COMMON}


def inside(state: State) -> State:
    """The state of the attack that another attack runs."""
    return {k.removeprefix("inner/"): v for k, v in state.items() if k.startswith("inner/")}


def around(state: State, inner: State) -> State:
    """The outer state with the inner one moved on, and what that cost counted."""
    before = inside(state)
    counted = {k: state[k] + inner[k] - (before[k] if before else 0) for k in COUNTERS}
    return {**common(state), **counted, **{f"inner/{k}": v for k, v in inner.items()}}


def _put(state: State, moved: State, rows: Tensor) -> State:
    """The state with the rows that moved; rows that did not keep theirs, or zeros where a key is new."""
    out = {}
    for key, value in moved.items():
        old = state[key] if key in state else value.new_zeros(len(rows), *value.shape[1:])
        out[key] = old.index_put((rows,), value)
    return out

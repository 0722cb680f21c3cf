"""What an attack is: a small value that changes a state, one step at a time.

    state ← step(problem, state, i),      i = 0 … steps - 1

The state holds everything (state.py). So an attack can be stopped after any step, saved, and continued to the same
result; images can leave it (misclassified, or out of budget) by leaving their rows out; and a result does not depend
on the batch. The unperturbed image is the first candidate.

An attack says what it is made of (`parts`), and one traversal (`walk`, `mapped`) serves specs, checks and estimates.
The gradient through the purifier is the attacker's choice, so it is a field of the attack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, final

import torch
from torch import Tensor

from diffpure.attacks.expectation import EOT, ONE_SAMPLE
from diffpure.attacks.losses import MARGIN, Model, Objective
from diffpure.attacks.state import AttackRun, Problem, State, first_state, put
from diffpure.diffusion.gradients import Gradient, GradientMode, gradient_mode
from diffpure.errors import InputError
from diffpure.named import check_fields
from diffpure.noise import Noise, Seeds
from diffpure.threats import AnyThreat, threat_of
from diffpure.validate import as_images, as_labels

OnStep = Callable[[AttackRun], bool | None]


@final
@dataclass(frozen=True)
class Cost:
    """Model evaluations per image: with a gradient, and without. As a limit, None means as many as it takes."""

    gradients: int | None = None
    queries: int | None = None


@final
@dataclass(frozen=True)
class Spending:
    """Evaluations per image of the model (part ""), or of a part of it, through one gradient mode (None: its own)."""

    gradients: int
    queries: int
    mode: GradientMode | None = None
    part: str = ""


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """An attack value; called, it returns the strongest perturbation it found, inside the threat.

    gradient: the mode in which it goes through the purifier, by name, table or value; without one the defence's own.
    label: what its rows are called, its kind by default.   skip_misclassified: leave an image alone once the mean over
    the EOT samples misclassifies it; by default every image is optimised to the end, also those that are misclassified
    from the start.
    """

    gradient: Gradient | None = None
    label: str = ""
    skip_misclassified: bool = False

    def __post_init__(self) -> None:
        if self.gradient is not None:
            object.__setattr__(self, "gradient", gradient_mode(self.gradient))
        check_fields(self)

    # ------------------------------------------------------------------------------------------ what it is called

    @property
    def mode(self) -> GradientMode | None:
        """The gradient mode that it names."""
        return self.gradient if isinstance(self.gradient, GradientMode) else None

    @property
    def name(self) -> str:
        """The name of its rows, with the gradient modes that it and its parts name: `pgd-ce`, `pgd-ce@bpda`."""
        modes = dict.fromkeys(attack.mode.name for attack in self.walk() if attack.mode is not None)
        return "@".join([self.label or self.kind, *filter(None, ["/".join(modes)])])

    @property
    @abstractmethod
    def kind(self) -> str:
        """A short name of what it does, without its gradient."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What it does in the field's words, with its parameters, without its gradient."""

    # --------------------------------------------------------------------------------------- what it is made of

    def parts(self) -> tuple[Attack, ...]:
        """The attacks that it is made of."""
        values = [getattr(self, f.name) for f in fields(self)]
        nested = [v if isinstance(v, tuple) else (v,) for v in values]
        return tuple(v for group in nested for v in group if isinstance(v, Attack))

    def walk(self) -> Iterator[Attack]:
        """The attack and everything that it is made of."""
        yield self
        for part in self.parts():
            yield from part.walk()

    def mapped(self, change: Callable[[Any], Any]) -> Self:
        """The attack with a change made to each of its parts, the innermost first, and to itself."""

        def inner(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(inner(v) for v in value)
            return value.mapped(change) if isinstance(value, Attack) else value

        made: Self = change(replace(self, **{f.name: inner(getattr(self, f.name)) for f in fields(self)}))
        return made

    def with_eot(self, value: int | Mapping[str, Any] | EOT) -> Self:
        """The attack with other EOT samples in each of its parts that takes some."""
        return self.mapped(lambda a: replace(a, eot=EOT.of(value, a.eot)) if isinstance(a, SampledAttack) else a)

    def with_per_call(self, images: int) -> Self:
        """The attack with at most so many images in one call of the model."""
        return self.mapped(lambda a: a.with_calls(min(images, a.eot.per_call)) if isinstance(a, SampledAttack) else a)

    def unsampled(self) -> Self:
        """The attack on a model that is not random: one sample of everything."""
        return self.mapped(lambda a: a.alone())

    def alone(self) -> Self:
        """The attack itself, without its parts, with one sample of everything."""
        return self

    # --------------------------------------------------------------------------------------------- what it costs

    @abstractmethod
    def steps(self, classes: int) -> int:
        """How many steps it takes."""

    @abstractmethod
    def price(self) -> Cost:
        """What one step costs per image at most."""

    def account(self, classes: int) -> tuple[Spending, ...]:
        """What it spends per image: exactly, or at most where it stops early or confirms what it found."""
        return Spending(0, self.ranking.samples, self.mode), *self.steps_account(classes)

    @abstractmethod
    def steps_account(self, classes: int) -> tuple[Spending, ...]:
        """What its steps spend per image, after the first evaluation of the unperturbed image."""

    @property
    def uses_gradients(self) -> bool:
        """Whether it differentiates the model at all."""
        return any(part.price().gradients for part in self.walk())

    # ---------------------------------------------------------------------------------------------- how it works

    @property
    @abstractmethod
    def ranking(self) -> EOT:
        """The samples with which perturbations are ranked."""

    @property
    def objective(self) -> Objective:
        """What is asked at the unperturbed images."""
        return MARGIN

    @abstractmethod
    def start(self, problem: Problem, state: State) -> State:
        """The state before the first step; given with what all attacks share."""

    @abstractmethod
    def step(self, problem: Problem, state: State, i: int) -> State:
        """The state after step i."""

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
        """The strongest perturbation z found; x (B, C, H, W) in [0, 1], y (B,), seeds one per image or fresh."""
        return self.run(model, x, y, threat, seeds=seeds, limit=limit, on_step=on_step).z

    def run(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        threat: AnyThreat,
        *,
        seeds: Seeds = None,
        limit: Cost | None = None,
        on_step: OnStep | None = None,
        resume: AttackRun | None = None,
    ) -> AttackRun:
        """The whole run: called after every step, `on_step` may return True to stop; `resume` continues such a run.

        `limit` bounds what one image may cost: a step that would exceed it is not taken.
        """
        if self.uses_gradients and torch.is_inference_mode_enabled():
            raise InputError("An attack follows gradients, which torch.inference_mode() forbids; use torch.no_grad().")
        x = as_images(x).detach().clamp(0, 1)
        y = as_labels(y, len(x)).to(x.device)
        if resume is None:
            problem = Problem(model, x, y, threat_of(threat), Noise.of(seeds, len(x)).seeds)
            run = self.begin_run(problem)
        else:
            self._check_resume(resume, len(x))
            problem, run = Problem(model, x, y, threat_of(threat), resume.seeds), resume
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
        """The run before its first step: one evaluation of the unperturbed images."""
        problem = problem.under(self.mode)
        seen = problem.expect(problem.threat.zeros(problem.x), self.objective, self.ranking, -1)
        state = first_state(problem, seen)
        return AttackRun(0, self.steps(state["clean"].shape[1]), self.start(problem, state))

    def advance(self, problem: Problem, state: State, i: int, limit: Cost | None = None) -> State:
        """Step i for the images that still take part; the others keep their rows."""
        rows = self._active(state, limit)
        if not rows.any():
            return state
        problem = problem.under(self.mode)
        if rows.all():
            return self.step(problem, state, i)
        return put(state, self.step(problem.rows(rows), {k: v[rows] for k, v in state.items()}, i), rows)

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
    """An attack that evaluates the model itself, with its own EOT samples.

    eot: EOT samples per step, a number or a table.
    """

    eot: EOT = ONE_SAMPLE

    def __post_init__(self) -> None:
        object.__setattr__(self, "eot", EOT.of(self.eot))
        super().__post_init__()

    @property
    def ranking(self) -> EOT:
        return self.eot

    @property
    def averaged_samples(self) -> int:
        """Over how many EOT samples a step's direction is averaged."""
        return self.eot.samples

    def alone(self) -> Self:
        return replace(self, eot=replace(self.eot, samples=1))

    def with_calls(self, images: int) -> Self:
        """The attack with so many images in one call of the model."""
        return replace(self, eot=replace(self.eot, per_call=images))

    def spending(self, with_gradient: int, without: int) -> Spending:
        """What so many expectations with and without a gradient cost per image."""
        gradients, queries = self.eot.spending(True)
        return Spending(with_gradient * gradients, with_gradient * queries + without * self.eot.samples, self.mode)

    def titled(self, *words: str) -> str:
        """The words of a title, and the EOT samples."""
        fixed = ", fixed noise" if self.eot.fixed else ""
        eot = f"EOT {self.eot.samples}{fixed}" if self.eot.samples > 1 or fixed else ""
        return ", ".join(filter(None, (*words, eot)))

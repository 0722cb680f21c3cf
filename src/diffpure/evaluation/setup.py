"""An evaluation that has passed every check, but has not begun: what is computed, and the header that names it.

The header holds everything that fixes the rows (`IDENTITY`): a run goes on, and is verified, only where all of it is
what it was. Attacks and threats are named by their non-default values, models by `identify`.
"""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from diffpure import __version__
from diffpure.attacks import EOT, Attack, SampledAttack, by_name
from diffpure.attacks.losses import Model, call
from diffpure.attacks.presets import AnyAttack
from diffpure.errors import InputError
from diffpure.evaluation.cost import Estimate, estimate, images_per_call
from diffpure.evaluation.units import Batch, Job, Seeded, Unit, device_of, plan
from diffpure.models.checkpoints import digest
from diffpure.models.identity import Unidentifiable, identify
from diffpure.named import brief, canonical, checked
from diffpure.noise import whole_number
from diffpure.purify import Defense, title_of
from diffpure.results.rows import CLEAN, DEFAULT_RULES, FORMAT, Rule, slug
from diffpure.threats import AnyThreat, threat_of
from diffpure.validate import as_images, as_labels, check_logits

# What fixes the rows of a run.
IDENTITY: Final = (
    "format", "spec", "model", "data", "indices", "threat", "attacks", "rules", "seeds", "batch",
)  # fmt: skip

Attacks = AnyAttack | Sequence[AnyAttack] | Mapping[str, AnyAttack]


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an evaluation beside its model, images, labels, threat and attacks.

    eot: EOT samples for every attack that takes some.   rules: when an image counts as right.   seeds: repeat it all.
    batch: images attacked together; it decides how sums round.   per_call: images in one call of the model, else
    chosen to fit `memory` bytes (half of what is free).   indices: the images' dataset indices, which name their noise.
    name: what the result is called.   class_names: of the labels, for pictures.   spec: what it was made from.
    """

    eot: int | Mapping[str, Any] | EOT | None = None
    rules: Sequence[str | Rule] = DEFAULT_RULES
    seeds: int | Sequence[int] = (0,)
    batch: int = 16
    per_call: int | None = None
    memory: int | None = None
    indices: Sequence[int] | None = None
    name: str = ""
    class_names: Sequence[str] = ()
    spec: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        kinds = {"batch": int, "per_call": int | None, "memory": int | None, "name": str, "class_names": Sequence}
        for key, kind in kinds.items():
            checked(getattr(self, key), kind, f"{key!r}, setting of an evaluation")
        if self.batch < 1 or (self.per_call is not None and self.per_call < 1) or not self.parsed_rules:
            raise InputError("An evaluation needs at least one rule, and a batch and per_call of at least 1.")

    @property
    def parsed_rules(self) -> tuple[Rule, ...]:
        """The decision rules."""
        several = isinstance(self.rules, Sequence) and not isinstance(self.rules, str)
        return tuple(map(Rule.parse, self.rules if several else (self.rules,)))  # type: ignore[arg-type]


@final
@dataclass(frozen=True)
class Evaluation:
    """A checked evaluation: the job, its images (N, C, H, W), their labels (N,), and the header of its run."""

    job: Job
    images: Tensor
    labels: Tensor
    header: Mapping[str, Any]
    classes: int

    @property
    def indices(self) -> tuple[int, ...]:
        """The images' dataset indices."""
        return tuple(self.header["indices"])

    @property
    def units(self) -> list[Unit]:
        """The units of the run."""
        return plan(len(self.images), self.header["batch"], tuple(self.job.attacks), self.header["seeds"])

    def batch(self, unit: Unit) -> Batch:
        """The images of a unit, where they lie."""
        part = slice(unit.start, unit.stop)
        return Batch(self.images[part], self.labels[part], self.indices[part])

    def keys(self, unit: Unit) -> list[tuple[int, int, str]]:
        """The keys of the rows of a unit."""
        return [(unit.seed, index, unit.attack) for index in self.indices[unit.start : unit.stop]]

    def estimate(self, units: Sequence[Unit] | None = None) -> Estimate:
        """What the run, or some of its units, will cost on this machine."""
        return estimate(self.job, self.units if units is None else units, self.images, self.classes)

    def planned(self, header: Mapping[str, Any]) -> Evaluation:
        """The same with the plan of the run that it goes on with."""
        return replace(self, job=replace(self.job, per_call=header["per_call"]), header=dict(header))


def set_up(
    model: Model,
    images: Any,
    labels: Any,
    threat: AnyThreat,
    attacks: Attacks = (),
    settings: Settings | None = None,
) -> Evaluation:
    """Check everything, and write the header."""
    settings = settings or Settings()
    if not callable(model):
        raise InputError(f"A model is called with images and returns logits, got {type(model).__name__}.")
    images = as_images(images, dtype=torch.float32)
    labels = as_labels(labels, len(images))
    indices = range(len(images)) if settings.indices is None else settings.indices
    seeds: Any = (settings.seeds,) if isinstance(settings.seeds, Integral) else settings.seeds
    chosen, numbers = distinct(indices, "dataset index", len(images)), distinct(seeds, "seed", None)
    refuse_training(model)
    first = images[:2].to(device_of(model))
    model, classes = _repeatable(model, first)
    as_labels(labels, len(images), classes)
    by_names = _checked(by_name(attacks), settings.eot)
    if not getattr(model, "stochastic", False):
        by_names = {name: attack.unsampled() for name, attack in by_names.items()}
    per_call = settings.per_call
    if per_call is None:
        per_call = images_per_call(model, tuple(by_names.values()), first[:1], settings.memory)
    job = Job(model, threat_of(threat), by_names, settings.parsed_rules, per_call)
    header = {
        "format": FORMAT,
        "name": settings.name,
        "spec": settings.spec,
        "model": about_model(model),
        "data": digest(images, labels),
        "indices": chosen,
        "classes": list(settings.class_names),
        "threat": brief(job.threat),
        "budget": canonical(job.threat),
        "attacks": {key: _about_attack(attack, model, classes) for key, attack in job.attacks.items()},
        "rules": [str(rule) for rule in job.rules],
        "seeds": numbers,
        "batch": settings.batch,
        "per_call": job.per_call,
        **surroundings(first.device),
    }
    return Evaluation(job, images, labels, json.loads(json.dumps(header)), classes)


def surroundings(device: torch.device) -> dict[str, Any]:
    """When, with what and where a run is made."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "versions": {"diffpure": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"device": str(device), "processor": platform.machine()},
    }


def distinct(values: Sequence[int], what: str, count: int | None) -> list[int]:
    """Integers, each once, and as many as there are images where that is asked."""
    numbers = [whole_number(value) for value in values]
    if len(set(numbers)) < len(numbers) or not numbers or (count is not None and len(numbers) != count):
        wanted = "at least one" if count is None else f"one per image, {count} in all"
        raise InputError(f"Every {what} is an integer that is given once, {wanted}; got {list(values)[:8]}.")
    return numbers


def _checked(attacks: Mapping[str, Attack], eot: int | Mapping[str, Any] | EOT | None) -> dict[str, Attack]:
    """The attacks with their EOT samples, under names that files can have."""
    if CLEAN in attacks or len({slug(name) for name in attacks}) < len(attacks):
        raise InputError(f"Attacks have names of their own, none of them {CLEAN!r}; got {', '.join(attacks)}.")
    return {name: attack if eot is None else attack.with_eot(eot) for name, attack in attacks.items()}


def refuse_training(model: Model) -> None:
    """Refuse a model with layers that are random in training."""
    if isinstance(model, nn.Module):
        for module in model.modules():
            random = isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd)
            if random and module.training:
                raise InputError("The model is in training mode; call its eval() before it is evaluated.")


@torch.no_grad()
def _repeatable(model: Model, x: Tensor) -> tuple[Model, int]:
    """The model, seeded image by image where two calls with equal seeds differ, and its number of classes."""
    first, second = (check_logits(call(model, x, range(len(x))), len(x)) for _ in range(2))
    if (first - second).abs().amax() > 1e-4 * first.abs().amax():
        model = Seeded(model)
    return model, first.shape[1]


def about_model(model: Model) -> dict[str, Any]:
    """A model in words, and what names its parts; a part that cannot be identified is None."""
    purifier = getattr(model, "purifier", None)
    mode = getattr(purifier, "gradient", None)
    found: dict[str, str | None] = {}
    for name, part in (model.parts() if hasattr(model, "parts") else {"model": model}).items():
        try:
            found[name] = identify(part)
        except Unidentifiable:
            found[name] = None
    return {
        "title": title_of(model),
        "gradient": "exact" if mode is None else mode.name,
        "approximate": (mode is not None and mode.approximate) or _straight_through(model),
        "stochastic": bool(getattr(model, "stochastic", False)),
        "purifier": None if purifier is None else repr(purifier),
        "parts": found,
    }


def _straight_through(model: Model) -> bool:
    """Whether a model's vote has the gradient of something else."""
    return isinstance(model, Defense) and model.vote is not None and model.vote.approximate


def _about_attack(attack: Attack, model: Model, classes: int) -> dict[str, Any]:
    """An attack in words, with the gradient that it follows, and the values that fix it; of one that stops at confirmed
    images, also the chance that a stop is a mistake, and the gradients per image of one that never does."""
    own = getattr(getattr(model, "purifier", None), "gradient", None)
    modes = {part.mode.name: part.mode for part in attack.walk() if part.mode is not None}
    if not modes and own is not None and getattr(attack, "part", "") != "classifier":
        modes = {own.name: own}
    error = max(getattr(part, "stop", 0.0) for part in attack.walk())
    straight = _straight_through(model) and not isinstance(getattr(attack, "part", None), str)  # a part has no vote
    named = " and ".join(modes or ["exact"]) + (" straight-through" if straight else "")
    return {
        "title": attack.title,
        "gradient": named if attack.uses_gradients else "",
        "approximate": attack.uses_gradients and (straight or any(mode.approximate for mode in modes.values())),
        "samples": max([1, *(part.averaged_samples for part in attack.walk() if isinstance(part, SampledAttack))]),
        "value": canonical(attack),
        **({"stop": {"error": error, "gradients": sum(s.gradients for s in attack.account(classes))}} if error else {}),
    }

"""The work of an evaluation in units: one batch of images, one attack (or none), one seed.

A unit is a pure function of (job, unit, images), so it can be computed again, elsewhere, in any order, to the same
rows. All randomness is named by the image:

    image seed         = mix(seed of the run, dataset index of the image)
    attack seed        = mix(image seed, name of the attack)          its starts, its EOT samples
    evaluation samples = samples of mix(attack seed, EVALUATION)      fresh: the attack never saw them

Only for an attack that knows the noise (`EOT(fixed=True)`) the evaluation uses the noise that the attack was given.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from diffpure.attacks import Attack, AttackRun, sample_seeds
from diffpure.attacks.base import OnStep
from diffpure.attacks.losses import Model, call
from diffpure.attacks.state import COUNTERS, choose
from diffpure.meter import CALLS, metered
from diffpure.noise import Noise, mix
from diffpure.results.rows import CLEAN, Row, Rule, slug
from diffpure.threats import ThreatModel
from diffpure.validate import check_logits

EVALUATION: Final = 0x1D6E


@final
@dataclass(frozen=True)
class Unit:
    """Images start … stop of the evaluation, under one attack, for one seed."""

    seed: int
    attack: str
    start: int
    stop: int

    @property
    def file(self) -> str:
        """The name of the file with its adversarial images."""
        return f"{slug(self.attack)}-seed{self.seed}-{self.start:06d}.safetensors"


@final
@dataclass(frozen=True)
class Job:
    """What all units share; per_call: how many images one call of the model may hold."""

    model: Model
    threat: ThreatModel
    attacks: Mapping[str, Attack]
    rules: tuple[Rule, ...]
    per_call: int = 256

    @property
    def stochastic(self) -> bool:
        """Whether the model says that it is random."""
        return bool(getattr(self.model, "stochastic", False))

    @property
    def samples(self) -> int:
        """How many evaluation samples an image gets."""
        return max(rule.n for rule in self.rules) if self.stochastic else 1

    @property
    def averages(self) -> tuple[int, ...]:
        """The N of every "average of N" rule."""
        return tuple(sorted({rule.n for rule in self.rules if rule.kind == "average"})) if self.stochastic else ()


@final
@dataclass(frozen=True)
class Batch:
    """The images of a unit: x (B, C, H, W), y (B,), and their dataset indices."""

    x: Tensor
    y: Tensor
    indices: tuple[int, ...]

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(self.x.to(device), self.y.to(device), self.indices)


@final
@dataclass(frozen=True)
class Done:
    """The rows of a unit, and the tensors that it keeps (none for the unperturbed images)."""

    unit: Unit
    rows: tuple[Row, ...]
    tensors: dict[str, Tensor]


@final
@dataclass(frozen=True)
class Predictions:
    """What the evaluation samples of a batch gave: classes (B, D), the class of the mean logits of N samples, each
    (B,), and the calls that they cost per image."""

    classes: Tensor
    averages: dict[int, Tensor]
    calls: Mapping[str, int]

    def of(self, i: int) -> dict[str, Any]:
        """The part of image i, as a row holds it."""
        averages = {n: int(k[i]) for n, k in self.averages.items()}
        return {"predictions": tuple(self.classes[i].tolist()), "averages": averages}


def plan(count: int, batch: int, attacks: Sequence[str], seeds: Sequence[int]) -> list[Unit]:
    """All units of an evaluation, in the order in which one process does them."""
    spans = [(a, min(a + batch, count)) for a in range(0, count, batch)]
    return [Unit(seed, name, a, b) for seed in seeds for a, b in spans for name in (CLEAN, *attacks)]


def compute(job: Job, unit: Unit, batch: Batch, on_step: OnStep | None = None, resume: AttackRun | None = None) -> Done:
    """Attack the images of a unit, build the adversarial ones, check the budget, and classify them afresh."""
    began = time.perf_counter()
    seeds = attack_seeds(unit, batch.indices)
    if unit.attack == CLEAN:
        predictions = classify(job, batch.x, evaluation_seeds(job, unit, seeds))
        return Done(unit, _rows(unit, batch, predictions, began, {}), {})
    attack = job.attacks[unit.attack].with_per_call(job.per_call)
    run = attack.run(job.model, batch.x, batch.y, job.threat, seeds=seeds, on_step=on_step, resume=resume)
    within = job.threat.within(batch.x, run.z)
    found = torch.nan_to_num(run.z, nan=0.0, posinf=0.0, neginf=0.0)  # what is no number changes nothing
    z = choose(within, found, job.threat.project(batch.x, found))
    x = job.threat.apply(batch.x, z)
    predictions = classify(job, x, evaluation_seeds(job, unit, seeds))
    about = {"size": job.threat.size(found), "within": within, "misclassified": run.misclassified}
    rows = _rows(unit, batch, predictions, began, {**about, **{key: run.state[key] for key in COUNTERS}})
    kept = {"z": z, "images": x, "labels": batch.y, "indices": torch.tensor(batch.indices)}
    return Done(unit, rows, {key: value.detach().cpu() for key, value in kept.items()})


def _rows(
    unit: Unit, batch: Batch, predictions: Predictions, began: float, about: Mapping[str, Tensor]
) -> tuple[Row, ...]:
    """One row per image; `about`: what the attack did, each (B,)."""
    seconds = round((time.perf_counter() - began) / len(batch.indices), 4)
    rows = []
    for i, index in enumerate(batch.indices):
        own = {key: value[i].item() for key, value in about.items()}
        calls = {key: int(own.pop(key, 0)) + predictions.calls[key] for key in CALLS}
        label = int(batch.y[i])
        row: dict[str, Any] = {**predictions.of(i), **own, **calls, "seconds": seconds}
        rows.append(Row(seed=unit.seed, image=index, attack=unit.attack, label=label, **row))
    return tuple(rows)


def attack_seeds(unit: Unit, indices: Sequence[int]) -> tuple[int, ...]:
    """The seed of each image for this attack."""
    name = zlib.crc32(unit.attack.encode())
    return tuple(mix(mix(unit.seed, index), name) for index in indices)


def evaluation_seeds(job: Job, unit: Unit, seeds: Sequence[int]) -> tuple[int, ...]:
    """The seeds of the evaluation samples, `job.samples` per image, one image after the other."""
    attack = job.attacks.get(unit.attack)
    if attack is not None and attack.ranking.fixed:
        return sample_seeds(seeds, 0, job.samples, fixed=True)
    return sample_seeds(Noise(tuple(seeds)).child(EVALUATION).seeds, 0, job.samples)


@torch.no_grad()
def classify(job: Job, x: Tensor, seeds: Sequence[int]) -> Predictions:
    """Classify images x (B, C, H, W) with D samples each, at most `job.per_call` per call; seeds (B · D)."""
    samples, pieces = job.samples, []
    with metered() as calls:
        for a in range(0, len(x) * samples, job.per_call):
            b = min(a + job.per_call, len(x) * samples)
            images = x[torch.arange(a, b, device=x.device) // samples]
            pieces.append(check_logits(call(job.model, images, seeds[a:b]), b - a).cpu().double())
    logits = torch.cat(pieces).reshape(len(x), samples, -1)
    averages = {n: logits[:, :n].mean(1).argmax(1) for n in job.averages}
    return Predictions(logits.argmax(2), averages, {key: value // len(x) for key, value in calls.items()})


def device_of(model: Model) -> torch.device:
    """Where a model computes."""
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return torch.device("cpu")


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads: they split sums, so another number may round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@final
class Seeded(nn.Module):
    """A random model that takes no seeds, run image by image with torch's generator seeded for each: then its noise
    belongs to the image and an evaluation can be repeated, at the price of batches of one."""

    stochastic = True

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    @property
    def title(self) -> str:
        """What results call it."""
        return f"{getattr(self.model, 'title', '') or type(self.model).__name__} (random, seeded image by image)"

    def parts(self) -> dict[str, object]:
        """Those of the model, or the model itself."""
        parts: dict[str, object] = self.model.parts() if hasattr(self.model, "parts") else {"model": self.model}
        return parts

    def with_gradient(self, gradient: Any) -> Seeded:
        """The same with another gradient mode of the model's purifier."""
        return Seeded(self.model.with_gradient(gradient) if hasattr(self.model, "with_gradient") else self.model)

    def forward(self, images: Tensor, seeds: Sequence[int]) -> Tensor:
        """Logits (B, K)."""
        logits = []
        devices = [images.device] if images.device.type == "cuda" else []
        for image, seed in zip(images, seeds, strict=True):
            with torch.random.fork_rng(devices):
                torch.manual_seed(int(seed) & (1 << 63) - 1)
                logits.append(call(self.model, image[None], [seed]))
        return torch.cat(logits)

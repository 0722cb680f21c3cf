"""The work of an evaluation in units: one batch of images, one attack (or none), one seed.

A unit is a pure function of (job, unit, images), so it can be computed again, elsewhere, in any order, to the same
rows. All randomness is named by the image:

    image seed   = mix(seed of the run, place of the image in its data)
    attack seed  = mix(image seed, name of the attack)          its starts, its samples of the defence's noise
    judge seeds  = samples of mix(attack seed, JUDGE)             fresh: the attack never saw them

Only for an attack that knows the noise (`EOT(fixed=True)`) the judge uses the noise that the attack was given.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from diffpure.attacks import EOT, Attack, AttackRun, Transfer, sample_seeds
from diffpure.attacks.base import COUNTERS, OnStep, choose
from diffpure.attacks.losses import Model, call, check_logits
from diffpure.evaluation.results import CLEAN, Row, Rule, slug
from diffpure.noise import Noise, mix
from diffpure.threats import ThreatModel

JUDGE: Final = 0x1D6E


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
    """What all units share; rows: how many images one call of the model may hold; calls: score calls of one image,
    (without, with) a gradient."""

    model: Model
    threat: ThreatModel
    attacks: Mapping[str, Attack]
    rules: tuple[Rule, ...]
    rows: int
    calls: tuple[int, int] = (0, 0)

    @property
    def stochastic(self) -> bool:
        """Whether the model says that it is random."""
        return bool(getattr(self.model, "stochastic", False))

    @property
    def samples(self) -> int:
        """How many fresh samples judge an image."""
        return max(rule.n for rule in self.rules) if self.stochastic else 1

    @property
    def averages(self) -> tuple[int, ...]:
        """The N of every "average of N" rule."""
        return tuple(sorted({rule.n for rule in self.rules if rule.kind == "average"})) if self.stochastic else ()


@final
@dataclass(frozen=True)
class Batch:
    """The images of a unit: x (B, C, H, W), y (B,), and their indices in the data."""

    x: Tensor
    y: Tensor
    indices: tuple[int, ...]


@final
@dataclass(frozen=True)
class Done:
    """The rows of a unit, and the tensors that it keeps (none for the unperturbed images)."""

    unit: Unit
    rows: tuple[Row, ...]
    tensors: dict[str, Tensor]


@final
@dataclass(frozen=True)
class Verdict:
    """Fresh samples of a batch: predictions (B, D), and the class of the mean logits of N samples, each (B,)."""

    predictions: Tensor
    averages: dict[int, Tensor]

    def of(self, i: int) -> dict[str, Any]:
        """The part of image i, as a row holds it."""
        averages = {n: int(k[i]) for n, k in self.averages.items()}
        return {"predictions": tuple(self.predictions[i].tolist()), "averages": averages}


def plan(count: int, batch: int, attacks: Sequence[str], seeds: Sequence[int]) -> list[Unit]:
    """All units of an evaluation, in the order in which one process does them."""
    spans = [(a, min(a + batch, count)) for a in range(0, count, batch)]
    return [Unit(seed, name, a, b) for seed in seeds for a, b in spans for name in (CLEAN, *attacks)]


def compute(job: Job, unit: Unit, batch: Batch, on_step: OnStep | None = None, resume: AttackRun | None = None) -> Done:
    """Attack the images of a unit, build the adversarial ones, check the budget, and judge them with fresh samples."""
    began = time.perf_counter()
    seeds = attack_seeds(unit, batch.indices)
    if unit.attack == CLEAN:
        verdict = judge(job, batch.x, judge_seeds(job, unit, seeds))
        return _done(unit, batch, verdict, job, began)
    attack = with_rows(job.attacks[unit.attack], job.rows)
    run = attack.run(job.model, batch.x, batch.y, job.threat, seeds=seeds, on_step=on_step, resume=resume)
    within = job.threat.within(batch.x, run.z)
    found = torch.nan_to_num(run.z, nan=0.0, posinf=0.0, neginf=0.0)  # what is no number changes nothing
    z = choose(within, found, job.threat.project(batch.x, found))
    x = job.threat.apply(batch.x, z)
    verdict = judge(job, x, judge_seeds(job, unit, seeds))
    size = job.threat.size(found)
    return _done(unit, batch, verdict, job, began, run=run, within=within, size=size, kept={"z": z, "images": x})


def _done(
    unit: Unit,
    batch: Batch,
    verdict: Verdict,
    job: Job,
    began: float,
    *,
    run: AttackRun | None = None,
    within: Tensor | None = None,
    size: Tensor | None = None,
    kept: Mapping[str, Tensor] | None = None,
) -> Done:
    seconds = round((time.perf_counter() - began) / len(batch.indices), 4)
    rows = []
    for i, place in enumerate(batch.indices):
        spent: dict[str, Any] = {} if run is None else {k: int(run.state[k][i]) for k in COUNTERS}
        row = Row(
            seed=unit.seed,
            image=place,
            attack=unit.attack,
            label=int(batch.y[i]),
            **verdict.of(i),
            size=0.0 if size is None else float(size[i]),
            within=within is None or bool(within[i]),
            misclassified=run is not None and bool(run.misclassified[i]),
            **spent,
            seconds=seconds,
        )
        rows.append(replace(row, score_calls=_score_calls(job, row)))
    tensors = {} if kept is None else {**kept, "labels": batch.y, "indices": torch.tensor(batch.indices)}
    return Done(unit, tuple(rows), {k: v.detach().cpu() for k, v in tensors.items()})


def _score_calls(job: Job, row: Row) -> int:
    forward, gradient = job.calls
    attack = job.attacks.get(row.attack)
    if isinstance(attack, Transfer) and attack.part == "classifier":
        # Crafted without the defence, which is asked twice: before, and to rank what was found.
        return (2 * attack.eot.samples + job.samples) * forward
    return row.gradients * gradient + (row.queries + job.samples) * forward


def attack_seeds(unit: Unit, indices: Sequence[int]) -> tuple[int, ...]:
    """The seed of each image for this attack."""
    name = zlib.crc32(unit.attack.encode())
    return tuple(mix(mix(unit.seed, place), name) for place in indices)


def judge_seeds(job: Job, unit: Unit, seeds: Sequence[int]) -> tuple[int, ...]:
    """The seeds of the final samples, `job.samples` an image, one image after the other."""
    attack = job.attacks.get(unit.attack)
    if attack is not None and attack.ranking.fixed:
        return sample_seeds(seeds, 0, job.samples, fixed=True)
    return sample_seeds(Noise(tuple(seeds)).child(JUDGE).seeds, 0, job.samples)


@torch.no_grad()
def judge(job: Job, x: Tensor, seeds: Sequence[int]) -> Verdict:
    """Classify images x (B, C, H, W) with D samples each, at most `job.rows` a call of the model; seeds (B · D)."""
    samples = job.samples
    pieces = []
    for a in range(0, len(x) * samples, job.rows):
        b = min(a + job.rows, len(x) * samples)
        images = x[torch.arange(a, b, device=x.device) // samples]
        pieces.append(check_logits(call(job.model, images, seeds[a:b]), b - a).cpu().double())
    logits = torch.cat(pieces).reshape(len(x), samples, -1)
    averages = {n: logits[:, :n].mean(1).argmax(1) for n in job.averages}
    return Verdict(logits.argmax(2), averages)


def with_rows(attack: Attack, rows: int) -> Attack:
    """The attack with at most so many images in one call of the model."""

    def limit(value: Any) -> Any:
        if isinstance(value, EOT):
            return replace(value, rows=min(value.rows, rows))
        if isinstance(value, tuple):
            return tuple(limit(v) for v in value)
        return _over_fields(value, limit) if isinstance(value, Attack) else value

    limited: Attack = limit(attack)
    return limited


def _over_fields(value: Any, change: Any) -> Any:
    assert is_dataclass(value)
    return replace(value, **{f.name: change(getattr(value, f.name)) for f in fields(value)})  # type: ignore[type-var]


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
    belongs to the image and a look can be repeated, at the price of batches of one."""

    stochastic = True

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, seeds: Sequence[int]) -> Tensor:
        """Logits (B, K)."""
        logits = []
        devices = [images.device] if images.device.type == "cuda" else []
        for image, seed in zip(images, seeds, strict=True):
            with torch.random.fork_rng(devices):
                torch.manual_seed(int(seed) & (1 << 63) - 1)
                logits.append(self.model(image[None]))
        return torch.cat(logits)

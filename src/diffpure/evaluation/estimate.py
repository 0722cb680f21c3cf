"""What an evaluation will cost: what its attacks spend, in calls as large as it will make, at the calibrated prices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from diffpure.attacks import FAB, Attack, Suite, Transfer, TwoStage
from diffpure.attacks.pgd import RestartedAttack
from diffpure.evaluation.calibrate import Calibration, Line
from diffpure.evaluation.units import Job, Unit


@final
@dataclass(frozen=True)
class Estimate:
    """What an evaluation will cost on this machine."""

    images: int
    gradients: int
    queries: int
    score_calls: int
    seconds: float
    memory: int
    rows: int

    def __str__(self) -> str:
        return (
            f"{self.images} images: about {self.score_calls:,} score calls ({self.gradients:,} gradients and "
            f"{self.queries:,} queries of the model), {duration(self.seconds)}, {self.memory / 2**20:,.0f} MiB with "
            f"{self.rows} images a call"
        )


def estimate(job: Job, calibration: Calibration, units: Sequence[Unit]) -> Estimate:
    """The cost of units; attacks that stop at misclassified images take less."""
    gradients = queries = largest = 0
    for unit in units:
        count, attack = unit.stop - unit.start, job.attacks.get(unit.attack)
        own = (0, 0) if attack is None else spending(attack, calibration.classes)
        gradients, queries = gradients + count * own[0], queries + count * (own[1] + job.samples)
        largest = max(largest, _rows_of_a_call(job, attack, count))
    return Estimate(
        images=len({place for unit in units for place in range(unit.start, unit.stop)}),
        gradients=gradients,
        queries=queries,
        score_calls=gradients * calibration.calls[1] + queries * calibration.calls[0],
        seconds=sum(seconds(job, calibration, unit) for unit in units),
        memory=int(calibration.memory(largest)),
        rows=job.rows,
    )


def largest_call(job: Job, images: int) -> int:
    """The most images that any call of the model holds when so many are attacked together, memory permitting."""
    return images * max([job.samples, *(attack.ranking.samples for attack in job.attacks.values())])


def seconds(job: Job, calibration: Calibration, unit: Unit) -> float:
    """How long a unit takes: the judge's samples, and the looks of its attack."""
    count, attack = unit.stop - unit.start, job.attacks.get(unit.attack)
    judged = count * job.samples * _each(calibration.forward, _rows_of_a_call(job, None, count))
    if attack is None:
        return judged
    gradients, queries = spending(attack, calibration.classes)
    rows = _rows_of_a_call(job, attack, count)
    forward = _each(calibration.forward, rows)
    gradient = 0.0 if calibration.gradient is None else _each(calibration.gradient, rows)
    if attack.ranking.samples > job.rows:
        gradient += forward  # one image's samples are asked in pieces: first for their outputs, then for the gradient
    return judged + count * (gradients * gradient + queries * forward)


def _each(line: Line, rows: int) -> float:
    return line(rows) / rows


def _rows_of_a_call(job: Job, attack: Attack | None, count: int) -> int:
    """Images in one call when `count` are attacked or (None) judged together: an attack keeps an image's samples whole
    where it can."""
    if attack is None:
        return min(job.rows, count * job.samples)
    samples = attack.ranking.samples
    return min(job.rows, samples * min(count, max(1, job.rows // samples)))


def spending(attack: Attack, classes: int) -> tuple[int, int]:
    """Gradients and queries that an image costs the model; less where an attack stops at misclassified images."""
    gradients, queries = _moves(attack, classes)
    return gradients, queries + attack.ranking.samples  # the look at the unperturbed image


def _moves(attack: Attack, classes: int) -> tuple[int, int]:
    """The same after the first look, sharper than the attack's own bound where its kind allows it."""
    if isinstance(attack, Suite):
        parts = [_moves(inner, classes) for inner in attack.attacks]
        return sum(g for g, _ in parts), sum(q for _, q in parts)
    if isinstance(attack, Transfer):
        # What is asked of the bare classifier is little beside a purification.
        gradients, queries = (0, 0) if attack.part == "classifier" else spending(attack.attack, classes)
        return gradients, queries + attack.eot.samples
    if isinstance(attack, TwoStage):  # an image that fails is asked again, and mostly fails again
        gradients, queries = spending(attack.attack, classes)
        return gradients, queries + attack.defence_samples
    if isinstance(attack, RestartedAttack) and not isinstance(attack, FAB):  # the last look of a run has no gradient
        runs = attack.steps(classes) // attack.length
        return runs * attack.iterations * attack.eot.samples, runs * attack.eot.samples
    price, steps = attack.price(), attack.steps(classes)
    return (price.gradients or 0) * steps, (price.queries or 0) * steps


def duration(seconds: float) -> str:
    """A time in the largest unit of which there are two."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{math.ceil(seconds)} s"

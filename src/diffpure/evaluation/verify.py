"""Check a finished run from its files, trusting nothing that can be computed again.

proven      rows: one for each image, attack and seed, as they were written, with the labels of the data
            model: its parts are those that the header names; data: the images are those of the header
            images: every adversarial file is there, inside the budget, and what its perturbation makes of the image
            decisions: the model, asked again with the same seeds, gives every prediction of every row
            rates and warnings: those that follow from the rows
with again  units computed anew give the same rows and the same adversarial images: then the attack was that of the
            header, too
claimed     that the attack was run as the header says (without again), times, dates, versions, machine
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from diffpure.errors import InputError
from diffpure.evaluation.results import Result
from diffpure.evaluation.rows import CLEAN, SUMMARY, Row, ordered, read_rows
from diffpure.evaluation.setup import IDENTITY, Evaluation
from diffpure.evaluation.store import IMAGES, read_tensors
from diffpure.evaluation.units import Batch, Unit, attack_seeds, classify, compute, device_of, evaluation_seeds, threads
from diffpure.evaluation.warn import of_rows

Rows = Mapping[tuple[int, int, str], Row]
PROVEN: Final = (
    "every image has one row per attack and seed, unedited, with the label of the data",
    "the model and the images at hand are those that the header names",
    "every adversarial image keeps the budget and is what its perturbation makes of the clean image",
    "the model, asked again with the recorded seeds, gives every prediction",
    "rates, counts and the warnings that follow from rows are those of the rows",
)
AGAIN: Final = "{n} of {total} units, chosen at random and computed again, gave the same rows and adversarial images"
CLAIMED: Final = ("seconds, dates, versions and the machine",)
CLAIMED_ATTACK: Final = "that the attacks ran as the header says (`--again N` computes N units again)"


@final
@dataclass(frozen=True)
class Verification:
    """What a check of a run found; `problems` are sentences, and none means that all that is proven is as it says."""

    rows: int
    images: int
    problems: tuple[str, ...]
    proven: tuple[str, ...] = ()
    claimed: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        if not self.passed:
            return "\n".join([f"{len(self.problems)} problems:", *self.problems])
        lines = [f"{self.rows} rows and {self.images} adversarial images are what the run says they are."]
        lines += [f"  proven   {text}" for text in self.proven]
        return "\n".join(lines + [f"  claimed  {text}" for text in self.claimed])


def verify(
    folder: str | Path,
    evaluation: Evaluation,
    *,
    again: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check the run in a folder against the model, images and attacks it claims to be about (`set_up` makes them).

    again: how many attacked units, chosen at random, to compute anew.
    """
    folder, problems = Path(folder), list[str]()
    header, rows = read_rows(folder, on_bad=problems.append)
    if wrong := list(_header_problems(header, evaluation.header)):
        return Verification(len(rows), 0, (*problems, *wrong))
    evaluation = evaluation.planned(header)
    problems += _row_problems(rows, evaluation)
    by_key, count, units = {row.key: row for row in rows}, 0, evaluation.units
    attacked = [unit for unit in units if unit.attack != CLEAN]
    repeated = random.SystemRandom().sample(attacked, min(again, len(attacked)))
    for done, unit in enumerate([*units, *repeated]):
        with threads(header["threads"]):
            if done < len(units):
                found, images = _unit_problems(folder, evaluation, unit, by_key)
                count += images
            else:
                found = list(_again_problems(folder, evaluation, unit, by_key))
        problems += found
        if progress is not None:
            progress(done + 1, len(units) + len(repeated))
    problems += _summary_problems(folder, header, by_key)
    extra = (AGAIN.format(n=len(repeated), total=len(attacked)),) if repeated else ()
    claimed = CLAIMED if len(repeated) == len(attacked) else (CLAIMED_ATTACK, *CLAIMED)
    return Verification(len(rows), count, tuple(dict.fromkeys(problems)), (*PROVEN, *extra), claimed)


def _header_problems(header: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    for part, name in expected["model"]["parts"].items():
        if header["model"].get("parts", {}).get(part) != name or name is None:
            yield f"The header names another {part} than the one at hand."
    for key in IDENTITY:
        if header.get(key) != expected[key] and key != "model":
            yield f"The header differs in {key!r} from what is evaluated."
    about, wanted = ({k: v for k, v in h["model"].items() if k != "parts"} for h in (header, expected))
    if about != wanted:
        yield "The header describes the model otherwise than it is."


def _row_problems(rows: Sequence[Row], evaluation: Evaluation) -> Iterator[str]:
    labels = dict(zip(evaluation.indices, evaluation.labels.tolist(), strict=True))
    expected = {key for unit in evaluation.units for key in evaluation.keys(unit)}
    for key, count in Counter(row.key for row in rows).items():
        if count > 1:
            yield f"There are {count} rows of {_where(key)}."
        if key not in expected:
            yield f"There is a row of {_where(key)}, which is no part of this run."
    if missing := expected - {row.key for row in rows}:
        yield f"{len(missing)} rows are missing, that of {_where(min(missing))} first."
    for row in rows:
        if row.image in labels and row.label != labels[row.image]:
            yield f"The row of {_where(row.key)} says label {row.label}, but the data say {labels[row.image]}."


def _unit_problems(folder: Path, evaluation: Evaluation, unit: Unit, rows: Rows) -> tuple[list[str], int]:
    """What is wrong with the images and decisions of one unit, and how many adversarial images it has."""
    job = evaluation.job
    batch = evaluation.batch(unit).to(device_of(job.model))
    x, problems, sizes = batch.x, list[str](), list[float]()
    if unit.attack != CLEAN:
        try:
            z, x, problems = _adversarial(folder / IMAGES / unit.file, evaluation, unit, batch)
        except InputError as error:
            return [str(error)], 0
        sizes = job.threat.size(z).tolist()
    predictions = classify(job, x, evaluation_seeds(job, unit, attack_seeds(unit, batch.indices)))
    for i, key in enumerate(evaluation.keys(unit)):
        row = rows.get(key)
        if row is None:
            continue
        if any(getattr(row, name) != value for name, value in predictions.of(i).items()):
            problems.append(f"The decisions in the row of {_where(key)} are not what the model says of that image.")
        if sizes and row.within and row.size != sizes[i]:
            problems.append(f"The row of {_where(key)} says size {row.size}, but the perturbation has {sizes[i]}.")
    return problems, len(sizes)


def _again_problems(folder: Path, evaluation: Evaluation, unit: Unit, rows: Rows) -> Iterator[str]:
    """What differs where a unit is computed anew."""
    done = compute(evaluation.job, unit, evaluation.batch(unit).to(device_of(evaluation.job.model)))
    for row in done.rows:
        said = rows.get(row.key)
        if said is None or replace(said, seconds=0.0) != replace(row, seconds=0.0):
            yield f"Computed again, the row of {_where(row.key)} is another one."
    try:
        kept = read_tensors(folder / IMAGES / unit.file)
    except InputError:
        return  # said already
    if not torch.equal(kept.get("z", torch.empty(0)), done.tensors["z"]):
        yield f"Computed again, {unit.attack} on images {unit.start} to {unit.stop - 1} finds other perturbations."


def _adversarial(path: Path, evaluation: Evaluation, unit: Unit, batch: Batch) -> tuple[Tensor, Tensor, list[str]]:
    """The perturbations and images in a file, and which of them are not what they should be."""
    tensors, threat, device = read_tensors(path), evaluation.job.threat, batch.x.device
    wanted = threat.zeros(batch.x).shape
    names = {"z": wanted, "images": batch.x.shape, "labels": batch.y.shape, "indices": batch.y.shape}
    if any(name not in tensors or tensors[name].shape != shape for name, shape in names.items()):
        raise InputError(f"The file {path} does not hold the adversarial images of its batch.")
    z, images = tensors["z"].to(device), tensors["images"].to(device)
    problems = []
    if tuple(tensors["indices"].tolist()) != batch.indices or not torch.equal(tensors["labels"].to(device), batch.y):
        problems.append(f"The file {path} names other images or labels than the data.")
    within, same = threat.within(batch.x, z), (threat.apply(batch.x, z) == images).flatten(1).all(1)
    for key, inside, made in zip(evaluation.keys(unit), within.tolist(), same.tolist(), strict=True):
        if not inside:
            problems.append(f"The adversarial image of {_where(key)} lies outside the budget.")
        if not made:
            problems.append(f"The adversarial image of {_where(key)} is not what its perturbation makes of the image.")
    return z, images, problems


def _summary_problems(folder: Path, header: Mapping[str, Any], rows: Rows) -> Iterator[str]:
    path = folder / SUMMARY
    if not path.is_file():
        yield f"The run has no {SUMMARY}: it was not finished."
        return
    try:
        said, result = json.loads(path.read_text("utf-8")), Result(header, ordered(rows.values(), header))
        true = result.summary()
        for key, title in (("rates", "rates"), ("spent", "costs")):
            if said[key] != true[key]:
                yield f"The {title} in {SUMMARY} are not those of the rows."
        for text in of_rows(result):
            if text not in said["warnings"]:
                yield f"The run leaves out a warning that follows from its rows: {text}"
    except (ValueError, KeyError, TypeError) as error:
        yield f"The rates in {SUMMARY} cannot be compared with the rows ({error})."


def _where(key: tuple[int, int, str]) -> str:
    seed, image, attack = key
    return f"image {image}, attack {attack}, seed {seed}"

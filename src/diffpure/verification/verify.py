"""Check a finished run from its files, trusting nothing that can be computed again.

proven      rows: one for each image, attack and seed, as they were written, with the labels of the data
            model: its parts are those that the header names; data: the images are those of the header
            images: every adversarial file is there, inside the budget, and what its perturbation makes of the image
            decisions: the model, asked again with the same seeds, gives every prediction of every row
            rates and warnings: those that follow from the rows
with again  units computed anew give the same rows and the same adversarial images: then the attack was that of the
            header, too
claimed     that the attack was run as the header says (without again), times, dates, versions, machine

Of a run without its folder of adversarial images nothing is proven of its attacks but by units that are computed anew,
and without any such unit the check fails. A run that was published so (`publish`) gives the reason and hashes of its
perturbations: it passes with a remark, and units that are computed anew must find perturbations with these hashes.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from diffpure.errors import InputError
from diffpure.evaluation.setup import IDENTITY, Evaluation
from diffpure.evaluation.store import IMAGES, read_tensors
from diffpure.evaluation.units import Batch, Unit, attack_seeds, classify, compute, device_of, evaluation_seeds, threads
from diffpure.evaluation.warn import of_rows
from diffpure.models.checkpoints import digest
from diffpure.results.read import read_rows
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN, SUMMARY, Row, ordered
from diffpure.verification.withheld import Withheld, check_withheld, holds_images

Rows = Mapping[tuple[int, int, str], Row]
PROVEN: Final = (
    "every image has one row per attack and seed, unedited, with the label of the data",
    "the model and the images at hand are those that the header names",
    "every adversarial image keeps the budget and is what its perturbation makes of the clean image",
    "the model, asked again with the recorded seeds, gives every prediction",
    "rates, counts and the warnings that follow from rows are those of the rows",
)
AGAIN: Final = "{n} of {total} units, chosen at random and computed again, gave the same rows"
AGAIN_IMAGES: Final = f"{AGAIN} and adversarial images"
AGAIN_HASHES: Final = f"{AGAIN} and perturbations with the published hashes"
PROVEN_CLEAN: Final = (
    *PROVEN[:2],
    "the model, asked again with the recorded seeds, gives every prediction of the unperturbed images",
    PROVEN[-1],
)
LEFT_OUT: Final = (
    "The run holds no adversarial images, so that nothing is proven of its attacks: `--again N` computes N of its "
    "{total} attacked units anew, and `--rows-only` checks the rows alone."
)
COMPUTE: Final = "--again N computes units anew from your own copy of the data"
CLAIMED: Final = ("seconds, dates, versions and the machine",)
CLAIMED_ATTACK: Final = "that the attacks ran as the header says (`--again N` computes N units again)"
CLAIMED_ATTACKED: Final = "the adversarial images, their budget and predictions: the run does not hold the images"


@final
@dataclass(frozen=True)
class Verification:
    """What a check of a run found; `problems` are sentences, and none means that all that is proven is as it says."""

    rows: int
    images: int
    problems: tuple[str, ...]
    proven: tuple[str, ...] = ()
    claimed: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()  # what may explain a difference

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        remarks = [f"  note     {text}" for text in self.remarks]
        if not self.passed:
            return "\n".join([f"{len(self.problems)} problems:", *self.problems, *remarks])
        images = f" and {self.images} adversarial images" if self.images else ""
        lines = [f"{self.rows} rows{images} are what the run says they are."]
        lines += [f"  proven   {text}" for text in self.proven]
        return "\n".join([*lines, *(f"  claimed  {text}" for text in self.claimed), *remarks])


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
    if wrong := list(header_problems(header, evaluation.header, IDENTITY)):
        return Verification(len(rows), 0, (*problems, *wrong))
    here, evaluation = evaluation.header, evaluation.planned(header)
    labels = dict(zip(evaluation.indices, evaluation.labels.tolist(), strict=True))
    problems += row_problems(header, rows, labels)
    by_key, count, units = {row.key: row for row in rows}, 0, evaluation.units
    attacked = [unit for unit in units if unit.attack != CLEAN]
    whole = holds_images(folder) or not attacked
    withheld, wrong = check_withheld(folder, {unit.file for unit in attacked})
    problems += wrong
    if not whole:
        units = [unit for unit in units if unit.attack == CLEAN]
        problems += [] if again or withheld or wrong else [LEFT_OUT.format(total=len(attacked))]
    repeated = random.SystemRandom().sample(attacked, min(again, len(attacked)))
    for done, unit in enumerate([*units, *repeated]):
        with threads(header["threads"]):
            if done < len(units):
                found, images = _unit_problems(folder, evaluation, unit, by_key)
                count += images
            else:
                found = list(_again_problems(folder, evaluation, unit, by_key, withheld))
        problems += found
        if progress is not None:
            progress(done + 1, len(units) + len(repeated))
    problems += summary_problems(folder, header, by_key)
    told = AGAIN_IMAGES if whole else AGAIN if withheld is None else AGAIN_HASHES
    extra = (told.format(n=len(repeated), total=len(attacked)),) if repeated else ()
    claimed = (*(() if whole else (CLAIMED_ATTACKED,)), CLAIMED_ATTACK) if len(repeated) < len(attacked) else ()
    said, proven = list(remarks(header, here)), (*(PROVEN if whole else PROVEN_CLEAN), *extra)
    if withheld is not None:
        said.insert(0, withheld.remark if repeated else f"{withheld.remark}; {COMPUTE}")
    return Verification(len(rows), count, tuple(dict.fromkeys(problems)), proven, (*claimed, *CLAIMED), tuple(said))


def remarks(header: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Other versions or another machine than those of the run, which may round otherwise."""
    for key in ("versions", "machine"):
        said, mine = header.get(key), here[key]
        if said != mine:
            told = (_words(table) if isinstance(table, Mapping) else "nothing" for table in (said, mine))
            yield "the run was made with {}, this check with {}: another rounding can change a close decision".format(
                *told
            )


def _words(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in table.items())


def header_problems(header: Mapping[str, Any], expected: Mapping[str, Any], identity: Sequence[str]) -> Iterator[str]:
    """In what a header differs from the one that the model and images at hand have; identity: the keys that count."""
    said, found = header["model"].get("parts", {}), expected["model"]["parts"]
    for part in {**found, **said}:
        if said.get(part) != found.get(part) or found.get(part) is None:
            yield f"The header names another {part} than the one at hand."
    for key in identity:
        if header.get(key) != expected[key] and key != "model":
            yield f"The header differs in {key!r} from what is evaluated."
    about, wanted = ({k: v for k, v in h["model"].items() if k != "parts"} for h in (header, expected))
    if about != wanted:
        yield "The header describes the model otherwise than it is."


def row_problems(
    header: Mapping[str, Any], rows: Sequence[Row], labels: Mapping[int, int], origin: str = "the data say"
) -> Iterator[str]:
    """Rows that are missing, that stand there twice or are no part of the run, or whose label is another."""
    kinds = header["seeds"], header["indices"], (CLEAN, *header["attacks"])
    sets, counts = [set(kind) for kind in kinds], Counter(row.key for row in rows)
    found = {key for key in counts if all(value in kind for value, kind in zip(key, sets, strict=True))}
    for key, count in counts.items():
        if count > 1:
            yield f"There are {count} rows of {where(key)}."
        if key not in found:
            yield f"There is a row of {where(key)}, which is no part of this run."
    if missing := math.prod(map(len, sets)) - len(found):
        # One after the other: a header may name more rows than any memory holds.
        first = next(key for key in itertools.product(*map(sorted, kinds)) if key not in found)
        yield f"{missing} rows are missing, that of {where(first)} first."
    for row in rows:
        if row.image in labels and row.label != labels[row.image]:
            yield f"The row of {where(row.key)} says label {row.label}, but {origin} {labels[row.image]}."


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
            problems.append(f"The decisions in the row of {where(key)} are not what the model says of that image.")
        if sizes and row.within and row.size != sizes[i]:
            problems.append(f"The row of {where(key)} says size {row.size}, but the perturbation has {sizes[i]}.")
    return problems, len(sizes)


def _again_problems(
    folder: Path, evaluation: Evaluation, unit: Unit, rows: Rows, withheld: Withheld | None
) -> Iterator[str]:
    """What differs where a unit is computed anew."""
    done = compute(evaluation.job, unit, evaluation.batch(unit).to(device_of(evaluation.job.model)))
    for row in done.rows:
        said = rows.get(row.key)
        if said is None or replace(said, seconds=0.0) != replace(row, seconds=0.0):
            yield f"Computed again, the row of {where(row.key)} is another one."
    told, z = f"Computed again, {unit.attack} on images {unit.start} to {unit.stop - 1} finds", done.tensors["z"]
    if withheld is not None:
        if withheld.perturbations.get(unit.file, digest(z)) != digest(z):  # one that is missing was said already
            yield f"{told} perturbations of another hash than the published one."
        return
    try:
        kept = read_tensors(folder / IMAGES / unit.file)
    except InputError:
        return  # said already
    if not torch.equal(kept.get("z", torch.empty(0)), z):
        yield f"{told} other perturbations."


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
            problems.append(f"The adversarial image of {where(key)} lies outside the budget.")
        if not made:
            problems.append(f"The adversarial image of {where(key)} is not what its perturbation makes of the image.")
    return z, images, problems


def summary_problems(folder: Path, header: Mapping[str, Any], rows: Rows) -> Iterator[str]:
    """What the rates, costs and warnings beside the rows are not."""
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


def where(key: tuple[int, int, str]) -> str:
    """A row in words."""
    seed, image, attack = key
    return f"image {image}, attack {attack}, seed {seed}"

"""Check a finished run from its files alone, trusting nothing that can be computed again.

rows        as they were written, one for each image, attack and seed, with the labels of the data
weights     of the model at hand hash to what the header says
images      every adversarial file is there, lies inside the budget, and is what its perturbation makes of the image
decisions   the model, asked again with the same seeds, gives every prediction of every row
rates       and costs are those of the rows
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from diffpure.errors import InputError
from diffpure.evaluation.engine import Work, on_device
from diffpure.evaluation.evaluate import Ready
from diffpure.evaluation.results import CLEAN, SUMMARY, Result, Row, ordered, read_rows
from diffpure.evaluation.store import IDENTITY, IMAGES, read_tensors
from diffpure.evaluation.units import Batch, Unit, attack_seeds, device_of, judge, judge_seeds, threads


@final
@dataclass(frozen=True)
class Verification:
    """What a check of a run found; `problems` are sentences, and none means that all is as it says."""

    rows: int
    images: int
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        if self.passed:
            return f"{self.rows} rows and {self.images} adversarial images are what the run says they are."
        return "\n".join([f"{len(self.problems)} problems:", *self.problems])


def verify(folder: str | Path, ready: Ready, *, progress: Callable[[int, int], None] | None = None) -> Verification:
    """Check the run in a folder against the model, images and attacks it claims to be about (`prepare` makes them)."""
    folder = Path(folder)
    problems: list[str] = []
    header, rows = read_rows(folder, on_bad=problems.append)
    problems += _header_problems(header, ready.header)
    if problems and any(text.startswith("The header") for text in problems):
        return Verification(len(rows), 0, tuple(problems))
    ready = ready.planned(header)
    problems += _row_problems(rows, ready)
    by_key = {row.key: row for row in rows}
    count = 0
    for done, unit in enumerate(ready.units):
        with threads(header["threads"]):
            found, images = _unit_problems(folder, ready, unit, by_key)
        problems += found
        count += images
        if progress is not None:
            progress(done + 1, len(ready.units))
    problems += _summary_problems(folder, header, rows)
    return Verification(len(rows), count, tuple(dict.fromkeys(problems)))


def _header_problems(header: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    for part, digest in expected["weights"].items():
        if header.get("weights", {}).get(part) != digest:
            yield f"The header names other weights of the {part} than those at hand."
    for key in IDENTITY:
        if key != "weights" and header.get(key) != expected[key]:
            yield f"The header differs in {key!r} from what is evaluated."


def _row_problems(rows: Sequence[Row], ready: Ready) -> Iterator[str]:
    labels = dict(zip(ready.indices, ready.labels.tolist(), strict=True))
    expected = {key for unit in ready.units for key in ready.keys(unit)}
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


def _unit_problems(
    folder: Path, ready: Ready, unit: Unit, rows: Mapping[tuple[int, int, str], Row]
) -> tuple[list[str], int]:
    """What is wrong with the images and decisions of one unit, and how many adversarial images it has."""
    work = Work(ready.job, ready.images, ready.labels, ready.indices, ())
    batch = on_device(work.batch(unit), device_of(ready.job.model))
    x, problems = batch.x, list[str]()
    if unit.attack != CLEAN:
        try:
            z, x, problems = _adversarial(folder / IMAGES / unit.file, ready, unit, batch)
        except InputError as error:
            return [str(error)], 0
        sizes = ready.job.threat.size(z).tolist()
    seeds = judge_seeds(ready.job, unit, attack_seeds(unit, batch.indices))
    verdict = judge(ready.job, x, seeds)
    for i, key in enumerate(ready.keys(unit)):
        row = rows.get(key)
        if row is None:
            continue
        if any(getattr(row, name) != value for name, value in verdict.of(i).items()):
            problems.append(f"The decisions in the row of {_where(key)} are not what the model says of that image.")
        if unit.attack != CLEAN and row.within and row.size != sizes[i]:
            problems.append(f"The row of {_where(key)} says size {row.size}, but the perturbation has {sizes[i]}.")
    return problems, 0 if unit.attack == CLEAN else len(batch.indices)


def _adversarial(path: Path, ready: Ready, unit: Unit, batch: Batch) -> tuple[Tensor, Tensor, list[str]]:
    """The perturbations and images in a file, and which of them are not what they should be."""
    tensors = read_tensors(path)
    threat, device = ready.job.threat, batch.x.device
    wanted = threat.zeros(batch.x).shape
    names = {"z": wanted, "images": batch.x.shape, "labels": batch.y.shape, "indices": batch.y.shape}
    if any(name not in tensors or tensors[name].shape != shape for name, shape in names.items()):
        raise InputError(f"The file {path} does not hold the adversarial images of its batch.")
    z, images = tensors["z"].to(device), tensors["images"].to(device)
    keys = [_where(key) for key in ready.keys(unit)]
    problems = []
    if tuple(tensors["indices"].tolist()) != batch.indices or not torch.equal(tensors["labels"].to(device), batch.y):
        problems.append(f"The file {path} names other images or labels than the data.")
    within, same = threat.within(batch.x, z), (threat.apply(batch.x, z) == images).flatten(1).all(1)
    for key, inside, made in zip(keys, within.tolist(), same.tolist(), strict=True):
        if not inside:
            problems.append(f"The adversarial image of {key} lies outside the budget.")
        if not made:
            problems.append(f"The adversarial image of {key} is not what its perturbation makes of the image.")
    return z, images, problems


def _summary_problems(folder: Path, header: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    path = folder / SUMMARY
    if not path.is_file():
        yield f"The run has no {SUMMARY}: it was not finished."
        return
    try:
        said, true = json.loads(path.read_text("utf-8")), Result(header, ordered(rows, header)).summary()
        for key, title in (("rates", "rates"), ("spent", "costs")):
            if said[key] != true[key]:
                yield f"The {title} in {SUMMARY} are not those of the rows."
    except (ValueError, KeyError) as error:
        yield f"The rates in {SUMMARY} cannot be compared with the rows ({error})."


def _where(key: tuple[int, int, str]) -> str:
    seed, image, attack = key
    return f"image {image}, attack {attack}, seed {seed}"

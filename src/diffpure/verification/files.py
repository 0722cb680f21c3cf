"""Check a run from its files alone, where its model, its data or its code are not at hand.

proven      rows: one for each image, attack and seed, as they were written, with one label per image
            files: every adversarial file is there and holds the images and labels of its rows; every perturbation
            keeps the budget of the header and has the size that its row says
            rates and warnings: those that follow from the rows
claimed     everything that only the model and the data can tell: `verify` with both at hand proves it; of a run that
            was published without its adversarial images, these too
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from diffpure.errors import InputError
from diffpure.evaluation.store import IMAGES, read_tensors
from diffpure.evaluation.units import Unit
from diffpure.results.read import read_rows
from diffpure.results.rows import CLEAN
from diffpure.threats import ThreatModel, threat_of
from diffpure.verification.verify import CLAIMED, COMPUTE, Rows, Verification, row_problems, summary_problems, where
from diffpure.verification.withheld import check_withheld, holds_images

PROVEN_FILES: Final = (
    "every image has one row per attack and seed, with a checksum that fits, and one label",
    "every adversarial file holds the images and labels of its rows",
    "every perturbation keeps the budget of the header and has the size of its row",
    "rates, counts and the warnings that follow from rows are those of the rows",
)
CLAIMED_FILES: Final = (
    "that the model is the one that the header names, and gave these predictions (not asked)",
    "that the images and labels are those of the data, changed by the perturbation alone (not compared)",
    "that the attacks ran as the header says (not computed again)",
    *CLAIMED,
)
CLAIMED_IMAGES: Final = "the adversarial images and their budget: the run does not hold them"
_ROUNDED: Final = 1e-5  # a header writes a budget with six digits


def verify_files(folder: str | Path) -> Verification:
    """Check what the files of a run show without its model and its data; nothing that they name is loaded."""
    folder, problems = Path(folder), list[str]()
    header, rows = read_rows(folder, on_bad=problems.append)
    threat = _threat(header)
    by_key, labels, count = {row.key: row for row in rows}, {row.image: row.label for row in reversed(rows)}, 0
    problems += row_problems(header, rows, labels, "the first row of that image says")
    whole, units = holds_images(folder) or not header["attacks"], list(attacked_units(header, by_key))
    withheld, wrong = check_withheld(folder, {unit.file for unit in units})
    problems += wrong
    for unit in units if whole else ():
        try:
            found, images = _unit_problems(folder, header, unit, threat, by_key)
        except InputError as error:
            found, images = [str(error)], 0
        problems += found
        count += images
    problems += summary_problems(folder, header, by_key)
    proven = PROVEN_FILES if whole else (PROVEN_FILES[0], PROVEN_FILES[-1])
    claimed = CLAIMED_FILES if whole else (CLAIMED_IMAGES, *CLAIMED_FILES)
    remarks = () if withheld is None else (f"{withheld.remark}; {COMPUTE}",)
    return Verification(len(rows), count, tuple(dict.fromkeys(problems)), proven, claimed, remarks)


def _threat(header: Mapping[str, Any]) -> ThreatModel:
    """The threat that a header describes."""
    match = re.fullmatch(r"(\w+)\(eps=([\d./e+-]+)\)", header["threat"])
    if match is None:
        raise InputError(f"The header says the threat {header['threat']!r}, which is none that files alone can check.")
    return threat_of(f"{match[1]} {match[2]}")


def attacked_units(header: Mapping[str, Any], rows: Rows) -> Iterator[Unit]:
    """The attacked units that have rows: so many as there are rows at most, whatever a header promises."""
    indices, batch = header["indices"], header["batch"]
    places = {index: i // batch * batch for i, index in enumerate(indices)}
    found = {(seed, attack, places[image]) for seed, image, attack in rows if image in places and attack != CLEAN}
    for seed, attack, start in sorted(found):
        if attack in header["attacks"]:
            yield Unit(seed, attack, start, min(start + batch, len(indices)))


def _unit_problems(
    folder: Path, header: Mapping[str, Any], unit: Unit, threat: ThreatModel, rows: Rows
) -> tuple[list[str], int]:
    """What is wrong with the file of one unit, and how many adversarial images it has."""
    path, indices = folder / IMAGES / unit.file, header["indices"][unit.start : unit.stop]
    tensors = read_tensors(path)
    z, images = tensors.get("z"), tensors.get("images")
    if z is None or images is None or not _fits(z, images, threat, len(indices)):
        raise InputError(f"The file {path} does not hold the adversarial images of its batch.")
    sizes = threat.size(z)
    kept = (sizes <= threat.eps * (1 + _ROUNDED)).tolist()
    problems = []
    if not (torch.isfinite(images) & (images >= 0) & (images <= 1)).all():
        problems.append(f"The file {path} holds images with values outside [0, 1].")
    said = {key: tensors.get(key, torch.empty(0)).tolist() for key in ("indices", "labels")}
    keys = [(unit.seed, index, unit.attack) for index in indices]
    known = [rows[key].label if key in rows else None for key in keys]
    if said["indices"] != indices or len(said["labels"]) != len(indices) or _differ(said["labels"], known):
        problems.append(f"The file {path} names other images or labels than the rows.")
    for key, size, inside in zip(keys, sizes.tolist(), kept, strict=True):
        row = rows.get(key)
        if not inside:
            problems.append(f"The adversarial image of {where(key)} lies outside the budget.")
        if row is not None and row.within and row.size != size:
            problems.append(f"The row of {where(key)} says size {row.size}, but the perturbation has {size}.")
    return problems, len(indices)


def _fits(z: Tensor, images: Tensor, threat: ThreatModel, count: int) -> bool:
    """Whether perturbations and images have the shapes that belong together."""
    floats = z.is_floating_point() and images.is_floating_point()
    return floats and images.ndim == 4 and len(images) == count and threat.zeros(images).shape == z.shape


def _differ(labels: list[int], known: list[int | None]) -> bool:
    return any(label != other for label, other in zip(labels, known, strict=True) if other is not None)

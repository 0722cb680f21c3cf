"""Finished runs, read for a report: rows, and pictures of what was attacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from diffpure.errors import InputError
from diffpure.pictures.gallery import ATTACKED, Gallery, eight_bits, strongest
from diffpure.report import words
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN, slug

PICTURES: Final = 8  # images whose pictures are shown unless another number is asked for


@final
@dataclass(frozen=True)
class ReportedRun:
    """One finished evaluation, the folder it lies in, and its pictures, with what there is to say of them."""

    folder: Path
    result: Result
    gallery: Gallery | None = None
    remark: str = ""

    @property
    def name(self) -> str:
        """Its given name, or its folder's."""
        return words.name(self.result.header, self.folder.name)

    def title(self, name: str) -> str:
        """What a line of rates is called; two attacks with equal titles are told apart by their names."""
        own = self.result.title(name)
        alike = [other for other in self.result.attacks if self.result.title(other) == own]
        return f"{own} ({name})" if len(alike) > 1 and name in alike else own

    def class_name(self, k: int) -> str:
        """What a class is called."""
        return words.class_name(self.result.header, k)


def read_run(folder: str | Path, remark: str = "", pictures: int = PICTURES) -> ReportedRun:
    """A finished run from its folder, with the pictures of its first images; remark: why there are no better ones."""
    result = Result.load(folder)
    folder = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    if not result.complete:
        raise InputError(f"The evaluation in {folder} is unfinished; resume it before it is reported.")
    _check(result.header, folder)
    if kept := Gallery.load(folder, result.header):
        return ReportedRun(folder, result, kept.first(pictures))
    return ReportedRun(folder, result, _rows_gallery(folder, result, pictures) if pictures else None, remark)


def _check(header: Mapping[str, Any], folder: Path) -> None:
    """Refuse a header without what a report prints beyond the rates."""
    if not isinstance(header["model"].get("title"), str) or not isinstance(header.get("classes"), list):
        raise InputError(f"The header of the run in {folder} has no title of the model or no list of classes.")


def _rows_gallery(folder: Path, result: Result, count: int) -> Gallery | None:
    """What a run's files show without its model: its strongest attack, with the first samples of its rows."""
    attack = strongest(result)
    files = sorted((folder / "adversarial").glob(f"{slug(attack)}-seed{result.seeds[0]}-*.safetensors"))
    if not files:
        return None
    try:
        kept = _first(files, count)
        return _gallery(result, attack, kept)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"The files {files[0].parent / slug(attack)}-… are damaged.") from error


def _first(files: Sequence[Path], count: int) -> dict[str, NDArray[Any]]:
    """The tensors of the first images, from as many files as it takes."""
    parts: list[dict[str, NDArray[Any]]] = []
    for file in files:
        parts.append(load_file(file))
        if sum(len(part["images"]) for part in parts) >= count:
            break
    return {key: np.concatenate([part[key] for part in parts])[:count] for key in parts[0]}


def _gallery(result: Result, attack: str, kept: Mapping[str, NDArray[Any]]) -> Gallery:
    attacked, z = kept["images"], kept["z"]
    stages = {ATTACKED: attacked}
    if z.shape == attacked.shape:  # what a flow moved cannot be moved back
        stages = {CLEAN: attacked - z, **stages}
    rows = {(row.attack, row.image): row for row in result.rows if row.seed == result.seeds[0]}
    names = {CLEAN: CLEAN, ATTACKED: attack}
    classes = [[rows[names[stage], int(index)].predictions[0] for index in kept["indices"]] for stage in stages]
    return Gallery(
        attack=attack,
        stages=tuple(stages),
        pictures=np.stack([eight_bits(x) for x in stages.values()]),
        classes=np.array(classes),
        confidence=np.full((len(stages), len(attacked)), np.nan, np.float32),
        labels=kept["labels"],
        names=tuple(map(str, result.header["classes"])),
    )


def attacked(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """The runs that measured robustness at all."""
    return [run for run in runs if run.result.attacks]

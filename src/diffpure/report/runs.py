"""Finished runs, read for a report: rows, rates as a flat table, pictures of what was attacked, and what varies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from diffpure.errors import InputError
from diffpure.evaluation.gallery import Gallery, eight_bits, strongest
from diffpure.evaluation.results import Result
from diffpure.evaluation.rows import CLEAN, MINIMUM, WORST, slug

COLUMNS: Final = ("run", "model", "threat", "attack", "rule", "images", "accuracy", "low", "high", "gradient")
# What a run may be swept over: a name, and where it stands in the spec.
AXES: Final[dict[str, tuple[str | int, ...]]] = {
    "t*": ("model", "sampler", "t_star"),
    "ε": ("threat", "eps"),
    "samples (EOT)": ("attacks", 0, "eot"),
    "iterations": ("attacks", 0, "iterations"),
}


@final
@dataclass(frozen=True)
class Run:
    """One finished evaluation, the folder it lies in, and its pictures, with what there is to say of them."""

    folder: Path
    result: Result
    gallery: Gallery | None = None
    remark: str = ""

    @property
    def name(self) -> str:
        """Its given name, or its folder's."""
        return str(self.result.header.get("name") or self.folder.name)

    def setting(self, axis: str) -> float | None:
        """The value of an axis in the run's spec, if it is a number there."""
        found: Any = self.result.header.get("spec") or {}
        for key in AXES[axis]:
            inside = isinstance(found, list) and isinstance(key, int) and key < len(found)
            if not inside and not (isinstance(found, dict) and key in found):
                return None
            found = found[key]
        return float(found) if isinstance(found, int | float) else None

    @property
    def lines(self) -> tuple[str, ...]:
        """What there is a rate of; a run without attacks has no worst case."""
        attacks = self.result.attacks
        return (CLEAN, *attacks, WORST, MINIMUM) if attacks else (CLEAN,)


def read_run(folder: str | Path, remark: str = "") -> Run:
    """A finished run from its folder; remark: why there are no better pictures of it."""
    result = Result.load(folder)
    folder = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    if not result.complete:
        raise InputError(f"The evaluation in {folder} is unfinished; resume it before it is reported.")
    kept = Gallery.load(folder, result.header)
    return Run(folder, result, kept or _rows_gallery(folder, result), "" if kept else remark)


def _rows_gallery(folder: Path, result: Result, count: int = 8) -> Gallery | None:
    """What a run's files show without its model: its strongest attack, judged by the first samples of its rows."""
    attack = strongest(result)
    files = sorted((folder / "adversarial").glob(f"{slug(attack)}-seed{result.seeds[0]}-*.safetensors"))
    if not files:
        return None
    try:
        kept = load_file(files[0])
    except (OSError, SafetensorError) as error:
        raise InputError(f"The file {files[0]} is damaged.") from error
    attacked, z = kept["images"][:count], kept["z"][:count]
    stages = {"attacked": attacked}
    if z.shape == attacked.shape:  # what a flow moved cannot be moved back
        stages = {"clean": attacked - z, **stages}
    rows = {(row.attack, row.image): row for row in result.rows if row.seed == result.seeds[0]}
    names = {"clean": CLEAN, "attacked": attack}
    classes = [[rows[names[s], int(p)].predictions[0] for p in kept["indices"][:count]] for s in stages]
    return Gallery(
        attack=attack,
        stages=tuple(stages),
        pictures=np.stack([eight_bits(x) for x in stages.values()]),
        classes=np.array(classes),
        confidence=np.full((len(stages), len(attacked)), np.nan, np.float32),
        labels=kept["labels"][:count],
    )


def flat(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Every rate of every run as a flat record with the columns `COLUMNS`."""
    for run in runs:
        header = run.result.header
        for attack in run.lines:
            for rule in run.result.rules:
                rate = run.result.rate(attack, rule)
                low, high = rate.interval
                values = (run.name, header["model"]["title"], header["threat"], attack, str(rule), rate.total)
                yield dict(zip(COLUMNS, (*values, rate.value, low, high, header["model"]["gradient"]), strict=True))


def attacked(runs: Sequence[Run]) -> list[Run]:
    """The runs that measured robustness at all."""
    return [run for run in runs if run.result.attacks]


def sweeps(runs: Sequence[Run]) -> list[tuple[str, list[tuple[float, Run]]]]:
    """The axes along which runs differ that are alike in everything else, each with its runs in order."""
    found = []
    for axis in AXES:
        alike: dict[str, list[tuple[float, Run]]] = {}
        for run in runs:
            if (value := run.setting(axis)) is not None:
                alike.setdefault(_without(run.result.header["spec"], AXES[axis]), []).append((value, run))
        for points in alike.values():
            if len({value for value, _ in points}) > 1:
                found.append((axis, sorted(points, key=lambda point: point[0])))
    return found


def _without(spec: Any, keys: Sequence[str | int]) -> str:
    """A spec but for one of its settings, as text."""
    rest = json.loads(json.dumps(spec))
    place = rest
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    return json.dumps(rest, sort_keys=True)

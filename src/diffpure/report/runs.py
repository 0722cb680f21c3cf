"""Finished runs, read for a report: rows, rates as a flat table, pictures of what was attacked, and what varies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from diffpure.errors import InputError
from diffpure.evaluation.results import CLEAN, MINIMUM, WORST, Result, Rule, ordered, read_rows

COLUMNS: Final = ("run", "model", "threat", "attack", "rule", "images", "accuracy", "low", "high", "gradient")
# What a run may be swept over: a name, and where it stands in the spec.
AXES: Final[dict[str, tuple[str | int, ...]]] = {
    "t*": ("model", "sampler", "t_star"),
    "ε": ("threat", "eps"),
    "draws (EOT)": ("attacks", 0, "eot"),
    "iterations": ("attacks", 0, "iterations"),
}


@final
@dataclass(frozen=True)
class Run:
    """One finished evaluation and the folder it lies in."""

    folder: Path
    result: Result

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

    def pictures(self, attack: str, most: int = 8) -> tuple[NDArray[Any], NDArray[Any], list[int]] | None:
        """Clean and attacked images (N, C, H, W) of the first seed and their places; None where none were kept."""
        files = sorted((self.folder / "adversarial").glob("*.safetensors"))
        wanted = [f for f in files if f.name.startswith(f"{_slug(attack)}-seed{self.result.seeds[0]}-")]
        if not wanted:
            return None
        kept = load_file(wanted[0])
        attacked, z = kept["images"][:most], kept["z"][:most]
        clean = np.clip(attacked - z, 0, 1) if z.shape == attacked.shape else attacked
        return clean, attacked, [int(p) for p in kept["places"][:most]]


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def read_run(folder: str | Path) -> Run:
    """A finished run from its folder."""
    header, rows = read_rows(folder)
    folder = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    summary = folder / "summary.json"
    warnings = json.loads(summary.read_text("utf-8")).get("warnings", []) if summary.is_file() else []
    result = Result(header, ordered(rows, header), tuple(warnings))
    if not result.complete:
        raise InputError(f"The evaluation in {folder} is unfinished; resume it before it is reported.")
    return Run(folder, result)


def flat(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Every rate of every run as a flat record with the columns `COLUMNS`."""
    for run in runs:
        header = run.result.header
        for attack in (CLEAN, *run.result.attacks, WORST, MINIMUM):
            for rule in run.result.rules:
                rate = run.result.rate(attack, rule)
                low, high = rate.interval
                values = (run.name, header["model"]["title"], header["threat"], attack, str(rule), rate.total)
                yield dict(zip(COLUMNS, (*values, rate.value, low, high, header["model"]["gradient"]), strict=True))


def sweeps(runs: Sequence[Run]) -> dict[str, list[tuple[float, Run]]]:
    """The axes along which the runs differ, each with its runs in order."""
    found = {}
    for axis in AXES:
        points = [(value, run) for run in runs if (value := run.setting(axis)) is not None]
        if len({value for value, _ in points}) > 1:
            found[axis] = sorted(points, key=lambda point: point[0])
    return found


def verdicts(run: Run, attack: str, places: Sequence[int]) -> list[tuple[int, bool]]:
    """What the first draw said of images under an attack, and whether it was right, for the first seed."""
    rows = {r.image: r for r in run.result.rows if r.attack == attack and r.seed == run.result.seeds[0]}
    return [(rows[p].predictions[0], Rule("one-shot").right(rows[p])) for p in places]

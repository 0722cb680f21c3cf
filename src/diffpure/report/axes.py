"""The axes of figures: along what a set of runs was swept.

An axis is a pair (label, path in the spec), such as ("t*", "model.sampler.t_star") or ("EOT samples", "attacks.0.eot").
Whoever made the runs declares the axes; where nobody did, the usual ones are tried. Runs stand in one figure if their
specs are alike in everything but the axis.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final

from diffpure.report import words
from diffpure.report.runs import ReportedRun

Axis = tuple[str, str]  # the label of a figure's axis, and where its value stands in the spec
Points = list[tuple[float, ReportedRun]]

USUAL: Final[tuple[Axis, ...]] = (
    ("t*", "model.sampler.t_star"),
    ("ε", "threat.eps"),
    ("EOT samples", "attacks.0.eot"),
    ("iterations", "attacks.0.iterations"),
)


def sweeps(runs: Sequence[ReportedRun], axes: Sequence[Axis] | None = None) -> list[tuple[str, Points]]:
    """The axes along which runs differ that are alike in everything else, each with its runs in order."""
    found = []
    for label, path in USUAL if axes is None else axes:
        alike: dict[str, Points] = {}
        for run in runs:
            if (value := setting(run, path)) is not None:
                alike.setdefault(_without(words.spec(run.result.header), path), []).append((value, run))
        for points in alike.values():
            if len({value for value, _ in points}) > 1:
                found.append((label, sorted(points, key=lambda point: point[0])))
    return found


def setting(run: ReportedRun, path: str) -> float | None:
    """The value at a path in the run's spec, if it is a finite number there."""
    found: Any = words.spec(run.result.header)
    for key in path.split("."):
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def _without(spec: Any, path: str) -> str:
    """A spec but for the value at a path, as text."""
    rest = json.loads(json.dumps(spec))
    *keys, last = path.split(".")
    inner = rest
    for key in keys:
        inner = inner[int(key)] if isinstance(inner, list) else inner[key]
    del inner[int(last) if isinstance(inner, list) else last]
    return json.dumps(rest, sort_keys=True)

"""Successive halving over a grid: many settings on few images with a weak attack, few settings on many with a strong.

    [grid]
    "model.sampler.rate" = [0.1, 1]            # every combination of the values is a setting

    [[rungs]]                                  # each keeps the best of what the one before kept
    keep = 2
    set = {attacks = []}

    [[rungs]]
    keep = 1
    set = {attacks = [{kind = "strong"}]}

A setting's score in a rung is its robust accuracy, or its clean accuracy where the rung has no attack; of equal ones
the first in the grid goes on. A setting whose solver would diverge is left out. Every evaluation is an ordinary run, so
a search that was stopped goes on where it was.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from diffpure.errors import Diverging, InputError
from diffpure.experiments.overrides import override
from diffpure.experiments.spec import EvaluationSpec
from diffpure.experiments.table import SMALL, Rung, Table, finished
from diffpure.results.result import Result
from diffpure.results.rows import Rate

Setting = Mapping[str, Any]  # path in the spec to its value
Measure = Callable[[EvaluationSpec], Result | None]  # the finished run of a spec; None: not to be run now

HEADINGS: Final = ("setting", "rung", "clean", "robust", "images", "attacks")


@final
@dataclass(frozen=True)
class Trial:
    """A setting in one rung, its spec, and its run if that is finished."""

    setting: Setting
    rung: int
    spec: EvaluationSpec
    result: Result | None = None

    @property
    def name(self) -> str:
        """The values of the setting."""
        return words(self.setting, " = ")

    def score(self, table: Table) -> Rate:
        """What a rung chooses by."""
        assert self.result is not None
        return table.rate(self.result, "robust" if self.result.attacks else "clean")

    def cells(self, table: Table) -> list[str]:
        """A line of the printed search."""
        if self.result is None:
            return [self.name, str(self.rung + 1), "not run", "", "", ""]
        robust = str(table.rate(self.result, "robust")) if self.result.attacks else "not measured"
        images, attacks = str(len(self.result.indices)), "; ".join(map(self.result.title, self.result.attacks))
        return [self.name, str(self.rung + 1), str(table.rate(self.result, "clean")), robust, images, attacks]


def words(setting: Setting, between: str = " ") -> str:
    """The values of a setting by the last parts of their paths."""
    return ", ".join(f"{path.rpartition('.')[2]}{between}{value:g}" for path, value in setting.items())


def settings(table: Table) -> Iterator[Setting]:
    """Every combination of the grid's values."""
    if not table.grid or not table.rungs or any(rung.keep < 1 for rung in table.rungs):
        raise InputError("A search needs a [grid] of paths and values, and [[rungs]] that keep at least one setting.")
    for values in itertools.product(*table.grid.values()):
        yield dict(zip(table.grid, values, strict=True))


def search(table: Table, measure: Measure, scale: str = SMALL, *, tiny: bool = False) -> list[Trial]:
    """The trials of all rungs that can be told, the best of the last rung first; `measure` runs or only looks up.

    Without the runs of a rung nobody knows which settings the next one has, so the search ends there.
    """
    left_out = diverging(table, scale, tiny=tiny)
    chosen, found = [setting for setting in settings(table) if setting not in left_out], list[Trial]()
    for number, rung in enumerate(table.rungs):
        trials = []
        for setting in chosen:
            spec = _spec(table, setting, rung, scale, tiny)
            trials.append(Trial(setting, number, spec, measure(spec)))
        if any(trial.result is None for trial in trials):
            return trials + found
        trials.sort(key=lambda trial: -trial.score(table).value)
        chosen = [trial.setting for trial in trials[: rung.keep]]
        found = trials + found
    return found


def diverging(table: Table, scale: str = SMALL, *, tiny: bool = False) -> list[Setting]:
    """The settings of the grid with which the solver would diverge."""
    found = []
    for setting in settings(table):
        try:
            _spec(table, setting, table.rungs[0], scale, tiny)
        except Diverging:
            found.append(setting)
    return found


def measured(table: Table, parent: str | Path, scale: str = SMALL, *, tiny: bool = False) -> list[Trial]:
    """The trials of a search as far as their runs are finished."""
    return search(table, lambda spec: finished(spec, parent), scale, tiny=tiny)


def _spec(table: Table, setting: Setting, rung: Rung, scale: str, tiny: bool) -> EvaluationSpec:
    plain = table.settings(scale)
    for path, value in {**rung.set, **setting}.items():
        override(plain, path, copy.deepcopy(value))
    spec = EvaluationSpec.of({**plain, "name": f"{table.title}: {words(setting)}"})
    return spec.tiny() if tiny else spec

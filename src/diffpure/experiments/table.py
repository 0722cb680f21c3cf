"""A table of the paper as data: a base spec, rows that override it, reported numbers beside, sweeps and a figure.

    title = "Samplers"
    source = "Table 6 of the paper"
    headline = "minimum"                       # or "worst case": which robust accuracy is printed

    [base]                                     # a spec, as in a spec's own file

    [[rows]]
    name = "VP-ODE"
    set = {"model.sampler.kind" = "ode"}       # overrides, by the path in the spec
    reported = {clean = 90.79, robust = 39.86, source = "the paper"}
    sweep = {"model.sampler.t_star" = [0.05, 0.1]}

    [figure]
    axis = "model.sampler.t_star"
    label = "t*"

    [[claims]]                                 # what the paper says of the order of rows; the runs decide
    says = "VP-SDE is more robust than VP-ODE"
    better = "VP-SDE"
    worse = ["VP-ODE"]

    [scales.full]                              # the same at another size: overrides of every row, before its own
    "model.score" = "cifar10-ddpmpp"

A row with `run = false` holds reported numbers only, one with `at = ["full"]` is run at that scale only, and
`scales.full` of a row overrides it there. Every run is a spec: hashed, resumable, verifiable. A table of another `kind`
(timing, gradient-error, pictures, search) has the settings of its measurement as [base]; its rows are reported numbers.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, Self, final

from diffpure.classifiers.load import load_classifier
from diffpure.errors import InputError, unknown
from diffpure.experiments.load import run_folder
from diffpure.experiments.overrides import override
from diffpure.experiments.spec import EvaluationSpec, ModelSpec, Reference, read_toml
from diffpure.models.cards import cards
from diffpure.models.identity import identify
from diffpure.named import construct, too_deep
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN, MINIMUM, ROWS, WORST, Rate, Rule
from diffpure.scores.load import load_score
from diffpure.views import FlipAverage

SMALL: Final = "small"  # the scale of the base itself

EVALUATION: Final = "evaluation"  # the kind of a table whose rows are runs
NOT_RUN: Final = "not run"
REPORTED_ONLY: Final = "reported only"
SWEEP: Final = "sweep"  # the key of a scale that replaces the table's sweep

Kind = Literal["evaluation", "timing", "gradient-error", "pictures", "search"]
Settings = Mapping[str, Any]  # path in a spec, such as "model.sampler.t_star", to a value


@final
@dataclass(frozen=True, kw_only=True)
class Reported:
    """What somebody reported, in per cent.

    clean: accuracy without attack.   robust: accuracy under attack, a number or a range in words.
    source: who reported it.
    """

    clean: float | None = None
    robust: float | str | None = None
    source: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One line of a table: how it differs from the base, and what was reported for it.

    name: what the line is called.   set: overrides of the base, by path.   sweep: lists of values by path, one run
    each.   reported: published numbers that are printed beside.   run: false for a line of reported numbers only.
    at: the scales at which it is run; all if none is named.   scales: how it differs further at a scale.
    """

    name: str
    set: Settings = field(default_factory=dict)
    sweep: Mapping[str, Any] = field(default_factory=dict)
    reported: tuple[Reported, ...] = ()
    run: bool = True
    at: tuple[str, ...] = ()
    scales: Mapping[str, Any] = field(default_factory=dict)

    def runs_at(self, scale: str) -> bool:
        """Whether the row is measured at a scale."""
        return self.run and (not self.at or scale in self.at)


@final
@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says of the order of rows: one of them is above others in robust (or clean) accuracy.

    says: the sentence.   better: the row that is above.   worse: the rows that are below.   what: "robust" or "clean".
    """

    says: str
    better: str
    worse: tuple[str, ...]
    what: Literal["robust", "clean"] = "robust"


@final
@dataclass(frozen=True, kw_only=True)
class Rung:
    """One round of a search.

    keep: how many settings go on to the next round.   set: how its specs differ from the base, by path.
    """

    keep: int
    set: Settings = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a figure of the table shows along its axis.

    axis: a path in the spec.   label: what the axis is called.
    """

    axis: str
    label: str


@final
@dataclass(frozen=True)
class Entry:
    """A row at one point of its sweep: its spec, and the values of the sweep."""

    row: TableRow
    spec: EvaluationSpec
    point: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The row's name, with the values of the sweep."""
        return _entry_name(self.row, self.point)


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, a base spec (or the settings of another kind of measurement), rows, and what is printed of them.

    title: what the table is called.   base: a spec.   rows: the lines.   source: the table of the paper that it
    repeats.   note: a sentence printed below.   headline: which robust accuracy is printed, "worst case" or "minimum".
    rule: the decision rule of the printed numbers.   sweep: a sweep of every row.   figure: what is drawn.
    scales: overrides of every row by the name of a scale, for `--scale`.   kind: what is measured.   claims: what the
    paper says of the order of its rows.
    """

    title: str
    rows: tuple[TableRow, ...]
    base: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = EVALUATION
    claims: tuple[Claim, ...] = ()
    source: str = ""
    note: str = ""
    headline: Literal["minimum", "worst case"] = "worst case"
    rule: str = "one-shot"
    sweep: Mapping[str, Any] = field(default_factory=dict)
    figure: Figure | None = None
    grid: Mapping[str, Any] = field(default_factory=dict)  # of a search: path to values
    rungs: tuple[Rung, ...] = ()  # of a search: its rounds
    scales: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Rule.parse(self.rule)
        if len({row.name for row in self.rows}) < len(self.rows) or not self.rows:
            raise InputError("A table has rows, each with a name of its own.")
        for scale in {scale for row in self.rows for scale in (*row.at, *row.scales)} - {SMALL, *self.scales}:
            raise unknown("scale", scale, [SMALL, *self.scales])

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """The table in what TOML gives."""
        values = dict(table)
        if too_deep(table):
            raise InputError("A table is nested beyond all measure; it has [base], [[rows]] and what they set.")
        if not isinstance(values.get("rows"), list):
            raise InputError("A table needs [[rows]], each with a name.")
        values["rows"] = [_row(row) for row in values["rows"]]
        values["claims"] = tuple(construct(Claim, each, "key of [[claims]]") for each in values.get("claims", ()))
        values["rungs"] = tuple(construct(Rung, each, "key of [[rungs]]") for each in values.get("rungs", ()))
        if "figure" in values:
            values["figure"] = construct(Figure, values["figure"], "key of [figure]")
        made: Self = construct(cls, values, "key of a table")
        return made

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The table in a TOML file."""
        return cls.of(read_toml(path))

    def entries(self, scale: str = SMALL, only: str | None = None, *, tiny: bool = False) -> Iterator[Entry]:
        """The specs that the table stands for, row by row and point by point."""
        for row in self.chosen(only):
            yield from self.expanded(row, scale, tiny=tiny)

    def chosen(self, only: str | None = None) -> tuple[TableRow, ...]:
        """All rows, or the one of that name."""
        if only is not None and only not in {row.name for row in self.rows}:
            raise unknown("row", only, [row.name for row in self.rows])
        return tuple(row for row in self.rows if only in (None, row.name))

    def expanded(self, row: TableRow, scale: str = SMALL, *, tiny: bool = False) -> Iterator[Entry]:
        """The specs of one row at a scale: none for one with reported numbers only."""
        whole = self.scale(scale)
        if self.kind != EVALUATION or not row.runs_at(scale):
            return
        own = dict(row.scales.get(scale, {}))
        sweep = {**whole.get(SWEEP, self.sweep), **own.get(SWEEP, row.sweep)}
        for values in itertools.product(*sweep.values()):
            point = dict(zip(sweep, values, strict=True))
            plain: dict[str, Any] = copy.deepcopy(dict(self.base))
            for settings in (whole, row.set, own, point):
                for path, value in settings.items():
                    if path != SWEEP:
                        override(plain, path, copy.deepcopy(value))
            spec = EvaluationSpec.of({**plain, "name": f"{self.title}: {_entry_name(row, point)}"})
            yield Entry(row, spec.tiny() if tiny else spec, point)

    def scale(self, name: str) -> Settings:
        """What a scale overrides."""
        if name != SMALL and name not in self.scales:
            raise unknown("scale", name, [SMALL, *self.scales])
        found: Settings = self.scales.get(name, {})
        return found

    def settings(self, scale: str = SMALL) -> dict[str, Any]:
        """The [base] of a measurement of another kind, at a scale."""
        plain: dict[str, Any] = copy.deepcopy(dict(self.base))
        for path, value in self.scale(scale).items():
            override(plain, path, value)
        return plain

    def measured(self, entry: Entry, parent: str | Path) -> Result | None:
        """The finished run of an entry, if there is one."""
        return finished(entry.spec, parent)

    def cells(self, entry: Entry, result: Result | None) -> list[str]:
        """A line of the printed table: name, reported, clean and robust accuracy as measured, images, attacks."""
        said = "; ".join(map(_words, entry.row.reported)) or "–"
        if result is None:
            return [entry.name, said, NOT_RUN, "", "", ""]
        robust = str(self.rate(result, "robust")) if result.attacks else "not measured"
        attacks = "; ".join(result.title(name) for name in result.attacks)
        return [entry.name, said, str(self.rate(result, "clean")), robust, str(len(result.indices)), attacks]

    def said(self, row: TableRow) -> list[str]:
        """A line of a row that is not run: what was reported for it."""
        return [row.name, "; ".join(map(_words, row.reported)) or "–", REPORTED_ONLY, "", "", ""]

    def rate(self, result: Result, what: Literal["robust", "clean"]) -> Rate:
        """The accuracy that the table prints of a run."""
        return result.rate(self.line(what), self._rule(result))

    def right(self, result: Result, what: Literal["robust", "clean"]) -> dict[int, bool]:
        """Which images that accuracy counts, by dataset index, for the first seed."""
        line = self.line(what)
        if line == MINIMUM:  # the attack that leaves the fewest
            line = min(result.attacks, key=lambda name: result.rate(name, self._rule(result)).value)
        return result.right(line, self._rule(result))

    def line(self, what: Literal["robust", "clean"]) -> str:
        """What a result calls the accuracy that the table prints."""
        return CLEAN if what == "clean" else {"minimum": MINIMUM, "worst case": WORST}[self.headline]

    def _rule(self, result: Result) -> str | None:
        return self.rule if self.rule in map(str, result.rules) else None  # a tiny run has smaller rules


HEADINGS: Final = ("row", "reported: clean / robust", "clean", "robust", "images", "attacks")


def finished(spec: EvaluationSpec, parent: str | Path) -> Result | None:
    """The finished run of a spec in a folder of runs, if there is one, with the weights that its models have now."""
    folder = run_folder(spec, parent)
    if not (folder / ROWS).is_file():
        return None
    result = Result.load(folder)
    return result if result.complete and not _outdated(spec.model, result) else None


def _outdated(model: ModelSpec, result: Result) -> bool:
    """Whether a model inside the package had other weights when a run was made: a name stays, its weights may not."""
    parts = result.header["model"].get("parts", {})
    made_with = {"score": parts.get("score"), "classifier": parts.get("classifier", parts.get("model"))}
    named = [("score", model.score), ("classifier", model.classifier)]
    names = [(part, reference.name) for part, reference in named if isinstance(reference, Reference)]
    embedded = {name for name, about in cards().items() if about.embedded}
    return any(name in embedded and made_with[part] != _identity(part, name, model.flip) for part, name in names)


@functools.cache
def _identity(part: str, name: str, flip: bool) -> str:
    if part == "score":
        return identify(load_score(name))
    return identify(FlipAverage(load_classifier(name)) if flip else load_classifier(name))


def _entry_name(row: TableRow, point: Mapping[str, Any]) -> str:
    return ", ".join([row.name, *(f"{path.rpartition('.')[2]} = {value}" for path, value in point.items())])


def _row(table: Any) -> TableRow:
    if not isinstance(table, Mapping):
        raise InputError(f"A row of a table is a table with a name, got {table!r}.")
    values = dict(table)
    reported = values.get("reported", [])
    reported = reported if isinstance(reported, list) else [reported]
    values["reported"] = tuple(construct(Reported, each, "key of reported") for each in reported)
    made: TableRow = construct(TableRow, values, f"key of the row {values.get('name')!r}")
    for path, points in made.sweep.items():
        if not isinstance(points, list) or not points:
            raise InputError(f"The sweep over {path!r} is a list of values, got {points!r}.")
    return made


def _words(reported: Reported) -> str:
    clean = "–" if reported.clean is None else f"{reported.clean:.2f}"
    robust = "–" if reported.robust is None else reported.robust
    robust = robust if isinstance(robust, str) else f"{robust:.2f}"
    return f"{clean} / {robust}" + (f" ({reported.source})" if reported.source else "")


def shipped_tables() -> dict[str, Path]:
    """The tables inside the package, by name, such as paper/table6."""
    root = Path(str(resources.files("diffpure.experiments").joinpath("tables")))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.toml"))}

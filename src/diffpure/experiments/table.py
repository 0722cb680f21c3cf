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

    [scales.full]                              # the same at another size: overrides of every row
    "model.score" = "cifar10-ddpmpp"

A row without `set` and `run = false` holds reported numbers only. Every other row expands to specs, each a hashed,
resumable, verifiable run.
"""

from __future__ import annotations

import copy
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, Self, final

from diffpure.errors import InputError, unknown
from diffpure.evaluation.results import Result
from diffpure.evaluation.rows import MINIMUM, ROWS, WORST, Rule
from diffpure.experiments.load import run_folder
from diffpure.experiments.spec import EvaluationSpec, read_toml
from diffpure.named import construct

SMALL: Final = "small"  # the scale of the base itself

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
    """

    name: str
    set: Settings = field(default_factory=dict)
    sweep: Mapping[str, Any] = field(default_factory=dict)
    reported: tuple[Reported, ...] = ()
    run: bool = True


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
    """A title, a base spec, rows that override it, and what is printed of them.

    title: what the table is called.   base: a spec.   rows: the lines.   source: the table of the paper that it
    repeats.   note: a sentence printed below.   headline: which robust accuracy is printed, "worst case" or "minimum".
    rule: the decision rule of the printed numbers.   sweep: a sweep of every row.   figure: what is drawn.
    scales: overrides of every row by the name of a scale, for `--scale`.
    """

    title: str
    base: Mapping[str, Any]
    rows: tuple[TableRow, ...]
    source: str = ""
    note: str = ""
    headline: Literal["minimum", "worst case"] = "worst case"
    rule: str = "one-shot"
    sweep: Mapping[str, Any] = field(default_factory=dict)
    figure: Figure | None = None
    scales: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Rule.parse(self.rule)
        if len({row.name for row in self.rows}) < len(self.rows) or not self.rows:
            raise InputError("A table has rows, each with a name of its own.")

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """The table in what TOML gives."""
        values = dict(table)
        if not isinstance(values.get("rows"), list):
            raise InputError("A table needs [[rows]], each with a name.")
        values["rows"] = [_row(row) for row in values["rows"]]
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
        if scale != SMALL and scale not in self.scales:
            raise unknown("scale", scale, [SMALL, *self.scales])
        if only is not None and only not in {row.name for row in self.rows}:
            raise unknown("row", only, [row.name for row in self.rows])
        for row in self.rows:
            if row.run and only in (None, row.name):
                yield from self._expanded(row, self.scales.get(scale, {}), tiny)

    def _expanded(self, row: TableRow, scale: Settings, tiny: bool) -> Iterator[Entry]:
        sweep = {**self.sweep, **row.sweep}
        for values in itertools.product(*sweep.values()):
            point = dict(zip(sweep, values, strict=True))
            plain: dict[str, Any] = copy.deepcopy(dict(self.base))
            for path, value in {**row.set, **scale, **point}.items():
                override(plain, path, value)
            spec = EvaluationSpec.of({**plain, "name": f"{self.title}: {_entry_name(row, point)}"})
            yield Entry(row, spec.tiny() if tiny else spec, point)

    def measured(self, entry: Entry, parent: str | Path) -> Result | None:
        """The finished run of an entry, if there is one."""
        folder = run_folder(entry.spec, parent)
        if not (folder / ROWS).is_file():
            return None
        result = Result.load(folder)
        return result if result.complete else None

    def cells(self, entry: Entry, result: Result | None) -> list[str]:
        """A line of the printed table: name, reported, clean and robust accuracy as measured, images, attacks."""
        said = "; ".join(map(_words, entry.row.reported)) or "–"
        if result is None:
            return [entry.name, said, "not run", "", "", ""]
        what = {"minimum": MINIMUM, "worst case": WORST}[self.headline]
        rule = self.rule if self.rule in map(str, result.rules) else None  # a tiny run has smaller rules
        robust = str(result.rate(what, rule)) if result.attacks else "not measured"
        attacks = "; ".join(result.title(name) for name in result.attacks)
        return [entry.name, said, str(result.clean(rule)), robust, str(len(result.indices)), attacks]


HEADINGS: Final = ("row", "reported: clean / robust", "clean", "robust", "images", "attacks")


def override(spec: dict[str, Any], path: str, value: Any) -> None:
    """Set a value in a spec's tables by its path, such as model.sampler.t_star or attacks.0.eot."""
    inner: Any = spec
    *parents, last = path.split(".")
    for key in parents:
        if isinstance(inner, list):
            inner = inner[_place(key, inner, path)]
            continue
        if isinstance(inner.get(key), str) and key in ("sampler", "gradient", "purifier"):
            inner[key] = {"kind": inner[key]}
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict | list):
            raise InputError(f"The path {path!r} leads through {key!r}, which is no table.")
    if isinstance(inner, list):
        inner[_place(last, inner, path)] = value
    else:
        inner[last] = value


def setting(text: str) -> tuple[str, list[Any]]:
    """The path and the values of a setting such as "model.sampler.t_star=0.05,0.1".

    Values are TOML's, several with commas between them; what is no TOML value, such as 8/255 or few-step, is a text.
    """
    path, sign, values = text.partition("=")
    if not sign or not path.strip() or not values.strip():
        raise InputError(f"A setting is KEY=VALUE or KEY=VALUE,VALUE, such as model.sampler.t_star=0.1, got {text!r}.")
    return path.strip(), _values(values)


def _values(text: str) -> list[Any]:
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except tomllib.TOMLDecodeError:
        pieces = [piece.strip() for piece in text.split(",")]
        return [text] if len(pieces) == 1 else [value for piece in pieces for value in _values(piece)]


def _place(key: str, items: list[Any], path: str) -> int:
    if not key.isdecimal() or int(key) >= len(items):
        raise InputError(f"The path {path!r} names the item {key!r} of a list of {len(items)}.")
    return int(key)


def _entry_name(row: TableRow, point: Mapping[str, Any]) -> str:
    return ", ".join([row.name, *(f"{path.rpartition('.')[2]} = {value}" for path, value in point.items())])


def _row(table: Any) -> TableRow:
    if not isinstance(table, Mapping):
        raise InputError(f"A row of a table is a table with a name, got {table!r}.")
    values = dict(table)
    reported = values.get("reported", [])
    reported = [reported] if isinstance(reported, Mapping) else reported
    values["reported"] = tuple(construct(Reported, each, "key of reported") for each in reported)
    made: TableRow = construct(TableRow, values, f"key of the row {values.get('name')!r}")
    for path, points in made.sweep.items():
        if not isinstance(points, list) or not points:
            raise InputError(f"The sweep over {path!r} is a list of values, got {points!r}.")
    return made


def _words(reported: Reported) -> str:
    clean = "–" if reported.clean is None else f"{reported.clean:.2f}"
    robust = "–" if reported.robust is None else str(reported.robust)
    return f"{clean} / {robust}" + (f" ({reported.source})" if reported.source else "")


def shipped_tables() -> dict[str, Path]:
    """The tables inside the package, by name, such as paper/table6."""
    root = Path(str(resources.files("diffpure.experiments").joinpath("tables")))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.toml"))}

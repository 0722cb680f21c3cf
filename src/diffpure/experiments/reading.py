"""Ways to read a measured table: by other decision rules, and rows compared with others, paired by image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from diffpure.errors import InputError
from diffpure.experiments.table import EVALUATION, HEADINGS, Entry, Table, TableRow
from diffpure.results.compare import Pairs
from diffpure.results.result import Result
from diffpure.results.rows import Rule

EVERY: Final = "every"

Runs = Mapping[str, Sequence[tuple[Entry, Result | None]]]  # by the row's name


@final
@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is printed of a table whose rows are runs.

    rule: the decision rule, in place of the table's own; "every" prints one line for each rule of a run.
    against: rows with which the robust accuracy of the others is compared, each with the first of its own threat.
    """

    rule: str | None = None
    against: tuple[str, ...] = ()

    @property
    def headings(self) -> tuple[str, ...]:
        """What stands above the columns."""
        return (*HEADINGS, "difference, paired") if self.against else HEADINGS

    @property
    def note(self) -> str:
        """What the last column is."""
        if not self.against:
            return ""
        rows = " or ".join(f'"{name}"' for name in self.against)
        return f"Differences are of robust accuracy, with 95 % intervals, to {rows} under the same threat, by one rule."

    def rows(self, table: Table, only: str | None = None) -> tuple[TableRow, ...]:
        """The rows that are printed: all, or one and what it is compared with."""
        if table.kind != EVALUATION and self != Reading():
            raise InputError("Only a table whose rows are evaluations has decision rules and rows to compare.")
        named = {row.name for name in self.against for row in table.chosen(name)}
        return tuple(row for row in table.rows if row in table.chosen(only) or row.name in named)

    def lines(self, table: Table, rows: Sequence[TableRow], runs: Runs) -> list[list[str]]:
        """The lines of the rows, from their entries and what was measured of them."""
        lines = []
        for row in rows:
            lines += [line for entry, result in runs[row.name] for line in self._of(table, entry, result, runs)]
            lines += [] if runs[row.name] else [self._wide(table.said(row))]
        return lines

    def _of(self, table: Table, entry: Entry, result: Result | None, runs: Runs) -> list[list[str]]:
        if result is None:
            return [self._wide(table.cells(entry, None))]
        lines = []
        for rule in self._rules(table, entry, result):
            ruled = replace(table, rule=rule)
            cells = ruled.cells(entry, result)
            cells[0] += f", by {rule}" if self.rule == EVERY else ""
            lines.append(self._wide(cells, self._difference(ruled, result, runs)))
        return lines

    def _wide(self, cells: list[str], difference: str = "") -> list[str]:
        """A line with what belongs below the last heading, if there is one more."""
        return [*cells, difference] if self.against else cells

    def _rules(self, table: Table, entry: Entry, result: Result) -> list[str]:
        """The decision rules by which a run is printed."""
        known = [str(rule) for rule in result.rules]
        if self.rule in (None, EVERY):
            return known if self.rule else [table.rule]
        rule = str(Rule.parse(self.rule))
        if rule not in known:
            raise InputError(f"The row {entry.name!r} was measured by the rules {', '.join(known)}, not by {rule}.")
        return [rule]

    def _difference(self, table: Table, result: Result, runs: Runs) -> str:
        """The paired difference to the first compared row under the same threat and on the same images."""
        for other in (other for name in self.against for _, other in runs[name]):
            if other is not None and _alike(result, other):
                one, its = table.right(result, "robust"), table.right(other, "robust")
                return "–" if other is result else str(Pairs.of((one[index], its[index]) for index in one))
        return "–"


def _alike(a: Result, b: Result) -> bool:
    """Whether two runs were attacked under one threat and on the same images."""
    return all(a.header[key] == b.header[key] for key in ("threat", "data")) and bool(a.attacks and b.attacks)

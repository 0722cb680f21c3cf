"""A table that is measured is read by any decision rule, and its rows are compared with one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffpure.errors import InputError
from diffpure.experiments.load import run_spec
from diffpure.experiments.paper import tables
from diffpure.experiments.reading import Reading
from diffpure.experiments.table import Table
from diffpure.results.compare import compare
from diffpure.results.result import Result


def three_runs() -> Table:
    """Three runs of two images on an undefended classifier: two threats, and one without attack."""
    pgd = {"kind": "pgd", "iterations": 1}
    base = {
        "rules": ["one-shot", "worst of 2"],
        "model": {"classifier": "cifar10-resnet"},
        "data": {"images": "0-1"},
        "threat": {"eps": "8/255"},
        "attacks": [pgd],
    }
    rows = [
        {"name": "a"},
        {"name": "b", "set": {"attacks": [{"kind": "pgd", "iterations": 2}]}},
        {"name": "c", "set": {"threat": {"kind": "l2", "eps": 0.5}}},
        {"name": "d", "run": False},
    ]
    return Table.of({"title": "small", "base": base, "rows": rows, "headline": "minimum"})


def read(reading: Reading, table: Table, out: Path, only: str | None = None) -> list[list[str]]:
    rows = reading.rows(table, only)
    runs = {row.name: [(each, run_spec(each.spec, out / each.name)) for each in table.expanded(row)] for row in rows}
    return reading.lines(table, rows, runs)


def test_a_table_is_read_by_every_rule_and_beside_a_row_of_the_same_threat(tmp_path: Path) -> None:
    table = three_runs()
    assert [line[0] for line in read(Reading(), table, tmp_path)] == ["a", "b", "c", "d"]
    lines = read(Reading(rule="every", against=("a",)), table, tmp_path)
    assert [line[0] for line in lines] == [f"{row}, by {rule}" for row in "abc" for rule in table.base["rules"]] + ["d"]
    assert {len(line) for line in lines} == {len(Reading(against=("a",)).headings)}
    entry, other = (next(table.entries(only=name)) for name in "ab")
    pairs = compare(Result.load(tmp_path / other.name), Result.load(tmp_path / entry.name)).pairs["worst case"]
    assert [line[-1] for line in lines] == ["–", "–", str(pairs), str(pairs), "–", "–", ""]
    assert [line[0] for line in read(Reading(against=("a",)), table, tmp_path, "c")] == ["a", "c"]


def test_a_rule_that_was_not_measured_and_a_row_that_is_not_there_are_refused(tmp_path: Path) -> None:
    table = three_runs()
    with pytest.raises(
        InputError, match=r"The row 'a' was measured by the rules one-shot, worst of 2, not by worst of 3"
    ):
        read(Reading(rule="worst of 3"), table, tmp_path, "a")
    with pytest.raises(InputError, match="row"):
        Reading(against=("e",)).rows(table)
    with pytest.raises(InputError, match="rows are evaluations"):
        Reading(rule="every").rows(tables()["paper/step-size"])

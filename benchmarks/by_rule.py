"""What defences keep under every threat by every decision rule, as one table.

    python benchmarks/by_rule.py [--tables robust benchmarks/siblings.toml] [--out runs]
                                 [--beside "adversarially trained"]

Rows of the tables are called "DEFENCE, THREAT" or "DEFENCE, towards four classes, THREAT"; their runs are read from
`--out`, where `diffpure table NAME` left them, and what is missing is not run. Prints two Markdown tables. The first
counts the images that are right by one draw / the average of ten / all of ten; "both" counts an image that is right
after both attacks of a threat. The second has the differences to one defence by the average of ten, paired by image,
with 95 % intervals, in points.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from diffpure.experiments.table import Table, shipped_tables
from diffpure.results.compare import Pairs
from diffpure.results.result import Result

RULES = ("one-shot", "average of 10", "worst of 10")
MANY = "average of 10"
FOUR = "towards four classes"
CLEAN, BOTH = "clean", "both"
Right = dict[int, bool]
Kept = dict[str, dict[str, Right]]  # by column and rule


def kept(table: Table, out: Path) -> dict[str, Kept]:
    """What each defence of a table has right, of the rows that are measured."""
    found: dict[str, Kept] = {}
    for entry in table.entries():
        result = table.measured(entry, out)
        defence, _, column = entry.name.partition(", ")
        columns = found.setdefault(defence, {})
        if result is not None:
            columns[CLEAN] = {rule: result.right("clean", rule) for rule in RULES}
            columns[column] = {rule: attacked(result, rule) for rule in RULES}
    for columns in found.values():
        pairs = [(column, f"{FOUR}, {column}") for column in list(columns) if f"{FOUR}, {column}" in columns]
        for one, other in pairs:
            columns[f"{BOTH}, {one}"] = {rule: joined(columns[one][rule], columns[other][rule]) for rule in RULES}
    return found


def attacked(result: Result, rule: str) -> Right:
    (attack,) = result.attacks
    return result.right(attack, rule)


def joined(a: Right, b: Right) -> Right:
    return {index: a[index] and b[index] for index in a}


def counts(defences: dict[str, Kept], columns: list[str]) -> Iterator[str]:
    yield from heading("defence", columns)
    for name, its in defences.items():
        cells = (" / ".join(str(sum(its[column][rule].values())) for rule in RULES) if column in its else "–"
                 for column in columns)  # fmt: skip
        yield f"| {name} | {' | '.join(cells)} |"


def differences(defences: dict[str, Kept], columns: list[str], beside: str) -> Iterator[str]:
    yield from heading(f"defence, minus {beside}", columns)
    base = defences[beside]
    for name, its in defences.items():
        if name != beside:
            cells = (difference(its, base, column) for column in columns)
            yield f"| {name} | {' | '.join(cells)} |"


def difference(its: Kept, base: Kept, column: str) -> str:
    """The paired difference; the other defence may have one attack where this has both, and then it is that one's."""
    other = base.get(column, base.get(column.removeprefix(f"{BOTH}, ")))
    if column not in its or other is None:
        return "–"
    one, its_own = its[column][MANY], other[MANY]
    return str(Pairs.of((one[index], its_own[index]) for index in one)).replace(" %", "")


def heading(first: str, columns: list[str]) -> Iterator[str]:
    yield f"| {first} | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="*", default=["robust", "benchmarks/siblings.toml"])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--beside", default="adversarially trained")
    given = parser.parse_args()
    shipped, defences = shipped_tables(), dict[str, Kept]()
    for name in given.tables:
        defences |= kept(Table.read(shipped.get(name, name)), given.out)
    columns = list(dict.fromkeys(column for its in defences.values() for column in its))
    threats = list(dict.fromkeys(column.rpartition(", ")[2] for column in columns))
    columns.sort(key=lambda column: (threats.index(column.rpartition(", ")[2]), BOTH in column, len(column)))
    print(*counts(defences, columns), "", *differences(defences, columns, given.beside), sep="\n")


if __name__ == "__main__":
    main()

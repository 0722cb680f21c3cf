"""The paper's tables and figures together: which are measured, whether their claims hold, and one page of all.

A claim of the paper is an order of rows, not a number: "VP-SDE is more robust than VP-ODE". It is decided by the runs,
image by image, with McNemar's exact test of the images on which the two rows disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, final

from diffpure.experiments import measure, search
from diffpure.experiments.needs import missing
from diffpure.experiments.table import EVALUATION, HEADINGS, SMALL, Claim, Table, shipped_tables
from diffpure.results.compare import Pairs
from diffpure.results.result import Result

PREFIX: Final = "paper/"
FULL: Final = "full"
SEARCH: Final = "search"
LEVEL: Final = 0.05  # below which an order is beyond chance

State = Literal["measured", "partly", "not run", "reported only"]


@final
@dataclass(frozen=True)
class Shown:
    """A table with what is measured of it in some folder: lines to print, runs by the names of their rows, state."""

    name: str
    table: Table
    headings: tuple[str, ...]
    lines: list[list[str]]
    runs: dict[str, Result]
    state: State
    folder: Path | None = None  # of a measurement that is no evaluation

    def verdicts(self) -> list[str]:
        """One sentence per claim: whether it holds here."""
        return [verdict(self.table, claim, self.runs) for claim in self.table.claims]


def tables() -> dict[str, Table]:
    """The tables and figures of the paper inside the package, by name: tables by number, then figures."""
    found = {name: Table.read(path) for name, path in shipped_tables().items() if name.startswith(PREFIX)}
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[int, str]:
    number = re.search(r"table(\d+)", name)
    return int(number[1]) if number else 100, name


def show(name: str, table: Table, parents: Sequence[Path], scale: str = SMALL) -> Shown:
    """What is measured of a table in the first of some folders that has it."""
    if table.kind == SEARCH:
        return _shown_search(name, table, parents, scale)
    if table.kind != EVALUATION:
        return _shown_measurement(name, table, parents, scale)
    lines, runs, wanted = [], dict[str, Result](), 0
    for row in table.rows:
        entries = list(table.expanded(row, scale))
        if not entries:
            lines.append(table.said(row))
        for entry in entries:
            found = (table.measured(entry, parent) for parent in parents)
            result = next((each for each in found if each is not None), None)
            wanted += 1
            if result is not None:
                runs[entry.name] = result
            lines.append(table.cells(entry, result))
    return Shown(name, table, HEADINGS, lines, runs, _state(len(runs), wanted))


def _shown_search(name: str, table: Table, parents: Sequence[Path], scale: str) -> Shown:
    trials = max((search.measured(table, parent, scale) for parent in parents), key=_progress)
    lines = [trial.cells(table) for trial in trials if trial.result is not None]
    runs = {f"{trial.name}, rung {trial.rung + 1}": trial.result for trial in trials if trial.result is not None}
    whole = trials[0].rung == len(table.rungs) - 1 and trials[0].result is not None
    state: State = "measured" if whole else "partly" if lines else "not run"
    return Shown(name, table, search.HEADINGS, lines, runs, state)


def _progress(trials: list[search.Trial]) -> tuple[int, int]:
    return trials[0].rung, sum(trial.result is not None for trial in trials)


def _shown_measurement(name: str, table: Table, parents: Sequence[Path], scale: str) -> Shown:
    made = measure.measurement(table, scale)
    for parent in parents:
        folder = measure.folder_of(table.kind, made, parent)
        if (found := measure.read(folder)) is not None:
            return Shown(name, table, found.headings, found.lines, {}, "measured", folder)
    return Shown(name, table, HEADINGS, [table.said(row) for row in table.rows], {}, "not run")


def _state(done: int, wanted: int) -> State:
    if not wanted:
        return "reported only"
    return "measured" if done == wanted else "partly" if done else "not run"


def lacking(table: Table, scale: str = FULL, base: Path | None = None) -> list[str]:
    """What a scale of a table needs that is not on this machine."""
    if table.kind == SEARCH:
        trials = search.search(table, lambda spec: None, scale)
        return missing(trials[0].spec, base)
    if table.kind != EVALUATION:
        return measure.measurement(table, scale).missing(base)
    return [name for entry in table.entries(scale) for name in missing(entry.spec, base)]


# ------------------------------------------------------------------------------------------------------------- claims


def verdict(table: Table, claim: Claim, runs: dict[str, Result]) -> str:
    """One sentence: whether a claim holds here, by how much, and whether that is beyond chance."""
    others = [name for name in claim.worse if name in runs]
    if not decided(claim, runs):
        return f"The claim that {claim.says}: not measured yet."
    found = [_compared(table, claim, runs[claim.better], runs[name]) for name in others]
    above = [better > worse for better, worse, _ in found]
    sure = [p is not None and p < LEVEL for *_, p in found]
    if all(above):
        word = "holds here" if all(sure) else "holds here in order, but not beyond chance"
    elif any(up is False and certain for up, certain in zip(above, sure, strict=True)):
        word = "does not hold here"
    else:
        word = "is not seen here"
    parts = [
        f"{100 * better:.1f} % against {100 * worse:.1f} % ({name}{_p(p)})"
        for name, (better, worse, p) in zip(others, found, strict=True)
    ]
    return f"The claim that {claim.says} {word}: {'; '.join(parts)}, {claim.what} accuracy."


def decided(claim: Claim, runs: Mapping[str, Result]) -> bool:
    """Whether the runs that a claim compares are there: the better one, and one of the others."""
    return claim.better in runs and any(name in runs for name in claim.worse)


def _compared(table: Table, claim: Claim, better: Result, worse: Result) -> tuple[float, float, float | None]:
    """The two accuracies, and p of McNemar's test where both have the same images."""
    first, second = table.rate(better, claim.what).value, table.rate(worse, claim.what).value
    a, b = table.right(better, claim.what), table.right(worse, claim.what)
    return first, second, Pairs.of((a[i], b[i]) for i in a).p_value if a.keys() == b.keys() else None


def _p(p: float | None) -> str:
    return "" if p is None else f", paired p = {p:.2g}"


# --------------------------------------------------------------------------------------------------------------- page


def page(shown: Sequence[Shown], figures: dict[str, list[str]], scale: str = SMALL) -> str:
    """The page in Markdown; figures: files of pictures by the name of their table, relative to the page."""
    sections = (_section(each, figures.get(each.name, [])) for each in shown)
    return "\n\n".join([_head(shown, scale), *_claims(shown), *sections]) + "\n"


def _claims(shown: Sequence[Shown]) -> list[str]:
    """All claims that runs decide, in front of the tables that they come from."""
    found = [
        f"- {each.table.source}: {verdict(each.table, claim, each.runs)}"
        for each in shown
        for claim in each.table.claims
        if decided(claim, each.runs)
    ]
    return ["## Do the paper's claims hold here?", "\n".join(found)] if found else []


def _head(shown: Sequence[Shown], scale: str) -> str:
    states = ("measured", "partly", "not run", "reported only")
    count = {state: sum(each.state == state for each in shown) for state in states}
    return (
        "# The paper, table by table\n\n"
        "Every table and figure of “Diffusion Models for Adversarial Purification”: what the paper and its critics "
        f"report, and what was measured at {scale} scale. Accuracies are in per cent with Wilson's 95 % interval; "
        "gradients are exact unless a line says otherwise (`backprop` is the exact one with every graph kept). Whether "
        "a claim of the paper holds is a matter of the order of rows on the same images, not of equal numbers. "
        "Clean and attacked images are evaluated with different noise, so under a weak attack a random defence can be "
        f"right more often than without. {count['measured']} are measured, {count['partly']} partly, "
        f"{count['not run']} not yet, and {count['reported only']} are only reported."
    )


def _section(shown: Shown, figures: list[str]) -> str:
    table = shown.table
    parts = [f"## {table.source}: {table.title}", f"`diffpure table {shown.name}` · {shown.state}"]
    parts += [table.note] if table.note else []
    if shown.lines:
        parts.append(markdown([list(shown.headings), *shown.lines]))
    if table.kind != EVALUATION and shown.state != "not run":
        parts.append("Reported: " + "; ".join(" ".join(table.said(row)[:2]) for row in table.rows) + ".")
    parts += [f"![{table.title}]({file})" for file in figures]
    parts += ["\n".join(f"- {text}" for text in shown.verdicts())] if table.claims else []
    if seeds := sorted({seed for result in shown.runs.values() for seed in result.seeds}):
        rules = sorted({table.rule or str(result.rules[0]) for result in shown.runs.values()})
        parts.append(f"Decision rule: {', '.join(rules)}. Seeds: {', '.join(map(str, seeds))}.")
    return "\n\n".join(parts)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table of lines, the first being the heading."""
    return "\n".join(_lines(lines))


def _lines(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        if number == 0:
            yield "|" + "---|" * len(line)


__all__ = ["FULL", "PREFIX", "Shown", "lacking", "markdown", "page", "show", "tables"]

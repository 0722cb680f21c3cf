"""A report as Markdown, CSV and JSON: the same numbers and titles as on the page, escaped as each format needs it."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from diffpure.report import tables, words
from diffpure.report.runs import ReportedRun

COLUMNS: Final = (
    "run", "date", "model", "threat", "attack", "name", "rule", "images", "indices", "accuracy", "low", "high",
)  # fmt: skip


def markdown(runs: Sequence[ReportedRun]) -> str:
    """A section per run: its conclusion, its warnings, what was evaluated, and a table of rates."""
    return "\n\n".join(_section(run) for run in runs) + "\n"


def _section(run: ReportedRun) -> str:
    rules = run.result.rules
    lines = [f"## {marked(run.name)}", "", marked(tables.conclusion(run)), ""]
    if run.result.warnings:
        lines += ["**Warnings**", "", *(f"- {marked(text)}" for text in run.result.warnings), ""]
    lines += [*(f"- {term}: {marked(said)}" for term, said in tables.facts(run)), ""]
    lines += ["| attack | name | " + " | ".join(map(str, rules)) + " |", "|---" * (len(rules) + 2) + "|"]
    for line in tables.rates(run):
        lines.append(f"| {' | '.join([marked(line.title), marked(line.name), *line.cells])} |")
    return "\n".join(lines)


def marked(text: str) -> str:
    """A text in Markdown that is read as it is, on one line."""
    text = " ".join(words.printable(text).replace("`", "'").split())
    return re.sub(r"([\\*<>|]|\[(?![\d.]+, [\d.]+\])|\](?=\())", r"\\\1", text)


def comma_separated(runs: Sequence[ReportedRun]) -> str:
    """Every rate as a line of CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(runs))
    return out.getvalue()


def _flat(runs: Sequence[ReportedRun]) -> Iterator[dict[str, Any]]:
    """Every rate of every run as a flat record with the columns `COLUMNS`."""
    for run in runs:
        header = run.result.header
        threat = words.threat(header) if run.result.attacks else ""
        about = (run.name, words.date(header), header["model"]["title"], threat)
        for what in run.result.lines:
            called = (run.title(what), what if what in run.result.attacks else "")
            for rule in run.result.rules:
                rate = run.result.rate(what, rule)
                counted = (rate.total, words.ranges(run.result.indices), rate.value, *rate.interval)
                values = (*(cell(text) for text in (*about, *called, str(rule))), *counted)
                yield dict(zip(COLUMNS, values, strict=True))


def cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    text = words.printable(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def as_json(runs: Sequence[ReportedRun]) -> str:
    """Every rate, cost and warning as JSON, with what the attacks are called and the conclusion."""
    return json.dumps([_plain(run) for run in runs], indent=1) + "\n"


def _plain(run: ReportedRun) -> dict[str, Any]:
    titles = {what: run.title(what) for what in run.result.lines}
    said = {"date": words.date(run.result.header), "conclusion": tables.conclusion(run), "titles": titles}
    return {"name": run.name, **said, **run.result.summary()}

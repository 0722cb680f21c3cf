"""One self-contained page about one or more runs: no network, no script, light and dark, from a phone to a desk.

The page is a template. Whatever comes from a file of a run is text in it and nothing else: it is made printable and
escaped where it is printed, anchors are numbers, and a Content-Security-Policy admits only the page's own style sheet
(by its hash) and the pictures inside the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from diffpure.disk import one_sentence, write_whole
from diffpure.errors import InputError, unknown
from diffpure.report import panels, plots, tables, words
from diffpure.report.axes import Axis, sweeps
from diffpure.report.runs import ReportedRun, attacked, read_run
from diffpure.report.texts import as_json, comma_separated, markdown
from diffpure.results.result import Result


def html(runs: Sequence[ReportedRun], remark: str = "", axes: Sequence[Axis] | None = None) -> str:
    """The page; remark: what has to be said of all runs; axes: along what they were swept, else the usual ones."""
    style = _templates().get_template("page.css").render()
    page = _templates().get_template("page.html")
    return page.render(
        style=Markup(style),
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        runs=runs,
        remark=remark,
        figures=_figures(runs, axes),
    )


@cache
def _templates() -> Environment:
    """The templates of the package; they escape everything that they print."""
    found = Environment(
        loader=PackageLoader("diffpure.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {"tables": tables, "panels": panels}
    found.filters |= {"prose": _prose, "unbroken": _unbroken, "provenance": _provenance}
    return found


def _printed(value: object) -> object:
    """A value as the page prints it: texts without what is not printable."""
    return words.printable(value) if type(value) is str else value


def _prose(text: str) -> Markup:
    """A sentence with what stands in backticks set as code."""
    parts = re.split(r"`([^`]*)`", words.printable(text).replace("\n", " "))
    said = (
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part.replace("`", "'"))
        for i, part in enumerate(parts)
    )
    return Markup().join(said)


def _unbroken(text: str) -> str:
    """A text that no line break parts from its numbers: a rate may break before its interval only."""
    space = "\N{NO-BREAK SPACE}"
    return re.sub(r" (?=%)|(?<=\[\d\.\d,) |(?<=\[\d\d\.\d,) |(?<=EOT|tep) (?=\d)|(?<=ℓ[∞2]) (?=\d)", space, text)


def _provenance(run: ReportedRun) -> str:
    """The header of a run, with ranges in place of long lists."""
    return json.dumps(words.compact(run.result.header), indent=1, ensure_ascii=False)


def _figures(runs: Sequence[ReportedRun], axes: Sequence[Axis] | None) -> list[tuple[str, str]]:
    """A plot along everything that varies alone, and one of no attack against the worst case, each with its caption."""
    found = [(plots.along(axis, points), f"Accuracy against {axis}") for axis, points in sweeps(runs, axes)]
    if len(attacked(runs)) > 1:
        found.append((plots.trade_off(attacked(runs)), "Accuracy under no attack against the worst case per image"))
    return [(panels.data_url(plots.encoded(plot)), f"{said}, 95 % intervals.") for plot, said in found]


FORMATS: Final[dict[str, Callable[[Sequence[ReportedRun]], str]]] = {
    "html": html,
    "md": markdown,
    "csv": comma_separated,
    "json": as_json,
}
KINDS: Final = (*FORMATS, "png", "pdf")


def write_report(runs: Sequence[Result | str | Path], out: str | Path, kind: str | None = None) -> None:
    """Write one page about finished evaluations, each a result or the folder of its run.

    kind: html, md, csv, json, png or pdf; by default the file's ending. Pictures are those that were kept with the run.
    """
    out = Path(out)
    write([_reported(run) for run in runs], out, kind or out.suffix.lstrip(".") or "html")


def _reported(run: Result | str | Path) -> ReportedRun:
    """A run as the page shows it; a result that was kept nowhere has no pictures."""
    folder = run.folder if isinstance(run, Result) else Path(run)
    if folder is not None:
        return read_run(folder)
    assert isinstance(run, Result)
    if not run.complete:
        raise InputError(f"The evaluation is unfinished: it has {len(run.rows)} rows; finish it before it is reported.")
    remark = "There are no pictures: the evaluation was not kept in a folder (`out=`)."
    return ReportedRun(Path(str(run.header["model"]["title"])), run, remark=remark)


def write(
    runs: Sequence[ReportedRun], out: Path, kind: str, remark: str = "", axes: Sequence[Axis] | None = None
) -> None:
    """Write a report, whole or not at all; PNG and PDF hold the plot of no attack against the worst case alone."""
    if kind not in KINDS:
        raise unknown("report format", kind, KINDS)
    if kind in FORMATS:
        data = (html(runs, remark, axes) if kind == "html" else FORMATS[kind](runs)).encode()
    elif measured := attacked(runs):
        data = plots.encoded(plots.trade_off(measured), kind)
    else:
        raise InputError(
            f"A report as {kind} plots robust accuracy, and none of these runs attacked; write html or md."
        )
    with one_sentence(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, data)

"""One self-contained page about one or more runs: no network, no script, light and dark, from a phone to a desk.

The page is a template, in which every text of a run is escaped and anchors are numbers. Runs of certificates have a
page of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from diffpure.disk import one_sentence, write_whole
from diffpure.errors import InputError, unknown
from diffpure.report import certified, panels, plots, tables
from diffpure.report.axes import Axis, sweeps
from diffpure.report.runs import ReportedRun, attacked, read_run
from diffpure.report.template import render
from diffpure.report.texts import as_json, comma_separated, markdown
from diffpure.results.certificates import Certification
from diffpure.results.read import holds_certificates
from diffpure.results.result import Result


def html(runs: Sequence[ReportedRun], remark: str = "", axes: Sequence[Axis] | None = None) -> str:
    """The page; remark: what has to be said of all runs; axes: along what they were swept, else the usual ones."""
    figures = _figures(runs, axes)
    return render("page.html", runs=runs, remark=remark, figures=figures, tables=tables, panels=panels)


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


def write_report(runs: Sequence[Result | Certification | str | Path], out: str | Path, kind: str | None = None) -> None:
    """Write one page about finished evaluations, or about certificates, each a result or the folder of its run.

    kind: html, md, csv, json, png or pdf; by default the file's ending. Pictures are those that were kept with the run.
    """
    out = Path(out)
    kind = kind or out.suffix.lstrip(".") or "html"
    certificates = [found for run in runs if (found := _certification(run)) is not None]
    if 0 < len(certificates) < len(runs):
        raise InputError("A report is about evaluations or about certificates, not both; write one of each.")
    if certificates:
        write_certified(certificates, out, kind)
    else:
        write([_reported(run) for run in runs if not isinstance(run, Certification)], out, kind)


def _certification(run: Result | Certification | str | Path) -> Certification | None:
    """The certificates that a run is, or holds."""
    if isinstance(run, Result | Certification):
        return run if isinstance(run, Certification) else None
    return Certification.load(run) if holds_certificates(run) else None


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
    _save(out, data)


def write_certified(runs: Sequence[Certification], out: Path, kind: str) -> None:
    """Write a report about certificates, whole or not at all; PNG and PDF hold its plot alone."""
    if kind not in KINDS:
        raise unknown("report format", kind, KINDS)
    told = certified.FORMATS.get(kind)
    _save(out, plots.encoded(plots.certified(runs), kind) if told is None else told(runs).encode())


def _save(out: Path, data: bytes) -> None:
    with one_sentence(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, data)

"""`diffpure report`: a page about finished evaluations, or about certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffpure.cli.base import Threads, app, console, use_threads
from diffpure.errors import InputError


@app.command(epilog="Example: diffpure report runs/* -o report.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished evaluations, or of certificates.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    kind: Annotated[
        str | None, typer.Option("--format", help="html, md, csv, json, png or pdf; from --out's ending.")
    ] = None,
    pictures: Annotated[
        int, typer.Option(min=0, help="Images to show, purified as the run did it; their pictures are kept with it.")
    ] = 8,
    threads: Threads = None,
) -> None:
    """Write one self-contained page about evaluations, or about certificates."""
    use_threads(threads)
    from diffpure.report.page import write, write_report
    from diffpure.report.runs import read_run
    from diffpure.results.read import holds_certificates

    kind = kind or out.suffix.lstrip(".") or "html"
    if any(map(holds_certificates, runs)):
        write_report(runs, out, kind)
        console.print(f"Report: {out}", soft_wrap=True, markup=False)
        return
    found = [read_run(folder, pictures=pictures) for folder in runs]
    if kind == "html" and pictures:
        with console.status("Making pictures …"):
            remarks = [_make_pictures(run.folder, pictures) for run in found]
            found = [read_run(path, remark, pictures) for path, remark in zip(runs, remarks, strict=True)]
    write(found, out, kind)
    console.print(f"Report: {out}", soft_wrap=True, markup=False)


def _make_pictures(folder: Path, count: int) -> str:
    """Make a run's pictures where they are missing; returns why that could not be done."""
    from diffpure.experiments.load import gallery_of

    try:
        gallery_of(folder, count)
        return ""
    except InputError as error:
        return f"There are no pictures of the diffused and purified images: {error}"

"""`diffpure report`: a page about finished evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffpure.cli.base import app, console


@app.command(epilog="Example: diffpure report runs/mine -o report.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished evaluations.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    kind: Annotated[
        str | None, typer.Option("--format", help="html, md, csv, json, png or pdf; from --out's ending.")
    ] = None,
) -> None:
    """Write one self-contained page about evaluations: warnings first, then rates with intervals, pictures, cost."""
    from diffpure.report.page import write
    from diffpure.report.runs import read_run

    write([read_run(folder) for folder in runs], out, kind or out.suffix.lstrip("."))
    console.print(f"Report: {out}", soft_wrap=True)

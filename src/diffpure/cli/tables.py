"""`diffpure table`: a table of the paper, or one of your own, from its file to its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from diffpure.cli.base import AsJson, Threads, app, console, use_threads
from diffpure.cli.evaluation import AllowCode, Device, Memory, RunBar, make_loader, stoppable
from diffpure.errors import unknown


@app.command(epilog="Example: diffpure table gradients --estimate")
def table(
    name: Annotated[str | None, typer.Argument(help="A TOML file, or a table inside the package; none: list.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Parent of the runs' folders.")] = Path("runs"),
    only: Annotated[str | None, typer.Option(help="Only the row of this name.")] = None,
    scale: Annotated[str, typer.Option(help="small, or another scale that the table has.")] = "small",
    tiny: Annotated[bool, typer.Option("--tiny", help="Two images and two steps of everything: does it run?")] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what is missing and what it costs.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only print what is measured already.")] = False,
    device: Device = "cpu",
    memory: Memory = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Run what is missing of a table and print it, with the reported numbers beside the measured ones."""
    use_threads(threads)
    from diffpure.experiments.load import run_folder, run_spec
    from diffpure.experiments.table import HEADINGS, Table, shipped_tables

    shipped = shipped_tables()
    if name is None:
        for key, path in shipped.items():
            console.print(f"{key:24} {Table.read(path).title}", soft_wrap=True, markup=False)
        return
    if name not in shipped and not Path(name).is_file():
        raise unknown("table", name, [*shipped, "a TOML file"])
    wanted = Table.read(shipped.get(name, name))
    loader = make_loader(device, allow_code, None if name in shipped else Path(name).parent)
    limit = None if memory is None else int(memory * 2**30)
    lines, seconds = [], 0.0
    for entry in wanted.entries(scale, only, tiny=tiny):
        result = wanted.measured(entry, out)
        if result is None and estimate:
            cost = loader.evaluation(entry.spec, memory=limit).estimate()
            seconds += cost.seconds
            console.print(f"{entry.name}: {cost}", soft_wrap=True, markup=False)
        elif result is None and not show:
            folder = run_folder(entry.spec, out)
            with stoppable(folder), RunBar() as bar:
                result = run_spec(entry.spec, folder, loader, memory=limit, progress=bar)
        lines.append(wanted.cells(entry, result))
    if estimate:
        from diffpure.evaluation.cost import duration

        console.print(f"Missing in all: about {duration(seconds)}.")
        return
    if as_json:
        console.print_json(json.dumps([dict(zip(HEADINGS, line, strict=True)) for line in lines]))
        return
    _print(wanted.title, wanted.source, lines, HEADINGS)
    if wanted.note:
        console.print(wanted.note, soft_wrap=True, markup=False)


def _print(title: str, source: str, lines: list[list[str]], headings: tuple[str, ...]) -> None:
    shown = RichTable(*headings, title=f"{title} ({source})" if source else title)
    for line in lines:
        shown.add_row(*line)
    console.print(shown)

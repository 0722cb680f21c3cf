"""`diffpure table`: a table of the paper, or one of your own, from its file to its numbers; and quick sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer
from rich.table import Table as RichTable
from rich.text import Text

from diffpure.cli.base import AsJson, Device, Quiet, Threads, app, console, say, use_threads, visible
from diffpure.cli.evaluation import AllowCode, Memory, RunBar, make_loader, stoppable
from diffpure.cli.output import print_json
from diffpure.errors import InputError, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from diffpure.evaluation.engine import Engine
    from diffpure.experiments.load import Loader
    from diffpure.experiments.table import Entry, Table


@final
@dataclass(frozen=True)
class Way:
    """How the entries of a table are run and shown."""

    out: Path
    loader: Loader
    memory: int | None = None
    engine: Engine | None = None
    estimate: bool = False
    as_json: bool = False
    quiet: bool = False
    show: bool = False


@app.command(epilog="Example: diffpure table gradients --estimate")
def table(
    name: Annotated[str | None, typer.Argument(help="A TOML file, or a table inside the package; none: list.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Parent of the runs' folders.")] = Path("runs"),
    only: Annotated[str | None, typer.Option(help="Only the row of this name.")] = None,
    scale: Annotated[str, typer.Option(help="small, or another scale that the table has.")] = "small",
    tiny: Annotated[bool, typer.Option("--tiny", help="Two images and two steps of everything: does it run?")] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what is missing and what it costs.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only print what is measured already.")] = False,
    device: Device = "auto",
    memory: Memory = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    threads: Threads = None,
) -> None:
    """Run what is missing of a table and print it, with the reported numbers beside the measured ones."""
    use_threads(threads)
    from diffpure.experiments.table import Table, shipped_tables

    shipped = shipped_tables()
    if name is None:
        for key, path in shipped.items():
            say(f"{key:24} {Table.read(path).title}")
        return
    if name not in shipped and not Path(name).is_file():
        raise unknown("table", name, [*shipped, "a TOML file"])
    wanted = Table.read(shipped.get(name, name))
    loader = make_loader(device, allow_code, None if name in shipped else Path(name).parent)
    limit = None if memory is None else int(memory * 2**30)
    way = Way(out, loader, limit, estimate=estimate, as_json=as_json, quiet=quiet, show=show)
    _measure(wanted, wanted.entries(scale, only, tiny=tiny), way)


def sweep(spec: Path, settings: list[str], way: Way) -> None:
    """Run a spec once for each combination of the settings' values, and print one table."""
    from diffpure.experiments.spec import read_toml
    from diffpure.experiments.table import Table, setting

    base, points = read_toml(spec), dict(map(setting, settings))
    if len(points) < len(settings):
        raise InputError(f"Every key is set once, got --set {' --set '.join(settings)}.")
    title = str(base.pop("name", "") or spec.stem)
    fixed = {path: values[0] for path, values in points.items() if len(values) == 1}
    name = ", ".join(f"{path.rpartition('.')[2]} = {value}" for path, value in fixed.items())
    swept = {path: values for path, values in points.items() if path not in fixed}
    wanted = Table.of({"title": title, "base": base, "rows": [{"name": name or "sweep", "set": fixed, "sweep": swept}]})
    _measure(wanted, wanted.entries(), way)


def _measure(wanted: Table, entries: Iterable[Entry], way: Way) -> None:
    """Run the entries that are missing, one after the other, and print all of them."""
    from diffpure.experiments.load import run_folder, run_spec
    from diffpure.experiments.table import HEADINGS

    lines, seconds = [], 0.0
    for entry in entries:
        result = wanted.measured(entry, way.out)
        if result is None and way.estimate:
            cost = way.loader.evaluation(entry.spec, memory=way.memory).estimate()
            seconds += cost.seconds
            if not way.as_json:
                say(f"{entry.name}: {cost}")
        elif result is None and not way.show:
            folder = run_folder(entry.spec, way.out)
            with stoppable(folder), RunBar(way.quiet) as bar:
                result = run_spec(entry.spec, folder, way.loader, engine=way.engine, memory=way.memory, progress=bar)
        lines.append(wanted.cells(entry, result))
    if way.estimate:
        _say_missing(seconds, way.as_json)
    elif way.as_json:
        print_json([dict(zip(HEADINGS, line, strict=True)) for line in lines])
    else:
        _print(f"{wanted.title} ({wanted.source})" if wanted.source else wanted.title, lines, HEADINGS)
        if wanted.note:
            say(wanted.note)


def _say_missing(seconds: float, as_json: bool) -> None:
    from diffpure.evaluation.cost import duration

    if as_json:
        print_json({"seconds": seconds})
    else:
        say(f"Missing in all: about {duration(seconds)}.")


def _print(title: str, lines: list[list[str]], headings: tuple[str, ...]) -> None:
    said = [i for i in range(len(headings)) if any(line[i] not in ("", "–") for line in lines)]
    shown = RichTable(*(headings[i] for i in said), title=Text(visible(title)))
    for line in lines:
        shown.add_row(*(Text(visible(line[i])) for i in said))
    console.print(shown)

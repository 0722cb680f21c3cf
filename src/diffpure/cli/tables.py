"""`diffpure table`: a table of the paper, or one of your own, from its file to its numbers; and quick sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer
from rich.table import Table as RichTable
from rich.text import Text

from diffpure.cli.base import AsJson, Device, Quiet, Threads, app, console, keep_memory, say, use_threads, visible
from diffpure.cli.evaluation import AllowCode, Memory, RunBar, make_loader, stoppable
from diffpure.cli.output import print_json
from diffpure.errors import InputError, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffpure.evaluation.engine import Engine
    from diffpure.experiments.load import Loader
    from diffpure.experiments.reading import Reading
    from diffpure.experiments.spec import EvaluationSpec
    from diffpure.experiments.table import Table
    from diffpure.results.result import Result

Scale = Annotated[str, typer.Option(help="small, or another scale that the table has.")]


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
    reading: Reading | None = None


class Runs:
    """Runs specs, or only adds up what they would cost, and remembers what they lack on this machine."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.seconds, self.lacking = 0.0, list[str]()

    def __call__(self, spec: EvaluationSpec) -> Result | None:
        """The finished run of a spec, which is made now unless it is there, is only estimated, or lacks something."""
        from diffpure.experiments.load import run_folder, run_spec
        from diffpure.experiments.needs import missing
        from diffpure.experiments.table import finished

        way = self.way
        if (done := finished(spec, way.out)) is not None or way.show:
            return done
        if lacking := missing(spec, way.loader.base):
            self.lacking += lacking
            return None
        if way.estimate:
            cost = way.loader.evaluation(spec, memory=way.memory).estimate()
            self.seconds += cost.seconds
            if not (way.as_json or way.quiet):
                say(f"{spec.name}: {cost}")
            return None
        folder = run_folder(spec, way.out)
        with stoppable(folder), RunBar(way.quiet) as bar:
            return run_spec(spec, folder, way.loader, engine=way.engine, memory=way.memory, progress=bar)


@app.command(epilog="Example: diffpure table paper/table6 --estimate")
def table(
    name: Annotated[str | None, typer.Argument(help="A TOML file, or a table inside the package; none: list.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Parent of the runs' folders.")] = Path("runs"),
    only: Annotated[str | None, typer.Option(help="Only the row of this name.")] = None,
    scale: Scale = "small",
    rule: Annotated[str | None, typer.Option(help='Decision rule of what is printed, or "every".')] = None,
    against: Annotated[list[str] | None, typer.Option(help="Compare others with this row, paired by image.")] = None,
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
    """Run what is missing of a table and print it beside the reported numbers."""
    use_threads(threads)
    keep_memory()
    from diffpure.experiments.reading import Reading
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
    reading = Reading(rule=rule, against=tuple(against or ()))
    way = Way(out, loader, limit, estimate=estimate, as_json=as_json, quiet=quiet, show=show, reading=reading)
    _measure(wanted, way, f"{name} at {scale} scale", scale, only, tiny)


def sweep(spec: Path, settings: list[str], way: Way) -> None:
    """Run a spec once for each combination of the settings' values, and print one table."""
    from diffpure.experiments.overrides import setting
    from diffpure.experiments.spec import read_toml
    from diffpure.experiments.table import Table

    base, points = read_toml(spec), dict(map(setting, settings))
    if len(points) < len(settings):
        raise InputError(f"Every key is set once, got --set {' --set '.join(settings)}.")
    title = str(base.pop("name", "") or spec.stem)
    fixed = {path: values[0] for path, values in points.items() if len(values) == 1}
    name = ", ".join(f"{path.rpartition('.')[2]} = {value}" for path, value in fixed.items())
    swept = {path: values for path, values in points.items() if path not in fixed}
    wanted = Table.of({"title": title, "base": base, "rows": [{"name": name or "sweep", "set": fixed, "sweep": swept}]})
    _measure(wanted, way, title)


def _measure(
    wanted: Table, way: Way, what: str, scale: str = "small", only: str | None = None, tiny: bool = False
) -> None:
    """Run what is missing of a table, one row after the other, and print all of it, and what it lacks here."""
    from diffpure.experiments.needs import sentence
    from diffpure.experiments.table import NOT_RUN, REPORTED_ONLY

    runs = Runs(way)
    headings, lines = measured(wanted, runs, scale, only, tiny)
    done = any(line[2] not in (NOT_RUN, REPORTED_ONLY) for line in lines)
    lacking = sentence(runs.lacking, f"The rest of {what}" if done else what)
    if way.estimate:
        _say_missing(runs.seconds, lacking, way.as_json)
    elif lacking and not done:
        raise InputError(lacking)
    elif way.as_json:
        print_json([dict(zip(headings, line, strict=True)) for line in lines])
    else:
        _print(f"{wanted.title} ({wanted.source})" if wanted.source else wanted.title, lines, headings)
        for text in filter(None, (wanted.note, way.reading and way.reading.note, lacking)):
            say(text)


def measured(
    wanted: Table, runs: Runs, scale: str, only: str | None = None, tiny: bool = False
) -> tuple[Sequence[str], list[list[str]]]:
    """The headings and lines of a table, after what is missing of it was run."""
    from diffpure.experiments import measure, search
    from diffpure.experiments.reading import Reading
    from diffpure.experiments.table import EVALUATION, HEADINGS

    reading = runs.way.reading or Reading()
    rows = reading.rows(wanted, only)
    if wanted.kind == "search":
        return search.HEADINGS, [trial.cells(wanted) for trial in search.search(wanted, runs, scale, tiny=tiny)]
    if wanted.kind != EVALUATION:
        made = measure.measurement(wanted, scale, tiny=tiny)
        folder = measure.folder_of(wanted.kind, made, runs.way.out)
        if (found := measure.read(folder)) is None and not runs.way.show:
            runs.lacking += made.missing(runs.way.loader.base)
            if not (runs.lacking or runs.way.estimate):
                found = measure.read(measure.measure(wanted, runs.way.out, scale, runs.way.loader, tiny=tiny))
        said = [wanted.said(row) for row in wanted.rows]
        return (HEADINGS, said) if found is None else (found.headings, found.lines)
    parts = {row.name: [(entry, runs(entry.spec)) for entry in wanted.expanded(row, scale, tiny=tiny)] for row in rows}
    return reading.headings, reading.lines(wanted, rows, parts)


def _say_missing(seconds: float, lacking: str, as_json: bool) -> None:
    from diffpure.evaluation.cost import duration

    if as_json:
        print_json({"seconds": seconds, **({"lacking": lacking} if lacking else {})})
    else:
        say(f"Missing in all: about {duration(seconds)}. {lacking}".rstrip())


def _print(title: str, lines: list[list[str]], headings: Sequence[str]) -> None:
    said = [i for i in range(len(headings)) if any(line[i] not in ("", "–") for line in lines)]
    shown = RichTable(*(headings[i] for i in said), title=Text(visible(title)))
    for line in lines:
        shown.add_row(*(Text(visible(line[i])) for i in said))
    console.print(shown)

"""`diffpure runs`: list, show, publish and delete the runs of evaluations. Only `publish` waits for torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffpure.cli.base import AsJson, app, say
from diffpure.cli.output import print_json
from diffpure.errors import InputError

if TYPE_CHECKING:
    from diffpure.results.catalogue import RunInfo

runs_app = typer.Typer(help="List, show, publish and delete runs of evaluations.", no_args_is_help=True)
app.add_typer(runs_app, name="runs")

Run = Annotated[Path, typer.Argument(help="The folder of a run.")]


@runs_app.command("list", epilog="Example: diffpure runs list runs")
def list_runs(
    home: Annotated[Path, typer.Argument(help="The folder that holds runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder: how far each has come, under which threat and attacks, and what it found."""
    from diffpure.results.catalogue import describe, find_runs

    if not home.is_dir():
        raise InputError(f"There is no folder {home}; name the one that holds your runs.")
    found: list[dict[str, Any]] = []
    lines: list[str] = []
    for folder in find_runs([home]):
        if folder == home and not any(home.iterdir()):
            continue
        try:
            run = describe(folder)
        except InputError as error:
            found.append({"folder": str(folder), "problem": str(error)})
            lines.append(f"{folder}  unreadable: {error}")
            continue
        found.append(run.as_dict())
        lines += _lines(run)
    if as_json:
        print_json(found)
    else:
        say("\n".join(lines) or f"There are no runs in {home}.")


def _lines(run: RunInfo) -> list[str]:
    """A run in a few lines that fit a terminal."""
    date = str(run.result.header.get("date") or "")[:16].replace("T", " ")
    told = (run.name, run.about, run.headline)
    return [f"{run.folder}  {run.state}  {date}", *(f"    {line}" for line in told if line)]


@runs_app.command(epilog="Example: diffpure runs show runs/mine")
def show(run: Run, as_json: AsJson = False) -> None:
    """Show one run: its rates with intervals, its attacks, what it cost and its warnings."""
    from diffpure.results.catalogue import describe

    found = describe(run)
    if as_json:
        summary = found.result.summary() if found.result.complete else {}
        print_json({**found.as_dict(), **summary, "header": dict(found.result.header)})
        return
    header = found.result.header
    say(f"{found.name} ({found.state}, {header.get('date') or 'no date'})\n")
    say(found.result)


@runs_app.command(
    epilog='Example: diffpure runs publish runs/mine --out published --why "The images may not be passed on"'
)
def publish(
    run: Run,
    out: Annotated[Path, typer.Option("--out", "-o", help="Parent of the published folder, which keeps its name.")],
    why: Annotated[str, typer.Option(help="Why its images are withheld, in one line; `verify` prints it.")],
) -> None:
    """Copy a finished run without its images, with the hashes of its perturbations, for others to verify."""
    from diffpure.verification.publish import publish

    made = publish(run, out, why)
    say(f"Published without its images: {made}   Check: diffpure verify {made}")


@runs_app.command(epilog="Example: diffpure runs rm runs/mine --yes")
def rm(run: Run, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Delete a run with its adversarial images; what is no run is refused."""
    from diffpure.results.catalogue import describe, remove_run

    found = describe(run)
    say(f"{run}: {found.name} ({found.state})")
    if not yes and not typer.confirm("Delete it?"):
        say("Nothing was deleted.")
        raise typer.Exit(1)
    remove_run(run)
    say(f"Deleted {run}.")

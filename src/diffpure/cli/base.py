"""What all commands share: the application, the console, progress bars and threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from diffpure import __version__

app = typer.Typer(
    help="Defend an image classifier with a diffusion model, and find out honestly how robust it then is.",
    epilog="Start with: diffpure demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
Threads = Annotated[int | None, typer.Option(help="CPU threads; by default as many as torch chooses.", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"diffpure {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def use_threads(threads: int | None) -> None:
    """Set torch's threads, if asked to."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def grid(rows: Mapping[str, RenderableType], style: str = "bold") -> Table:
    """Keys and values side by side; a long value goes on in the next line, and nothing is cut off."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=style, overflow="fold")
    table.add_column(overflow="fold")
    for key, value in rows.items():
        table.add_row(key, value)
    return table


class Bars:
    """One bar for each kind of work, with an estimate of the time that is left."""

    def __enter__(self) -> Bars:
        columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._bars.start()
        return self

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Say how far the work called `what` has come."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done)

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

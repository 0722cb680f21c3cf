"""What all commands share: the application, its consoles, progress, devices and threads.

Results go to standard output and progress to standard error. Names come from files and may hold anything: `say` and
`visible` show them without markup and without control characters, so that no file can talk to the terminal.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, final

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from diffpure import __version__
from diffpure.errors import InputError

app = typer.Typer(
    help="Defend an image classifier with a diffusion model, and find out honestly how robust it then is.",
    epilog="Start with: diffpure demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # every command inherits them
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)
DeviceName = Literal["auto", "cpu", "cuda", "mps"]
Threads = Annotated[int | None, typer.Option(help="CPU threads; by default, torch chooses.", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Device = Annotated[DeviceName, typer.Option(help="auto takes a GPU if there is one.", show_default=False)]
EVERY: Final = 30.0  # seconds between two lines where there is no terminal
_MALLOPT: Final = (-1, -3)  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


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


def keep_memory() -> None:
    """Let the C library keep memory that is freed, where it is glibc, as every step of an attack takes the same again.

    Else the pages of a step's graphs come from the system anew each time, a tenth of an evaluation's time
    (`benchmarks/freed_memory.py`). For commands that attack, not for a library inside somebody's program.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        for what in _MALLOPT:
            ctypes.CDLL(None).mallopt(what, 1 << 30)


def use_device(name: DeviceName) -> str:
    """The device of that name, or the best one for "auto"; one sentence if this machine has it not."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, found in there.items() if found)
    if not there[name]:
        has = ", ".join(device for device, found in there.items() if found)
        raise InputError(f"Torch finds no device {name!r} on this machine; it finds {has}.")
    return name


def visible(text: str) -> str:
    """Text with every character that a terminal would act on, or cannot show, written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def say(what: object, to: Console | None = None) -> None:
    """Print text as it is: lines are kept, but nothing in it is markup, and nothing reaches the terminal's controls."""
    text = "\n".join(visible(line) for line in str(what).split("\n"))
    (to or console).print(text, markup=False, soft_wrap=True)


def grid(rows: Mapping[str, RenderableType], style: str = "bold") -> Table:
    """Keys and values side by side; a long value goes on in the next line, and nothing is cut off."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=style, overflow="fold")
    table.add_column(overflow="fold")
    for key, value in rows.items():
        table.add_row(key, value)
    return table


# ---------------------------------------------------------------------------------------------------------- progress


@final
@dataclass(frozen=True)
class _State:
    """How far a piece of work has come."""

    shown: str
    done: int | float  # a float is a share of the total
    total: int | float | None
    left: str

    def __str__(self) -> str:
        return ", ".join(part for part in (f"{self.shown} {self.count}", self.left) if part)

    @property
    def count(self) -> str:
        """Done of all: a share in per cent, other work in numbers."""
        if isinstance(self.done, float):
            return f"{100 * self.done / (self.total or 1):.0f} %"
        return f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"


class Bars:
    """Progress on standard error: a bar for each kind of work, or a line every 30 s where there is no terminal.

    Work that has reached its total disappears, so that the next image's tiles take the place of the last one's.
    """

    def __init__(self, quiet: bool = False, every: float = EVERY) -> None:
        self._quiet, self._every = quiet, every
        self._lines = not errors.is_terminal or errors.is_dumb_terminal
        self._states: dict[str, _State] = {}
        self._began: dict[str, tuple[float, float]] = {}  # the time and the count of the first call
        self._tasks: dict[str, TaskID] = {}
        self._over = threading.Event()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[state].count}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state].left}", markup=False),
        )
        self._bars = Progress(*columns, console=errors, transient=True, disable=quiet or self._lines)

    def __enter__(self) -> Bars:
        self._bars.start()
        if self._lines and not self._quiet:
            threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __call__(
        self, what: str, done: float, total: float | None, *, shown: str | None = None, left: str | None = None
    ) -> None:
        """Say how far the work called `what` has come; a float is a share of the total.

        shown: what to call it now, if that changes.   left: the time that is left, if the caller knows better.
        """
        then, first = self._began.setdefault(what, (time.monotonic(), done))
        if left is None:
            left = _left(time.monotonic() - then, done - first, None if total is None else total - done)
        state = _State(visible(what if shown is None else shown), done, total, f"{left} left" if left else "")
        if total is not None and done >= total:
            self._states.pop(what, None)
            self._began.pop(what)
            if what in self._tasks:
                self._bars.remove_task(self._tasks.pop(what))
            return
        self._states[what] = state
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(state.shown, total=total, state=state)
        self._bars.update(self._tasks[what], description=state.shown, completed=done, total=total, state=state)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._bars.stop()

    def _tell(self) -> None:
        """Print a line every now and then, until the work is over."""
        while not self._over.wait(self._every):
            say("; ".join(map(str, list(self._states.values()))) or "working", errors)


def _left(elapsed: float, done: float, missing: float | None) -> str:
    """The time that is left at the speed so far, or nothing before there is one."""
    if missing is None or done <= 0:
        return ""
    minutes, seconds = divmod(round(elapsed * missing / done), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"

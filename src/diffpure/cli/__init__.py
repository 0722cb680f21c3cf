"""The command line: parse, call, show. Everything heavy is imported inside a command, so that --help is instant."""

from __future__ import annotations

import io
import os
import sys
from typing import Final

from rich.console import Console
from rich.markup import escape

from diffpure.cli import (
    advising,
    certifying,
    comparing,
    demo,
    evaluation,
    exporting,
    images,
    machine,
    models,
    paper,
    play,
    reporting,
    runs,
    serve,
    spec,
    start,
    tables,
    training,
)
from diffpure.cli.base import app, visible
from diffpure.errors import InputError

__all__ = ["app", "main"]
COMMANDS: Final = (
    *(demo, play, evaluation, certifying, advising, comparing, runs, spec, start, tables, paper, reporting),
    *(images, exporting, machine, models, serve, training),
)  # each registers its commands when it is imported


def main() -> None:
    """Run the command line; what a user can mend is one sentence on standard error and exit code 2."""
    # Before torch is imported: threads that spin while they wait stop each other on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Greek letters shows question marks
    try:
        app()
    except InputError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]Error:[/red] {escape(visible(str(error)))}")
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted.")
        sys.exit(130)

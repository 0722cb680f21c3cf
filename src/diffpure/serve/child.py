"""A process that answers over a connection: forked in milliseconds from a small one, ended whatever it does."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

_LOADED: Final = "diffpure.serve.decoding"  # what the small process has imported, and with it torch, but no network


class Child:
    """One process at a time; without a connection there is none."""

    def __init__(self) -> None:
        self.process: Any = None
        self.connection: Connection | None = None

    def fork(self, work: Callable[..., None], *arguments: Any) -> Connection:
        """Start `work` with the other end of the connection and the arguments, in a new process."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_LOADED])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        return self.connection

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self.connection is not None:
            self.connection.close()
            self.process.kill()
            self.process.join()
            self.connection = None

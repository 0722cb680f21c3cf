"""A model in a process of its own, so that HTTP and the network do not take turns with Python's lock.

Measured with both in one process, a served image took as long as its HTTP and its network one after the other, on a
machine with a core for each. The process is forked from the small one that the decoders come from. A batch is one
message there and one back; while it waits, this side asks now and then whether anybody still does, and if not says
stop, which the other side sees between two steps. A process that dies fails its batch and is started again.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor

from diffpure.errors import InputError
from diffpure.serve.batching import Failed, Kind, Stopped
from diffpure.serve.child import Child
from diffpure.serve.model import Check, Classification

if TYPE_CHECKING:
    from diffpure.serve.load import Plan

_ASK: Final = 0.05  # seconds between two looks at who waits
_STOP: Final = None  # the message that ends a batch


@final
class Apart(Child):
    """The model of a plan, loaded and computed elsewhere; threads: of its process."""

    def __init__(self, plan: Plan, threads: int) -> None:
        super().__init__()
        self._plan, self._threads = plan, threads
        self.size: int | None = None
        self.draws, self.fit = 1, plan.fit
        self._start()

    def _start(self) -> Connection:
        """The connection to a living process that has loaded the model."""
        if self.connection is None:
            connection = self.fork(_work, self._plan, self._threads)
            try:
                told = connection.recv()
            except (EOFError, OSError):
                self.stop()
                raise InputError("The process of the model ended while it loaded; is there memory for it?") from None
            if isinstance(told, InputError):
                self.stop()
                raise told
            self.size, self.draws = told
        assert self.connection is not None
        return self.connection

    def compute(self, kind: Kind, images: Tensor, check: Check) -> Sequence[Tensor | Classification]:
        """One answer per image."""
        try:
            answer = self._asked(self._start(), (kind, images.numpy()), check)
        except (EOFError, OSError):
            self.stop()
            raise Failed("its process died") from None
        if isinstance(answer, Exception):
            raise answer
        return list(torch.from_numpy(answer)) if kind == "purify" else answer

    def _asked(self, connection: Connection, question: Any, check: Check) -> Any:
        """The answer to a question, or why it was stopped; every question has one answer."""
        connection.send(question)
        stopped = False
        while not connection.poll(_ASK):
            try:
                check()
            except Stopped:
                if not stopped:
                    connection.send(_STOP)
                stopped = True
        answer = connection.recv()
        return Stopped() if stopped else answer


# -------------------------------------------------------------------------------------------------- in the process


def _work(connection: Connection, plan: Plan, threads: int) -> None:
    """Load the model, and answer one batch after the other until the service is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches everybody; the service ends this one
    torch.set_num_threads(threads)

    def check() -> None:
        if connection.poll():
            connection.recv()
            raise Stopped

    try:
        model = plan.computer()
    except InputError as error:
        connection.send(error)
        return
    connection.send((model.size, model.draws))
    while True:
        try:
            question = connection.recv()
            if question is _STOP:  # it came when its batch was finished already
                continue
            kind, images = question
            try:
                found: Any = model.compute(kind, torch.from_numpy(images), check)
                answer = torch.stack(found).numpy() if kind == "purify" else found
            except (Stopped, InputError) as error:
                answer = error
            except Exception as error:
                answer = Failed(type(error).__name__)
            connection.send(answer)
        except (EOFError, OSError):
            return

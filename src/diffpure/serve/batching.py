"""Requests of equal shape are computed together, on one thread, and stopped when nobody waits for them any more.

    a work arrives → waits at most `wait` for others of its key → the oldest and all that are alike → compute → answers

While a batch is computed others arrive, so under load a batch is full when its turn comes and nothing is waited for: a
full one is handed to the thread before the other is finished, so that the model need not wait for its answers to be
given out. One thread is enough: two batches at once would only share the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, final

from torch import Tensor

from diffpure.diffusion.gradients import Calls, GradientMode, network_calls
from diffpure.diffusion.paths import Path
from diffpure.errors import InputError
from diffpure.serve.limits import Refusal, full

Kind = Literal["purify", "classify"]
log: Final = logging.getLogger("diffpure.serve")


@final
@dataclass(eq=False)
class Work:
    """An image (C, H, W) that somebody waits for; alike works, by their key, can be computed together."""

    kind: Kind
    image: Tensor
    answer: asyncio.Future[Any]
    since: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> Hashable:
        """What works of one batch have in common."""
        return self.kind, self.image.shape, self.image.dtype

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for it."""
        return not self.answer.done()


class Stopped(Exception):
    """Nobody waits for a batch any more."""


class Failed(Exception):
    """A model failed elsewhere; its argument says of what."""


@final
@dataclass(frozen=True)
class Watched(GradientMode):
    """A path walked without a gradient, and stopped by `check`, which raises, between two steps."""

    check: Callable[[], None]
    approximate = False

    def __call__(self, path: Path, x: Tensor) -> Tensor:
        for i in range(len(path)):
            self.check()
            x = path.step(x, i)
        return x

    def calls(self, path: Path, x: Tensor) -> Calls:
        return network_calls(path), 0


@final
class Batcher:
    """Works in, answers out.

    compute: called on the thread with alike works, gives one answer per work.   capacity: how many works like this one
    fit into a batch.   wait: seconds that a work waits for others.   held: pixels of all works that wait.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Work]], Sequence[Any]],
        capacity: Callable[[Work], int],
        wait: float,
        held: int,
        on_batch: Callable[[int, float], None] = lambda count, seconds: None,
    ) -> None:
        self._compute, self._capacity, self._wait, self._held, self._on_batch = compute, capacity, wait, held, on_batch
        self._waiting: list[Work] = []
        self._handed: list[Sequence[Work]] = []  # to the thread: the batch that is computed, and the one after it
        self._running: Sequence[Work] = ()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "model")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to compute, in the loop that runs."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def alive(self) -> bool:
        """Whether works are computed."""
        return self._task is not None and not self._task.done()

    async def close(self) -> None:
        """Stop; what is under way ends at its next step."""
        for work in itertools.chain(self._waiting, *self._handed):
            work.answer.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._thread.shutdown()

    async def answer(self, kind: Kind, image: Tensor) -> Any:
        """The answer to one image; whoever stops waiting for it takes it back."""
        if self._waiting and sum(work.image.numel() for work in self._waiting) + image.numel() > self._held:
            raise full()
        work = Work(kind, image, asyncio.get_running_loop().create_future())
        self._waiting.append(work)
        self._arrived.set()
        return await work.answer

    def check(self) -> None:
        """Raise if nobody waits for the batch under way; called between the steps of a purification."""
        if not any(work.wanted for work in self._running):
            raise Stopped

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next()
            self._handed.append(batch)
            loop.run_in_executor(self._thread, self._answers, batch).add_done_callback(partial(self._give, batch))

    def _give(self, batch: Sequence[Work], found: asyncio.Future[tuple[Sequence[Any], float]]) -> None:
        """Give each work its answer."""
        self._handed.remove(batch)
        self._arrived.set()
        if found.cancelled():
            return
        answers, seconds = found.result()
        self._on_batch(len(batch), seconds)
        for work, answer in zip(batch, answers, strict=True):
            if work.wanted and isinstance(answer, Refusal):
                work.answer.set_exception(answer)
            elif work.wanted:
                work.answer.set_result(answer)

    async def _next(self) -> list[Work]:
        """The oldest work and those alike, once they fill a batch and at most one is computed, or once the oldest has
        waited long enough and none is."""
        while True:
            self._arrived.clear()
            self._waiting = [work for work in self._waiting if work.wanted]
            left = None
            if self._waiting:
                oldest = self._waiting[0]
                room = self._capacity(oldest)
                batch = [work for work in self._waiting if work.key == oldest.key][:room]
                left = oldest.since + self._wait - time.monotonic()
                late = left <= 0
                left = None if self._handed else left  # `_give` tells when there is room
                if len(self._handed) < (2 if len(batch) == room else int(late)):
                    taken = set(map(id, batch))
                    self._waiting = [work for work in self._waiting if id(work) not in taken]
                    return batch
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._arrived.wait()

    def _answers(self, batch: Sequence[Work]) -> tuple[Sequence[Any], float]:
        """One answer or refusal per work, and the seconds that they took."""
        self._running, began = batch, time.monotonic()
        return self._answered(batch), time.monotonic() - began

    def _answered(self, batch: Sequence[Work]) -> Sequence[Any]:
        """One answer or refusal per work; a batch that fails is computed again one by one: no image fails another."""
        try:
            self.check()
            return self._compute(batch)
        except Stopped:
            return [None] * len(batch)
        except Exception as error:
            if len(batch) > 1:
                return [self._answered([work])[0] for work in batch]
            if isinstance(error, InputError):
                return [Refusal(422, str(error))]
            why = error.args[0] if isinstance(error, Failed) else type(error).__name__
            log.error("The model failed on an image of shape %s (%s).", tuple(batch[0].image.shape), why)
            return [Refusal(503, "The model failed on this image; smaller images take less memory.", retry_after=10)]

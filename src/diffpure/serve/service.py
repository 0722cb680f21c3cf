"""The handler: bytes of an image file in; a purified file, or what the defended classifier says, out.

    purify      decode → batch → purified 8-bit pixels → encode in the format that came
    classify    decode → resize and cut to the model's size → batch of `draws` purifications each → classifier

It knows nothing of HTTP: FastAPI, Ray and the tests call it alike, and whatever it cannot do is a `Refusal`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import torch

from diffpure.files.tiles import count_tiles, way
from diffpure.serve.batching import Batcher, Kind, Work
from diffpure.serve.decoding import TYPES, Decoders
from diffpure.serve.limits import GONE, Limits, Refusal, full
from diffpure.serve.metrics import Metrics
from diffpure.serve.model import Classification, Computer

GROUP: Final = 1_000_000  # pixels that are purified together at most, unless one image alone has more


@final
@dataclass(frozen=True)
class File:
    """An image file and its media type."""

    data: bytes
    type: str


class Handler(Protocol):
    """What an HTTP application needs of a service, wherever it computes."""

    @property
    def limits(self) -> Limits:
        """The limits of a request."""

    @property
    def metrics(self) -> Metrics:
        """The counters of this service."""

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""

    async def start(self) -> None:
        """Make ready."""

    async def close(self) -> None:
        """End, once everything is answered."""

    async def purify(self, data: bytes) -> File:
        """The purified image file."""

    async def classify(self, data: bytes) -> Classification:
        """What the defended classifier says of an image file."""


@final
class Door:
    """Lets so many images in at once, each for a limited time, and counts what became of them."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics, self._inside = limits, metrics, 0
        metrics.house.set_function(lambda: self._inside)

    @contextlib.asynccontextmanager
    async def open(self, kind: Kind) -> AsyncIterator[None]:
        """A place in the house for one image."""
        status = 200
        self._inside += 1
        try:
            if self._inside > self._limits.queue:
                raise full()
            async with asyncio.timeout(self._limits.seconds):
                yield
        except TimeoutError:
            status = 504
            raise Refusal(504, f"The image was not finished within {self._limits.seconds:g} seconds.") from None
        except Refusal as refusal:
            status = refusal.status
            raise
        except asyncio.CancelledError:
            status = GONE
            raise
        finally:
            self._inside -= 1
            self._metrics.images.labels(kind, status).inc()


@final
class Service:
    """The handler that decodes, batches and encodes on this machine.

    model: what computes, in this process or in one of its own.   size: to which classified images are brought, None for
    as they are.
    """

    def __init__(self, model: Computer, limits: Limits, *, size: int | None = None) -> None:
        self.limits, self.metrics = limits, Metrics()
        self._model, self._size = model, size
        self._decoders = Decoders(limits)
        self._batcher = Batcher(self._compute, self._capacity, limits.wait, limits.held, self._count)
        self._door = Door(limits, self.metrics)
        self.metrics.restarts.set_function(lambda: self._decoders.restarts)

    @property
    def ready(self) -> bool:
        """Whether works are computed."""
        return self._batcher.alive

    async def start(self) -> None:
        """Start the workers and the batches, in the loop that runs."""
        await asyncio.to_thread(self._decoders.start)
        self._batcher.start()

    async def close(self) -> None:
        """End the workers; whatever is under way is lost."""
        await self._batcher.close()
        self._decoders.close()
        self._model.stop()

    async def purify(self, data: bytes) -> File:
        """The purified image file, in the format that came."""
        async with self._door.open("purify"):
            picture = await self._decoders.picture(data)
            self._check_tiles(*picture.pixels.shape[-2:])
            clean = await self._batcher.answer("purify", picture.pixels)
            return File(await self._decoders.encoded(picture, clean), TYPES[picture.format])

    async def classify(self, data: bytes) -> Classification:
        """What the defended classifier says of an image file."""
        async with self._door.open("classify"):
            image = await self._decoders.rgb(data, self._size)
            answer: Classification = await self._batcher.answer("classify", image)
            return answer

    def _check_tiles(self, height: int, width: int) -> None:
        """Refuse an image that would keep the model from all others."""
        size = self._model.size
        if size is not None and way(height, width, size, self._model.fit) == "tiles":
            tiles, most = count_tiles(height, width, size), self.limits.tiles
            if tiles > most:
                raise Refusal(
                    413, f"An image of {width}×{height} pixels is {tiles:,} tiles; at most {most:,} are accepted."
                )

    # ------------------------------------------------------------------------------------------ on the model's thread

    def _capacity(self, work: Work) -> int:
        """How many works like this one are computed together; tiles of one image fill a batch alone."""
        height, width = work.image.shape[-2:]
        if work.kind == "classify":
            return max(1, self.limits.batch // self._model.draws)
        if way(height, width, self._model.size, self._model.fit) == "tiles":
            return 1
        return max(1, min(self.limits.batch, GROUP // (height * width)))

    def _compute(self, works: Sequence[Work]) -> Sequence[Any]:
        return self._model.compute(works[0].kind, torch.stack([work.image for work in works]), self._batcher.check)

    def _count(self, images: int, seconds: float) -> None:
        self.metrics.batches.observe(images)
        self.metrics.computing.inc(seconds)

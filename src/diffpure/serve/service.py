"""The handler: bytes of an image file in; a purified file, or what the defended classifier says, out.

    purify      decode → batch → purified 8-bit pixels → encode in the format that came
    classify    decode → resize and cut to the model's size → batch of `draws` purifications each → classifier

Over the draws the logits are averaged, as the decision rule "average of N" does it, unless the defence votes itself:
then its own vote decides. The spread is the standard deviation of the logits. It knows nothing of HTTP: FastAPI, Ray
and the tests call it alike, and whatever it cannot do is a `Refusal`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Protocol, final

import torch
from torch import Tensor

from diffpure.errors import InputError
from diffpure.files.pictures import eight_bits
from diffpure.files.tiles import Fit, as_floats, count_tiles, purify_images, way
from diffpure.noise import Noise
from diffpure.purify import Defense
from diffpure.serve.batching import Batcher, Watched, Work
from diffpure.serve.decoding import TYPES, Decoders
from diffpure.serve.limits import GONE, Limits, Refusal, full
from diffpure.serve.metrics import Metrics

Kind = Literal["purify", "classify"]
GROUP: Final = 1_000_000  # pixels that are purified together at most, unless one image alone has more


@final
@dataclass(frozen=True)
class File:
    """An image file and its media type."""

    data: bytes
    type: str


@final
@dataclass(frozen=True)
class Classification:
    """What the defended classifier says of an image: per class, in the order of its logits.

    label: the class of the largest logit.   logits: averaged over the draws, or what the defence's vote makes of them.
    probabilities: their softmax.   spread: the standard deviation of each logit over the draws, None for one draw.
    agreement: the share of draws whose own largest logit is the label's.   names: of the classes, empty where they are
    not known.
    """

    label: int
    name: str | None
    draws: int
    agreement: float
    logits: tuple[float, ...]
    probabilities: tuple[float, ...]
    spread: tuple[float, ...] | None
    names: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


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
    """The handler that computes in this process.

    model: the defence; it is moved nowhere.   draws: purifications per classified image, by default those of the
    model.   fit: how images of another size than the purifier's are purified.   size: to which classified images
    are brought, None for as they are.
    """

    def __init__(
        self,
        model: Defense,
        limits: Limits,
        *,
        draws: int | None = None,
        fit: Fit = "auto",
        size: int | None = None,
        names: Sequence[str] = (),
        device: str = "cpu",
    ) -> None:
        draws = model.draws if draws is None else draws
        if model.vote and draws != model.draws:
            raise InputError(f"The model votes over {model.draws} draws itself, so leave draws out, got {draws}.")
        self.limits, self.metrics = limits, Metrics()
        self._draws, self._fit, self._size, self._names, self._device = draws, fit, size, tuple(names), device
        self._decoders = Decoders(limits)
        self._batcher = Batcher(self._compute, self._capacity, limits.wait, limits.held, self._count)
        self._model = model.with_gradient(Watched(self._batcher.check))
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
        size = self._model.purifier.size
        if size is not None and way(height, width, size, self._fit) == "tiles":
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
            return max(1, self.limits.batch // self._draws)
        if way(height, width, self._model.purifier.size, self._fit) == "tiles":
            return 1
        return max(1, min(self.limits.batch, GROUP // (height * width)))

    @torch.no_grad()
    def _compute(self, works: Sequence[Work]) -> Sequence[Any]:
        images = torch.stack([work.image for work in works])
        if works[0].kind == "classify":
            return self._classifications(images)
        seeds = Noise.of(None, len(images)).seeds
        purifier, rows = self._model.purifier, self.limits.batch
        return list(eight_bits(purify_images(purifier, images, self._fit, seeds, rows, device=self._device)))

    def _classifications(self, images: Tensor) -> list[Classification]:
        rows = as_floats(images).repeat_interleave(self._draws, 0)
        parts = []
        for first in range(0, len(rows), self.limits.batch):
            self._batcher.check()
            part = rows[first : first + self.limits.batch].to(self._device)
            parts.append(self._model.classify(self._model.purifier(part)).double().cpu())
        logits = torch.cat(parts)
        return [self._classification(each) for each in logits.reshape(len(images), self._draws, -1)]

    def _classification(self, logits: Tensor) -> Classification:
        decided = self._model.decide(logits)[0] if self._model.vote else logits.mean(0)
        label = int(decided.argmax())
        names = self._names if len(self._names) == len(decided) else ()
        return Classification(
            label=label,
            name=names[label] if names else None,
            draws=len(logits),
            agreement=float((logits.argmax(1) == label).double().mean()),
            logits=tuple(decided.tolist()),
            probabilities=tuple(decided.softmax(0).tolist()),
            spread=tuple(logits.std(0).tolist()) if len(logits) > 1 else None,
            names=names,
        )

    def _count(self, images: int, seconds: float) -> None:
        self.metrics.batches.observe(images)
        self.metrics.computing.inc(seconds)

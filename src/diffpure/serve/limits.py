"""What a request may cost, and the one sentence that refuses it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, final

from diffpure.errors import InputError

MIB: Final = 1 << 20
GONE: Final = 499  # as web servers write it down: whoever asked has hung up, and nobody reads the answer


@final
@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a service; every one is there so that no request can take it down or hold others up.

    batch: images that are purified together at most.   wait: seconds that the first of them waits for others.
    queue: images in the house at most, from the first byte of the decoder to the last of the encoder.
    seconds: the time of a request in the house, after which its work is stopped.   read: the time to send a body.
    bytes: the size of a body.   pixels, tiles: of an image, where it is purified in tiles, each of which costs as much
    as an image of the model's size.   images: of a batch request.   held: bytes of all bodies that are
    being read, and pixels of all images that wait.   decoders: processes that read image files, each with
    `decoder_memory` bytes beyond its code and `decoder_seconds` of CPU time per image.
    """

    batch: int = 32
    wait: float = 0.005
    queue: int = 256
    seconds: float = 30.0
    read: float = 10.0
    bytes: int = 16 * MIB
    pixels: int = 4_000_000
    tiles: int = 256
    images: int = 64
    held: int = 128 * MIB
    decoders: int = 2
    decoder_memory: int = 512 * MIB
    decoder_seconds: float = 10.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value < 0 or (value == 0 and f.name != "wait"):
                raise InputError(f"The limit {f.name} is a number above 0, got {value}.")
        if self.bytes > self.held:
            raise InputError(
                f"A body of {self.bytes:,} bytes does not fit into the {self.held:,} bytes for all of them."
            )


class Refusal(Exception):
    """A request that is not answered as it was asked: an HTTP status, and one sentence for whoever asked."""

    def __init__(self, status: int, sentence: str, retry_after: int | None = None) -> None:
        super().__init__(status, sentence, retry_after)  # all of them, so that it can be pickled
        self.status, self.sentence, self.retry_after = status, sentence, retry_after


def full() -> Refusal:
    """The refusal of a service that has as much to do as it takes on."""
    return Refusal(503, "The service is busy; try again in a second.", retry_after=1)

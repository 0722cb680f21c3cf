"""A convolutional score on images of any size in bounded memory: the network sees one tile at a time.

An output of a convolutional score depends on the pixels within its receptive field r, so on a window that starts at a
multiple of the stride and reaches r further than a tile on every side, the network gives the tile what it gives it on
the whole image, up to rounding:

    score(x)[tile] = score(x[window])[tile],      window = the tile and m ≥ r more pixels, m a multiple of the stride.

Only the network is called in tiles. State and noise are those of the whole image, so that every sampler and every
gradient mode purifies the image as it would without tiles; at most `side`² pixels are in the network at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Final, final

import torch
from torch import Tensor

from diffpure.diffusion.score import ConvolutionalScore, ScoreWrapper
from diffpure.errors import InputError

SIDE: Final = 1024  # pixels; photos-small takes about half a GiB for a window of this side
Window = tuple[slice, slice]  # along an axis: what the network sees, and the tile itself


@final
class TiledScore(ScoreWrapper):
    """A convolutional score that is called in tiles where an image has more than side² pixels.

    side: of the largest window that the network sees.   tick: called after every tile, to show progress.
    """

    def __init__(self, inner: ConvolutionalScore, side: int = SIDE, tick: Callable[[], object] = lambda: None) -> None:
        if not isinstance(inner, ConvolutionalScore):
            raise InputError(
                f"Only a convolutional score is exact in tiles, one with a receptive_field and a stride; "
                f"{type(inner).__name__} has none."
            )
        super().__init__(inner)
        self.receptive_field, self.stride, self.side, self.tick = inner.receptive_field, inner.stride, side, tick
        self.margin = -(-inner.receptive_field // inner.stride) * inner.stride
        self.tile = (side - 2 * self.margin) // inner.stride * inner.stride
        if self.tile < 1:
            least = 2 * self.margin + inner.stride
            raise InputError(f"Windows have a side of at least {least} for this score, got {side}.")

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self._tiled(self.inner, x, t)

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        return self._tiled(self.inner.epsilon_step, x, i)

    def count(self, height: int, width: int) -> int:
        """How many tiles an image takes."""
        if height * width <= self.side**2:
            return 1
        return -(-height // self.tile) * -(-width // self.tile)

    def _tiled(self, network: Callable[[Tensor, Tensor], Tensor], x: Tensor, t: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if self.count(height, width) == 1:
            out = network(x, t)
            self.tick()
            return out
        out = torch.empty_like(x)
        for (rows, own_rows), (columns, own_columns) in product(self._windows(height), self._windows(width)):
            part = network(x[..., rows, columns], t)
            inside = slice(own_rows.start - rows.start, own_rows.stop - rows.start)
            beside = slice(own_columns.start - columns.start, own_columns.stop - columns.start)
            out[..., own_rows, own_columns] = part[..., inside, beside]
            self.tick()
        return out

    def _windows(self, length: int) -> Iterator[Window]:
        for start in range(0, length, self.tile):
            stop = min(start + self.tile, length)
            yield slice(max(0, start - self.margin), min(stop + self.margin, length)), slice(start, stop)

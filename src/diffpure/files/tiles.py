"""Images of any size before a purifier that wants one size, or takes any.

    whole    the image has the model's size, or the model takes any; a large image goes through a convolutional model
             in exact tiles (`scores.tiled`): only the network sees tiles, state and noise are those of the image
    resize   the whole image at the model's resolution and back: everything is seen, detail is lost
    tiles    overlapping tiles of the model's size, blended with linear ramps: detail is kept, a tile sees only itself
    auto     resize up to twice the model's size, tiles above

Tiles are cut from 8-bit pixels, and finished rows are handed out from the top: memory grows with one row of tiles, not
with the image, and large images that are resized go the same way. Grey images are purified as one channel by a score
model of one channel, and as three equal ones by others, whose luma Y = 0.299 R + 0.587 G + 0.114 B is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from diffpure.diffusion.score import ConvolutionalScore
from diffpure.errors import InputError
from diffpure.noise import mix
from diffpure.purifiers.diffusion import Purifier
from diffpure.purifiers.tiles import grow, starts, window
from diffpure.purify import PurifierBase
from diffpure.scores.tiled import TiledScore

Fit = Literal["auto", "resize", "tiles"]
Way = Literal["whole", "resize", "tiles"]
Tick = Callable[[int, int], None]  # tiles done, tiles in all
LARGE: Final = 1_000_000  # pixels; of larger images, those that are resized or cut are never in memory as floats
BAND: Final = 64  # rows of a resized image that are handed out together
LUMA: Final = (0.299, 0.587, 0.114)


def way(height: int, width: int, size: int | None, fit: Fit) -> Way:
    """How an image of a size is purified."""
    if size is None or (height, width) == (size, size):
        return "whole"
    if fit == "auto":
        return "tiles" if max(height, width) > 2 * size else "resize"
    return fit


@torch.no_grad()
def purify_images(
    purifier: PurifierBase,
    images: Tensor,
    fit: Fit,
    seeds: Sequence[int],
    rows: int = 16,
    *,
    device: str = "cpu",
    tick: Tick = lambda *_: None,
) -> Tensor:
    """Purify images (B, C, H, W) of one size, float in [0, 1] or 8-bit, whole or in overlapping tiles: float.

    rows: how many tiles are purified together.   device: where the purifier is; the result is on the CPU.
    """
    height, width = images.shape[-2:]
    if purifier.size is None:
        purifier, together = _in_tiles(purifier, images, tick), max(1, LARGE // (height * width))
        firsts = range(0, len(images), together)
        parts = [_purified(purifier, images[a : a + together], seeds[a : a + together], device) for a in firsts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if way(height, width, purifier.size, fit) != "tiles":
        return _purified(purifier, images, seeds, device)
    return torch.stack(
        [
            torch.cat(list(purify_tiles(purifier, x, seed, rows, device=device, tick=tick)), dim=1)
            for x, seed in zip(images, seeds, strict=True)
        ]
    )


@torch.no_grad()
def purify_tiles(
    purifier: PurifierBase, image: Tensor, seed: int, rows: int, *, device: str = "cpu", tick: Tick = lambda *_: None
) -> Iterator[Tensor]:
    """Rows (C, h, W) of one purified image (C, H, W) from the top, out of tiles that overlap by at least a quarter."""
    size = purifier.size
    if size is None:
        raise InputError("This purifier takes images of any size and has no size for tiles.")
    channels, height, width = image.shape
    padded = grow(image, max(height, size), max(width, size))
    tops, lefts = starts(padded.shape[-2], size), starts(padded.shape[-1], size)
    tiles = _clean_tiles(purifier, padded, list(itertools.product(tops, lefts)), size, seed, rows, device, tick)
    weights = window(size)
    total, weight = torch.zeros(channels, size, padded.shape[-1]), torch.zeros(1, size, padded.shape[-1])
    for top, following in zip(tops, [*tops[1:], tops[-1] + size], strict=True):
        for left in lefts:
            total[:, :, left : left + size] += weights * next(tiles)
            weight[:, :, left : left + size] += weights
        finished = following - top  # no further tile touches these rows
        yield (total[:, :finished] / weight[:, :finished])[:, : max(0, height - top), :width]
        total, weight = (torch.cat([x[:, finished:], torch.zeros_like(x[:, :finished])], 1) for x in (total, weight))


@torch.no_grad()
def purify_large(purifier: PurifierBase, image: Tensor, seed: int, *, device: str = "cpu") -> Iterator[Tensor]:
    """Rows (C, h, W) of one image (C, H, W) from the top, resized to the purifier's size and back as it does itself."""
    size, (height, width) = purifier.size, image.shape[-2:]
    if size is None:
        raise InputError("This purifier takes images of any size and has no size to resize to.")
    small = _stretched(_stretched(image, 1, size), 2, size)
    (clean,) = _purified(purifier, small[None], [seed], device)
    for top in range(0, height, BAND):
        rows = _stretched(clean, 1, height, range(top, min(top + BAND, height)))
        yield _stretched(rows, 2, width)


def _stretched(image: Tensor, axis: int, length: int, part: range | None = None) -> Tensor:
    """An image (C, H, W), 8-bit or float, as float with an axis (or a part of it) resized bilinearly to a length.

    Pixel i of the result is at (i + ½) · old / new - ½ of the old axis, as in torch's `interpolate`.
    """
    old = image.shape[axis]
    if old == length and part is None:
        return as_floats(image)
    wanted = torch.tensor(part or range(length), dtype=torch.float64)
    where = ((wanted + 0.5) * old / length - 0.5).clamp(0, old - 1)
    low = where.long()
    left, right = (as_floats(image.index_select(axis, i)) for i in (low, (low + 1).clamp(max=old - 1)))
    weight = (where - low).float().reshape([-1 if i == axis else 1 for i in range(3)])
    return torch.lerp(left, right, weight.expand_as(left))


def as_floats(images: Tensor) -> Tensor:
    """Images in [0, 1], out of 8-bit ones."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def count_tiles(height: int, width: int, size: int) -> int:
    """How many tiles an image takes."""
    return len(starts(max(height, size), size)) * len(starts(max(width, size), size))


def _clean_tiles(
    purifier: PurifierBase,
    image: Tensor,
    corners: Sequence[tuple[int, int]],
    size: int,
    seed: int,
    rows: int,
    device: str,
    tick: Tick,
) -> Iterator[Tensor]:
    """The purified tiles (C, size, size) at the corners, one after the other, `rows` of them purified together."""
    for first in range(0, len(corners), rows):
        part = corners[first : first + rows]
        tiles = torch.stack([image[:, top : top + size, left : left + size] for top, left in part])
        clean = _purified(purifier, tiles, [mix(seed, first + k) for k in range(len(part))], device)
        tick(first + len(part), len(corners))
        yield from clean


def _in_tiles(purifier: PurifierBase, images: Tensor, tick: Tick) -> PurifierBase:
    """The purifier with its convolutional network called in exact tiles, if the images (B, C, H, W) are large."""
    height, width = images.shape[-2:]
    if height * width <= LARGE or not isinstance(purifier, Purifier):
        return purifier
    score = purifier.score
    if not isinstance(score, ConvolutionalScore):
        return purifier
    calls, _ = purifier.calls(torch.zeros(1, purifier.channels or 3, 1, 1), gradient=False)
    tiled, done = TiledScore(score), itertools.count(1)
    total = len(images) * calls * tiled.count(height, width)
    tiled.tick = lambda: tick(next(done), total)
    return Purifier(tiled, purifier.sampler, rounds=purifier.rounds, autocast=purifier.autocast)


def _purified(purifier: PurifierBase, images: Tensor, seeds: Sequence[int], device: str) -> Tensor:
    """Purified images of the channels they came with, on the CPU."""
    channels, wanted = images.shape[1], purifier.channels
    if channels == 3 and wanted == 1:
        raise InputError("A colour image cannot be purified by a score model of one channel; grey images can.")
    given = as_floats(images.to(device))
    clean: Tensor = purifier(given.expand(-1, wanted or 3, -1, -1) if channels == 1 else given, seeds)
    if not torch.isfinite(clean).all():
        raise InputError("The purifier returned values that are not finite; nothing is written for this image.")
    if channels == 1 and clean.shape[1] == 3:
        clean = (clean * torch.tensor(LUMA, device=clean.device)[:, None, None]).sum(1, keepdim=True)
    return clean.cpu()

"""Tiles: an image of any size as overlapping squares of a network's own size, blended back with linear ramps.

Tiles overlap by at least a quarter of their side; where they do, each counts by its ramp. Cutting and blending are
linear, so gradients go through them exactly, and blend(cut(x)) = x.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def starts(length: int, size: int) -> list[int]:
    """Where tiles of a size begin along a side, evenly, overlapping by at least a quarter."""
    count = 1 if length == size else 1 + -(-(length - size) // (size - size // 4))
    return [round(i * (length - size) / max(1, count - 1)) for i in range(count)]


def corners(height: int, width: int, size: int) -> list[tuple[int, int]]:
    """The upper left corners of the tiles of an image, which is grown to at least one tile."""
    return list(itertools.product(starts(max(height, size), size), starts(max(width, size), size)))


def grow(images: Tensor, height: int, width: int) -> Tensor:
    """Images (..., H, W) repeated at their lower and right edge up to a size."""
    if images.shape[-2:] == (height, width):
        return images
    rows = torch.arange(height, device=images.device).clamp(max=images.shape[-2] - 1)
    columns = torch.arange(width, device=images.device).clamp(max=images.shape[-1] - 1)
    return images.index_select(-2, rows).index_select(-1, columns)


def window(size: int) -> Tensor:
    """The weight of a tile's pixels, (size, size): linear ramps over a quarter of the side."""
    ramp = torch.minimum(torch.arange(1, size + 1), torch.arange(size, 0, -1)).clamp(max=max(1, size // 4)).float()
    return ramp[:, None] * ramp[None, :]


def cut(images: Tensor, size: int) -> Tensor:
    """The tiles (B · T, C, size, size) of images (B, C, H, W), one image after the other."""
    height, width = images.shape[-2:]
    padded = grow(images, max(height, size), max(width, size))
    tiles = [padded[..., top : top + size, left : left + size] for top, left in corners(height, width, size)]
    return torch.stack(tiles, 1).flatten(0, 1)


def blend(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """Images of a shape (B, C, H, W) from their tiles (B · T, C, size, size)."""
    batch, channels, height, width = shape
    size = tiles.shape[-1]
    weights, rows, columns = window(size).to(tiles), max(height, size), max(width, size)
    total, share = tiles.new_zeros(batch, channels, rows, columns), tiles.new_zeros(rows, columns)
    each = tiles.reshape(batch, -1, *tiles.shape[1:])
    for k, (top, left) in enumerate(corners(height, width, size)):
        around = (left, columns - left - size, top, rows - top - size)
        total = total + F.pad(weights * each[:, k], around)
        share = share + F.pad(weights, around)
    return (total / share)[..., :height, :width]

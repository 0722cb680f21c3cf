"""Photographs of any sizes, unlabelled, kept as 8-bit pixels in memory: what a prior of natural images is trained on.

`read` takes a folder (with its subfolders) or a tar archive. Images whose shorter side exceeds 256 pixels are reduced
to it, the scale at which ImageNet classifiers see photographs; smaller ones stay as they are.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diffpure.data.images import SUFFIXES, Source, read_rgb, resize
from diffpure.errors import InputError
from diffpure.scores.photos import mirrored

SIDE: Final = 256  # pixels of the shorter side at most


@final
@dataclass(frozen=True)
class Photos:
    """Images of any sizes as they are stored: (3, H, W) uint8 each."""

    pixels: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: slice) -> Photos:
        return Photos(self.pixels[index])

    def squares(self, size: int) -> Tensor:
        """The squares in the middle of the images, (N, 3, size, size) uint8; smaller images are mirrored."""
        half = torch.full((2,), 0.5)
        return torch.stack([_cut(image, size, half) for image in self.pixels])

    def crops(self, index: Tensor, size: int, rescale: float, random: torch.Generator) -> Tensor:
        """Random squares of the indexed images, (B, 3, size, size) float32 in [0, 255].

        Every second square on average is up to `rescale` times as large and reduced to the size.
        """
        draws = torch.rand(len(index), 4, generator=random)
        rows = []
        for i, (often, factor, *corner) in zip(index.tolist(), draws, strict=True):
            image = self.pixels[i]
            larger = round(size * (1 + (rescale - 1) * factor.item())) if often < 0.5 else size
            side = max(size, min(larger, *image.shape[1:]))
            square = _cut(image, side, torch.stack(corner)).float()
            rows.append(square if side == size else _reduced(square, size))
        return torch.stack(rows)


def read(path: str | Path, side: int = SIDE) -> Photos:
    """All images of a folder or a tar archive in the order of their names, with a shorter side of at most `side`."""
    root = Path(path)
    if not root.exists():
        raise InputError(f"There is no folder or tar archive {root}.")
    photos = Photos(tuple(_pixels(name, source, side) for name, source in _sources(root)))
    if not photos:
        raise InputError(f"{root} holds no image; a folder or a tar archive of JPEG, PNG or other images is accepted.")
    return photos


def _sources(root: Path) -> Iterator[tuple[str, Source]]:
    """The names of the images and where their bytes are, sorted by name."""
    if root.is_dir():
        found = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        yield from ((path.relative_to(root).as_posix(), path) for path in found)
        return
    try:
        with tarfile.open(root) as archive:
            members = [m for m in archive if m.isfile() and PurePosixPath(m.name).suffix.lower() in SUFFIXES]
            for member in sorted(members, key=lambda member: member.name):
                stream = archive.extractfile(member)
                assert stream is not None  # it is a file
                yield member.name, stream.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise InputError(f"{root.name} is damaged or no tar archive, and cannot be read.") from error


def _pixels(name: str, source: Source, side: int) -> Tensor:
    """One image as (3, H, W) uint8, reduced where its shorter side is longer than `side`."""
    try:
        image = read_rgb(source)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    if min(image.size) > side:
        image = resize(image, side)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _cut(image: Tensor, side: int, corner: Tensor) -> Tensor:
    """The square of an image (3, H, W) whose upper left corner is at these shares, in [0, 1), of the free space."""
    image = mirrored(image, max(side, image.shape[1]), max(side, image.shape[2]))
    top, left = ((n - side + 1) * share for n, share in zip(image.shape[1:], corner.tolist(), strict=True))
    return image[:, int(top) : int(top) + side, int(left) : int(left) + side]


def _reduced(square: Tensor, size: int) -> Tensor:
    return F.interpolate(square[None], (size, size), mode="bilinear", antialias=True)[0]

"""Images and labels in an npz file, of which only the chosen rows are read.

The arrays are called `images` and `labels`, `x` and `y`, or `x_test` and `y_test`. Images are 8-bit or floats in
[0, 1], of shape (N, H, W) for grey, (N, H, W, C) or (N, C, H, W) with one or three channels; labels are N whole
numbers. A member of the archive is a header and the rows one after the other, so a row is found by its number.
"""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diffpure.data.folder import shifted
from diffpure.errors import InputError

Array = npt.NDArray[Any]
NAMES: Final = (("images", "labels"), ("x", "y"), ("x_test", "y_test"))
_FORMAT: Final[Any] = np.lib.format  # its header readers have no types


@final
@dataclass(frozen=True)
class Arrays:
    """The images of an npz file, read when they are asked for, with all labels."""

    path: Path
    key: str
    labels: tuple[int, ...]
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The images of these indices as float32 (B, C, H, W) in [0, 1], and their labels (B,)."""
        stack = channels_first(_rows(self.path, self.key, indices), self.path.name)
        return torch.from_numpy(stack), torch.tensor([self.labels[i] for i in indices])


def source(*, path: Path, label_offset: int = 0) -> Arrays:
    """The source `npz` of a spec."""
    with _archive(path) as archive:
        members = {name.removesuffix(".npy") for name in archive.namelist()}
        found = [pair for pair in NAMES if members.issuperset(pair)]
        if not found:
            accepted = ", ".join(f"{x} and {y}" for x, y in NAMES)
            has = ", ".join(sorted(members)) or "nothing"
            raise InputError(f"{path.name} holds {has}, but images and labels are accepted as {accepted}.")
        key, labels_key = found[0]
        with archive.open(f"{key}.npy") as member:
            shape, _, _ = _header(member, path, key)
        with archive.open(f"{labels_key}.npy") as member:
            labels_shape, _, kind = _header(member, path, labels_key)
            count = math.prod(labels_shape)
            if kind.kind not in "iu" or count != labels_shape[0]:
                raise InputError(f"{labels_key} of {path.name} is not one whole number per image, got {labels_shape}.")
            if count != shape[0]:
                raise InputError(
                    f"{path.name} has {shape[0]} images but {count} labels; one label per image is wanted."
                )
            labels = np.frombuffer(member.read(count * kind.itemsize), kind).tolist()
    return Arrays(path, key, shifted(labels, label_offset, path.name))


def channels_first(images: Array, name: str) -> npt.NDArray[np.float32]:
    """Images of any accepted shape and type as float32 (N, C, H, W), of which 8-bit ones are divided by 255."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[-1] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise InputError(
            f"The images of {name} have the shape {images.shape}; (N, H, W), (N, H, W, C) and (N, C, H, W) with one or "
            "three channels are accepted."
        )
    if images.dtype == np.uint8:
        return np.array(images, np.float32, order="C") / np.float32(255)
    if images.dtype.kind != "f":
        raise InputError(f"The images of {name} are {images.dtype}; 8-bit numbers and floats in [0, 1] are accepted.")
    return np.array(images, np.float32, order="C")


def _rows(path: Path, key: str, indices: Sequence[int]) -> Array:
    """The rows of an array with these indices; nothing else of it stays in memory."""
    with _archive(path) as archive, archive.open(f"{key}.npy") as member:
        shape, fortran, kind = _header(member, path, key)
        if fortran:
            raise InputError(f"{key} of {path.name} is stored by columns; save it with numpy.ascontiguousarray.")
        start, size = member.tell(), kind.itemsize * math.prod(shape[1:])
        rows: dict[int, bytes] = {}
        for i in sorted(set(indices)):
            member.seek(start + i * size)
            rows[i] = member.read(size)
        return np.frombuffer(b"".join(rows[i] for i in indices), kind).reshape(len(indices), *shape[1:])


def _header(member: IO[bytes], path: Path, key: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of an array of numbers, with the member left at its first row."""
    version = _FORMAT.read_magic(member)
    read = _FORMAT.read_array_header_1_0 if version == (1, 0) else _FORMAT.read_array_header_2_0
    shape, fortran, kind = read(member)
    if kind.kind not in "iuf" or not shape or 0 in shape:
        raise InputError(f"{key} of {path.name} is no array of numbers, got {kind} {shape}.")
    return shape, fortran and len(shape) > 1, kind


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """An npz file that is open, with every way in which it can be damaged told in one sentence."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"There is no npz file {path}.") from None
    except Exception as error:  # archives, compressions and headers each fail in ways of their own
        raise InputError(f"{path.name} is damaged or no npz file and cannot be read.") from error

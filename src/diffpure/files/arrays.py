"""npz files: arrays of images in, the same arrays purified out, in their layout and type; labels and others are kept.

    (N, H, W, 3)  (N, H, W, 1)  (N, 3, H, W)  (N, 1, H, W)  (N, H, W) grey  (H, W, 3) one image

8-bit, or floats in [0, 1]. Arrays are read and written batch by batch, so that memory grows with the batch, not with
the file; the size that a file unpacks to is checked before anything is unpacked. Finished batches wait in a hidden
folder until the file is whole, so that a killed run goes on.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, final

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from diffpure.disk import write_whole
from diffpure.errors import InputError
from diffpure.files import names
from diffpure.files.archives import HEADER, readable, unpacked_limit
from diffpure.files.sources import GROUP

TYPES: Final = ("u1", "f2", "f4", "f8")
ACCEPTED: Final = "8-bit or float arrays (N, H, W, 3), (N, 3, H, W) or (N, H, W)"
Clean = Callable[["Images", Tensor, int], Tensor]  # array, images (B, C, H, W), index of the first one -> purified


@final
@dataclass(frozen=True)
class Images:
    """An array of images in an npz file; full is its shape with every axis, (N, H, W, C) or (N, C, H, W)."""

    member: zipfile.ZipInfo
    shape: tuple[int, ...]
    full: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool

    @property
    def name(self) -> str:
        """The name that `np.load` gives it."""
        return _key(self.member)

    @property
    def channels_last(self) -> bool:
        """Whether its images are (H, W, C)."""
        return self.full[-1] in (1, 3)

    @property
    def pixels(self) -> int:
        """How many pixels each image has."""
        return math.prod(self.full[1:]) // (self.full[-1] if self.channels_last else self.full[1])

    @property
    def count(self) -> int:
        """How many images it holds."""
        return self.full[0]


def purify_arrays(path: Path, target: Path, work: Path, clean: Clean, batch: int, largest: int) -> str:
    """Write an npz file with its images purified to `target`, and say what was; `work` keeps finished batches."""
    with readable(path), zipfile.ZipFile(path) as archive:
        arrays = read_images(archive, path, largest)
        for array in arrays:
            _check_values(archive, array, batch)
        kept = work / _identity(archive, batch)
        with names.writing(kept):
            kept.mkdir(parents=True, exist_ok=True)
        for array in arrays:
            for start, values in batches(archive, array, batch):
                file = _batch_file(kept, arrays, array, start)
                if not file.is_file():
                    purified = _unpacked(clean(array, _packed(values, array), start), array)
                    with names.writing(kept):
                        write_whole(file, _saved(purified))
        _assemble(archive, arrays, kept, target, batch)
        shutil.rmtree(kept, ignore_errors=True)
        images = {array.name for array in arrays}
        others = [name for name in (_key(member) for member in archive.infolist()) if name not in images]
    said = ", ".join(f"{array.count:,} in {array.name} {array.shape}" for array in arrays)
    return f"images purified: {said}" + (f"; kept as they are: {', '.join(others)}" if others else "")


def read_images(archive: zipfile.ZipFile, path: Path, largest: int) -> list[Images]:
    """The arrays of images in an npz file that keeps the limits; raises if there are none."""
    members = archive.infolist()
    size, limit = sum(member.file_size for member in members), unpacked_limit(path)
    if size > limit:
        raise InputError(f"{path.name} unpacks to {size:,} bytes; at most {limit:,} are accepted.")
    if len({member.filename for member in members}) < len(members):
        raise InputError(f"{path.name} holds two arrays of one name.")
    for member in members:
        if names.clean(member.filename) != member.filename:
            raise InputError(f"{path.name} holds an array whose name {member.filename!r} leads elsewhere.")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(f"{path.name} is compressed in a way that NumPy does not write, and is not read.")
    found = [array for member in members if (array := _images(archive, member)) is not None]
    if not found:
        raise InputError(f"{path.name} holds no images; {ACCEPTED} are read.")
    for array in found:
        if array.pixels > largest:
            raise InputError(f"{array.name} holds images of {array.pixels:,} pixels; at most {largest:,} are accepted.")
    return found


def _images(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Images | None:
    """A member's images; None for what holds none, such as labels, text and empty arrays."""
    if not member.filename.endswith(".npy"):
        return None
    with archive.open(member) as file:
        shape, fortran, dtype = _header(file)
    full = _full(shape)
    if dtype.str[1:] not in TYPES or full is None or min(shape) < 1:
        return None
    if len(shape) == 3 and shape[0] == 3 and shape[-1] != 3:
        raise InputError(
            f"{member.filename} of shape {shape} may be one colour image or three grey ones; "
            "save it with four axes, (1, 3, H, W) or (3, H, W, 1)."
        )
    return Images(member, shape, full, dtype, fortran)


def _key(member: zipfile.ZipInfo) -> str:
    """The name that `np.load` gives an array."""
    return member.filename.removesuffix(".npy")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape, the order and the type that the start of an array says."""
    version = npy.read_magic(file)
    if version == (1, 0):
        return npy.read_array_header_1_0(file, max_header_size=HEADER)
    if version == (2, 0):
        return npy.read_array_header_2_0(file, max_header_size=HEADER)
    return (), False, np.dtype(object)  # version 3 is written for the names of structures alone


def _full(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a stack of images with every axis, or None for what holds no images."""
    if len(shape) == 4 and (shape[-1] in (1, 3) or shape[1] in (1, 3)):
        return shape
    if len(shape) == 3:
        return (1, *shape) if shape[-1] == 3 else (*shape, 1)
    return None


def batches(archive: zipfile.ZipFile, array: Images, batch: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """The images of an array in batches of the full shape, each with the index of its first image."""
    count, *inner = array.full
    rows = min(batch, max(1, GROUP // array.pixels))
    with archive.open(array.member) as file:
        _header(file)
        if array.fortran:  # the first axis runs fastest: no image is there before the end
            whole = _values(file, array, array.shape[::-1]).T.reshape(array.full)
        for start in range(0, count, rows):
            here = min(rows, count - start)
            yield start, whole[start : start + here] if array.fortran else _values(file, array, (here, *inner))


def _values(file: IO[bytes], array: Images, shape: tuple[int, ...]) -> NDArray[Any]:
    size = math.prod(shape) * array.dtype.itemsize
    data = file.read(size) if size <= array.member.file_size else b""
    if len(data) < size:
        raise InputError(f"{array.name} claims {array.shape} values and holds fewer.")
    return np.frombuffer(data, array.dtype).reshape(shape)


def _check_values(archive: zipfile.ZipFile, array: Images, batch: int) -> None:
    """Raise unless every value can be that of an image, before the first one is purified."""
    for start, values in batches(archive, array, batch):
        if values.dtype != np.uint8:
            right = ((values >= 0) & (values <= 1)).all(axis=(1, 2, 3))
            if not right.all():
                where = f"{array.name}[{start + int(right.argmin())}]"
                raise InputError(f"{where} holds values that are not 8-bit or finite floats in [0, 1].")


def _identity(archive: zipfile.ZipFile, batch: int) -> str:
    """What the batches of a file depend on: its content and how it is cut."""
    content = [(member.filename, member.CRC, member.file_size) for member in archive.infolist()]
    return hashlib.sha256(repr((archive.filename, content, batch)).encode(errors="surrogateescape")).hexdigest()[:16]


def _batch_file(kept: Path, arrays: Sequence[Images], array: Images, start: int) -> Path:
    return kept / f"{arrays.index(array)}-{start}.npy"


def _packed(values: NDArray[Any], array: Images) -> Tensor:
    """Images of an array as a tensor (B, C, H, W), 8-bit or float32."""
    stack = torch.from_numpy(values.astype(np.uint8 if values.dtype == np.uint8 else np.float32))
    return stack.permute(0, 3, 1, 2) if array.channels_last else stack


def _unpacked(images: Tensor, array: Images) -> NDArray[Any]:
    """Purified images (B, C, H, W) in the layout and type of the array they came from."""
    values = (images.permute(0, 2, 3, 1) if array.channels_last else images).clamp(0, 1).numpy()
    return ((values * 255).round() if array.dtype == np.uint8 else values).astype(array.dtype)


def _saved(values: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, values, allow_pickle=False)
    return out.getvalue()


def _assemble(archive: zipfile.ZipFile, arrays: Sequence[Images], kept: Path, target: Path, batch: int) -> None:
    """Write the npz file out of its purified batches and of what else it holds, whole or not at all."""
    images = {array.member.filename: array for array in arrays}
    part = kept / "whole"
    with names.writing(target), part.open("wb") as file, zipfile.ZipFile(file, "w") as out:
        for member in archive.infolist():
            info = zipfile.ZipInfo(member.filename)
            info.compress_type = member.compress_type
            with out.open(info, "w", force_zip64=True) as into:
                if array := images.get(member.filename):
                    header = {"descr": npy.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
                    npy.write_array_header_1_0(into, header)
                    for start, _ in batches(archive, array, batch):
                        into.write(np.load(_batch_file(kept, arrays, array, start), allow_pickle=False).tobytes())
                else:
                    with archive.open(member) as source:
                        shutil.copyfileobj(source, into)
    with names.writing(target):
        with part.open("rb") as written:
            os.fsync(written.fileno())
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)

"""Purify image files: one image, folders, globs, npz arrays and tar archives, of any size, keeping what they are.

Names, formats, greyscale and transparency are kept, and the EXIF orientation is applied to the pixels. A file that
cannot be read is reported at the end with its reason and stops nothing. An output is written beside its place and
renamed, so that a killed run leaves whole files only, and the next run skips what is there.

An image of another size than the score model's is purified by one of

    resize   the whole image at the model's resolution and back: everything is seen, detail is lost
    tiles    overlapping tiles of the model's size, blended with linear ramps: detail is kept, a tile sees only itself
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from diffpure.data.images import SUFFIXES, open_image, pixels_of, to_tensor
from diffpure.disk import one_sentence, write_whole
from diffpure.errors import InputError
from diffpure.noise import Noise, mix
from diffpure.purifiers.diffusion import Purifier

Fit = Literal["resize", "tiles"]
ARCHIVES: Final = frozenset({".npz", ".tar", ".gz", ".tgz"})
GROUP: Final = 16_000_000  # pixels that are purified together at most, unless one image alone has more
SAVE_OPTIONS: Final[dict[str, dict[str, Any]]] = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}


@final
@dataclass(frozen=True)
class Picture:
    """An image and what its file was: pixels (3, H, W) in [0, 1], alpha (H, W) uint8 or None, grey or not, format."""

    pixels: Tensor
    alpha: NDArray[np.uint8] | None
    grey: bool
    format: str


@final
@dataclass
class Report:
    """What became of every file."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Item:
    """One image to purify: its name below the output folder, and how to read it."""

    name: str
    read: Callable[[], Picture]


def read_picture(source: Path | bytes) -> Picture:
    """An image file with its transparency set aside."""
    image = open_image(source)
    kind, grey = image.format or "PNG", image.mode in ("1", "L", "I", "F") or image.mode.startswith("I;")
    if "A" not in image.getbands() and "transparency" not in image.info:
        name = "The image" if isinstance(source, bytes) else source.name
        return Picture(pixels_of(image, name), None, grey, kind)
    layers = image.convert("RGBA")
    return Picture(to_tensor(layers.convert("RGB")), np.asarray(layers.getchannel("A")), False, kind)


def encode(picture: Picture, pixels: Tensor) -> bytes:
    """Purified pixels (3, H, W) in the format of the picture they came from."""
    array = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    image = Image.fromarray(array)
    if picture.alpha is not None:
        image.putalpha(Image.fromarray(picture.alpha))
    elif picture.grey:
        image = image.convert("L")
    kind = "JPEG" if picture.format == "MPO" else picture.format  # MPO: a JPEG with further pictures behind it
    out = io.BytesIO()
    image.save(out, kind, **SAVE_OPTIONS.get(kind, {}))
    return out.getvalue()


# ------------------------------------------------------------------------------------------------------------- sizes


@torch.no_grad()
def purify_images(purifier: Purifier, images: Tensor, fit: Fit, seeds: Sequence[int], rows: int = 16) -> Tensor:
    """Purify images (B, 3, H, W) of one size, whole or in overlapping tiles."""
    size = purifier.score.size
    if fit == "resize" or size is None or images.shape[-2:] == (size, size):
        whole: Tensor = purifier(images, seeds)
        return whole
    return torch.stack([_in_tiles(purifier, x, size, seed, rows) for x, seed in zip(images, seeds, strict=True)])


def _in_tiles(purifier: Purifier, image: Tensor, size: int, seed: int, rows: int) -> Tensor:
    """One image (3, H, W) in tiles that overlap by at least a quarter, blended with linear ramps."""
    height, width = image.shape[-2:]
    padded = _grow(image, max(height, size), max(width, size))
    corners = [(top, left) for top in _starts(padded.shape[-2], size) for left in _starts(padded.shape[-1], size)]
    ramp = torch.minimum(torch.arange(1, size + 1), torch.arange(size, 0, -1)).clamp(max=max(1, size // 4)).float()
    window = ramp[:, None] * ramp[None, :]
    total, weight = torch.zeros_like(padded), torch.zeros_like(padded[:1])
    for first in range(0, len(corners), rows):
        part = corners[first : first + rows]
        tiles = torch.stack([padded[:, top : top + size, left : left + size] for top, left in part])
        clean = purifier(tiles, [mix(seed, first + k) for k in range(len(part))])
        for tile, (top, left) in zip(clean, part, strict=True):
            total[:, top : top + size, left : left + size] += window * tile
            weight[:, top : top + size, left : left + size] += window
    return (total / weight)[:, :height, :width]


def _grow(image: Tensor, height: int, width: int) -> Tensor:
    """The image repeated at its lower and right edge up to a size."""
    rows = torch.arange(height).clamp(max=image.shape[-2] - 1)
    columns = torch.arange(width).clamp(max=image.shape[-1] - 1)
    return image[:, rows][:, :, columns]


def _starts(length: int, size: int) -> list[int]:
    """Where tiles of a size begin along a side, evenly, overlapping by at least a quarter."""
    count = 1 if length == size else 1 + -(-(length - size) // (size - size // 4))
    return [round(i * (length - size) / max(1, count - 1)) for i in range(count)]


# ------------------------------------------------------------------------------------------------------------- files


def purify_files(
    purifier: Purifier,
    inputs: Sequence[str],
    out: Path,
    *,
    fit: Fit = "resize",
    seed: int | None = None,
    batch: int = 16,
    on_image: Callable[[Item, Tensor, Sequence[int]], None] | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Report:
    """Purify everything that `inputs` name into the folder `out`; what is there already is skipped.

    on_image is called with an image's item, its pixels (1, 3, H, W) and its seed, for pictures of the way back.
    """
    report = Report()
    homes = [path if path.is_dir() else path.parent for path in map(Path, inputs)]
    if out.resolve() in [path.resolve() for path in homes]:
        raise InputError(f"The images lie in {out} themselves; give another folder for the purified ones.")
    items = list(find(inputs, report, out))
    if not items and not report.failed:
        raise InputError(f"There are no images in {', '.join(inputs)}; image files, npz and tar archives are read.")
    if twice := [name for name, count in Counter(item.name for item in items).items() if count > 1]:
        raise InputError(f"Two images would be written to {out / twice[0]}; purify them into folders of their own.")
    with one_sentence(out):
        out.mkdir(parents=True, exist_ok=True)
    report.skipped = [item.name for item in items if (out / item.name).exists()]
    todo = [item for item in items if item.name not in set(report.skipped)]
    for group in _groups(todo, batch, report):
        seeds = [_seed_of(item.name, seed) for item, _ in group]
        pixels = torch.stack([picture.pixels for _, picture in group])
        clean = purify_images(purifier, pixels, fit, seeds, batch)
        for (item, picture), x, y, own in zip(group, pixels, clean, seeds, strict=True):
            with one_sentence(out):
                (out / item.name).parent.mkdir(parents=True, exist_ok=True)
                write_whole(out / item.name, encode(picture, y))
            report.done.append(item.name)
            if on_image is not None:
                on_image(item, x[None], [own])
        progress("purify", len(items) - len(todo) + len(report.done), len(items))
    return report


def find(inputs: Sequence[str], report: Report, out: Path) -> Iterator[Item]:
    """The images that files, folders, globs, npz and tar archives name; what cannot be opened goes to the report.

    What lies in `out` is not an input, even if `out` lies in one.
    """
    for text in inputs:
        path = Path(text)
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES | ARCHIVES and p.is_file())
            for file in files:
                if not file.resolve().is_relative_to(out.resolve()):
                    yield from _of_file(file, file.relative_to(path).parent, report)
        elif path.is_file():
            yield from _of_file(path, Path(), report)
        else:
            matches = sorted(glob.glob(text, recursive=True))
            if not matches:
                raise InputError(f"There is no file, folder or match for {text!r}.")
            for match in map(Path, matches):
                if match.is_file():
                    yield from _of_file(match, Path(), report)


def _of_file(path: Path, below: Path, report: Report) -> Iterator[Item]:
    """The image in a file, or the images in an archive, with names below a folder."""
    if path.suffix.lower() not in ARCHIVES:
        yield Item((below / path.name).as_posix(), lambda: read_picture(path))
        return
    try:
        with _readable(path):
            items = list(_of_npz(path) if path.suffix.lower() == ".npz" else _of_tar(path))
        yield from (Item((below / item.name).as_posix(), item.read) for item in items)
    except InputError as error:
        report.failed.append(((below / path.name).as_posix(), str(error)))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say in one sentence that an archive could not be read."""
    try:
        yield
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path.name} is damaged or no archive of images, and cannot be read.") from error


def _of_npz(path: Path) -> Iterator[Item]:
    """Arrays (N, H, W, 3) or (H, W, 3), 8-bit or float in [0, 1]; image i of array k becomes STEM/k-i.png."""
    with np.load(path, allow_pickle=False) as arrays:
        keys = list(arrays.files)
    for key in keys:
        stack = _stack(path, key, path.stat().st_mtime_ns)
        if stack.ndim == 4 and stack.shape[-1] == 3:  # labels and other arrays stand beside the images
            for i in range(len(stack)):
                yield Item(f"{path.stem}/{key}-{i:05d}.png", _array_reader(path, key, i))


@lru_cache(maxsize=1)  # the images of an array are read one after the other, and arrays may be large
def _stack(path: Path, key: str, changed: int) -> NDArray[Any]:
    """An array of an npz file as it was at a time, as a stack of images."""
    with np.load(path, allow_pickle=False) as arrays:
        array: NDArray[Any] = arrays[key]
    return array[None] if array.ndim == 3 else array


def _array_reader(path: Path, key: str, i: int) -> Callable[[], Picture]:
    def read() -> Picture:
        with _readable(path):
            image, name = _stack(path, key, path.stat().st_mtime_ns)[i], f"{key}[{i}]"
        values = image.astype(np.float32) / (255 if image.dtype == np.uint8 else 1)
        if not np.isfinite(values).all() or values.min() < 0 or values.max() > 1:
            raise InputError(f"{name} holds values that are not 8-bit or finite floats in [0, 1].")
        return Picture(torch.from_numpy(values.transpose(2, 0, 1).copy()), None, False, "PNG")

    return read


def _of_tar(path: Path) -> Iterator[Item]:
    """The images of a tar archive, below a folder of its name; members with unsafe names are flattened."""
    stem = path.name.split(".")[0]
    with tarfile.open(path) as archive:
        members = [m for m in archive.getmembers() if m.isfile() and PurePosixPath(m.name).suffix.lower() in SUFFIXES]
    for member in members:
        parts = [p for p in PurePosixPath(member.name).parts if p not in ("/", "..", ".")]
        yield Item("/".join([stem, *parts]), _member_reader(path, member))


def _member_reader(path: Path, member: tarfile.TarInfo) -> Callable[[], Picture]:
    def read() -> Picture:
        with _readable(path), tarfile.open(path) as archive:
            stream = archive.extractfile(member)
            if stream is None:
                raise InputError(f"{member.name} cannot be read from {path.name}.")
            return read_picture(stream.read())

    return read


def _groups(items: Iterable[Item], batch: int, report: Report) -> Iterator[list[tuple[Item, Picture]]]:
    """Neighbours of one size in groups of at most `batch` images; what cannot be read goes to the report."""
    group: list[tuple[Item, Picture]] = []
    for item in items:
        try:
            picture = item.read()
        except InputError as error:
            report.failed.append((item.name, str(error)))
            continue
        size = picture.pixels.shape
        most = min(batch, max(1, GROUP // (size[-2] * size[-1])))
        if group and (len(group) >= most or group[0][1].pixels.shape != size):
            yield group
            group = []
        group.append((item, picture))
    if group:
        yield group


def _seed_of(name: str, seed: int | None) -> int:
    """The seed of an image: from its name, so that it does not depend on what else is purified; or entropy."""
    if seed is None:
        return Noise.of(None, 1).seeds[0]
    return mix(seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))

"""What there is to purify: files, folders and globs first, then the images in them one after the other.

Batches are planned from the inputs alone, never from what is already purified: a network gives an image other last
digits in a batch of another size, and a run that was killed must go on to the same files.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, final

from diffpure.data.images import SUFFIXES, claimed_pixels
from diffpure.errors import InputError
from diffpure.files import names
from diffpure.files.archives import tar_images
from diffpure.files.pictures import Picture, read_picture
from diffpure.files.report import Report

TARS: Final = frozenset({".tar", ".gz", ".tgz"})
ARRAYS: Final = ".npz"
KNOWN: Final = SUFFIXES | TARS | {ARRAYS}
DRAWING: Final = ".trajectory"  # what ends the name of a drawing of the way back, before .png or .gif
HEADROOM: Final = 1 << 20  # bytes of an image file that are not pixels
GROUP: Final = 16_000_000  # pixels that are purified together at most, unless one image alone has more


@final
@dataclass(frozen=True)
class Item:
    """One image to purify: its name below the output folder, its claimed size in pixels, and how to read it."""

    name: str
    pixels: int
    read: Callable[[], Picture]


@final
@dataclass(frozen=True, slots=True)  # small, as there may be millions: a Path takes several times the memory
class Input:
    """A file to purify, by its absolute path, and the folder that it lies in below what was named."""

    file: str
    below: str = ""

    @property
    def path(self) -> Path:
        """Where it is."""
        return Path(self.file)

    @property
    def shown(self) -> str:
        """What a report calls it."""
        return f"{self.below}/{self.path.name}".lstrip("/")

    @property
    def suffix(self) -> str:
        """The ending of its name in lower case."""
        return self.path.suffix.lower()


def find(inputs: Sequence[str], out: Path) -> list[Input]:
    """The image files, tar archives and npz files that `inputs` name; what lies in `out` is not among them."""
    found: list[Input] = []
    homes = [path if path.is_dir() else path.parent for path in map(Path, inputs)]
    if out.resolve() in [path.resolve() for path in homes]:
        raise InputError(f"The images lie in {out} themselves; give another folder for the purified ones.")
    for text in inputs:
        path = Path(text).absolute()
        if path.is_dir():
            found += _below(path, out.resolve())
        elif path.is_file():
            found.append(Input(str(path)))
        elif matches := sorted(glob.glob(text, recursive=True)):
            found += [Input(str(match.absolute())) for match in map(Path, matches) if match.is_file()]
        else:
            raise InputError(f"There is no file, folder or match for {text!r}.")
    if not found:
        raise InputError(f"There are no images in {', '.join(inputs)}; image files, npz and tar archives are read.")
    counts = Counter(each.shown for each in found if each.suffix not in TARS)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InputError(f"Two images would be written to {out / twice[0]}; purify them into folders of their own.")
    return found


def _below(folder: Path, outside: Path, below: str = "") -> Iterator[Input]:
    """The files in a folder that may hold images, in the order of their paths, except what lies in `outside`."""
    if folder.resolve().is_relative_to(outside):
        return
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(PermissionError), os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)  # one folder at a time
    for entry in entries:
        file = folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _below(file, outside, f"{below}/{entry.name}".lstrip("/"))
            continue
        known = file.suffix.lower() in KNOWN and Path(file.stem).suffix != DRAWING
        if known and file.is_file() and not (entry.is_symlink() and file.resolve().is_relative_to(outside)):
            yield Input(str(file), below)


def items(inputs: Iterable[Input], largest: int, report: Report) -> Iterator[Item]:
    """The images in files and tar archives; what cannot be opened goes to the report."""
    for each in inputs:
        try:
            if each.suffix in TARS:
                yield from _of_tar(each, largest, report)
            else:
                yield _of_file(each, largest)
        except InputError as error:
            report.failed.append((each.shown, str(error)))


def _of_file(each: Input, largest: int) -> Item:
    name = names.clean(each.below, each.path.name)
    return Item(name, claimed_pixels(each.path), partial(read_picture, each.path, largest))


def _of_tar(each: Input, largest: int, report: Report) -> Iterator[Item]:
    """The images of a tar archive, below a folder of its name."""
    encoded = 8 * largest + HEADROOM  # no image that is accepted has a longer file
    for member, content in tar_images(each.path, encoded):
        try:
            name = names.clean(each.below, names.stem(each.path.name), member)
            yield _of_bytes(name, content, largest)
        except InputError as error:
            report.failed.append((f"{each.shown}/{member}", str(error)))


def _of_bytes(name: str, content: bytes | InputError, largest: int) -> Item:
    if isinstance(content, InputError):
        raise content
    return Item(name, max(claimed_pixels(content), len(content) // 3), partial(read_picture, content, largest))


def plan(images: Iterable[Item], batch: int) -> Iterator[list[Item]]:
    """Neighbours in groups of at most `batch` images and GROUP pixels, by the inputs alone."""
    group: list[Item] = []
    for item in images:
        if group and (len(group) == batch or sum(each.pixels for each in group) + item.pixels > GROUP):
            yield group
            group = []
        group.append(item)
    if group:
        yield group

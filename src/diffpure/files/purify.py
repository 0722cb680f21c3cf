"""`purify_files`: everything that inputs name, purified into one folder, where a second run goes on.

    inputs → work: groups of images, npz files → engine: here, or on a Ray cluster → files, and a report of each group

The inputs are walked here, and no further than the engine has room. A group holds the images that are purified
together, so that its files depend on nothing else; whoever has it reads and writes the files itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from diffpure.data.images import LARGEST
from diffpure.disk import write_whole
from diffpure.errors import InputError
from diffpure.evaluation.engine import Engine, Local
from diffpure.files import names, record
from diffpure.files.arrays import Clean, Images, purify_arrays
from diffpure.files.pictures import Picture, eight_bits, encode
from diffpure.files.report import Report
from diffpure.files.sources import ARRAYS, TARS, Input, Item, find, items, plan
from diffpure.files.tiles import (
    LARGE,
    Fit,
    as_floats,
    count_tiles,
    purify_images,
    purify_large,
    purify_tiles,
    way,
)
from diffpure.purify import PurifierBase

OnImage = Callable[[Path, Tensor, Sequence[int]], None]
Progress = Callable[[str, int, int | None], None]
Read = tuple[Item, Picture]


def _silent(what: str, done: int, total: int | None) -> None:
    """Tell nobody how far the work has come."""


def purify_files(
    purifier: PurifierBase,
    inputs: Sequence[str],
    out: Path,
    *,
    fit: Fit = "auto",
    seed: int | None = None,
    batch: int = 16,
    max_pixels: int = LARGEST,
    device: str = "cpu",
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    sizes: Mapping[tuple[int, int], PurifierBase] | None = None,
    on_image: OnImage | None = None,
    engine: Engine | None = None,
    progress: Progress = _silent,
) -> Report:
    """Purify everything that `inputs` name into the folder `out`; what is there already is skipped.

    settings: what else decides the result, such as the model and t*; the folder records them, and refuses others unless
    it is to be overwritten.   device: where the purifier is.   sizes: purifiers for images of one (height, width), in
    place of `purifier`; their settings are the caller's to record.   on_image is called with the file of an image that
    was purified as a whole, its pixels (1, C, H, W) and its seed, for pictures of the way back.
    engine: `Local()`, or `Ray(...)`, whose workers see the same folders and whose options choose the device.
    """
    engine = Local() if engine is None else engine
    found = find(inputs, out)
    known = dict(settings or {}, fit=fit)
    if seed is not None:
        known |= {"seed": seed, "batch": batch}  # without a seed nobody can tell what a batch changes
    ours = record.claim(out, known, overwrite)
    total = None if any(each.suffix in TARS for each in found) else len(found)
    run = _Run(
        purifier,
        sizes or {},
        out.absolute(),  # a worker may have another working directory
        fit,
        seed,
        batch,
        max_pixels,
        engine.device or device,
        overwrite,
        ours,
        on_image,
        progress,
        Report(),
    )
    for part in engine.map(_Run.purified, run, run.work(found, total)):
        run.report.add(part)
        progress("images", run.report.count, total)
    record.finish(out, known, overwrite)
    return run.report


@final
@dataclass(frozen=True)
class _Group:
    """Images that are read together, and the names of those that are missing."""

    items: Sequence[Item]
    missing: frozenset[str]


@final
@dataclass(frozen=True)
class _Run:
    """One call of `purify_files`, or the part of it that a worker does."""

    usual: PurifierBase
    sizes: Mapping[tuple[int, int], PurifierBase]
    out: Path
    fit: Fit
    seed: int | None
    batch: int
    largest: int
    device: str
    overwrite: bool
    ours: bool  # what is in the folder was written with these settings
    on_image: OnImage | None
    progress: Progress
    report: Report

    def __getstate__(self) -> dict[str, Any]:
        """What a worker is sent: progress is shown where the run began."""
        return {**vars(self), "progress": _silent}

    def purifier(self, images: Tensor) -> PurifierBase:
        """The purifier of images (..., H, W)."""
        height, width = images.shape[-2:]
        return self.sizes.get((height, width), self.usual)

    def work(self, found: Sequence[Input], total: int | None) -> Iterator[_Group | Input]:
        """What is missing, one piece after the other: groups of images, then npz files."""
        taken: set[str] = set()
        pictures = (each for each in found if each.suffix != ARRAYS)
        for group in plan(items(pictures, self.largest, self.report), self.batch):
            there = [(item, self._is_there(item.name, taken)) for item in group]
            missing = frozenset(item.name for item, known in there if known is False)
            # A batch that is purified again has the images of the first time, so that every digit is the same.
            again = missing and self.seed is not None
            if missing:
                yield _Group([item for item, known in there if known is False or (known and again)], missing)
            else:
                self.progress("images", self.report.count, total)
        for each in found:
            known = None
            if each.suffix == ARRAYS:
                with self._failure(each.shown):
                    known = self._is_there(names.clean(each.below, each.path.name), set())
            if known is False:
                yield each

    def purified(self, piece: _Group | Input) -> Report:
        """Purify a piece of the work; after a worker was lost, a second time, to the same files."""
        part = replace(self, report=Report())
        for purifier in (self.usual, *self.sizes.values()):
            if isinstance(purifier, nn.Module):
                purifier.to(self.device)  # a worker's own copies, and here where they are already
        if isinstance(piece, Input):
            part._arrays(piece)
        else:
            for alike in part._read(piece.items):
                part._purify(alike, piece.missing)
        return part.report

    def _arrays(self, each: Input) -> None:
        """Purify the images in an npz file."""
        with self._failure(each.shown):
            name = names.clean(each.below, each.path.name)
            target, work = names.place(self.out, name), names.place(self.out, names.WORK)
            said = purify_arrays(each.path, target, work, self._cleaner(name), self.batch, self.largest)
            self.report.done.append(name)
            self.report.notes.append((name, said))

    def _cleaner(self, name: str) -> Clean:
        """What purifies the images of an npz file, with the seed of each from the name of its array and its index."""

        def clean(array: Images, images: Tensor, start: int) -> Tensor:
            seeds = [names.seed_of(f"{name}:{array.name}[{start + k}]", self.seed) for k in range(len(images))]
            tick = partial(self.progress, f"tiles of {name}")
            purifier = self.purifier(images)
            pixels = purify_images(purifier, images, self.fit, seeds, self.batch, device=self.device, tick=tick)
            self._count(images)
            self.progress(f"{name}: {array.name}", start + len(images), array.count)
            return pixels

        return clean

    def _is_there(self, name: str, taken: set[str]) -> bool | None:
        """Whether an image was purified before; None, and a line in the report, if it cannot be."""
        known: bool | None = None
        with self._failure(name):
            if name in taken:
                raise InputError("Another image of these inputs has the same name; only the first was purified.")
            taken.add(name)
            with names.writing(self.out):
                target = names.place(self.out, name)
                folder, file = target.is_dir(), target.exists()
            if folder:
                raise InputError("A folder of this name is there, so that no image can be written.")
            if file and not (self.overwrite or self.ours):
                raise InputError("A file of this name is there, and no record of how it was made.")
            known = file and not self.overwrite
        if known:
            self.report.skipped.append(name)
        return known

    def _read(self, group: Sequence[Item]) -> Iterator[list[Read]]:
        """The pictures of a group, those of one size and type together; tiles are cut from one picture at a time."""
        alike: dict[tuple[torch.Size, torch.dtype], list[Read]] = {}
        for item in group:
            with self._failure(item.name):
                picture = item.read()
                alike.setdefault((picture.pixels.shape, picture.pixels.dtype), []).append((item, picture))
        yield from alike.values()

    def _purify(self, alike: Sequence[Read], missing: frozenset[str]) -> None:
        """Purify pictures of one size and write those that are missing."""
        how = self._way(alike[0][1])
        if how != "whole":
            for item, picture in alike:
                if item.name in missing:
                    with self._failure(item.name):
                        self._write(item, picture, self._alone(item, picture, how))
                        if self.on_image is not None:
                            self.report.notes.append((item.name, f"no way back is drawn of {how}"))
            return
        if not any(item.name in missing for item, _ in alike):
            return
        seeds = [names.seed_of(item.name, self.seed) for item, _ in alike]
        pixels = torch.stack([picture.pixels for _, picture in alike])
        try:
            clean = purify_images(self.purifier(pixels), pixels, self.fit, seeds, device=self.device)
        except InputError as error:
            self.report.failed += [(item.name, str(error)) for item, _ in alike if item.name in missing]
            return
        for (item, picture), x, y, own in zip(alike, pixels, clean, seeds, strict=True):
            if item.name in missing:
                with self._failure(item.name):
                    self._write(item, picture, eight_bits(y))
                    if self.on_image is not None:
                        with names.writing(self.out):
                            self.on_image(self.out / item.name, as_floats(x[None]), [own])

    def _way(self, picture: Picture) -> str:
        """Whether a picture is purified with others of its size, or alone: in tiles, or because it is large."""
        height, width = picture.pixels.shape[-2:]
        size = self.purifier(picture.pixels).size
        if way(height, width, size, self.fit) == "tiles":
            return "tiles"
        return "large images" if height * width > LARGE and (height, width) != (size, size) else "whole"

    def _alone(self, item: Item, picture: Picture, how: str) -> Tensor:
        """The purified 8-bit pixels of one picture."""
        purifier, pixels = self.purifier(picture.pixels), picture.pixels
        clean, done = torch.empty(pixels.shape, dtype=torch.uint8), 0
        seed, tick = names.seed_of(item.name, self.seed), partial(self.progress, f"tiles of {item.name}")
        if how == "tiles":
            bands = purify_tiles(purifier, pixels, seed, self.batch, device=self.device, tick=tick)
        elif purifier.size is None:
            bands = iter(purify_images(purifier, pixels[None], self.fit, [seed], device=self.device, tick=tick))
        else:
            bands = purify_large(purifier, pixels, seed, device=self.device)
        for rows in bands:
            clean[:, done : done + rows.shape[1]] = eight_bits(rows)
            done += rows.shape[1]
        return clean

    def _write(self, item: Item, picture: Picture, clean: Tensor) -> None:
        data = encode(picture, clean)
        with names.writing(self.out):
            target = names.place(self.out, item.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, data)
        self.report.done.append(item.name)
        self.report.notes += [(item.name, note) for note in picture.notes]
        self._count(clean[None])

    def _count(self, images: Tensor) -> None:
        """Count how images (B, C, H, W) were purified."""
        height, width = images.shape[-2:]
        size = self.purifier(images).size
        how = way(height, width, size, self.fit)
        self.report.ways[how] += len(images)
        if how == "tiles" and size is not None:
            self.report.tiles += len(images) * count_tiles(height, width, size)

    @contextmanager
    def _failure(self, name: str) -> Iterator[None]:
        """One image's trouble goes to the report; what would trouble all, such as a full disk, is raised."""
        try:
            yield
        except names.Unwritable:
            raise
        except InputError as error:
            self.report.failed.append((name, str(error)))

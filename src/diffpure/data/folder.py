"""Labelled image files that are read when they are asked for: any folder of images, by class folders or by a CSV.

- root/<class>/*.jpg …: a label a class folder, in alphabetical order;
- root/*.jpg … and a CSV: rows of file name and label, which is a whole number, or a name in alphabetical order. The
  label stands in the second column or in a named one, and a file may be named without its suffix.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from PIL import Image
from torch import Tensor

from diffpure.data.images import SUFFIXES, center_crop, read_rgb, resize, to_tensor
from diffpure.errors import InputError, unknown

Transform = Callable[[Image.Image], Image.Image]


@final
@dataclass(frozen=True)
class Files:
    """Image files with their labels; an image is opened, checked and transformed when it is asked for."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    transform: Transform

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.labels):
            raise InputError(f"There are {len(self.paths)} images but {len(self.labels)} labels; one each is wanted.")

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """The images of these indices as float32 (B, 3, H, W) in [0, 1], and their labels (B,) int64."""
        chosen = [int(i) for i in indices]
        outside = [i for i in chosen if not 0 <= i < len(self)]
        if not chosen or outside:
            raise InputError(f"Indices are in 0 … {len(self) - 1}, at least one, got {outside or chosen}.")
        images = [to_tensor(self.transform(read_rgb(self.paths[i]))) for i in chosen]
        shapes = {tuple(image.shape[1:]) for image in images}
        if len(shapes) > 1:
            raise InputError(f"Images of a batch have one size, got {sorted(shapes)}; give a size to resize to.")
        return torch.stack(images), torch.tensor([self.labels[i] for i in chosen])


def source(
    *,
    path: Path,
    labels: Path | None = None,
    label_column: str | None = None,
    label_offset: int = 0,
    size: int | None = None,
) -> Files:
    """The source `folder` of a spec."""
    check_csv(labels, label_column, label_offset)
    return read(path, labels=labels, column=label_column, offset=label_offset, size=size)


def read(
    root: str | Path,
    *,
    labels: str | Path | None = None,
    column: str | None = None,
    offset: int = 0,
    size: int | None = None,
) -> Files:
    """Any image folder, labelled by its class folders or by a CSV of file names and labels.

    column: the named column of the labels.   offset: what is subtracted from labels that are numbers.   size: resize
    and crop to squares of this size.
    """
    root = existing(root)
    transform: Transform = _unchanged if size is None else square(size)
    if labels is not None:
        rows = read_labels(Path(labels), column)
        numbers, classes = _numbered(list(rows.values()), offset, Path(labels).name)
        return Files(listed(root, rows), numbers, classes, transform)
    classes = tuple(class_folders(root))
    if not classes:
        raise InputError(f"{root} has no class folders; give a CSV of file names and labels for a flat folder.")
    return by_class(root, {name: i for i, name in enumerate(classes)}, classes, transform)


def check_csv(labels: Path | None, column: str | None, offset: int) -> None:
    """Refuse what describes a CSV where there is none."""
    if labels is None and (column is not None or offset):
        raise InputError("`label_column` and `label_offset` describe a CSV; name it with `labels`.")


def _numbered(labels: list[str], offset: int, name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Labels as numbers from 0, and the names of the classes where the labels are names."""
    if all(label.isdecimal() for label in labels):
        return shifted([int(label) for label in labels], offset, name), ()
    if offset:
        raise InputError(f"The labels of {name} are names such as {labels[0]!r}, to which no label_offset applies.")
    names = sorted(set(labels))
    index = {label: i for i, label in enumerate(names)}
    return tuple(index[label] for label in labels), tuple(names)


def shifted(labels: Sequence[int], offset: int, name: str) -> tuple[int, ...]:
    """Labels less the number at which they begin; none may become negative."""
    if labels and min(labels) < offset:
        raise InputError(f"{name} has the label {min(labels)}, which is below the label_offset {offset}.")
    return tuple(label - offset for label in labels)


def by_class(root: Path, index: Mapping[str, int], classes: Sequence[str], transform: Transform) -> Files:
    """The images of the class folders that `index` gives a label, folder by folder, sorted."""
    found = [(path, label) for name, label in index.items() for path in images_in(root / name)]
    if not found:
        raise InputError(f"The class folders of {root} hold no image.")
    return Files(tuple(path for path, _ in found), tuple(label for _, label in found), tuple(classes), transform)


def existing(root: str | Path) -> Path:
    """The folder, if it is one."""
    if not os.path.isdir(root):
        raise InputError(f"There is no folder {root}.")
    return Path(root)


def class_folders(root: Path) -> list[str]:
    """The names of the folders in a folder, sorted."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def images_in(folder: Path) -> list[Path]:
    """The image files in a folder, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())


def listed(root: Path, rows: Mapping[str, str]) -> tuple[Path, ...]:
    """The files that rows name, with or without suffix, in their order; every image beside them is named, too."""
    paths = [root / name for name in rows]
    folders = {folder: _by_stem(folder) for folder in {root, *(path.parent for path in paths)} if folder.is_dir()}
    found: list[Path] = []
    missing: list[str] = []
    for path in paths:
        beside = folders.get(path.parent, {}).get(path.name, [])
        if len(beside) > 1:
            raise InputError(
                f"{path.name} may be {' or '.join(p.name for p in beside)}; write the name with its suffix."
            )
        if path.is_file() or beside:
            found.append(path if path.is_file() else beside[0])
        else:
            missing.append(path.name)
    if missing:
        raise InputError(f"{root} lacks {len(missing)} of the {len(paths)} listed images, {missing[0]} first.")
    named = set(found)
    left = [p for stems in folders.values() for same in stems.values() for p in same if p not in named]
    if left:
        raise InputError(f"{len(left)} of the images in {root} have no label, {left[0].name} first.")
    return tuple(found)


def _by_stem(folder: Path) -> dict[str, list[Path]]:
    """The image files in a folder by their names without suffix."""
    stems: dict[str, list[Path]] = {}
    for path in images_in(folder):
        stems.setdefault(path.stem, []).append(path)
    return stems


def read_labels(path: Path, column: str | None = None) -> dict[str, str]:
    """File names and labels from a CSV; without a named column the second one, of which the first word counts.

    A header is there if a column is named, or if the first row begins as headers do. The file names stand in the
    first column whose header says so. Several words are what Kaggle's ImageNet has, a class and its boxes.
    """
    try:
        rows = [row for row in csv.reader(path.read_text("utf-8-sig").splitlines()) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a readable CSV of file names and labels.") from error
    header = [cell.strip() for cell in rows[0]] if rows else []
    if column is not None and column not in header:
        raise unknown("column", column, header)
    named = [i for i, cell in enumerate(header) if cell.lower() in HEADERS and cell != column]
    if column is not None or 0 in named:
        rows = rows[1:]
    if not rows:
        raise InputError(f"{path.name} has no row; rows of file name and label are accepted.")
    at, label = (named or [0])[0], 1 if column is None else header.index(column)
    if any(len(row) <= max(at, label) or not row[at].strip() or not row[label].strip() for row in rows):
        raise InputError(f"Every row of {path.name} is a file name and a label.")
    found: dict[str, str] = {}
    for row in rows:
        name = row[at].strip()
        if name in found:
            raise InputError(f"{path.name} names {name} twice.")
        found[name] = row[label].split()[0] if column is None else row[label].strip()
    return found


def square(size: int) -> Transform:
    """The shorter side to `size`, then the square in the middle."""
    return lambda image: center_crop(resize(image, size), size)


def _unchanged(image: Image.Image) -> Image.Image:
    return image


HEADERS = frozenset({"file", "filename", "file_name", "image", "imageid", "image_id", "path", "name", "id"})

"""Labelled image files that are read when they are asked for: any folder of images, by class folders or by a CSV.

- root/<class>/*.jpg …: a label a class folder, in alphabetical order;
- root/*.jpg … and a CSV: rows of file name and label, which is a whole number, or a name in alphabetical order.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from PIL import Image
from torch import Tensor

from diffpure.data.images import SUFFIXES, center_crop, read_rgb, resize, to_tensor
from diffpure.errors import InputError

Transform = Callable[[Image.Image], Image.Image]


@final
@dataclass(frozen=True)
class Files:
    """Image files with their labels; an image is opened, checked and transformed when it is asked for."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    transform: Transform

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


def read(root: str | Path, *, labels: str | Path | None = None, size: int | None = None) -> Files:
    """Any image folder, labelled by its class folders or by a CSV of (file, label); squares of `size` if given."""
    root = existing(root)
    transform: Transform = _unchanged if size is None else square(size)
    if labels is not None:
        rows = read_labels(Path(labels))
        names = sorted(set(rows.values()))
        numbered = all(name.isdecimal() for name in names)
        index = {name: int(name) if numbered else i for i, name in enumerate(names)}
        return Files(listed(root, rows), tuple(index[label] for label in rows.values()), tuple(names), transform)
    classes = class_folders(root)
    if not classes:
        raise InputError(f"{root} has no class folders; give a CSV of file names and labels for a flat folder.")
    return by_class(root, {name: i for i, name in enumerate(classes)}, classes, transform)


def by_class(root: Path, index: Mapping[str, int], classes: Sequence[str], transform: Transform) -> Files:
    """The images of the class folders that `index` gives a label, folder by folder, sorted."""
    found = [(path, label) for name, label in index.items() for path in images_in(root / name)]
    if not found:
        raise InputError(f"The class folders of {root} hold no image.")
    return Files(tuple(path for path, _ in found), tuple(label for _, label in found), tuple(classes), transform)


def existing(root: str | Path) -> Path:
    """The folder, if it is one."""
    if not Path(root).is_dir():
        raise InputError(f"There is no folder {root}.")
    return Path(root)


def class_folders(root: Path) -> list[str]:
    """The names of the folders in a folder, sorted."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def images_in(folder: Path) -> list[Path]:
    """The image files in a folder, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())


def listed(root: Path, rows: Mapping[str, str]) -> tuple[Path, ...]:
    """The files that rows name, in their order, all of which exist."""
    paths = tuple(root / name for name in rows)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise InputError(f"{root} lacks {len(missing)} of the {len(paths)} listed images, {missing[0]} first.")
    return paths


def read_labels(path: Path) -> dict[str, str]:
    """Rows of file name and label from a CSV, with or without a header; of a longer label the first word counts.

    The longer form is the one of Kaggle's ImageNet, a class and its boxes; its names have no suffix.
    """
    try:
        rows = [row for row in csv.reader(path.read_text("utf-8").splitlines()) if row]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a readable CSV of file names and labels.") from error
    if any(len(row) < 2 or not row[1].strip() for row in rows):
        raise InputError(f"Every row of {path.name} is a file name and a label.")
    if rows and rows[0][0].strip().lower() in HEADERS:
        rows = rows[1:]
    if not rows:
        raise InputError(f"{path.name} has no row; rows of file name and label are accepted.")
    return {row[0].strip(): row[1].split()[0] for row in rows}


def square(size: int) -> Transform:
    """The shorter side to `size`, then the square in the middle."""
    return lambda image: center_crop(resize(image, size), size)


def _unchanged(image: Image.Image) -> Image.Image:
    return image


HEADERS = frozenset({"file", "filename", "file_name", "image", "imageid", "image_id", "path", "name", "id"})

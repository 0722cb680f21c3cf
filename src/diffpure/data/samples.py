"""Five hundred labelled CIFAR-10 test images inside the package: something real to defend, without any download.

`cifar10-samples.png` is a lossless sheet of 20 rows × 25 images of 32×32. Fifty images of each class were drawn from
the test set by `choose(labels, SEED)`; row r holds images 25 r … 25 r + 24 in the order of their index in the test set,
and `cifar10-samples.txt` holds, a line an image, that index and the label. No model of this package was trained or
tuned on them. `ATTRIBUTION` is what CIFAR-10 asks its users to say.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffpure.data.cifar10 import CLASSES, Images, load
from diffpure.errors import InputError

ATTRIBUTION: Final = (
    "CIFAR-10 was collected by Alex Krizhevsky, Vinod Nair and Geoffrey Hinton "
    "(Alex Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009)."
)
SEED: Final = 2022
PER_CLASS: Final = 50
COLUMNS: Final = 25
_SHEET: Final = "cifar10-samples.png"
_INDEX: Final = "cifar10-samples.txt"


def samples(n: int | None = None) -> tuple[Tensor, Tensor]:
    """The first n embedded images (n, 3, 32, 32) float32 in [0, 1] and their labels (n,); all 500 by default."""
    stored = _stored()
    if n is not None and not 1 <= n <= len(stored):
        raise InputError(f"There are {len(stored)} embedded images, so n is in 1 … {len(stored)}, got {n}.")
    stored = stored[:n]
    return stored.float(), stored.labels


def class_names() -> tuple[str, ...]:
    """The names of the ten classes of the embedded images, in the order of their labels."""
    return CLASSES


def source() -> Images:
    """The source `cifar10-samples` of a spec: the 500 embedded images; an index counts among them."""
    return _stored()


def indices() -> Tensor:
    """The indices (500,) of the embedded images in the official test set."""
    return _index()[:, 0]


def choose(labels: Tensor, seed: int = SEED, per_class: int = PER_CLASS) -> Tensor:
    """The indices of `per_class` images of each class, drawn by a recorded seed and sorted."""
    draw = np.random.Generator(np.random.Philox(key=seed))
    chosen = [draw.permutation(np.flatnonzero(labels.numpy() == label))[:per_class] for label in np.unique(labels)]
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


def write(folder: Path, path: str | Path | None = None) -> None:
    """Make the two files of this module again from the official test set."""
    test = load("test", path)
    chosen = choose(test.labels)
    tiles = test.pixels[chosen].reshape(-1, COLUMNS, 3, 32, 32).permute(0, 3, 1, 4, 2)
    sheet = tiles.reshape(tiles.shape[0] * 32, COLUMNS * 32, 3).numpy()
    Image.fromarray(sheet).save(folder / _SHEET, optimize=True)
    lines = [f"{index} {label}" for index, label in zip(chosen.tolist(), test.labels[chosen].tolist(), strict=True)]
    (folder / _INDEX).write_text("\n".join(lines) + "\n")


def _index() -> Tensor:
    text = resources.files("diffpure.data").joinpath(_INDEX).read_text()
    return torch.tensor([[int(word) for word in line.split()] for line in text.splitlines()])


def _stored() -> Images:
    with resources.files("diffpure.data").joinpath(_SHEET).open("rb") as stream, Image.open(stream) as image:
        sheet = torch.from_numpy(np.array(image))
    tiles = sheet.reshape(-1, 32, COLUMNS, 32, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)
    return Images(tiles.contiguous(), _index()[:, 1])

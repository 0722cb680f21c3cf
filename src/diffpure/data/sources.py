"""Where the images of an evaluation come from: the `[data]` table of a spec, and the dataset it names.

    [data]
    source = "folder"                   # see SOURCES below
    path = "photos"                     # relative to the folder of the spec
    images = "0-63, 100-109"            # or [0, 5, 9], or "all"; without it the first 64

A source is a function whose keyword arguments are the keys that it takes; it returns a `Source`, which knows how many
images there are and reads those that are asked for. A key that a source does not take is refused. Adding a source
means writing its file and adding one line to `SOURCES`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Protocol, final

from torch import Tensor

from diffpure.data import celebahq, cifar10, folder, imagenet, npz, samples, tensors
from diffpure.data.choice import ALL, expand, normal
from diffpure.data.subsets import named
from diffpure.errors import InputError, unknown
from diffpure.validate import as_images, as_labels

USUAL: Final = 64  # images, where a spec does not choose


class Source(Protocol):
    """Labelled images that are read when they are asked for."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in the order of the labels, or () where nobody knows them."""

    def __len__(self) -> int:
        """How many images there are."""

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The images of these indices as float32 (B, C, H, W) in [0, 1], and their labels (B,) int64."""


@final
@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Everything that the [data] table of a spec may say; which keys a source takes is checked here.

    images: "all", ranges or a list of indices, counted within the subset if one is named; kept as text, and as None
    where it is the default: the first 64 images of a source (or all, if there are fewer), all images of a subset.
    """

    source: str = "cifar10-samples"  # where the images come from, see below
    path: str | None = None  # a folder or file; relative to the folder of the spec
    images: str | Sequence[int] | None = None
    subset: str | None = None  # a fixed subset such as "cifar10/paper"
    labels: str | None = None  # a CSV of file names and labels
    label_column: str | None = None  # the name of its column of labels; the second column by default
    label_offset: int = 0  # what is subtracted from every label; 1 for labels that count from 1
    size: int | None = None  # resize the shorter side to this and crop the square in the middle
    devkit: str | None = None  # the folder of the ILSVRC2012 devkit
    attribute: str | None = None  # the attribute of CelebA-HQ that is the label, such as "Eyeglasses"
    part: str | None = None  # the part of CelebA-HQ: train, val (default), test or all
    split: str | None = None  # the split of CIFAR-10: test (default) or train

    def __post_init__(self) -> None:
        for key, value in _given(self).items():
            if isinstance(value, os.PathLike):
                object.__setattr__(self, key, os.fspath(value))
            elif key in _NUMBERS and (type(value) is not int or (key == "size" and value < 1)):
                raise InputError(f"`{key}` is a {'positive ' * (key == 'size')}whole number, got {value!r}.")
            elif key not in _NUMBERS and not isinstance(value, str):
                raise InputError(f"`{key}` is a text, got {value!r}.")
        if not isinstance(self.source, str) or self.source not in SOURCES:
            raise unknown("source of images", self.source, SOURCES)
        if self.subset is not None:
            named(self.subset, None)
            if not f"{self.subset.partition('/')[0]}-".startswith(f"{self.source}-"):
                raise InputError(f"The subset {self.subset!r} is not one of the source {self.source!r}.")
        if self.images is not None:
            text = normal(self.images)
            usual = ALL if self.subset is not None else f"0-{USUAL - 1}"
            object.__setattr__(self, "images", None if text == usual else text)
        _check_keys(self)


@final
@dataclass(frozen=True, eq=False)
class Dataset:
    """Chosen images (N, C, H, W) float32 in [0, 1], labels (N,) int64, and their indices in their source."""

    images: Tensor
    labels: Tensor
    indices: tuple[int, ...]
    class_names: tuple[str, ...] = ()


def load(spec: DataSpec, base: Path | None = None) -> Dataset:
    """The images that a [data] table chooses; `base` is the folder that its relative paths start from."""
    given = {key: value for key, value in _given(spec).items() if key != "subset"}
    for key in _PATHS & set(given):
        given[key] = (base or Path()) / given[key]
    source = SOURCES[spec.source](**given)
    indices = _chosen(spec, len(source))
    images, labels = source.batch(indices)
    labels = as_labels(labels, len(images), len(source.classes) or None)
    return Dataset(as_images(images), labels, indices, source.classes)


def _chosen(spec: DataSpec, size: int) -> tuple[int, ...]:
    """The indices in the source that a spec chooses."""
    if spec.subset is None:
        what = f"The source {spec.source!r}"
        return expand(str(spec.images), size, what) if spec.images is not None else tuple(range(min(size, USUAL)))
    members = named(spec.subset, size)
    within = expand(str(spec.images or ALL), len(members), f"The subset {spec.subset!r}")
    return tuple(members[i] for i in within)


def _given(spec: DataSpec) -> dict[str, Any]:
    """The keys beside source and images that are not at their default."""
    options = [f for f in fields(spec) if f.name not in ("source", "images")]
    return {f.name: getattr(spec, f.name) for f in options if getattr(spec, f.name) != f.default}


def _check_keys(spec: DataSpec) -> None:
    """Refuse keys that the source does not take, and a source without a key that it needs."""
    takes = inspect.signature(SOURCES[spec.source]).parameters
    ignored = [key for key in _given(spec) if key not in takes and key != "subset"]
    if ignored:
        accepted = ", ".join(["images", "subset", *takes])
        raise InputError(f"The source {spec.source!r} does not take `{ignored[0]}`; its keys are {accepted}.")
    missing = [key for key, p in takes.items() if p.default is p.empty and getattr(spec, key) is None]
    if missing:
        raise InputError(f"The source {spec.source!r} needs `{missing[0]}` in the [data] table.")


_NUMBERS: Final = frozenset({"label_offset", "size"})
_PATHS: Final = frozenset({"path", "labels", "devkit"})

# Where images come from, by the name that a spec calls it; the arguments of a reader are the keys that it takes.
SOURCES: Final[dict[str, Callable[..., Source]]] = {
    "cifar10-samples": samples.source,
    "cifar10": cifar10.source,
    "imagenet": imagenet.source,
    "celebahq": celebahq.source,
    "folder": folder.source,
    "npz": npz.source,
    "file": tensors.source,
}

"""Pictures of a run, kept beside its rows: the first images in stages, each with the class and confidence it was given.

    clean → attacked                        of an undefended classifier
    clean → attacked → diffused → purified  of a defence: what its classifier says of each picture alone
    given → …                               of a run without attacks

They are 8-bit and few, so that a report can be made again anywhere, without the model. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from diffpure.disk import write_whole
from diffpure.errors import InputError
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN

FILE: Final = "pictures.safetensors"  # in the folder of a run
GIVEN: Final = "given"  # the first stage of a run without attacks
ATTACKED: Final = "attacked"
DIFFUSED: Final = "diffused"  # noise that nobody classifies, so it has no caption


@final
@dataclass(frozen=True)
class Gallery:
    """Pictures (S, N, C, H, W) of N images in S stages, 8-bit; classes and confidence (S, N), labels (N,).

    A confidence that is not known is NaN.   names: of the classes, or none.   C is 1 or 3.
    """

    attack: str
    stages: tuple[str, ...]
    pictures: NDArray[np.uint8]
    classes: NDArray[np.int64]
    confidence: NDArray[np.float32]
    labels: NDArray[np.int64]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape, each = self.pictures.shape, (len(self.stages), len(self.labels))
        fits = len(shape) == 5 and shape[:2] == self.classes.shape == self.confidence.shape == each
        kinds = (self.pictures.dtype.kind, self.classes.dtype.kind, self.confidence.dtype.kind, self.labels.dtype.kind)
        if (
            not fits
            or shape[2] not in (1, 3)
            or 0 in (shape[0], *shape[3:])
            or kinds != ("u", "i", "f", "i")
            or self.labels.ndim != 1
        ):
            raise InputError(
                f"Pictures are 8-bit (S, N, 1 or 3, H, W) with classes and confidence (S, N), got {shape}."
            )
        if not all(isinstance(text, str) for text in (self.attack, *self.stages, *self.names)):
            raise InputError("The attack, the stages and the classes of pictures are called by texts.")

    def first(self, count: int) -> Self:
        """The pictures of the first images alone."""
        some = {key: getattr(self, key)[:, :count] for key in ("pictures", "classes", "confidence")}
        return replace(self, **some, labels=self.labels[:count])

    def caption(self, stage: int, image: int) -> tuple[str, bool]:
        """The class and confidence of a picture in words (none of a diffused one), and whether the class is right."""
        k, sure = int(self.classes[stage, image]), float(self.confidence[stage, image])
        words = self.class_name(k) + ("" if math.isnan(sure) else f" {100 * sure:.0f}\N{NO-BREAK SPACE}%")
        return "" if self.stages[stage] == DIFFUSED else words, k == int(self.labels[image])

    def class_name(self, k: int) -> str:
        """What a class is called."""
        return self.names[k] if 0 <= k < len(self.names) else f"class {k}"

    def save(self, folder: Path, header: Mapping[str, Any]) -> None:
        """Keep the pictures with the run that has this header; a folder that cannot be written to is left alone."""
        arrays = {
            "pictures": self.pictures,
            "classes": self.classes,
            "confidence": self.confidence,
            "labels": self.labels,
        }
        words = {"attack": self.attack, "stages": self.stages, "names": self.names, "run": _key(header)}
        data = save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, {"about": json.dumps(words)})
        with contextlib.suppress(OSError):
            write_whole(folder / FILE, data)

    @classmethod
    def load(cls, folder: Path, header: Mapping[str, Any]) -> Self | None:
        """The pictures that were kept with the run of this header, if any were."""
        try:
            with safe_open(folder / FILE, "numpy") as file:
                words = json.loads(file.metadata()["about"])
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if words.pop("run") != _key(header):
                return None
            return cls(**arrays, attack=words["attack"], stages=tuple(words["stages"]), names=tuple(words["names"]))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None  # missing or damaged: they can be made again


def kept_gallery(folder: Path, result: Result, count: int) -> Gallery | None:
    """The pictures that were kept with a run, if they show so many of its images."""
    kept = Gallery.load(folder, result.header)
    return kept if kept is not None and len(kept.labels) >= min(count, len(result.indices)) else None


def _key(header: Mapping[str, Any]) -> str:
    """What names a run: a hash of its header."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def strongest(result: Result) -> str:
    """The attack of a run that its pictures show: the one that leaves the lowest accuracy, or `clean` without any."""
    return min(result.attacks, key=lambda name: result.rate(name).value, default=CLEAN)


def eight_bits(images: NDArray[Any]) -> NDArray[np.uint8]:
    """Pictures in about [0, 1] as 8-bit ones."""
    levels: NDArray[np.uint8] = (np.clip(images, 0, 1) * 255).round().astype(np.uint8)
    return levels

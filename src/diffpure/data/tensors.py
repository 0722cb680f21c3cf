"""Images and labels in a safetensors file, as a run keeps them, of which only the chosen images are read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffpure.data.npz import channels_first
from diffpure.errors import InputError


@final
@dataclass(frozen=True)
class Tensors:
    """The images of a safetensors file, read when they are asked for, with all labels."""

    path: Path
    labels: Tensor
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The images of these indices as float32 (B, C, H, W) in [0, 1], and their labels (B,)."""
        with _opened(self.path) as file:
            images = file.get_slice("images")
            stack = torch.cat([images[i : i + 1] for i in indices])
        if stack.is_floating_point():
            stack = stack.to(torch.float32)
        return torch.from_numpy(channels_first(stack.numpy(), self.path.name)), self.labels[list(indices)]


def source(*, path: Path) -> Tensors:
    """The source `file` of a spec: a safetensors file with `images` and `labels`."""
    with _opened(path) as file:
        if not {"images", "labels"} <= set(file.keys()):
            raise InputError(f"{path.name} holds {', '.join(file.keys())}, but `images` and `labels` are wanted.")
        shape, labels = file.get_slice("images").get_shape(), file.get_tensor("labels")
        classes = _names((file.metadata() or {}).get("classes", "[]"))
    if labels.is_floating_point() or labels.ndim != 1:
        raise InputError(f"The labels of {path.name} are whole numbers (N,), got {labels.dtype} {tuple(labels.shape)}.")
    if not shape or shape[0] != len(labels) or not len(labels):
        raise InputError(f"{path.name} has images {tuple(shape)} but {len(labels)} labels; one per image is wanted.")
    return Tensors(path, labels.to(torch.int64), classes)


def _names(text: str) -> tuple[str, ...]:
    """The names of the classes that a run keeps with its images, or none where they are damaged."""
    try:
        return tuple(map(str, json.loads(text)))
    except (ValueError, TypeError):
        return ()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file that is open, with its damage told in one sentence."""
    if not os.path.isfile(path):
        raise InputError(f"There is no safetensors file {path}.")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path.name} is damaged or no safetensors file and cannot be read.") from error

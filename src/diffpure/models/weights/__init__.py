"""The files of weights inside the package, one per card of `models/embedded.toml`, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from safetensors.torch import save
from torch import Tensor

from diffpure.errors import InputError

_LARGEST_HALF: Final = 65504.0


def pack(state: Mapping[str, Tensor]) -> bytes:
    """Weights as safetensors with floating-point numbers in half precision."""
    return save({key: _half(key, value).contiguous() for key, value in state.items()})


def _half(key: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    if not value.abs().max() <= _LARGEST_HALF:
        raise InputError(f"The weights {key!r} hold numbers that half precision cannot.")
    return value.to(torch.float16)

"""The weights inside the package, described by cards.

`cards.toml` holds a table a model: its file and sha256, what it is (`kind`, `architecture`, `arguments`), how it was
made (`data`, `command`, `seed`, `hours`, `images`) and what was measured. `embedded(name)` gives the card and the
weights; the network is the constructor named by `architecture` in the `ARCHITECTURES` of `scores.small` or
`classifiers.small`, called with `arguments`.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

import torch
from safetensors.torch import load, save
from torch import Tensor

from diffpure.errors import InputError, unknown

Card = dict[str, Any]
_LARGEST_HALF: Final = 65504.0


def cards() -> dict[str, Card]:
    """The cards of all embedded models by name."""
    return tomllib.loads(resources.files(__name__).joinpath("cards.toml").read_text("utf-8"))


def embedded(name: str) -> tuple[Card, dict[str, Tensor]]:
    """The card of an embedded model and its weights as float32, once the file's sha256 is the card's."""
    known = cards()
    if name not in known:
        raise unknown("embedded model", name, known)
    card = known[name]
    data = resources.files(__name__).joinpath(card["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != card["sha256"]:
        raise InputError(f"The weights {card['file']} are damaged: their sha256 is not the one of the card.")
    return card, {key: value.float() if value.is_floating_point() else value for key, value in load(data).items()}


def pack(state: Mapping[str, Tensor]) -> bytes:
    """Weights as safetensors with floating-point numbers in half precision; `embedded` reads it."""
    return save({key: _half(key, value).contiguous() for key, value in state.items()})


def _half(key: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    if not value.abs().max() <= _LARGEST_HALF:
        raise InputError(f"The weights {key!r} hold numbers that half precision cannot.")
    return value.to(torch.float16)

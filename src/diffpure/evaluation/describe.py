"""What the header of a run says of its model: words for people, and hashes that name its weights and data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffpure.attacks.losses import Model
from diffpure.evaluation.units import Seeded
from diffpure.purify import Defense


def describe(model: Model) -> dict[str, Any]:
    """A model in words: what it is, its gradient, and whether it is random."""
    about = {"title": type(model).__name__, "gradient": "autograd", "approximate": False}
    if isinstance(model, Seeded):
        about["title"] = f"{type(model.model).__name__} (random, seeded image by image)"
    if isinstance(model, Defense):
        purifier = model.purifier
        rounds = f", {purifier.rounds} rounds" if purifier.rounds > 1 else ""
        about = {
            "title": f"{type(model.classifier).__name__} behind {brief(purifier.sampler)}{rounds}",
            "gradient": type(purifier.gradient).__name__.lower(),
            "approximate": purifier.approximate_gradient,
            "sampler": stable(purifier.sampler),
        }
    return {**about, "stochastic": bool(getattr(model, "stochastic", False))}


def weight_hashes(model: Model) -> dict[str, str]:
    """A SHA-256 of the weights of each part of a model."""
    if isinstance(model, Defense):
        return {"score": _hash_of(model.purifier.score), "classifier": _hash_of(model.classifier)}
    return {"model": _hash_of(model.model if isinstance(model, Seeded) else model)}


def _hash_of(part: object) -> str:
    if not isinstance(part, nn.Module):
        return hashlib.sha256(stable(part).encode()).hexdigest()
    state = part.state_dict()
    names = ",".join(f"{key}:{value.dtype}" for key, value in state.items() if isinstance(value, Tensor))
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return hashlib.sha256((names + digest(tensors)).encode()).hexdigest()


def digest(tensors: Sequence[Tensor]) -> str:
    """A SHA-256 of the shapes and bytes of tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(str(tuple(tensor.shape)).encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def brief(value: object) -> str:
    """A dataclass with those of its fields that are not the default, and with t*, which nobody wants to look up."""
    if not is_dataclass(value) or isinstance(value, type):
        return stable(value)
    now = {f.name: getattr(value, f.name) for f in fields(value)}
    usual = {f.name for f in fields(value) if f.default is not MISSING and now[f.name] == f.default} - {"t_star"}
    shown = (f"{name}={_short(now[name])}" for name in now if name not in usual)
    return f"{type(value).__name__}({', '.join(shown)})"


def _short(value: object) -> str:
    """A number as people write it: 8/255 for what an 8-bit image counts in."""
    if isinstance(value, float) and len(repr(value)) > 8 and abs(255 * value - round(255 * value)) < 1e-9:
        return f"{round(255 * value)}/255"
    return stable(value)


def stable(value: object) -> str:
    """The representation of a value without the addresses of this process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))

"""Checkpoint files: read without running anything in them, opened by layout, loaded strictly or not at all.

A file is safetensors, or a pickle that `torch.load(weights_only=True)` reads. What it holds is a container; one small
function a layout takes the state dict out of it, by the keys of the network it is for. `load_state` compares every
key and shape first and only then copies, so a file that does not fit changes nothing. Each failure is one sentence.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from diffpure.errors import InputError

State = dict[str, Tensor]
Module = TypeVar("Module", bound=nn.Module)
Layout = Callable[[Mapping[str, Any], nn.Module], Mapping[str, Any]]

# Some checkpoints carry an accuracy as a NumPy number beside the tensors: harmless, and so allowed.
_NUMBERS: Final[list[Any]] = [
    np.dtype, type(np.dtype(np.float64)), type(np.dtype(np.float32)), type(np.dtype(np.int64)),
    (np.float64(0).__reduce__()[0], "numpy.core.multiarray.scalar"),
    (np.float64(0).__reduce__()[0], "numpy._core.multiarray.scalar"),
]  # fmt: skip


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(*tensors: Tensor) -> str:
    """The SHA-256 of the shapes and bytes of tensors, in hex."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(str(tuple(tensor.shape)).encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def check_hash(path: Path, expected: str) -> None:
    """Refuse a file whose SHA-256 does not begin with `expected` (publishers often give the first digits only)."""
    actual = sha256(path)
    if not actual.startswith(expected):
        raise InputError(f"{path.name} has SHA-256 {actual}, but {expected} is expected; fetch the file again.")


def read(path: Path) -> dict[str, Any]:
    """The container in a checkpoint file, on the CPU, without running any code from it."""
    if not path.is_file():
        raise InputError(f"There is no checkpoint file {path}.")
    with path.open("rb") as file:
        magic = file.read(9)
    content = _safetensors(path) if magic[8:] == b"{" else _pickle(path, magic)
    if not isinstance(content, dict):
        raise InputError(f"{path.name} holds a {type(content).__name__}, but a checkpoint is a dict of tensors.")
    return content


def _safetensors(path: Path) -> State:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path) from error


def _pickle(path: Path, magic: bytes) -> Any:
    try:
        if magic.startswith(b"PK"):
            _refuse_compressed(path)
        with torch.serialization.safe_globals(_NUMBERS), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wants = re.search(r"(?<=GLOBAL )[\w.]+|(?<=Unsupported )operand \d+", str(error))
        if wants is None or not magic.startswith((b"PK", b"\x80")):
            raise _damaged(path) from error
        raise InputError(
            f"{path.name} is refused because it holds more than tensors ({wants[0]}), which could run code; "
            "convert it to safetensors where you trust it."
        ) from error
    except InputError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way whatever
        raise _damaged(path) from error


def _refuse_compressed(path: Path) -> None:
    """Refuse a torch file that would grow as it is read: torch stores, it does not compress."""
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise InputError(f"{path.name} is compressed, so that a small file could fill the memory; save it anew.")


def _damaged(path: Path) -> InputError:
    return InputError(f"{path.name} is damaged, cut short or no checkpoint; accepted are safetensors and torch files.")


def load_state(network: nn.Module, state: Mapping[str, Any], origin: str) -> None:
    """Copy a state dict into a network if every key and shape agrees; else one sentence, and nothing is loaded."""
    check_state(network, state, origin)
    network.load_state_dict(state, strict=True)


def check_state(network: nn.Module, state: Mapping[str, Any], origin: str) -> None:
    """Refuse a state dict in which a key or shape differs from the network's."""
    own = network.state_dict()
    missing = [key for key in own if key not in state]
    extra = [key for key in state if key not in own]
    if missing and len(missing) + len(extra) > len(own) / 2:
        raise InputError(
            f"{origin} belongs to another architecture: {len(missing)} of the {len(own)} keys of "
            f"{type(network).__name__} are missing, {missing[0]!r} first."
        )
    if missing:
        raise InputError(f"{origin} lacks {len(missing)} keys of {type(network).__name__}: {_some(missing)}.")
    if extra:
        raise InputError(f"{origin} has {len(extra)} keys that {type(network).__name__} lacks: {_some(extra)}.")
    for key, tensor in own.items():
        shape = tuple(state[key].shape) if isinstance(state[key], Tensor) else type(state[key]).__name__
        if shape != tuple(tensor.shape):
            raise InputError(f"{origin} has {key!r} of shape {shape}, but {tuple(tensor.shape)} is expected.")


def frozen(network: Module) -> Module:
    """The network as it is deployed: evaluation mode, weights that want no gradient, channels-last for speed."""
    return network.eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _some(keys: list[str]) -> str:
    return ", ".join(repr(key) for key in keys[:3]) + (", …" if len(keys) > 3 else "")


def expect(network: str, config: Mapping[str, Any], **accepted: object) -> None:
    """Refuse a configuration that gives a field another value than the one implemented; absent fields are fine."""
    for field, value in accepted.items():
        if field in config and config[field] != value:
            raise InputError(f"{network} with {field} = {config[field]!r} is not implemented; accepted is {value!r}.")


# One layout a function: container and network in, state dict out.


def plain(container: Mapping[str, Any], network: nn.Module) -> Mapping[str, Any]:
    """The file is the state dict (guided diffusion, SDEdit, torchvision)."""
    return container


def score_sde(container: Mapping[str, Any], network: nn.Module) -> Mapping[str, Any]:
    """Score SDE: the moving average `ema.shadow_params`, nameless, in the order of the parameters.

    The entry `model` is not the network that was evaluated, so it is never read; buffers come from the network.
    """
    shadow = _section(container, "ema", "shadow_params")
    names = [name for name, _ in network.named_parameters()]
    if len(shadow) != len(names):
        raise InputError(f"The checkpoint has {len(shadow)} averaged parameters, but {len(names)} are expected.")
    return {**network.state_dict(), **dict(zip(names, shadow, strict=True))}


def robustbench(container: Mapping[str, Any], network: nn.Module) -> Mapping[str, Any]:
    """RobustBench: plain or under `state_dict`, with the prefixes `module.` then `model.`, and stored statistics."""
    state = container.get("state_dict", container)
    named = {key.removeprefix("module.").removeprefix("model."): value for key, value in state.items()}
    return {key: value for key, value in named.items() if key not in ("mu", "sigma", "mean", "std")}


def nvlabs_wrn(container: Mapping[str, Any], network: nn.Module) -> Mapping[str, Any]:
    """DiffPure's `wideresnet-70-16`: under `model_state_dict`, prefix `module.0.`."""
    return _unprefixed(_section(container, "model_state_dict"), "module.0.")


def nvlabs(container: Mapping[str, Any], network: nn.Module) -> Mapping[str, Any]:
    """DiffPure's `resnet-50` and `wrn-70-16-dropout`: plain, prefix `module.`."""
    return _unprefixed(container, "module.")


def attribute(container: Mapping[str, Any], network: nn.Module) -> Mapping[str, Any]:
    """The CelebA-HQ attribute networks: under `state_dict`."""
    state: Mapping[str, Any] = _section(container, "state_dict")
    return state


def deit(container: Mapping[str, Any], network: nn.Module) -> Mapping[str, Any]:
    """DeiT: under `model`."""
    state: Mapping[str, Any] = _section(container, "model")
    return state


def diffusers(container: Mapping[str, Any], network: nn.Module) -> Mapping[str, Any]:
    """Diffusers: plain; older files call the attention layers query, key, value and proj_attn."""
    names = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
    legacy = re.compile(r"(\.attentions\.\d+\.)(query|key|value|proj_attn)(?=\.)")
    return {legacy.sub(lambda m: m[1] + names[m[2]], key): value for key, value in container.items()}


def _section(container: Mapping[str, Any], *path: str) -> Any:
    inner: Any = container
    for key in path:
        if not isinstance(inner, Mapping) or key not in inner:
            raise InputError(f"The checkpoint has no entry {'.'.join(path)!r}, where its layout keeps the weights.")
        inner = inner[key]
    return inner


def _unprefixed(state: Mapping[str, Any], prefix: str) -> State:
    return {key.removeprefix(prefix): value for key, value in state.items()}


LAYOUTS: Final[dict[str, Layout]] = {
    "plain": plain,
    "score-sde": score_sde,
    "robustbench": robustbench,
    "nvlabs-wrn": nvlabs_wrn,
    "nvlabs": nvlabs,
    "attribute": attribute,
    "deit": deit,
    "diffusers": diffusers,
}

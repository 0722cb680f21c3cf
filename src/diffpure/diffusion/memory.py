"""Memory without a device: the bytes that autograd saves for some work."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(work: Callable[[], object], weights: Iterable[Tensor] = ()) -> int:
    """The bytes that autograd saves for some work, beside the given weights."""
    known = {w.untyped_storage().data_ptr() for w in weights}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = work()  # the graph must live until it is counted
    del kept
    return sum(saved.values())

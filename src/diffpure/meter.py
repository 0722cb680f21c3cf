"""What is spent is counted where it is spent: images that networks and classifiers were asked about.

    with metered() as calls:
        model(images)
    calls["network"], calls["network_gradient"], calls["classifier"], calls["classifier_gradient"]

A purifier reports each call of its network and a defence each call of its classifier, per image, and whether the call
was made with a graph for a backward pass. Calls that a backward pass makes again are reported, too. The open meters
are a list of this process and not of a thread, because a backward pass may run in another one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

NETWORK: Final = "network"
CLASSIFIER: Final = "classifier"
CALLS: Final = (NETWORK, f"{NETWORK}_gradient", CLASSIFIER, f"{CLASSIFIER}_gradient")

_open: list[Counter[str]] = []


@contextlib.contextmanager
def metered() -> Iterator[Counter[str]]:
    """Count the calls that are made inside; keys are `CALLS`."""
    calls = Counter(dict.fromkeys(CALLS, 0))
    _open.append(calls)
    try:
        yield calls
    finally:
        _open[:] = [other for other in _open if other is not calls]


def count(what: str, x: Tensor) -> None:
    """Report one call of a network or classifier with images x (B, ...)."""
    if _open:
        kind = f"{what}_gradient" if torch.is_grad_enabled() and x.requires_grad else what
        for calls in _open:
            calls[kind] += len(x)

"""Normalisation of images inside the classifier: (x - mean)/std, a channel at a time, kept out of the state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

Statistics = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation, one number a channel

CIFAR10: Statistics = ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@final
class Normalize(nn.Module):
    """(x - mean)/std for images x (B, C, H, W) in [0, 1]; it adds no key to a state dict."""

    mean: Tensor
    std: Tensor

    def __init__(self, statistics: Statistics) -> None:
        super().__init__()
        mean, std = (torch.tensor(tuple(values)).reshape(-1, 1, 1) for values in statistics)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def normalization(config: Mapping[str, Any], default: Statistics | None) -> Normalize | None:
    """The normalisation a configuration asks for by `mean` and `std`, else the network's usual one."""
    statistics = (config["mean"], config["std"]) if config.get("mean") else default
    return None if statistics is None else Normalize(statistics)

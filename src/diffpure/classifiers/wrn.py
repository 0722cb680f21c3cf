"""Wide residual networks for CIFAR-10 (Zagoruyko & Komodakis 2016), under the two namings of their checkpoints.

Pre-activation blocks: a = φ(bn(x)), x ↦ shortcut + conv(φ(bn(conv(a)))), where the shortcut is x, or a 1×1 convolution
of a where the width changes. Three groups of (depth - 4)/6 blocks with widths 16k, 32k, 64k. `WideResNet` is
RobustBench's `Standard` and DiffPure's dropout variant; `DMWideResNet` is DeepMind's, with swish and with its strided
convolutions padded right and bottom only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, final

import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.classifiers.normalize import CIFAR10, Normalize, normalization
from diffpure.errors import InputError, unknown
from diffpure.models.checkpoints import expect


def blocks_of(depth: int) -> int:
    """The number of blocks in each of the three groups of a network of that depth."""
    if depth < 10 or (depth - 4) % 6:
        raise InputError(f"The depth of a wide residual network is 6n + 4 with n >= 1, got {depth}.")
    return (depth - 4) // 6


@final
class Block(nn.Module):
    """One pre-activation block of `WideResNet`."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        if inputs != outputs:
            self.convShortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.bn1(x))
        h = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(a)))))
        shortcut = self.convShortcut(a) if hasattr(self, "convShortcut") else x
        out: Tensor = shortcut + h
        return out


@final
class Group(nn.Module):
    """The blocks of one resolution, the first of them with the stride."""

    def __init__(self, inputs: int, outputs: int, stride: int, count: int, dropout: float) -> None:
        super().__init__()
        first = Block(inputs, outputs, stride, dropout)
        self.layer = nn.Sequential(first, *(Block(outputs, outputs, 1, dropout) for _ in range(count - 1)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


@final
class WideResNet(nn.Module):
    """WRN-depth-width: images (B, 3, 32, 32) in [0, 1] ↦ logits (B, classes)."""

    def __init__(
        self, depth: int = 28, width: int = 10, classes: int = 10, *, dropout: float = 0.0, bias: bool = True,
        normalize: Normalize | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        count = blocks_of(depth)
        self.normalize = normalize or nn.Identity()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = Group(16, 16 * width, 1, count, dropout)
        self.block2 = Group(16 * width, 32 * width, 2, count, dropout)
        self.block3 = Group(32 * width, 64 * width, 2, count, dropout)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes, bias=bias)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """RobustBench's network, or DiffPure's dropout variant, which alone has a `dropRate` and normalises."""
        expect("WideResNet", config, sub_block1=False, activation="relu", input_normalisation=None)
        default = CIFAR10 if "dropRate" in config else None
        return cls(
            config["depth"],
            config["widen_factor"],
            config["num_classes"],
            dropout=config.get("dropRate", 0.0),
            bias=config.get("bias_last", True),
            normalize=normalization(config, default),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.normalize(x))
        h = self.block3(self.block2(self.block1(h)))
        out: Tensor = self.fc(F.relu(self.bn1(h)).mean((2, 3)))
        return out


@final
class DMBlock(nn.Module):
    """One pre-activation block of `DMWideResNet`."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.pad = (0, 1, 0, 1) if stride == 2 else (1, 1, 1, 1)
        self.batchnorm_0 = nn.BatchNorm2d(inputs)
        self.conv_0 = nn.Conv2d(inputs, outputs, 3, stride=stride, bias=False)
        self.batchnorm_1 = nn.BatchNorm2d(outputs)
        self.conv_1 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.activation(self.batchnorm_0(x))
        h = self.conv_0(F.pad(a, self.pad))
        h = self.conv_1(self.activation(self.batchnorm_1(h)))
        shortcut = self.shortcut(a) if hasattr(self, "shortcut") else x
        out: Tensor = shortcut + h
        return out


@final
class DMGroup(nn.Module):
    """The blocks of one resolution, the first of them with the stride."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, count: int, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        first = DMBlock(inputs, outputs, stride, activation)
        self.block = nn.Sequential(first, *(DMBlock(outputs, outputs, 1, activation) for _ in range(count - 1)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


@final
class DMWideResNet(nn.Module):
    """DeepMind's WRN-depth-width: images (B, 3, 32, 32) in [0, 1] ↦ logits (B, classes)."""

    def __init__(
        self, depth: int = 70, width: int = 16, classes: int = 10, *, activation: str = "swish",
        normalize: Normalize | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        count, self.activation = blocks_of(depth), ACTIVATIONS[activation]
        self.normalize = normalize or nn.Identity()
        self.init_conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.layer = nn.Sequential(
            DMGroup(16, 16 * width, 1, count, self.activation),
            DMGroup(16 * width, 32 * width, 2, count, self.activation),
            DMGroup(32 * width, 64 * width, 2, count, self.activation),
        )
        self.batchnorm = nn.BatchNorm2d(64 * width)
        self.logits = nn.Linear(64 * width, classes)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The network of a RobustBench configuration."""
        expect("DMWideResNet", config, padding=0)
        return cls(
            config["depth"],
            config["width"],
            config["num_classes"],
            activation=config.get("activation", "swish"),
            normalize=normalization(config, CIFAR10),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.init_conv(self.normalize(x)))
        out: Tensor = self.logits(self.activation(self.batchnorm(h)).mean((2, 3)))
        return out


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swish": F.silu, "relu": F.relu}

"""CelebA-HQ attribute classifiers (eyeglasses, smiling): the discriminator of a progressive GAN (Karras et al. 2018).

Weights are stored unscaled and multiplied by gain/√fan_in when they are used ("equalised learning rate"). The raw
network maps images in [-1, 1] to one logit z; the classifier maps images in [0, 1] to the logits [z, -z], so label 1
(the attribute is present) is the second entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.errors import InputError
from diffpure.models.checkpoints import expect


def leaky(x: Tensor) -> Tensor:
    """LeakyReLU with slope 0.2, the only activation here."""
    return F.leaky_relu(x, 0.2)


@final
class Bias(nn.Module):
    """The bias that is added after the scaling."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(outputs))


@final
class ScaledConv(nn.Module):
    """A convolution whose output is scaled by √2/√fan_in before the bias."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.scale = math.sqrt(2) / math.sqrt(inputs * kernel**2)
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.wscale = Bias(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x) * self.scale + self.wscale.b[:, None, None]
        return out


@final
class ScaledLinear(nn.Module):
    """A linear map whose output is scaled by gain/√fan_in before the bias."""

    def __init__(self, inputs: int, outputs: int, gain: float) -> None:
        super().__init__()
        self.scale = gain / math.sqrt(inputs)
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.wscale = Bias(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale + self.wscale.b
        return out


@final
class FromRGB(nn.Module):
    """Colours to features."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv = ScaledConv(channels, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return leaky(self.conv(x))


@final
class Halving(nn.Module):
    """Two convolutions and half the resolution; the mean is taken before the last activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv0 = ScaledConv(inputs, inputs, 3)
        self.conv1 = ScaledConv(inputs, outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        return leaky(F.avg_pool2d(self.conv1(leaky(self.conv0(x))), 2))


@final
class Head(nn.Module):
    """The last 4 × 4 positions to one logit."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.conv = ScaledConv(inputs, inputs, 3)
        self.dense0 = ScaledLinear(16 * inputs, hidden, math.sqrt(2))
        self.dense1 = ScaledLinear(hidden, 1, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense1(leaky(self.dense0(leaky(self.conv(x)).flatten(1))))
        return out


@final
class AttributeNet(nn.Module):
    """The raw network: images (B, 3, size, size) in [-1, 1] ↦ one logit (B, 1)."""

    def __init__(
        self, *, size: int = 256, channels: int = 3, base: int = 8192, decay: float = 1.0, widest: int = 512
    ) -> None:
        super().__init__()
        if size < 4 or size & (size - 1):
            raise InputError(f"The size of an attribute network is a power of two from 4 on, got {size}.")
        self.size = size
        self.register_buffer("lod_in", torch.zeros((), dtype=torch.float64))  # stored with the weights, never read

        def width(stage: int) -> int:
            return min(int(base / 2 ** (stage * decay)), widest)

        finest = size.bit_length() - 1
        levels = range(finest, 2, -1)  # log₂ of the resolution, from the input's down to 8
        self.fromrgb_lod0 = FromRGB(channels, width(finest - 1))
        self.names = [f"{2**r}x{2**r}" for r in levels]
        for name, r in zip(self.names, levels, strict=True):
            self.add_module(name, Halving(width(r - 1), width(r - 2)))
        self.add_module("4x4", Head(width(1), width(0)))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The network of a progressive GAN's arguments."""
        expect("AttributeNet", config, fixed_size=True, use_mbstd=False)
        return cls(
            size=config["resolution"],
            channels=config.get("num_channels", 3),
            base=config["fmap_base"],
            decay=config.get("fmap_decay", 1.0),
            widest=config["fmap_max"],
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.fromrgb_lod0(x)
        for name in [*self.names, "4x4"]:
            h = self.get_submodule(name)(h)
        out: Tensor = h
        return out


@final
class AttributeClassifier(nn.Module):
    """An attribute network as a classifier: images (B, 3, H, W) in [0, 1] ↦ logits [absent, present] (B, 2)."""

    def __init__(self, network: AttributeNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        size = self.network.size
        if x.shape[-1] > size:  # larger images are averaged over blocks first
            x = F.avg_pool2d(x, x.shape[-1] // size)
        z = self.network(2 * x - 1)
        return torch.cat([z, -z], dim=1)

"""DDPM++ continuous, the CIFAR-10 score network of Score SDE (Song et al. 2021), called `ncsnpp` in its checkpoints.

A UNet of BigGAN residual blocks: resampling happens inside a block, on both its branches, and every sum is divided
by √2. The network reads the label 999·t as a real number and returns ε. Its state dict knows the modules only by
their place in one list, `all_modules.N`, so the constructor and `forward` below walk the same road.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import VPSDE, Schedule
from diffpure.models.checkpoints import expect
from diffpure.scores.layers import attend, downsample, sin_cos, tokens, untokens, upsample


def group_norm(channels: int) -> nn.GroupNorm:
    """The group norm of Score SDE: four channels a group at least, 32 groups at most."""
    return nn.GroupNorm(min(channels // 4, 32), channels, eps=1e-6)


@final
class ResidualBlock(nn.Module):
    """x, h ↦ (x + h)/√2 with two convolutions in h; `resample` acts on both branches."""

    def __init__(
        self, inputs: int, outputs: int, time: int, dropout: float, resample: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.resample = resample
        self.GroupNorm_0 = group_norm(inputs)
        self.Conv_0 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.Dense_0 = nn.Linear(time, outputs)
        self.GroupNorm_1 = group_norm(outputs)
        self.dropout = nn.Dropout(dropout)
        self.Conv_1 = nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs or resample is not None:
            self.Conv_2 = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = F.silu(self.GroupNorm_0(x))
        if self.resample is not None:
            h, x = self.resample(h), self.resample(x)
        h = self.Conv_0(h) + self.Dense_0(time)[:, :, None, None]
        h = self.Conv_1(self.dropout(F.silu(self.GroupNorm_1(h))))
        shortcut = self.Conv_2(x) if hasattr(self, "Conv_2") else x
        out: Tensor = (shortcut + h) / math.sqrt(2)
        return out


@final
class NetworkInNetwork(nn.Module):
    """A linear map over channels whose weight is stored as (inputs, outputs)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.eye(channels))
        self.b = nn.Parameter(torch.zeros(channels))

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.W.t(), self.b)


@final
class Attention(nn.Module):
    """x ↦ (x + attention)/√2 over all positions, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.GroupNorm_0 = group_norm(channels)
        self.NIN_0, self.NIN_1, self.NIN_2, self.NIN_3 = (NetworkInNetwork(channels) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = tokens(self.GroupNorm_0(x))
        h = self.NIN_3(attend(self.NIN_0(h), self.NIN_1(h), self.NIN_2(h)))
        return (x + untokens(h, x)) / math.sqrt(2)


@final
class DDPMpp(nn.Module):
    """The raw network: images x (B, C, H, W) in [-1, 1] and real labels (B,) ↦ ε (B, C, H, W)."""

    def __init__(
        self,
        *,
        size: int = 32,
        channels: int = 3,
        width: int = 128,
        multipliers: Sequence[int] = (1, 2, 2, 2),
        blocks: int = 8,
        attention: Sequence[int] = (16,),
        dropout: float = 0.1,
        sigmas: tuple[float, float, int] = (0.01, 50.0, 1000),
    ) -> None:
        super().__init__()
        self.width, self.blocks = width, blocks
        self.attends = [size // 2**level in attention for level in range(len(multipliers))]
        low, high, count = sigmas  # a relic of the variance-exploding sibling: stored with the weights, never read
        self.register_buffer("sigmas", torch.linspace(math.log(high), math.log(low), count, dtype=torch.float64).exp())

        time, widths = 4 * width, [width * m for m in multipliers]
        modules: list[nn.Module] = [nn.Linear(width, time), nn.Linear(time, time)]
        modules.append(nn.Conv2d(channels, width, 3, padding=1))
        now, skips = width, [width]

        def residual(inputs: int, outputs: int, resample: Callable[[Tensor], Tensor] | None = None) -> None:
            modules.append(ResidualBlock(inputs, outputs, time, dropout, resample))

        for level, target in enumerate(widths):
            for _ in range(blocks):
                residual(now, target)
                now = target
                if self.attends[level]:
                    modules.append(Attention(now))
                skips.append(now)
            if level + 1 < len(widths):
                residual(now, now, downsample)
                skips.append(now)

        residual(now, now)
        modules.append(Attention(now))
        residual(now, now)

        for level, target in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                residual(now + skips.pop(), target)
                now = target
            if self.attends[level]:
                modules.append(Attention(now))
            if level > 0:
                residual(now, now, upsample)

        modules += [group_norm(now), nn.Conv2d(now, channels, 3, padding=1)]
        self.all_modules = nn.ModuleList(modules)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The network of a Score SDE configuration with its sections `data` and `model`."""
        data, model = config["data"], config["model"]
        expect(
            "DDPM++", {**data, **model}, centered=True, scale_by_sigma=False, normalization="GroupNorm",
            nonlinearity="swish", conditional=True, fir=False, skip_rescale=True, resblock_type="biggan",
            progressive="none", progressive_input="none", attention_type="ddpm", embedding_type="positional",
            conv_size=3,
        )  # fmt: skip
        return cls(
            size=data["image_size"],
            channels=data["num_channels"],
            width=model["nf"],
            multipliers=model["ch_mult"],
            blocks=model["num_res_blocks"],
            attention=model["attn_resolutions"],
            dropout=model.get("dropout", 0.0),
            sigmas=(model["sigma_min"], model["sigma_max"], model["num_scales"]),
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        modules = iter(self.all_modules)
        time = sin_cos(labels, self.width).to(x.dtype)
        time = next(modules)(time)
        time = F.silu(next(modules)(F.silu(time)))  # every residual block begins with this SiLU: applied once here

        skips = [next(modules)(x)]
        last = len(self.attends) - 1
        for level, attends in enumerate(self.attends):
            for _ in range(self.blocks):
                h = next(modules)(skips[-1], time)
                skips.append(next(modules)(h) if attends else h)
            if level < last:
                skips.append(next(modules)(skips[-1], time))

        h = next(modules)(skips[-1], time)
        h = next(modules)(h)
        h = next(modules)(h, time)

        for level, attends in reversed(list(enumerate(self.attends))):
            for _ in range(self.blocks + 1):
                h = next(modules)(torch.cat([h, skips.pop()], dim=1), time)
            if attends:
                h = next(modules)(h)
            if level > 0:
                h = next(modules)(h, time)

        h = F.silu(next(modules)(h))
        out: Tensor = next(modules)(h)
        return out


@final
class DDPMppScore(EpsilonScore):
    """DDPM++ as a score model: it is asked at the label 999·t."""

    def __init__(self, network: DDPMpp, sde: Schedule = VPSDE(), size: int | None = 32, channels: int = 3) -> None:
        super().__init__(sde, size, channels)
        self.network = network

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The score model of a Score SDE configuration, with random weights."""
        data, model = config["data"], config["model"]
        sde = VPSDE(model["beta_min"], model["beta_max"])
        return cls(DDPMpp.from_config(config), sde, data["image_size"], data["num_channels"])

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = self.network(x, (999 * t).to(device=x.device, dtype=torch.float32).expand(x.shape[0]))
        return out

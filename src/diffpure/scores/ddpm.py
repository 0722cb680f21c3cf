"""The UNet of DDPM (Ho et al. 2020), the paper's CelebA-HQ model at 256 × 256 (SDEdit's checkpoint).

Residual blocks with a time bias, one-headed attention after every block of a listed resolution, strided and
nearest-neighbour resampling. The network reads a step 0 … N-1 and returns ε; step i is the marginal at t = (i+1)/N,
so a continuous t is asked at N·t - 1, which the sinusoidal embedding takes as a real number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import STEPS, VPSDE, Schedule
from diffpure.models.checkpoints import expect
from diffpure.scores.layers import attend, downsample, pointwise, sin_cos, tokens, untokens, upsample


def group_norm(channels: int) -> nn.GroupNorm:
    """The group norm of DDPM."""
    return nn.GroupNorm(32, channels, eps=1e-6)


@final
class ResidualBlock(nn.Module):
    """x ↦ shortcut(x) + h, with a bias from time in h."""

    def __init__(self, inputs: int, outputs: int, time: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = group_norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.temb_proj = nn.Linear(time, outputs)
        self.norm2 = group_norm(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.temb_proj(time)[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        shortcut = self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x
        out: Tensor = shortcut + h
        return out


@final
class Attention(nn.Module):
    """x ↦ x + attention over all positions, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = tokens(self.norm(x))
        h = attend(pointwise(self.q, h), pointwise(self.k, h), pointwise(self.v, h))
        return x + untokens(pointwise(self.proj_out, h), x)


@final
class Downsample(nn.Module):
    """Half the resolution: a strided convolution padded right and bottom only, or a plain mean."""

    def __init__(self, channels: int, convolve: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2) if convolve else None

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is None:
            return downsample(x)
        out: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return out


@final
class Upsample(nn.Module):
    """Twice the resolution by repetition, then a convolution if asked for."""

    def __init__(self, channels: int, convolve: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if convolve else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(upsample(x))
        return out


@final
class DownLevel(nn.Module):
    """The encoder at one resolution: it pushes what every block, and the way down, gives onto the skips."""

    def __init__(
        self, blocks: Sequence[ResidualBlock], attention: Sequence[Attention], down: Downsample | None
    ) -> None:
        super().__init__()
        self.block, self.attn = nn.ModuleList(blocks), nn.ModuleList(attention)
        self.downsample = down

    def forward(self, skips: list[Tensor], time: Tensor) -> None:
        for i, block in enumerate(self.block):
            h = block(skips[-1], time)
            skips.append(self.attn[i](h) if self.attn else h)
        if self.downsample is not None:
            skips.append(self.downsample(skips[-1]))


@final
class UpLevel(nn.Module):
    """The decoder at one resolution: each block pops a skip."""

    def __init__(self, blocks: Sequence[ResidualBlock], attention: Sequence[Attention], up: Upsample | None) -> None:
        super().__init__()
        self.block, self.attn = nn.ModuleList(blocks), nn.ModuleList(attention)
        self.upsample = up

    def forward(self, h: Tensor, skips: list[Tensor], time: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            h = block(torch.cat([h, skips.pop()], dim=1), time)
            if self.attn:
                h = self.attn[i](h)
        return h if self.upsample is None else self.upsample(h)


@final
class Middle(nn.Module):
    """The deepest point: residual, attention, residual."""

    def __init__(self, channels: int, time: int, dropout: float) -> None:
        super().__init__()
        self.block_1 = ResidualBlock(channels, channels, time, dropout)
        self.attn_1 = Attention(channels)
        self.block_2 = ResidualBlock(channels, channels, time, dropout)

    def forward(self, h: Tensor, time: Tensor) -> Tensor:
        out: Tensor = self.block_2(self.attn_1(self.block_1(h, time)), time)
        return out


@final
class TimeEmbedding(nn.Module):
    """Steps (B,) ↦ (B, 4·width), ending in the SiLU with which every residual block would begin."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.dense = nn.ModuleList([nn.Linear(width, 4 * width), nn.Linear(4 * width, 4 * width)])

    def forward(self, steps: Tensor, dtype: torch.dtype) -> Tensor:
        h = sin_cos(steps, self.width).to(dtype)
        for dense in self.dense:
            h = F.silu(dense(h))
        return h


@final
class DDPMUNet(nn.Module):
    """The raw network: images x (B, C, H, W) in [-1, 1] and steps (B,), whole or real ↦ ε (B, C, H, W)."""

    def __init__(
        self,
        *,
        size: int = 256,
        channels: int = 3,
        outputs: int = 3,
        width: int = 128,
        multipliers: Sequence[int] = (1, 1, 2, 2, 4, 4),
        blocks: int = 2,
        attention: Sequence[int] = (16,),
        dropout: float = 0.0,
        convolve: bool = True,
    ) -> None:
        super().__init__()
        time, widths = 4 * width, [width * m for m in multipliers]
        last = len(widths) - 1
        self.temb = TimeEmbedding(width)
        self.conv_in = nn.Conv2d(channels, width, 3, padding=1)

        def attends(level: int, count: int) -> list[Attention]:
            return [Attention(widths[level]) for _ in range(count)] if size // 2**level in attention else []

        now, skips = width, [width]
        self.down = nn.ModuleList()
        for level, target in enumerate(widths):
            stack = []
            for _ in range(blocks):
                stack.append(ResidualBlock(now, target, time, dropout))
                now = target
                skips.append(now)
            down = Downsample(now, convolve) if level < last else None
            self.down.append(DownLevel(stack, attends(level, blocks), down))
            if down is not None:
                skips.append(now)

        self.mid = Middle(now, time, dropout)

        levels = []
        for level, target in reversed(list(enumerate(widths))):
            stack = []
            for _ in range(blocks + 1):
                stack.append(ResidualBlock(now + skips.pop(), target, time, dropout))
                now = target
            up = Upsample(now, convolve) if level > 0 else None
            levels.append(UpLevel(stack, attends(level, blocks + 1), up))
        self.up = nn.ModuleList(reversed(levels))  # indexed by level, run from the deepest

        self.norm_out = group_norm(now)
        self.conv_out = nn.Conv2d(now, outputs, 3, padding=1)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The network of a DDPM configuration with its sections `data` and `model`."""
        data, model = config["data"], config["model"]
        expect("DDPM", {**data, **model}, type="simple", logit_transform=False, rescaled=True)
        return cls(
            size=data["image_size"],
            channels=model["in_channels"],
            outputs=model["out_ch"],
            width=model["ch"],
            multipliers=model["ch_mult"],
            blocks=model["num_res_blocks"],
            attention=model["attn_resolutions"],
            dropout=model.get("dropout", 0.0),
            convolve=model.get("resamp_with_conv", True),
        )

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        time = self.temb(steps, x.dtype)
        skips = [self.conv_in(x)]
        for level in self.down:
            level(skips, time)
        h = self.mid(skips[-1], time)
        for level in reversed(self.up):
            h = level(h, skips, time)
        out: Tensor = self.conv_out(F.silu(self.norm_out(h)))
        return out


@final
class DDPMScore(EpsilonScore):
    """A DDPM as a score model: step i for the marginal at t = (i+1)/N, a real number of steps in between."""

    def __init__(
        self, network: nn.Module, sde: Schedule = VPSDE(), size: int | None = 256, channels: int | None = 3,
        steps: int = STEPS,
    ) -> None:  # fmt: skip
        super().__init__(sde, size, channels)
        self.network = network
        self.steps = steps

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The score model of a DDPM configuration, with random weights."""
        diffusion = config["diffusion"]
        expect("DDPM", diffusion, beta_schedule="linear")
        steps = diffusion["num_diffusion_timesteps"]
        sde = VPSDE(diffusion["beta_start"] * steps, diffusion["beta_end"] * steps)
        data = config["data"]
        return cls(DDPMUNet.from_config(config), sde, data["image_size"], data["channels"], steps)

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        return self.epsilon_step(x, (t * self.steps - 1).clamp(0, self.steps - 1))

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        out: Tensor = self.network(x, i.to(x.device).expand(x.shape[0]))
        return out

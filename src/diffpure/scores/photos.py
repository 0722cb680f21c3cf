"""A fully convolutional score network for photographs of any size.

2×2 pixels are folded into channels at the door, which makes every convolution four times cheaper, and a U of residual
blocks works at a half, a quarter and an eighth of the resolution, so that an output sees far enough to average away
the noise of t* = 0.2 (σ = 92/255 for images in [0, 1]). Skips are added. Nothing is normalised over the image (each
pixel is, over its channels) and nothing attends over it: an output depends on the pixels within `receptive_field` of
it and on nothing else. So an image can be cut into overlapping tiles that start at multiples of `stride`, and the
result is that of the whole image.

To cancel noise the network has to reproduce it. To make that easy from the first step, the first channels behind the
door start as the pixels themselves, the exit is amplified, and a multiple of the input, chosen by the noise level, is
added; what each of these contributes was not measured.

Borders are mirrored: the image at its edges to a multiple of the stride (cropped afterwards), and the features by the
one pixel that a 3×3 convolution needs. The network F is conditioned on the noise level and preconditioned as
`scores.preconditioned` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.diffusion.sde import VPSDE, Schedule
from diffpure.errors import InputError
from diffpure.scores.preconditioned import LevelEmbedding, PreconditionedScore, zero

_GAIN: Final = 4.0  # of the exit


@final
class PhotoUNet(PreconditionedScore):
    """ε̂(x, t) for images x (B, C, H, W) in [-1, 1] of any size; `widths` are the channels at 1/2, 1/4, 1/8, …

    `blocks` are the residual blocks at each of these resolutions, on the way down and again on the way up (once at
    the last, the bottom of the U).
    """

    def __init__(
        self,
        widths: Sequence[int] = (48, 64, 96),
        blocks: Sequence[int] = (3, 3, 3),
        embedding: int = 64,
        channels: int = 3,
        sde: Schedule = VPSDE(),
    ) -> None:
        super().__init__(sde, None, channels)
        if len(widths) < 2 or len(blocks) != len(widths) or min(*widths, *blocks) < 1:
            raise InputError(
                f"Two widths or more, and as many numbers of blocks, are accepted, got {list(widths)}, {list(blocks)}."
            )
        pairs = list(pairwise(widths))
        levels = list(zip(widths, blocks, strict=True))
        self.blocks = tuple(blocks)
        self.stride = 2 ** len(widths)
        self.embed = LevelEmbedding(embedding, waves=8, shortest=1.0)
        self.skip = zero(nn.Linear(embedding, 1))
        self.door = _conv(4 * channels, widths[0])
        with torch.no_grad():
            nn.init.dirac_(self.door.weight[: 4 * channels])
        self.down = nn.ModuleList(_Stage(width, count, embedding) for width, count in levels)
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 2, stride=2) for a, b in pairs)
        self.grow = nn.ModuleList(nn.Conv2d(b, 4 * a, 1) for a, b in pairs)
        self.up = nn.ModuleList(_Stage(width, count, embedding) for width, count in levels[:-1])
        self.exit = zero(_conv(widths[0], 4 * channels))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def receptive_field(self) -> int:
        """How many pixels an output pixel sees in each direction, at most."""
        # A 3×3 convolution at 1/c of the resolution sees c pixels further; a block has two, and runs down and up.
        *sides, bottom = (2 ** (depth + 2) * count for depth, count in enumerate(self.blocks))
        folds = self.stride - 1  # of its coarsest cell, an output may be the first pixel and see the last
        reach: int = folds + 2 * 2 + 2 * sum(sides) + bottom
        return reach

    def network(self, x: Tensor, level: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        level = self.embed(level.to(x.dtype).expand(x.shape[0]))
        h = F.pixel_unshuffle(mirrored(x, height + -height % self.stride, width + -width % self.stride), 2)
        h = self.door(h.contiguous(memory_format=torch.channels_last))
        skips = []
        for stage, shrink in zip(self.down, self.shrink, strict=False):
            h = stage(h, level)
            skips.append(h)
            h = shrink(h)
        h = self.down[-1](h, level)
        for depth in reversed(range(len(self.up))):
            h = F.pixel_shuffle(self.grow[depth](h), 2).contiguous(memory_format=torch.channels_last)
            h = self.up[depth](h + skips[depth], level)
        out: Tensor = F.pixel_shuffle(_GAIN * self.exit(h), 2)[..., :height, :width]
        return torch.addcmul(out, self.skip(level)[:, :, None, None], x)


class _Stage(nn.Module):
    """Residual blocks of one resolution."""

    def __init__(self, width: int, count: int, embedding: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width, embedding) for _ in range(count))

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, level)
        return x


class _Block(nn.Module):
    """A residual block on the channels of each pixel, normalised; the noise level scales and shifts in its middle."""

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.conv1 = _conv(width, width)
        self.level = zero(nn.Linear(embedding, 2 * width))
        self.conv2 = zero(_conv(width, width))

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        scale, shift = self.level(level)[:, :, None, None].chunk(2, 1)
        h = F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]).permute(0, 3, 1, 2)
        out: Tensor = x + self.conv2(F.silu(torch.addcmul(shift, self.conv1(h), 1 + scale)))
        return out


def _conv(a: int, b: int) -> nn.Conv2d:
    """A 3×3 convolution whose input is mirrored at its edges; a mirror of one pixel repeats it."""
    return nn.Conv2d(a, b, 3, padding=1, padding_mode="replicate")


def mirrored(x: Tensor, height: int, width: int) -> Tensor:
    """The image x (..., H, W) continued to the right and downwards by its reflections, as many as it takes."""
    for axis, size in ((-2, height), (-1, width)):
        if (own := x.shape[axis]) < size:
            place = torch.arange(size, device=x.device) % (2 * own)
            x = x.index_select(axis, torch.minimum(place, 2 * own - 1 - place))
    return x

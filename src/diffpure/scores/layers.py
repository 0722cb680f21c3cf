"""What the diffusion networks of the paper share: time embeddings, attention over positions, resampling.

A label s (a time in the network's own unit) becomes the D numbers sin(s ω_i), cos(s ω_i), i = 0 … D/2 - 1, with
frequencies that fall geometrically from 1 to about 1/10000. Two conventions exist and differ in the last frequency
and in the order of the halves. Attention is softmax(q kᵀ/√d) v over all positions of the image.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sin_cos(labels: Tensor, dim: int) -> Tensor:
    """[sin, cos] with ω_i = 10000^(-i/(D/2 - 1)), as DDPM embeds time; labels (B,) -> (B, dim) float32."""
    angles = _angles(labels, dim // 2, dim // 2 - 1)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def cos_sin(labels: Tensor, dim: int) -> Tensor:
    """[cos, sin] with ω_i = 10000^(-i/(D/2)), as guided diffusion embeds time; labels (B,) -> (B, dim) float32."""
    angles = _angles(labels, dim // 2, dim // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _angles(labels: Tensor, half: int, last: int) -> Tensor:
    # float32 throughout: the published networks were trained on these roundings.
    index = torch.arange(half, dtype=torch.float32, device=labels.device)
    return labels.float()[:, None] * torch.exp(index * -(math.log(10000) / last))[None]


class GroupNorm(nn.GroupNorm):
    """A group norm that computes in the precision of its own weights, also amid half-precision convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def tokens(x: Tensor) -> Tensor:
    """An image (B, C, H, W) as the sequence of its positions (B, H·W, C)."""
    return x.flatten(2).transpose(1, 2)


def untokens(h: Tensor, like: Tensor) -> Tensor:
    """The inverse of `tokens`: (B, H·W, C) as an image shaped like `like` (B, C, H, W)."""
    return h.transpose(1, 2).reshape(like.shape)


def pointwise(conv: nn.Conv1d | nn.Conv2d, h: Tensor) -> Tensor:
    """A convolution of kernel one applied to a sequence of positions (B, N, C)."""
    return F.linear(h, conv.weight.flatten(1), conv.bias)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ/√d) v with one head; (B, N, C) each."""
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def upsample(x: Tensor) -> Tensor:
    """Twice the resolution, each pixel repeated."""
    return F.interpolate(x, scale_factor=2, mode="nearest")


def downsample(x: Tensor) -> Tensor:
    """Half the resolution, each pixel the mean of four."""
    return F.avg_pool2d(x, 2)

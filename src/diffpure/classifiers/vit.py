"""The vision transformer of DeiT (Touvron et al. 2021), patch 16 and width 384 for DeiT-S.

The image is cut into patches, a class token is put before them, positions are added, and pre-norm blocks follow:
x ↦ x + attention(norm(x)), x ↦ x + MLP(norm(x)). The class token's end state gives the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.classifiers.normalize import IMAGENET, Normalize, normalization
from diffpure.errors import InputError


@final
class Attention(nn.Module):
    """Multi-head attention over tokens (B, N, D); the rows of `qkv` are q, k, v, each split into heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.proj(h)
        return out


@final
class MLP(nn.Module):
    """Two linear layers with an exact GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


@final
class Block(nn.Module):
    """One pre-norm transformer block over tokens (B, N, D)."""

    def __init__(self, width: int, heads: int, ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, int(width * ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


@final
class PatchEmbedding(nn.Module):
    """Images (B, 3, H, W) as tokens (B, H·W/patch², D)."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return tokens


@final
class VisionTransformer(nn.Module):
    """DeiT: images (B, 3, size, size) in [0, 1] ↦ logits (B, classes); `patches` replaces its patch embedding."""

    def __init__(
        self, *, size: int = 224, patch: int = 16, width: int = 384, depth: int = 12, heads: int = 6, ratio: float = 4,
        classes: int = 1000, normalize: Normalize | None = None, patches: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if size % patch or width % heads:
            raise InputError(
                f"A vision transformer needs a size that its patch divides and a width that its heads divide, "
                f"got {size}/{patch} and {width}/{heads}."
            )
        self.normalize = normalize or nn.Identity()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))
        self.patch_embed = patches or PatchEmbedding(patch, width)
        self.blocks = nn.Sequential(*(Block(width, heads, ratio) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The network of DeiT's arguments."""
        return cls(
            size=config["img_size"],
            patch=config["patch_size"],
            width=config["embed_dim"],
            depth=config["depth"],
            heads=config["num_heads"],
            ratio=config.get("mlp_ratio", 4),
            classes=config["num_classes"],
            normalize=normalization(config, IMAGENET),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch_embed(self.normalize(x))
        h = torch.cat([self.cls_token.expand(len(h), -1, -1), h], dim=1) + self.pos_embed
        h = self.norm(self.blocks(h))
        logits: Tensor = self.head(h[:, 0])
        return logits

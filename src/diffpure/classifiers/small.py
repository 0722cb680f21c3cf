"""Small CIFAR classifiers that train and run on a CPU: images in [0, 1] -> logits.

`SmallResNet` follows the published ten-epoch recipes (Page 2018; Jordan, "94% on CIFAR-10 in 3.29 seconds", 2024): a
fixed 2×2 convolution that whitens patches, then three stages

    x ← φ(N(pool(W₁ ∗ x))),        x ← φ(x + N(W₂ ∗ x)),

a global maximum and a linear head whose logits are scaled down. `small_wrn` and `small_vit` are the paper's wide
residual network and vision transformer in sizes for a laptop; the latter reads its patches through two convolutions,
with which a transformer learns from far fewer images (Xiao et al., "Early convolutions help transformers see better",
2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.classifiers.normalize import CIFAR10, Normalize
from diffpure.classifiers.vit import VisionTransformer
from diffpure.classifiers.wrn import WideResNet


def _norm(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation with a bias but without a scale, which the next convolution makes redundant."""
    norm = nn.BatchNorm2d(channels, momentum=0.3)
    norm.weight.requires_grad_(False)
    return norm


class _Stage(nn.Module):
    """Halve the resolution, change the width, then one residual convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.widen = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.refine = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = _norm(outputs), _norm(outputs)
        # The first input channels pass through unchanged at the start of training.
        nn.init.dirac_(self.widen.weight[:inputs].data)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.widen(x), 2)), approximate="tanh")
        return F.gelu(x + self.norm2(self.refine(x)), approximate="tanh")


@final
class SmallResNet(nn.Module):
    """A ResNet of 118 million multiply-adds and 2 million parameters for 32×32 images."""

    def __init__(self, widths: Sequence[int] = (64, 256, 256), classes: int = 10, scale: float = 1 / 9) -> None:
        super().__init__()
        self.scale = scale
        self.normalize = Normalize(CIFAR10)
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        self.stages = nn.Sequential(*(_Stage(i, o) for i, o in zip((24, *widths), widths, strict=False)))
        self.head = nn.Linear(widths[-1], classes, bias=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = self.normalize(x).contiguous(memory_format=torch.channels_last)
        x = self.stages(F.gelu(self.whiten(x), approximate="tanh"))
        logits: Tensor = self.scale * self.head(x.amax((2, 3)))
        return logits

    @torch.no_grad()
    def fit_whitening(self, images: Tensor, floor: float = 5e-4) -> None:
        """Set the first filters to ± the whitened principal axes of the 2×2 patches of images (N, 3, H, W)."""
        patches = F.unfold(self.normalize(images), 2).transpose(1, 2).reshape(-1, 12).double()
        values, axes = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (axes / torch.sqrt(values + floor)).T.reshape(12, 3, 2, 2)
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


def small_wrn(depth: int = 16, width: int = 2, classes: int = 10) -> WideResNet:
    """WRN-16-2: 0.7 million parameters and 101 million multiply-adds."""
    return WideResNet(depth, width, classes, normalize=Normalize(CIFAR10))


class _Stem(nn.Module):
    """Images (B, 3, S, S) as tokens (B, S²/16, width), each of which has seen more than its patch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        coarse = (nn.Conv2d(3, half, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(half), nn.GELU())
        fine = (nn.Conv2d(half, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.GELU(), nn.MaxPool2d(2))
        self.layers = nn.Sequential(*coarse, *fine, nn.Conv2d(width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers(x.contiguous(memory_format=torch.channels_last))
        return h.flatten(2).transpose(1, 2)


def small_vit(width: int = 128, depth: int = 4, heads: int = 4, classes: int = 10) -> VisionTransformer:
    """A vision transformer of 64 tokens for 32×32 images, its positions and class token drawn at random."""
    model = VisionTransformer(
        size=32, patch=4, width=width, depth=depth, heads=heads, ratio=2, classes=classes, normalize=Normalize(CIFAR10),
        patches=_Stem(width),
    )  # fmt: skip
    for tokens in (model.pos_embed, model.cls_token):
        nn.init.trunc_normal_(tokens, std=0.02)
    return model


ARCHITECTURES: Final[dict[str, Callable[..., nn.Module]]] = {
    "SmallResNet": SmallResNet,
    "small_wrn": small_wrn,
    "small_vit": small_vit,
}

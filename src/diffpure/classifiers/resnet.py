"""Residual networks of bottleneck blocks (He et al. 2016): DiffPure's for CIFAR-10, torchvision's for ImageNet.

Both run 1×1, 3×3 (with the stride), 1×1 convolutions and activate after the sum; they differ in the stem, in the
names of two layers, and in that torchvision's wide variant widens the two inner convolutions only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.classifiers.normalize import CIFAR10, IMAGENET, Normalize, normalization
from diffpure.models.checkpoints import expect

EXPANSION = 4  # the last convolution of a bottleneck is four times as wide as `planes`


@final
class Bottleneck(nn.Module):
    """x ↦ φ(shortcut(x) + h) with three convolutions in h; `name` is what the checkpoint calls the shortcut."""

    def __init__(self, inputs: int, planes: int, width: int, stride: int, name: str) -> None:
        super().__init__()
        outputs = EXPANSION * planes
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.name = name
        changes = stride != 1 or inputs != outputs
        shortcut = [nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)]
        self.add_module(name, nn.Sequential(*shortcut) if changes else nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        return F.relu(self.get_submodule(self.name)(x) + self.bn3(self.conv3(h)))


def stages(planes: Sequence[int], counts: Sequence[int], widening: float, name: str) -> list[nn.Sequential]:
    """The four stages after the stem: `counts` blocks each, stride two at the head of all but the first."""
    now, result = planes[0], []
    for stage, (plane, count) in enumerate(zip(planes, counts, strict=True)):
        blocks = []
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append(Bottleneck(now, plane, int(plane * widening), stride, name))
            now = EXPANSION * plane
        result.append(nn.Sequential(*blocks))
    return result


def planes_of(config: Mapping[str, Any]) -> Sequence[int]:
    """The widths of the four stages, given outright or by that of the first."""
    planes: Sequence[int] = config.get("planes") or [config.get("base_planes", 64) * 2**stage for stage in range(4)]
    return planes


@final
class CifarResNet(nn.Module):
    """DiffPure's ResNet-50 for CIFAR-10: images (B, 3, 32, 32) in [0, 1] ↦ logits (B, classes)."""

    def __init__(
        self, counts: Sequence[int] = (3, 4, 6, 3), planes: Sequence[int] = (64, 128, 256, 512), classes: int = 10,
        *, normalize: Normalize | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.normalize = normalize or nn.Identity()
        self.conv1 = nn.Conv2d(3, planes[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes[0])
        self.layer1, self.layer2, self.layer3, self.layer4 = stages(planes, counts, 1, "shortcut")
        self.linear = nn.Linear(EXPANSION * planes[-1], classes)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The network of a configuration in DiffPure's words."""
        expect("CifarResNet", config, expansion=EXPANSION)
        normalize = normalization(config, CIFAR10)
        return cls(config["num_blocks"], planes_of(config), config["num_classes"], normalize=normalize)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(self.normalize(x))))
        h = self.layer4(self.layer3(self.layer2(self.layer1(h))))
        out: Tensor = self.linear(h.mean((2, 3)))
        return out


@final
class ImageNetResNet(nn.Module):
    """Torchvision's ResNet-50 and WRN-50-2: images (B, 3, 224, 224) in [0, 1] ↦ logits (B, classes)."""

    def __init__(
        self, counts: Sequence[int] = (3, 4, 6, 3), planes: Sequence[int] = (64, 128, 256, 512), classes: int = 1000,
        *, widening: float = 1, normalize: Normalize | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.normalize = normalize or nn.Identity()
        self.conv1 = nn.Conv2d(3, planes[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(planes[0])
        self.layer1, self.layer2, self.layer3, self.layer4 = stages(planes, counts, widening, "downsample")
        self.fc = nn.Linear(EXPANSION * planes[-1], classes)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The network of torchvision's arguments."""
        widening = config.get("width_per_group", 64) / 64
        normalize = normalization(config, IMAGENET)
        return cls(config["layers"], planes_of(config), config["num_classes"], widening=widening, normalize=normalize)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(self.normalize(x))))
        h = F.max_pool2d(h, 3, stride=2, padding=1)
        h = self.layer4(self.layer3(self.layer2(self.layer1(h))))
        out: Tensor = self.fc(h.mean((2, 3)))
        return out

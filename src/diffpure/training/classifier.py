"""Training a classifier on images in [0, 1]: flips that alternate, small translations, smoothed labels.

The recipe is Nesterov SGD with a decoupled weight decay and a learning rate that rises and falls along a triangle
(Jordan, "94% on CIFAR-10 in 3.29 seconds", 2024). An image is mirrored in every second epoch, beginning with a coin of
its own, so that two epochs show each image from both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from diffpure.data.cifar10 import Images
from diffpure.errors import unknown
from diffpure.training.adversarial import Adversary
from diffpure.training.loop import State, batch_indices, generator, run_of, train, triangular


@final
@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """What a training of a classifier depends on, beside its data; the defaults are those of `cifar10-resnet`.

    `rate` and `weight_decay` of "sgd" are per 1024 images, as in the recipe, and biases learn `bias_factor` times as
    fast; those of "adamw" are its own. `adversary` trains on attacked images, `purify` on purified ones.
    """

    epochs: float = 10.0
    batch: int = 512
    optimiser: str = "sgd"
    rate: float = 11.5
    weight_decay: float = 0.0153
    momentum: float = 0.85
    bias_factor: float = 64.0
    smoothing: float = 0.2
    translate: int = 2
    flip: bool = True
    decay: float = 0.98
    adversary: Adversary | None = None
    purify: Callable[[Tensor, Tensor], Tensor] | None = None
    seed: int = 0
    threads: int | None = None
    precision: str = "float32"
    checkpoint_seconds: float = 180.0

    def __post_init__(self) -> None:
        if self.optimiser not in OPTIMISERS:
            raise unknown("optimiser", self.optimiser, OPTIMISERS)


def train_classifier(
    model: nn.Module,
    images: Images,
    config: ClassifierConfig,
    folder: Path | None = None,
    console: Console | None = None,
) -> State:
    """Train `model` (images in [0, 1] -> logits) in place; returns the averaged weights, the ones to keep."""
    model.train()
    source = Augmented(images, config)

    def batch(step: int) -> tuple[Tensor, ...]:
        seeds = torch.randint(1 << 62, (config.batch,), generator=generator(config.seed, step, 4))
        return *source(step), seeds

    def loss(replica: nn.Module, x: Tensor, y: Tensor, seeds: Tensor) -> Tensor:
        if config.purify:
            x = config.purify(x, seeds).detach()
        if config.adversary:
            return config.adversary.loss(replica, x, y, seeds, config.smoothing)
        return F.cross_entropy(replica(x), y, label_smoothing=config.smoothing)

    run = run_of(config, images, round(config.epochs * (len(images) // config.batch)), folder)
    return train(model, OPTIMISERS[config.optimiser](model, config), batch, loss, triangular(), run, console=console)


def _sgd(model: nn.Module, config: ClassifierConfig) -> torch.optim.Optimizer:
    """Nesterov SGD on the mean loss, with weights and biases at their own rates and one decoupled weight decay."""
    scale = config.batch / (1024 * (1 + 1 / (1 - config.momentum)))  # the recipe states rates per 1024 summed losses
    rate, shrink = config.rate * scale, config.weight_decay * scale
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "lr": rate, "weight_decay": shrink / rate},
        {
            "params": [p for p in trained if p.ndim <= 1],
            "lr": rate * config.bias_factor,
            "weight_decay": shrink / (rate * config.bias_factor),
        },
    ]
    return torch.optim.SGD(groups, momentum=config.momentum, nesterov=True)


def _adamw(model: nn.Module, config: ClassifierConfig) -> torch.optim.Optimizer:
    """AdamW, which transformers want; vectors are not shrunk."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.rate)


@final
class Augmented:
    """Batches of a training set as a pure function of the step: shuffled, mirrored, translated."""

    def __init__(self, images: Images, config: ClassifierConfig) -> None:
        self.labels = images.labels
        self.config = config
        self.size = images.pixels.shape[-1]
        pad = config.translate
        padded = F.pad(images.pixels.float(), (pad,) * 4, mode="reflect") if pad else images.pixels
        self.pixels = padded.to(torch.uint8).permute(0, 2, 3, 1).contiguous()  # (N, H + 2p, W + 2p, C)
        self.side = torch.rand(len(images), generator=generator(config.seed, 0, 2)) < 0.5

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """The images (B, C, H, W) in [0, 1], channels-last, and the labels (B,) of one step."""
        config = self.config
        epoch, index = batch_indices(config.seed, step, len(self.labels), config.batch)
        shift = torch.randint(2 * config.translate + 1, (2, len(index), 1), generator=generator(config.seed, step, 3))
        span = torch.arange(self.size)
        rows, columns = shift[0] + span, shift[1] + span
        if config.flip:
            mirrored = self.side[index] ^ bool(epoch % 2)
            columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        x = self.pixels[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        return x.permute(0, 3, 1, 2).float() / 255, self.labels[index]


OPTIMISERS: Final[dict[str, Callable[[nn.Module, ClassifierConfig], torch.optim.Optimizer]]] = {
    "sgd": _sgd,
    "adamw": _adamw,
}

"""A linear model, whose optimal attack is known, and a random defence, for the tests of attacks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffpure.noise import Noise


class Linear(nn.Module):
    """Logits Wx + b, whose optimal attack is known."""

    def __init__(self, classes: int, pixels: int, scale: float = 1.0) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        self.w = scale * torch.randn(classes, pixels, generator=gen)
        self.b = scale * torch.randn(classes, generator=gen)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.w.to(x.dtype).T + self.b.to(x.dtype)


class Noisy(nn.Module):
    """A random defence: seeded noise, a small denoiser, a classifier; with the parts that a `Defense` has."""

    stochastic = True

    def __init__(self, sigma: float = 0.1, channels: int = 1, size: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.sigma = sigma
        self.kernel = torch.full((channels, 1, 3, 3), 1 / 9)
        self.classifier = Linear(classes, channels * size * size)

    @property
    def purifier(self) -> nn.Module:
        return Blur(self.sigma, self.kernel)

    def forward(self, x: Tensor, seeds=None) -> Tensor:
        return self.classifier(self.purifier(x, seeds))


class Blur(nn.Module):
    stochastic = True

    def __init__(self, sigma: float, kernel: Tensor) -> None:
        super().__init__()
        self.sigma, self.kernel = sigma, kernel

    def forward(self, x: Tensor, seeds=None) -> Tensor:
        x = x + self.sigma * Noise.of(seeds, len(x))(0, x)
        return nn.functional.conv2d(x, self.kernel.to(x.dtype), padding=1, groups=x.shape[1]).tanh()


def problem(n: int = 6, classes: int = 5, channels: int = 1, size: int = 8) -> tuple[Tensor, Tensor]:
    """Grey images far from the walls of the box, with the labels that the linear model gives them."""
    gen = torch.Generator().manual_seed(2)
    x = 0.5 + 0.05 * torch.randn(n, channels, size, size, generator=gen)
    return x, Linear(classes, channels * size * size)(x).argmax(1)


class TinyFeatures(nn.Module):
    """A network with two stages, for perceptual distances that cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stages = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(x).amax((2, 3))

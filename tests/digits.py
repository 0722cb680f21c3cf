"""A small real world that needs no download: scikit-learn's digits, a classifier trained on them in a second, and
the exact score of their kernel density, which is a diffusion model without training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from diffpure.diffusion.samplers import ReverseSDE, Sampler
from diffpure.diffusion.sde import VPSDE, Schedule, over
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense

SEEN = 1500  # the classifier and the density have seen these


@cache
def data() -> tuple[Tensor, Tensor]:
    """All digits, (1797, 1, 8, 8) in [0, 1], and their labels."""
    digits = load_digits()
    return torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)


@cache
def classifier() -> nn.Module:
    """A small convolutional network, trained on the digits that are not held out."""
    x, y = data()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
        adam = torch.optim.Adam(net.parameters(), 2e-3)
        for _ in range(12):
            for batch in torch.randperm(SEEN).split(64):
                adam.zero_grad()
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                adam.step()
    return net.requires_grad_(False).eval()


def held_out(n: int) -> tuple[Tensor, Tensor]:
    """n digits that the classifier has not seen and classifies correctly."""
    x, y = (t[SEEN:] for t in data())
    right = (classifier()(x).argmax(1) == y).nonzero()[:n, 0]
    return x[right], y[right]


@dataclass(frozen=True)
class KernelScore:
    """The exact score of Σ_i N(x_i, s² I) over the seen digits: p_t = Σ_i N(√α x_i, (α s² + 1 - α) I)."""

    width: float = 0.1
    sde: Schedule = VPSDE()
    size: int | None = None

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        a = over(torch.exp(-self.sde.gamma(t)), x).flatten(1)
        variance = over(self.sde.alpha(t) * self.width**2 + self.sde.std(t) ** 2, x).flatten(1)
        flat, centres = x.flatten(1), (2 * data()[0][:SEEN].flatten(1) - 1).to(x.dtype)
        away = a**2 * centres.square().sum(1) - 2 * a * (flat @ centres.T)  # ‖x - a x_i‖² but for what all share
        nearest = a * (torch.softmax(-away / (2 * variance), 1) @ centres)
        return ((nearest - flat) / variance).view_as(x)


def defence(gradient: str = "exact", sampler: Sampler | None = None) -> Defense:
    """The digits' classifier behind their diffusion."""
    purifier = Purifier(KernelScore(), sampler or ReverseSDE(t_star=0.1, steps=8), gradient)
    return Defense(purifier, classifier())

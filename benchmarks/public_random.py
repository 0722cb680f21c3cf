"""The random choices of the public AutoAttack package, made by our attacks.

A random start decides over single images, and a random search over several: two attacks with choices of their own can
only be compared by their means over many seeds. With the same choices, attacks that are the same leave the same images.

The public package seeds torch once an attack and samples for all images at hand together: APGD its starts; Square for
ℓ∞ one window a move for all images, whose corner is never in the last row or column that it could be in, and for ℓ2
one pair of windows, one turn of the bump, and signs for each image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from diffpure.attacks import square
from diffpure.threats import L2, Linf, Norm, per_image


@contextmanager
def public_random(seed: int) -> Iterator[None]:
    """Our APGD or Square, run once within, chooses what the public one chooses with that seed."""
    generator = torch.Generator().manual_seed(seed)

    def start(threat: Norm, x: Tensor, noise: object, step: int = 0) -> Tensor:
        linf = isinstance(threat, Linf)
        z = 2 * torch.rand(x.shape, generator=generator) - 1 if linf else torch.randn(x.shape, generator=generator)
        return threat.project(x, threat.eps * z / per_image(threat.size(z), z))

    def uniforms(problem: square.Problem, i: int, count: int) -> Tensor:
        shape = tuple(problem.x.shape)
        if isinstance(problem.threat, Linf):
            return _stripes(generator, shape) if i == 0 else _window(generator, shape)
        return _tiles(generator, shape, count) if i == 0 else _windows(generator, shape)

    with (
        mock.patch.object(Linf, "random", start),
        mock.patch.object(L2, "random", start),
        mock.patch.object(square, "_uniforms", uniforms),
        mock.patch.object(square, "_offset", lambda u, room: (room * u).long()),
    ):
        yield


def _stripes(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    """A sign for each image, channel and column: (B, C W)."""
    b, c, _, w = shape
    return torch.rand(b, c * w, generator=generator)


def _window(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    """A corner and a sign for each channel, the same for all images: (B, 2 + C)."""
    return torch.rand(2 + shape[1], generator=generator).expand(shape[0], -1)


def _tiles(generator: torch.Generator, shape: Sequence[int], count: int) -> Tensor:
    """For one tile after the other, also for those below and beside the (square) image, a turn for all images and a
    sign for each image and channel; of the tiles inside: (B, (1 + C) tiles)."""
    b, c, h, _ = shape
    drawn, inside = h // (h // 5), math.isqrt(count // (1 + c))
    tiles = torch.stack([_turn_and_signs(generator, b, c) for _ in range(drawn**2)], 2)
    return tiles.view(b, 1 + c, drawn, drawn)[:, :, :inside, :inside].flatten(1)


def _windows(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    """Two corners and a turn for all images, and a sign for each image and channel: (B, 5 + C)."""
    b, c = shape[:2]
    corners = torch.rand(4, generator=generator).expand(b, -1)
    return torch.cat([corners, _turn_and_signs(generator, b, c)], 1)


def _turn_and_signs(generator: torch.Generator, b: int, c: int) -> Tensor:
    turn = torch.rand(1, generator=generator).expand(b, 1)
    return torch.cat([turn, torch.rand(b, c, generator=generator)], 1)

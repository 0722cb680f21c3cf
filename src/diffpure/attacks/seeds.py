"""Every random number of an attack is a function of (seed of the image, purpose, counter).

So an image's attack does not depend on its batch, an interrupted attack goes on to the same result, and the samples
that a random defence was given can be made again from the seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffpure.noise import Noise, mix

Words = NDArray[np.uint64]

START: Final = 0x57A27  # the purposes: random starts, moves of a random search, samples of the defence's noise
MOVE: Final = 0x303E
DRAW: Final = 0xD2A3


def starts(seeds: Sequence[int]) -> Noise:
    """The noise of the random starts, one step a restart."""
    return Noise(tuple(seeds)).child(START)


def sample_seeds(seeds: Sequence[int], step: int, samples: int, *, fixed: bool = False) -> tuple[int, ...]:
    """The seeds that a random defence is given at a step, `samples` of them an image, one image after the other.

    Fresh at every step; with `fixed` always the same, the first of them the image's own seed: then the attacker knows
    the noise that `model(x, seeds=seeds)` will use.
    """
    if fixed:
        return tuple(mix(seed, d) if d else seed for seed in seeds for d in range(samples))
    children = mixed(mixed(np.array(seeds, dtype=np.uint64), DRAW), step)
    return tuple(mixed(children[:, None], np.arange(samples)).ravel().tolist())


def uniforms(seeds: Sequence[int], step: int, count: int) -> Tensor:
    """Numbers in [0, 1) for a move of a random search: (B, count) float64."""
    children = mixed(mixed(np.array(seeds, dtype=np.uint64), MOVE), step)
    bits = mixed(children[:, None], np.arange(count))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def mixed(seeds: Words, tag: int | NDArray[np.int64]) -> Words:
    """`diffpure.diffusion.sde.mix` of many at once."""
    word = np.uint64
    z = seeds ^ (np.asarray(tag).astype(word) * word(0x9E3779B97F4A7C15))
    for _ in range(2):
        z = z + word(0x9E3779B97F4A7C15)
        z = (z ^ (z >> word(30))) * word(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> word(27))) * word(0x94D049BB133111EB)
        z = z ^ (z >> word(31))
    return z

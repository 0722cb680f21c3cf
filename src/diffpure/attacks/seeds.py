"""Every random number of an attack is a function of (seed of the image, purpose, counter).

So an image's attack does not depend on its batch, an interrupted attack goes on to the same result, and the samples
that a random defence was given can be made again from the seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diffpure.noise import Noise, mix, mix_all

START: Final = 0x57A27  # the purposes: random starts, steps of a random search, samples of the defence's noise
STEP: Final = 0x303E
SAMPLE: Final = 0xD2A3


def starts(seeds: Sequence[int]) -> Noise:
    """The noise of the random starts, one step per restart."""
    return Noise(tuple(seeds)).child(START)


def sample_seeds(seeds: Sequence[int], step: int, samples: int, *, fixed: bool = False) -> tuple[int, ...]:
    """The seeds that a random defence is given at a step, `samples` of them per image, one image after the other.

    Fresh at every step; with `fixed` always the same, the first of them the image's own seed: then the attacker knows
    the noise that `model(x, seeds=seeds)` will use.
    """
    if fixed:
        return tuple(mix(seed, d) if d else seed for seed in seeds for d in range(samples))
    return Noise(tuple(seeds)).child(SAMPLE).child(step).draws(samples).seeds


def uniforms(seeds: Sequence[int], step: int, count: int) -> Tensor:
    """Numbers in [0, 1) for a step of a random search: (B, count) float64."""
    children = mix_all(mix_all(np.array(seeds, dtype=np.uint64), STEP), step)
    bits = mix_all(children[:, None], np.arange(count))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)

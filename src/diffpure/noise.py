"""Randomness as a value: every random number is a function of (seed of the image, step), never of a shared generator.

So an image gets the same noise in any batch, order, shard or process, and a backward pass can draw it again. Without
seeds they come from the operating system's entropy, so that nobody can predict a deployed defence.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from diffpure.errors import InputError

NoiseSource = Callable[[int, Tensor], Tensor]  # (step, like) -> standard normal numbers shaped like `like`

_MASK: Final = (1 << 64) - 1


def mix(seed: int, tag: int) -> int:
    """A 64-bit child of (seed, tag), by two rounds of the SplitMix64 finaliser: equal inputs, equal child."""
    z = (seed ^ (tag * 0x9E3779B97F4A7C15)) & _MASK
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


@final
@dataclass(frozen=True)
class Noise:
    """Gaussian noise as a pure function of (seed of the image, step).

    Each image draws from its own Philox stream whose 128-bit key is (seed, step): an image gets the same noise in
    any batch, order, shard or process, a backward pass can draw it again, and no two keys share a stream. (torch's
    CPU generator keeps only 32 bits of a seed.) The numbers are drawn on the CPU, so every device sees the same.
    """

    seeds: tuple[int, ...]

    @classmethod
    def of(cls, seeds: Sequence[int] | Tensor | None, batch: int) -> Noise:
        """The noise of a batch: from explicit seeds, one an image, or from the operating system's entropy."""
        if seeds is None:
            return cls(tuple(secrets.randbits(64) for _ in range(batch)))
        values = tuple(int(s) & _MASK for s in (seeds.tolist() if isinstance(seeds, Tensor) else seeds))
        if len(values) != batch:
            raise InputError(f"Seeds are one an image: got {len(values)} seeds for {batch} images.")
        return cls(values)

    def __call__(self, step: int, like: Tensor) -> Tensor:
        """Standard normal numbers shaped like `like` (B, ...), for one step."""
        out = np.empty(like.shape, dtype=np.float64 if like.dtype == torch.float64 else np.float32)
        for row, seed in zip(out, self.seeds, strict=True):
            self._stream(seed, step).standard_normal(out=row, dtype=row.dtype)
        return torch.from_numpy(out).to(device=like.device, dtype=like.dtype)

    def uniform(self, step: int) -> Tensor:
        """One number in [0, 1) an image: (B,) float64."""
        return torch.tensor([self._stream(seed, step).random() for seed in self.seeds], dtype=torch.float64)

    def child(self, tag: int) -> Noise:
        """An independent noise for a part of the work (a round, a draw), again one stream an image."""
        return Noise(tuple(mix(seed, tag) for seed in self.seeds))

    @staticmethod
    def _stream(seed: int, step: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=np.array([seed, step & _MASK], dtype=np.uint64)))

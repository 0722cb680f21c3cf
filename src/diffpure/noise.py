"""Randomness as a value: every random number is a function of (seed of the image, step), never of a shared generator.

So an image gets the same noise in any batch, order, shard or process, and a backward pass can draw it again. Without
seeds they come from the operating system's entropy, so that nobody can predict a deployed defence.
"""

from __future__ import annotations

import functools
import operator
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffpure.errors import InputError

NoiseSource = Callable[[int, Tensor], Tensor]  # (step, like) -> standard normal numbers shaped like `like`
Seeds = int | Sequence[int] | Tensor | None  # one per image; one number for all; or the system's entropy
Words = NDArray[np.uint64]

_MASK: Final = (1 << 64) - 1
_MANY: Final = 1 << 17  # numbers; fewer are drawn as soon by one thread beside a network of several
_MIRRORED: Final[ContextVar[bool]] = ContextVar("mirrored", default=False)


@contextmanager
def mirrored() -> Iterator[None]:
    """Whatever noise begins inside is the negative of what its seeds give, and 1 - u where they give a uniform u.

    Two samples of which one is mirrored are antithetic: in their mean, whatever is odd in the noise cancels.
    """
    token = _MIRRORED.set(True)
    try:
        yield
    finally:
        _MIRRORED.reset(token)


def mix(seed: int, tag: int) -> int:
    """A 64-bit child of (seed, tag): equal inputs, equal child."""
    return int(mix_all(_words([seed]), tag)[0])


def mix_all(seeds: Words, tag: int | NDArray[np.int64]) -> Words:
    """`mix` of many seeds at once, by two rounds of the SplitMix64 finaliser."""
    word = np.uint64
    tags = word(tag & _MASK) if isinstance(tag, int) else tag.astype(word)
    with np.errstate(over="ignore"):
        z = seeds ^ (tags * word(0x9E3779B97F4A7C15))
        for _ in range(2):
            z = z + word(0x9E3779B97F4A7C15)
            z = (z ^ (z >> word(30))) * word(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> word(27))) * word(0x94D049BB133111EB)
            z = z ^ (z >> word(31))
    return z


def _words(seeds: Sequence[int]) -> Words:
    return np.array([seed & _MASK for seed in seeds], dtype=np.uint64)


@final
@dataclass(frozen=True)
class Noise:
    """Gaussian noise as a pure function of (seed of the image, step).

    Each image draws from its own Philox stream whose 128-bit key is (seed, step): an image gets the same noise in
    any batch, order, shard or process, a backward pass can draw it again, and no two keys share a stream. (torch's
    CPU generator keeps only 32 bits of a seed.) The numbers are drawn on the CPU, so every device sees the same.
    """

    seeds: tuple[int, ...]
    mirrored: bool = field(default_factory=_MIRRORED.get)  # kept, as a backward pass draws again, in any thread

    @classmethod
    def of(cls, seeds: Seeds, batch: int) -> Noise:
        """The noise of a batch: from explicit seeds, one per image; from one number, of which image i gets the child
        i; or from the operating system's entropy."""
        if seeds is None:
            return cls(tuple(secrets.randbits(64) for _ in range(batch)))
        if isinstance(seeds, int):
            return cls(tuple(mix_all(_words([seeds]), np.arange(batch)).tolist()))
        values = tuple(whole_number(s) & _MASK for s in (seeds.tolist() if isinstance(seeds, Tensor) else seeds))
        if len(values) != batch:
            raise InputError(f"Seeds are integers, one per image: got {len(values)} seeds for {batch} images.")
        return cls(values)

    def __call__(self, step: int, like: Tensor) -> Tensor:
        """Standard normal numbers shaped like `like` (B, ...), for one step."""
        out = np.empty(like.shape, dtype=np.float64 if like.dtype == torch.float64 else np.float32)
        rows = list(zip(out, self.seeds, strict=True))
        threads = min(torch.get_num_threads(), len(rows)) if out.size >= _MANY else 1
        others = [_pool(threads, os.getpid()).submit(self._fill, rows[i::threads], step) for i in range(1, threads)]
        self._fill(rows[::threads], step)
        for other in others:
            other.result()
        drawn = torch.from_numpy(out).to(device=like.device, dtype=like.dtype)
        return -drawn if self.mirrored else drawn

    def uniform(self, step: int) -> Tensor:
        """One number in [0, 1) per image: (B,) float64."""
        drawn = torch.tensor([self._stream(seed, step).random() for seed in self.seeds], dtype=torch.float64)
        return 1 - 2**-53 - drawn if self.mirrored else drawn

    def child(self, tag: int) -> Noise:
        """An independent noise for a part of the work (a round, a sample), again one stream per image."""
        return replace(self, seeds=tuple(mix_all(_words(self.seeds), tag).tolist()))

    def draws(self, count: int) -> Noise:
        """The children 0 … count - 1 of each image, one image after the other: (B · count) streams."""
        return replace(self, seeds=tuple(mix_all(_words(self.seeds)[:, None], np.arange(count)).ravel().tolist()))

    def _fill(self, rows: Sequence[tuple[NDArray[Any], int]], step: int) -> None:
        """Draw into the rows, each from the stream of its seed."""
        for row, seed in rows:
            self._stream(seed, step).standard_normal(out=row, dtype=row.dtype)

    @staticmethod
    def _stream(seed: int, step: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=np.array([seed, step & _MASK], dtype=np.uint64)))


@functools.lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that draw beside the calling one, as many as torch computes with; a forked process has its own."""
    return ThreadPoolExecutor(threads, "noise")


def whole_number(seed: Any) -> int:
    """A seed, which is an integer: a float would be cut to the same few seeds for all images."""
    try:
        return operator.index(seed)
    except TypeError:
        raise InputError(f"A seed is an integer, got {seed!r}.") from None

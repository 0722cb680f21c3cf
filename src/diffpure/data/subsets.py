"""The paper's fixed subsets, as its authors drew them, and what they really are.

For each data seed s the authors take `RandomState(s).choice(N, n, replace=False)`: n images without repetition within
a seed, but not across seeds. So the paper's "512 images" of CIFAR-10 are 504 different ones, its 512 of ImageNet 510.
`corrected` keeps those, each once, and goes on with the next seeds until the number is what the paper says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Final, final

import numpy as np

from diffpure.errors import InputError, unknown


@final
@dataclass(frozen=True)
class Subset:
    """Draws of `size` images out of `total`, one a data seed."""

    total: int
    size: int
    seeds: int
    note: str

    @property
    def stated(self) -> int:
        """The number of images the paper counts."""
        return self.size * self.seeds

    def draw(self, data_seed: int) -> tuple[int, ...]:
        """The indices of one data seed, in the authors' order."""
        return draw(self.total, self.size, data_seed)

    def paper(self) -> tuple[int, ...]:
        """All indices of the paper, repetitions included, seed after seed."""
        return tuple(chain.from_iterable(self.draw(seed) for seed in range(self.seeds)))

    def unique(self) -> tuple[int, ...]:
        """The paper's images, each once, in the order of their first appearance."""
        return tuple(dict.fromkeys(self.paper()))

    def corrected(self) -> tuple[int, ...]:
        """As many different images as the paper states: its own, then those of the next data seeds."""
        endless: Iterable[int] = chain.from_iterable(self.draw(seed) for seed in count())
        return tuple(islice(_first_appearances(endless), self.stated))


def draw(total: int, size: int, data_seed: int) -> tuple[int, ...]:
    """`RandomState(data_seed).choice(total, size, replace=False)`, the authors' draw."""
    if not 0 < size <= total:
        raise InputError(f"A subset has between 1 and {total} images, got {size}.")
    return tuple(np.random.RandomState(data_seed).choice(total, size, replace=False).tolist())


def celebahq(validation: int, data_seed: int, batch: int = 8) -> tuple[int, ...]:
    """The paper's CelebA-HQ images of a seed: the first `batch` of a draw of 2 % of the validation part.

    validation: how many images the part has; the indices count within it.
    """
    return draw(validation, int(2 / 100 * validation), data_seed)[:batch]


def subset(name: str) -> Subset:
    """The subset of that name."""
    if name not in SUBSETS:
        raise unknown("subset", name, SUBSETS)
    return SUBSETS[name]


def named(name: str, total: int | None) -> tuple[int, ...]:
    """The indices of a subset by its full name, FAMILY/WHICH, in a source of `total` images (None: not known yet).

    WHICH is paper (repetitions included), paper-unique, corrected, or seed-N for the draw of one data seed.
    """
    family, _, which = name.partition("/")
    seed = re.fullmatch(r"seed-(\d{1,9})", which)
    if (family not in SUBSETS and family != CELEBAHQ) or not (seed or (which in _WHOLE and family != CELEBAHQ)):
        known = [f"{each}/{kind}" for each in SUBSETS for kind in (*_WHOLE, "seed-N")]
        raise unknown("subset", name, [*known, f"{CELEBAHQ}/seed-N"])
    if family == CELEBAHQ:
        return celebahq(total, int(seed[1])) if seed and total is not None else ()
    drawn = SUBSETS[family]
    if total not in (None, drawn.total):
        raise InputError(f"The subset {name!r} is one of {drawn.total} images, but the source has {total}.")
    return drawn.draw(int(seed[1])) if seed else _WHOLE[which](drawn)


def _first_appearances(indices: Iterable[int]) -> Iterable[int]:
    seen: set[int] = set()
    for i in indices:
        if i not in seen:
            seen.add(i)
            yield i


SUBSETS: Final[dict[str, Subset]] = {
    "cifar10": Subset(10_000, 64, 8, "AutoAttack and StAdv on CIFAR-10: data seeds 0–7, 504 different images of 512"),
    "imagenet": Subset(50_000, 16, 32, "AutoAttack on ImageNet: data seeds 0–31, 510 different images of 512"),
    "cifar10-bpda": Subset(10_000, 200, 5, "BPDA+EOT on CIFAR-10: data seeds 0–4, 960 different images of 1000"),
}

CELEBAHQ: Final = "celebahq"  # how many images it draws depends on the size of the part, so it is a function
_WHOLE: Final[dict[str, Callable[[Subset], tuple[int, ...]]]] = {
    "paper": Subset.paper,
    "paper-unique": Subset.unique,
    "corrected": Subset.corrected,
}

"""Two runs compared image by image. No torch here.

Accuracies of two models on the same images are not independent, so their intervals say little about their difference.
Paired, only the images matter on which the models disagree: b that only A classifies correctly, c that only B does.

    difference   (b - c) / n, with the adjusted Wald interval of Bonett & Price 2012 at 95 %:
                 p - q ± z √((p + q - (p - q)²) / (n + 2)),   p = (b + 1) / (n + 2),   q = (c + 1) / (n + 2)
    McNemar      exact and two-sided: how likely is a split at least as uneven as b : c, if each image is a fair coin?
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

from diffpure.errors import InputError
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN, WORST, Z95, Rule


@final
@dataclass(frozen=True)
class Pairs:
    """How many images both models classify correctly, only A, only B, and neither."""

    both: int
    only_a: int
    only_b: int
    neither: int

    def __post_init__(self) -> None:
        if min(self.both, self.only_a, self.only_b, self.neither) < 0 or not self.total:
            raise InputError(f"Pairs are counts of at least one image, got {self!r}.")

    @classmethod
    def of(cls, pairs: Iterable[tuple[bool, bool]]) -> Pairs:
        """The counts of (A is right, B is right), one pair per image."""
        given = list(pairs)
        return cls(*(given.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))))

    @property
    def total(self) -> int:
        """How many images were compared."""
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> float:
        """The accuracy of A minus that of B."""
        return (self.only_a - self.only_b) / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference by Bonett & Price."""
        n = self.total + 2
        b, c = (self.only_a + 1) / n, (self.only_b + 1) / n
        half = Z95 * math.sqrt((b + c - (b - c) ** 2) / n)
        return max(-1.0, b - c - half), min(1.0, b - c + half)

    @property
    def p_value(self) -> float:
        """McNemar's exact test: min(1, 2 P(X ≤ min(b, c))) with X ~ Binomial(b + c, ½)."""
        n, fewer = self.only_a + self.only_b, min(self.only_a, self.only_b)
        return float(min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n))

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.difference:+.1f} % [{100 * low:+.1f}, {100 * high:+.1f}]"

    def as_dict(self) -> dict[str, Any]:
        """The counts and what follows from them, as plain data."""
        counts = {key: getattr(self, key) for key in ("both", "only_a", "only_b", "neither", "total", "difference")}
        return {**counts, "interval": list(self.interval), "p_value": self.p_value}


@final
@dataclass(frozen=True)
class Comparison:
    """Pairs per line (no attack, each common attack, worst case), with what a reader must know of the two runs."""

    rule: str
    indices: tuple[int, ...]
    pairs: dict[str, Pairs]
    titles: dict[str, str]
    remarks: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain data."""
        lines = {name: {"title": self.titles[name], **found.as_dict()} for name, found in self.pairs.items()}
        return {"rule": self.rule, "images": len(self.indices), "pairs": lines, "remarks": list(self.remarks)}


def compare(a: Result, b: Result, rule: str | Rule | None = None) -> Comparison:
    """Compare two finished runs over their common images, each by its first seed.

    rule: when an image counts as right; by default the first that both runs have.
    """
    for result in (a, b):
        if not result.complete:
            raise InputError(f"An unfinished evaluation with {len(result.rows)} rows cannot be compared; resume it.")
    common = tuple(index for index in a.indices if index in set(b.indices))
    if not common:
        raise InputError("The two runs have no dataset index in common, so no image can be paired.")
    _same_images(a, b, common)
    chosen = _rule(a, b, rule)
    names = [CLEAN, *(name for name in a.attacks if name in b.attacks), *([WORST] if a.attacks and b.attacks else [])]
    pairs = {}
    for name in names:
        one, other = a.right(name, chosen), b.right(name, chosen)
        pairs[name] = Pairs.of((one[index], other[index]) for index in common)
    titles = {name: a.title(name) for name in names}
    return Comparison(str(chosen), common, pairs, titles, tuple(_remarks(a, b, common)))


def _same_images(a: Result, b: Result, common: tuple[int, ...]) -> None:
    """Refuse images that differ: by the hash of the data where both have the same indices, else by their labels."""
    if a.indices == b.indices and a.header["data"] != b.header["data"]:
        raise InputError("The two runs have equal dataset indices but other images or labels; they cannot be paired.")
    one, other = ({row.image: row.label for row in result.rows} for result in (a, b))
    if wrong := [index for index in common if one[index] != other[index]]:
        labels = f"{one[wrong[0]]} and {other[wrong[0]]}"
        raise InputError(f"The two runs give image {wrong[0]} the labels {labels}, so it is not the same image.")


def _rule(a: Result, b: Result, rule: str | Rule | None) -> Rule:
    if rule is not None:
        return Rule.parse(rule)
    found = next((each for each in a.rules if each in b.rules), None)
    if found is None:
        one, other = (", ".join(map(str, result.rules)) for result in (a, b))
        raise InputError(f"The two runs have no decision rule in common ({one}; {other}); name one.")
    return found


def _remarks(a: Result, b: Result, common: tuple[int, ...]) -> Iterator[str]:
    """What the numbers alone do not tell."""
    if a.indices != b.indices:
        yield (
            f"Only {len(common)} images are in both runs ({len(a.indices)} in A, {len(b.indices)} in B); their labels "
            "agree, and whether the images do was not checked."
        )
    if a.header["threat"] != b.header["threat"]:
        yield f"The threats differ: {a.header['threat']} for A, {b.header['threat']} for B."
    for name in a.attacks:
        if name in b.attacks and a.header["attacks"][name].get("value") != b.header["attacks"][name].get("value"):
            yield f"The attack {name} differs: {a.title(name)} on A, {b.title(name)} on B."
    if set(a.attacks) != set(b.attacks) and a.attacks and b.attacks:
        one, other = (", ".join(result.attacks) for result in (a, b))
        yield f"The worst cases are over other attacks: {one} on A; {other} on B."
    if len(a.seeds) > 1 or len(b.seeds) > 1:
        yield f"Compared by the first seed of each run: {a.seeds[0]} for A, {b.seeds[0]} for B."

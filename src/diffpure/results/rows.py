"""Rows: what happened to one image under one attack, and the rules that say when it counts as right. No torch here.

A row holds the classes that fresh evaluation samples of the defence gave. A random defence has no single accuracy, so
a rule says when the row is right:

    one-shot        the first sample is right
    average of N    the mean of the logits of N samples is right
    worst of N      all of N samples are right
    majority of K   more of K samples give the label than give any other class; a tie is no majority

Intervals are Wilson's at 95 %, over the images: several seeds make the rate steadier, not the sample larger.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, final

from diffpure.errors import InputError, unknown

CLEAN: Final = "clean"  # the name of the attack that changes nothing
WORST: Final = "worst case"  # per image, over clean and all attacks
MINIMUM: Final = "minimum"  # of the attacks' accuracies, as in the paper
ROWS: Final = "rows.jsonl"  # in the folder of a run
SUMMARY: Final = "summary.json"
WITHHELD: Final = "withheld.json"  # in place of adversarial images that may not be passed on
FORMAT: Final = 2  # of the header and the rows
Z95: Final = 1.959963984540054  # two-sided 95 %


@final
@dataclass(frozen=True)
class Rate:
    """A share of images with Wilson's 95 % interval; `correct` may be a fraction, as a mean over seeds is."""

    correct: float
    total: int

    def __post_init__(self) -> None:
        if not (self.total > 0 and 0 <= self.correct <= self.total):
            raise InputError(f"A rate counts 0 … n of n > 0 images, got {self.correct} of {self.total}.")

    @property
    def value(self) -> float:
        """The share itself."""
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
        p, n = self.value, self.total
        centre = (p * n + Z95**2 / 2) / (n + Z95**2)
        half = Z95 / (n + Z95**2) * math.sqrt(n * p * (1 - p) + Z95**2 / 4)
        # At the ends the formula gives 0 and 1 exactly, but for rounding.
        return (centre - half if p > 0 else 0.0), (centre + half if p < 1 else 1.0)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """One image under one attack (or `clean`), for one seed of the evaluation.

    predictions: the class each evaluation sample gave, a single one where the model is not random.
    averages: for each N of an "average of N" rule, the class of the mean logits of the first N samples.
    size, within: how much of the budget the attack's perturbation took, and whether it kept it (if not, the
    perturbation was projected back before it was evaluated).   misclassified: what the attack itself believed.
    gradients, queries: evaluations of the model that the attack made, with and without a gradient.   zero, nonfinite:
    how many of its gradients were.   network, classifier (…_gradient): calls of the purifier's network and of the
    classifier that were counted, without (with) a graph, the evaluation samples included.
    """

    seed: int
    image: int
    attack: str
    label: int
    predictions: tuple[int, ...]
    averages: Mapping[int, int] = field(default_factory=dict)
    size: float = 0.0
    within: bool = True
    misclassified: bool = False
    gradients: int = 0
    queries: int = 0
    zero: int = 0
    nonfinite: int = 0
    network: int = 0
    network_gradient: int = 0
    classifier: int = 0
    classifier_gradient: int = 0
    seconds: float = 0.0

    @property
    def key(self) -> tuple[int, int, str]:
        """What there is one row of: (seed, image, attack)."""
        return self.seed, self.image, self.attack

    def line(self) -> str:
        """The row as one line of JSON with a checksum of everything but the time."""
        return sealed(asdict(self))

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        """The row that a line of JSON held, if its checksum is right."""
        values = unsealed(data, _KINDS, "an evaluation")
        averages = {int(n): k for n, k in values["averages"].items()}
        return cls(**{**values, "predictions": tuple(values["predictions"]), "averages": averages})


def whole(value: Any) -> bool:
    """Whether a file holds a whole number there."""
    return type(value) is int and abs(value) < 1 << 64


def finite(value: Any) -> bool:
    """Whether a file holds a finite number there."""
    return type(value) in (int, float) and abs(value) < math.inf


def sealed(data: Mapping[str, Any]) -> str:
    """A row as one line of JSON with a checksum of everything but its time."""
    rest = {k: v for k, v in data.items() if k != "seconds"}
    return json.dumps({**rest, "seconds": data["seconds"], "sum": _checksum(rest)}, allow_nan=False)


def unsealed(data: Mapping[str, Any], kinds: Mapping[str, Callable[[Any], bool]], what: str) -> dict[str, Any]:
    """The values that a line of JSON held, if each is of its kind and the checksum is right."""
    if (missing := kinds.keys() - data.keys()) or (extra := data.keys() - kinds.keys() - {"sum"}):
        raise InputError(f"This is no row of {what}: its keys differ in {', '.join(missing or extra)}.")
    values = {k: v for k, v in data.items() if k != "sum"}
    if wrong := [name for name, kind in kinds.items() if not kind(values[name])]:
        raise InputError(f"This is no row of {what}: its {wrong[0]} is {cut(values[wrong[0]])}.")
    if data.get("sum") != _checksum({k: v for k, v in values.items() if k != "seconds"}):
        where = ", ".join(f"{key} {data[key]}" for key in ("image", "attack", "seed") if key in data)
        raise InputError(f"The row of {where} was edited: its checksum is not that of its content.")
    return values


# What the fields of a row are, where a file holds them.
_KINDS: Final[dict[str, Callable[[Any], bool]]] = {
    **dict.fromkeys((f.name for f in fields(Row) if f.type == "int"), whole),
    **dict.fromkeys((f.name for f in fields(Row) if f.type == "float"), finite),
    **dict.fromkeys((f.name for f in fields(Row) if f.type == "bool"), lambda value: type(value) is bool),
    "attack": lambda value: isinstance(value, str),
    "predictions": lambda value: isinstance(value, list) and value != [] and all(map(whole, value)),
    "averages": lambda value: (
        isinstance(value, dict) and all(re.fullmatch(r"\d{1,9}", n) and whole(k) for n, k in value.items())
    ),
}


def _checksum(data: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(data))  # keys become strings before they are sorted
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


@final
@dataclass(frozen=True)
class Rule:
    """When an image counts as right, given n samples."""

    kind: str
    n: int = 1

    def __post_init__(self) -> None:
        if self.kind not in RULES:
            raise unknown("decision rule", self.kind, (f"{k} of N" if k != "one-shot" else k for k in RULES))
        if self.n < 1 or (self.kind == "one-shot" and self.n != 1):
            raise InputError(f"A decision rule needs one sample or more (one-shot exactly one), got {self.n}.")

    @classmethod
    def parse(cls, text: str | Rule) -> Rule:
        """The rule written as "one-shot", "average of 10", "worst of 10" or "majority of 10"."""
        if isinstance(text, Rule):
            return text
        if not isinstance(text, str):
            raise InputError(f'A decision rule is "one-shot" or "average/worst/majority of N", got {text!r}.')
        match = re.fullmatch(r"\s*([\w-]+)(?:\s+of\s+(\d+))?\s*", text)
        if match is None or (match[1] in RULES and (match[2] is None) != (match[1] == "one-shot")):
            raise InputError(f'A decision rule is "one-shot" or "average/worst/majority of N", got {text!r}.')
        return cls(match[1], int(match[2] or 1))

    def right(self, row: Row) -> bool:
        """Whether the row's image counts as right."""
        if len(row.predictions) == 1:  # one sample is all there is of a model that is not random
            return row.predictions[0] == row.label
        if len(row.predictions) < self.n:
            raise InputError(f"The rule {self} needs {self.n} samples, but the rows hold {len(row.predictions)}.")
        return RULES[self.kind](row, self.n)

    def __str__(self) -> str:
        return self.kind if self.kind == "one-shot" else f"{self.kind} of {self.n}"


def _average(row: Row, n: int) -> bool:
    if n not in row.averages:
        raise InputError(f"These rows hold no average of {n} samples; they hold those of {list(row.averages)}.")
    return row.averages[n] == row.label


def _majority(row: Row, n: int) -> bool:
    votes = Counter(row.predictions[:n])
    return all(votes[row.label] > count for k, count in votes.items() if k != row.label) and row.label in votes


RULES: Final[dict[str, Callable[[Row, int], bool]]] = {
    "one-shot": lambda row, n: row.predictions[0] == row.label,
    "average": _average,
    "worst": lambda row, n: all(k == row.label for k in row.predictions[:n]),
    "majority": _majority,
}
DEFAULT_RULES: Final = (Rule("one-shot"), Rule("average", 10), Rule("worst", 10), Rule("majority", 10))


def cut(value: Any) -> str:
    """A value as a sentence can hold it."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]} …"


def slug(name: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^\w.-]", "_", name)


def ordered(rows: Iterable[Row], header: Mapping[str, Any]) -> tuple[Row, ...]:
    """The rows by seed, attack and image, in the order of the header, whatever order they were written in."""
    attacks = _order((CLEAN, *header["attacks"]))
    images, seeds = _order(header["indices"]), _order(header["seeds"])
    found: dict[tuple[int, int, str], Row] = {}
    for row in rows:
        if row.key in found or row.seed not in seeds or row.attack not in attacks or row.image not in images:
            what = "a second row" if row.key in found else "a row that is no part of this run"
            raise InputError(f"There is {what}: image {row.image}, attack {row.attack}, seed {row.seed}.")
        found[row.key] = row
    return tuple(sorted(found.values(), key=lambda r: (seeds[r.seed], attacks[r.attack], images[r.image])))


def _order(items: Sequence[Any]) -> dict[Any, int]:
    return {item: i for i, item in enumerate(items)}

"""Rows, and the numbers that are views of them. Nothing here imports torch.

A row is what happened to one image under one attack: the classes that fresh samples of the defence gave. A random
defence has no single accuracy, so a rule says when the row is right:

    one-shot        the first draw is right
    average of N    the mean of the logits of N samples is right
    worst of N      all of N samples are right
    majority of K   more of K samples give the label than give any other class; a tie is no majority

The worst case counts an image as robust if it is right unperturbed and under every attack, so it is never above the
clean accuracy; the paper's number, the minimum over attacks of their accuracies, stands beside it. Intervals are
Wilson's at 95 %, over the images: several seeds make the rate steadier, not the sample larger.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, final

from diffpure.disk import one_sentence, write_whole
from diffpure.errors import InputError, unknown

CLEAN: Final = "clean"  # the name of the attack that changes nothing
WORST: Final = "worst case"  # per image, over clean and all attacks
MINIMUM: Final = "minimum"  # of the attacks' accuracies, as in the paper
ROWS: Final = "rows.jsonl"  # in the folder of a run
SUMMARY: Final = "summary.json"
_Z: Final = 1.959963984540054  # two-sided 95 %


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
        centre = (p * n + _Z**2 / 2) / (n + _Z**2)
        half = _Z / (n + _Z**2) * math.sqrt(n * p * (1 - p) + _Z**2 / 4)
        # At the ends the formula gives 0 and 1 exactly, but for rounding.
        return (centre - half if p > 0 else 0.0), (centre + half if p < 1 else 1.0)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """One image under one attack (or `clean`), for one seed of the evaluation.

    predictions: the class each fresh draw gave, a single one where the model is not random.
    averages: for each N of an "average of N" rule, the class of the mean logits of the first N samples.
    size, within: how much of the budget the attack's perturbation took, and whether it kept it (if not, the
    perturbation was moved back inside before it was judged).   misclassified: what the attack itself believed.
    gradients, queries, zero, nonfinite: what the attack spent, and how many of its gradients were zero or not finite.
    score_calls: calls of the score network, the final samples included.
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
    score_calls: int = 0
    seconds: float = 0.0

    @property
    def key(self) -> tuple[int, int, str]:
        """What there is one row of: (seed, image, attack)."""
        return self.seed, self.image, self.attack

    def line(self) -> str:
        """The row as one line of JSON with a checksum of everything but the time."""
        data = {k: v for k, v in asdict(self).items() if k != "seconds"}
        return json.dumps({**data, "seconds": self.seconds, "sum": _checksum(data)}, allow_nan=False)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        """The row that a line of JSON held, if its checksum is right."""
        known = {f.name for f in fields(cls)}
        if (missing := known - data.keys()) or (extra := data.keys() - known - {"sum"}):
            raise InputError(f"This is no row of an evaluation: its keys differ in {', '.join(missing or extra)}.")
        values = {k: v for k, v in data.items() if k != "sum"}
        if data.get("sum") != _checksum({k: v for k, v in values.items() if k != "seconds"}):
            where = f"image {data['image']}, attack {data['attack']}, seed {data['seed']}"
            raise InputError(f"The row of {where} was edited: its checksum is not that of its content.")
        averages = {int(n): int(k) for n, k in values["averages"].items()}
        return cls(**{**values, "predictions": tuple(values["predictions"]), "averages": averages})


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
            raise InputError(f"A decision rule needs one draw or more (one-shot exactly one), got {self.n}.")

    @classmethod
    def parse(cls, text: str | Rule) -> Rule:
        """The rule written as "one-shot", "average of 10", "worst of 10" or "majority of 10"."""
        if isinstance(text, Rule):
            return text
        match = re.fullmatch(r"\s*([\w-]+)(?:\s+of\s+(\d+))?\s*", text)
        if match is None or (match[1] in RULES and (match[2] is None) != (match[1] == "one-shot")):
            raise InputError(f'A decision rule is "one-shot" or "average/worst/majority of N", got {text!r}.')
        return cls(match[1], int(match[2] or 1))

    def right(self, row: Row) -> bool:
        """Whether the row's image counts as right."""
        if len(row.predictions) == 1:  # one draw is all there is of a model that is not random
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


@final
@dataclass(frozen=True)
class Result:
    """What an evaluation found: its header, its rows, its warnings; every number is computed from the rows."""

    header: Mapping[str, Any]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The decision rules, the first one being the default of every number."""
        return tuple(Rule.parse(text) for text in self.header["rules"])

    @property
    def attacks(self) -> tuple[str, ...]:
        """The names of the attacks."""
        return tuple(self.header["attacks"])

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the evaluation."""
        return tuple(self.header["seeds"])

    @property
    def complete(self) -> bool:
        """Whether every image has its row for every seed and attack."""
        return len(self.rows) == len(self.seeds) * len(self.header["images"]) * (1 + len(self.attacks))

    def clean(self, rule: str | Rule | None = None) -> Rate:
        """Standard accuracy under a rule."""
        return self.rate(CLEAN, rule)

    def robust(self, rule: str | Rule | None = None) -> Rate:
        """Worst case per image, over the unperturbed image and all attacks."""
        return self.rate(WORST, rule)

    def minimum(self, rule: str | Rule | None = None) -> Rate:
        """The paper's number: the smallest accuracy of any attack."""
        return self.rate(MINIMUM, rule)

    def rate(self, what: str, rule: str | Rule | None = None) -> Rate:
        """The accuracy under `what`: clean, an attack's name, "worst case" or "minimum"; the mean over the seeds."""
        return Rate(statistics.fmean(self._counts(what, rule)), len(self.header["images"]))

    def over_seeds(self, what: str, rule: str | Rule | None = None) -> tuple[float, ...]:
        """The same accuracy for each seed alone; their deviation is `statistics.stdev` of it."""
        return tuple(count / len(self.header["images"]) for count in self._counts(what, rule))

    def _counts(self, what: str, rule: str | Rule | None) -> list[int]:
        """How many images are right, for each seed."""
        rule = self.rules[0] if rule is None else Rule.parse(rule)
        if what not in (CLEAN, WORST, MINIMUM, *self.attacks):
            raise unknown("attack", what, (CLEAN, WORST, MINIMUM, *self.attacks))
        if not self.complete:
            raise InputError(f"This evaluation is unfinished: it has {len(self.rows)} rows; resume it first.")
        return [self._count(what, rule, seed) for seed in self.seeds]

    def _count(self, what: str, rule: Rule, seed: int) -> int:
        if what == MINIMUM:
            return min(self._count(name, rule, seed) for name in self.attacks or (CLEAN,))
        names = (CLEAN, *self.attacks) if what == WORST else (what,)
        wrong = {r.image for r in self.rows if r.seed == seed and r.attack in names and not rule.right(r)}
        return len(self.header["images"]) - len(wrong)

    def save(self, path: str | Path) -> None:
        """Write the header (with the warnings) and the rows to one JSONL file, whole or not at all."""
        header = json.dumps({"header": {**self.header, "warnings": list(self.warnings)}})
        text = "".join(line + "\n" for line in (header, *(row.line() for row in self.rows)))
        with one_sentence(Path(path)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(Path(path), text.encode())

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """The result in a run's folder, or in a file that `save` wrote."""
        header, rows = read_rows(path)
        summary = Path(path) / SUMMARY
        kept = json.loads(summary.read_text("utf-8")) if summary.is_file() else header
        return cls(header, ordered(rows, header), tuple(kept.get("warnings", ())))

    def spent(self) -> dict[str, float]:
        """Gradients, queries, score calls and seconds of all rows together."""
        names = ("gradients", "queries", "score_calls", "seconds")
        return {name: sum(getattr(row, name) for row in self.rows) for name in names}

    def summary(self) -> dict[str, Any]:
        """Every rate as plain data: what a run keeps beside its rows."""
        lines = (CLEAN, *self.attacks, WORST, MINIMUM)
        rates = {what: {str(rule): self._entry(what, rule) for rule in self.rules} for what in lines}
        return {"rates": rates, "spent": self.spent(), "warnings": list(self.warnings)}

    def _entry(self, what: str, rule: Rule) -> dict[str, Any]:
        rate, each = self.rate(what, rule), self.over_seeds(what, rule)
        deviation = {"deviation": statistics.stdev(each)} if len(each) > 1 else {}
        return {"value": rate.value, "interval": list(rate.interval), **deviation}

    def __str__(self) -> str:
        if not self.complete:
            return f"An unfinished evaluation with {len(self.rows)} rows."
        lines = [("", *map(str, self.rules))]
        for what in (CLEAN, *self.attacks, WORST, MINIMUM):
            lines.append((_TITLES.get(what, what), *(self.cell(what, rule) for rule in self.rules)))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*self._heading(), "", *table, "", *self._footing()])

    def cell(self, what: str, rule: str | Rule | None = None) -> str:
        """The accuracy with its interval, and with its deviation where there are several seeds."""
        each = self.over_seeds(what, rule)
        spread = f" ± {100 * statistics.stdev(each):.1f}" if len(each) > 1 else ""
        return f"{self.rate(what, rule)}{spread}"

    def _heading(self) -> list[str]:
        model, images = self.header["model"], len(self.header["images"])
        seeds = f", {len(self.seeds)} seeds (mean ± deviation)" if len(self.seeds) > 1 else ""
        return [f"{model['title']} under {self.header['threat']}: accuracy [95 % interval] on {images} images{seeds}"]

    def _footing(self) -> list[str]:
        spent, model = self.spent(), self.header["model"]
        said = " (APPROXIMATE: robust accuracy may be overstated)" if model["approximate"] else ""
        cost = f"{spent['gradients']:,} gradients, {spent['queries']:,} queries, {spent['score_calls']:,} score calls"
        lines = [f"gradient: {model['gradient']}{said}", f"spent: {cost}, {spent['seconds']:.0f} s"]
        return lines + [f"warning: {text}" for text in self.warnings]


_TITLES: Final = {WORST: "worst case per image", MINIMUM: "minimum of attacks"}


def slug(name: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^\w.-]", "_", name)


def ordered(rows: Iterable[Row], header: Mapping[str, Any]) -> tuple[Row, ...]:
    """The rows by seed, attack and image, in the order of the header, whatever order they were written in."""
    attacks = _places((CLEAN, *header["attacks"]))
    images, seeds = _places(header["images"]), _places(header["seeds"])
    return tuple(sorted(rows, key=lambda r: (seeds[r.seed], attacks[r.attack], images[r.image])))


def _places(items: Sequence[Any]) -> dict[Any, int]:
    return {item: i for i, item in enumerate(items)}


def read_rows(path: str | Path, on_bad: Callable[[str], None] | None = None) -> tuple[dict[str, Any], list[Row]]:
    """The header and rows in a run's folder or file; a row not as it was written raises, or is told to `on_bad`."""
    path = Path(path) / ROWS if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise InputError(f"There is no run of an evaluation at {path}.")
    with one_sentence(path), path.open(encoding="utf-8") as file:
        try:
            header = json.loads(file.readline())["header"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} does not begin with the header of an evaluation.") from error
        rows = []
        for line in file:
            try:
                rows.append(Row.of(_parsed(line, path)))
            except InputError as error:
                if on_bad is None:
                    raise
                on_bad(str(error))
    return header, rows


def _parsed(line: str, path: Path) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path} holds a line that is no JSON: {line.strip()[:40]!r}.") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a line that is no row: {line.strip()[:40]!r}.")
    return data

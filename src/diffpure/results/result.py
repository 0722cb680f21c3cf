"""`Result`: every number of an evaluation as a view of its rows. Nothing here imports torch.

The worst case counts an image as robust if it is right unperturbed and under every attack, so it is never above the
clean accuracy; the paper's number, the minimum over attacks of their accuracies, stands beside it. Without an attack
there is no robust accuracy, and none is printed.
"""

from __future__ import annotations

import html
import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from diffpure.disk import one_sentence, write_whole
from diffpure.errors import InputError, unknown
from diffpure.results.read import read_rows
from diffpure.results.rows import CLEAN, MINIMUM, SUMMARY, WORST, Rate, Row, Rule, ordered
from diffpure.results.text import aligned, as_html

SPENT: Final = ("gradients", "queries", "network", "network_gradient", "classifier", "classifier_gradient", "seconds")
TITLES: Final = {CLEAN: "no attack", WORST: "worst case per image", MINIMUM: "minimum of attacks"}
NOT_MEASURED: Final = "not measured: the evaluation has no attack"


@final
@dataclass(frozen=True)
class Result:
    """What an evaluation found: its header, its rows, its warnings; every number is computed from the rows."""

    header: Mapping[str, Any]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()
    folder: Path | None = None  # where the run lies, if it was kept

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
    def indices(self) -> tuple[int, ...]:
        """The dataset indices of the images."""
        return tuple(self.header["indices"])

    @property
    def complete(self) -> bool:
        """Whether every image has its row for every seed and attack."""
        return len(self.rows) == len(self.seeds) * len(self.indices) * (1 + len(self.attacks))

    @property
    def lines(self) -> tuple[str, ...]:
        """What there is a rate of; without an attack there is no worst case."""
        return (CLEAN, *self.attacks, WORST, MINIMUM) if self.attacks else (CLEAN,)

    def title(self, what: str) -> str:
        """What a line of a table is called: an attack with its parameters and its gradient."""
        about = self.header["attacks"].get(what)
        if about is None:
            return TITLES.get(what, what)
        gradient = about["gradient"] and f", {about['gradient']} gradient"
        return f"{about['title']}{gradient}{' (approximate)' if about['approximate'] else ''}"

    def clean(self, rule: str | Rule | None = None) -> Rate:
        """Standard accuracy under a rule."""
        return self.rate(CLEAN, rule)

    def robust(self, rule: str | Rule | None = None) -> Rate:
        """The worst case per image over all attacks."""
        return self.rate(WORST, rule)

    def minimum(self, rule: str | Rule | None = None) -> Rate:
        """The smallest accuracy under a single attack, as the paper reports it."""
        return self.rate(MINIMUM, rule)

    def rate(self, what: str, rule: str | Rule | None = None) -> Rate:
        """The accuracy under `what`: "clean" ("no attack"), an attack's name or kind, "worst case" or "minimum"; the
        mean over the seeds."""
        return Rate(statistics.fmean(self._counts(what, rule)), len(self.indices))

    def over_seeds(self, what: str, rule: str | Rule | None = None) -> tuple[float, ...]:
        """The same accuracy for each seed alone; their deviation is `statistics.stdev` of it."""
        return tuple(count / len(self.indices) for count in self._counts(what, rule))

    def right(self, what: str, rule: str | Rule | None = None, seed: int | None = None) -> dict[int, bool]:
        """Which images are right for one seed (the first by default), by dataset index."""
        rule = self.rules[0] if rule is None else Rule.parse(rule)
        line = self._line(what)
        if line == MINIMUM:
            raise InputError("The minimum is the smallest accuracy of an attack; no image is right or wrong under it.")
        wrong = self._wrong(line, rule, self.seeds[0] if seed is None else seed)
        return {index: index not in wrong for index in self.indices}

    def _line(self, what: str) -> str:
        """The name of a line of rates, from its name or its title, or from an attack's kind where only one is of it."""
        if what in (CLEAN, WORST, MINIMUM, *self.attacks):
            return what
        titled = [line for line in (CLEAN, WORST, MINIMUM, *self.attacks) if self.title(line) == what]
        alike = titled or [name for name in self.attacks if re.split("[-@]", name)[0] == what]
        if len(alike) != 1:
            raise unknown("attack", what, (CLEAN, WORST, MINIMUM, *self.attacks))
        return alike[0]

    def _counts(self, what: str, rule: str | Rule | None) -> list[int]:
        """How many images are right, for each seed."""
        rule = self.rules[0] if rule is None else Rule.parse(rule)
        what = self._line(what)
        if what in (WORST, MINIMUM) and not self.attacks:
            raise InputError(f"The robust accuracy was {NOT_MEASURED}.")
        if not self.complete:
            raise InputError(f"This evaluation is unfinished: it has {len(self.rows)} rows; resume it first.")
        return [self._count(what, rule, seed) for seed in self.seeds]

    def _count(self, what: str, rule: Rule, seed: int) -> int:
        if what == MINIMUM:
            return min(self._count(name, rule, seed) for name in self.attacks)
        return len(self.indices) - len(self._wrong(what, rule, seed))

    def _wrong(self, what: str, rule: Rule, seed: int) -> set[int]:
        names = (CLEAN, *self.attacks) if what == WORST else (what,)
        return {r.image for r in self.rows if r.seed == seed and r.attack in names and not rule.right(r)}

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
        try:
            kept = json.loads(summary.read_text("utf-8")) if summary.is_file() else header
            warnings = tuple(map(str, kept.get("warnings", ())))
        except (ValueError, AttributeError, TypeError) as error:
            raise InputError(
                f"The file {summary} is damaged; delete it and evaluate again to write it anew."
            ) from error
        return cls(header, ordered(rows, header), warnings, Path(path) if Path(path).is_dir() else None)

    def spent(self) -> dict[str, float]:
        """Evaluations, counted calls and seconds of all rows together."""
        return {name: sum(getattr(row, name) for row in self.rows) for name in SPENT}

    def summary(self) -> dict[str, Any]:
        """Every rate as plain data: what a run keeps beside its rows."""
        rates = {what: {str(rule): self._entry(what, rule) for rule in self.rules} for what in self.lines}
        return {"rates": rates, "spent": self.spent(), "warnings": list(self.warnings)}

    def _entry(self, what: str, rule: Rule) -> dict[str, Any]:
        rate, each = self.rate(what, rule), self.over_seeds(what, rule)
        deviation = {"deviation": statistics.stdev(each)} if len(each) > 1 else {}
        return {"value": rate.value, "interval": list(rate.interval), **deviation}

    def cell(self, what: str, rule: str | Rule | None = None) -> str:
        """The accuracy with its interval, and with its deviation where there are several seeds."""
        each = self.over_seeds(what, rule)
        spread = f" ± {100 * statistics.stdev(each):.1f}" if len(each) > 1 else ""
        return f"{self.rate(what, rule)}{spread}"

    def table(self) -> list[list[str]]:
        """The rates as rows of text, the first one the heading."""
        head = ["", *map(str, self.rules)]
        return [head, *([self.title(what), *(self.cell(what, rule) for rule in self.rules)] for what in self.lines)]

    def __str__(self) -> str:
        if not self.complete:
            return f"An unfinished evaluation with {len(self.rows)} rows."
        return "\n".join([self.heading, "", *aligned(self.table()), "", *self._footing()])

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return as_html(self.heading, self.table(), self._footing()) if self.complete else html.escape(str(self))

    def report(self, out: str | Path, kind: str | None = None) -> None:
        """Write the page about this evaluation: html, md, csv, json, png or pdf, by the file's ending unless named.

        A run that was kept in a folder shows its pictures.
        """
        # By the package's own door, as pages know results, but results know no pages.
        from diffpure import write_report

        write_report([self], out, kind)

    @property
    def heading(self) -> str:
        """What was evaluated, under which threat, on how many images."""
        seeds = f", {len(self.seeds)} seeds (mean ± deviation)" if len(self.seeds) > 1 else f", seed {self.seeds[0]}"
        about = f"{self.header.get('name') or self.header['model']['title']} under {self.header['threat']}"
        return f"{about}: accuracy [95 % interval] on {len(self.indices)} images{seeds}"

    def _footing(self) -> list[str]:
        spent = self.spent()
        calls = spent["network"] + spent["network_gradient"]
        cost = (
            f"{spent['gradients']:,} gradients and {spent['queries']:,} queries of the model, {calls:,} network calls"
        )
        measured = [] if self.attacks else [f"robust accuracy: {NOT_MEASURED}"]
        return [*measured, f"spent: {cost}, {spent['seconds']:.0f} s", *(f"warning: {text}" for text in self.warnings)]

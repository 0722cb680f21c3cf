"""The tables and the sentences of a report as plain texts, before any format: rates, runs at a glance, images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from diffpure.pictures.gallery import strongest
from diffpure.report import words
from diffpure.report.runs import ReportedRun
from diffpure.results.result import TITLES
from diffpure.results.rows import CLEAN, MINIMUM, WORST, Row, Rule

LISTED: Final = 1000  # images of a run that a page lists


@final
@dataclass(frozen=True)
class RateLine:
    """One line of a table of rates: an attack with its name in the rows, and a cell for each decision rule."""

    title: str
    name: str
    cells: tuple[str, ...]
    total: bool


@final
@dataclass(frozen=True)
class ImageLine:
    """One image: its dataset index, its label, what it was classified as (and whether correctly), and what misled."""

    index: int
    label: str
    predictions: tuple[tuple[str, bool], ...]
    misclassified: tuple[str, ...]


def rates(run: ReportedRun) -> list[RateLine]:
    """The accuracy under everything that was measured; without attacks, that robustness was not."""
    result = run.result
    lines = []
    for what in result.lines:
        cells = tuple(result.cell(what, rule) for rule in result.rules)
        name = what if what in result.attacks else ""
        lines.append(RateLine(run.title(what), name, cells, what in (WORST, MINIMUM)))
    if not result.attacks:
        lines.append(RateLine("robust accuracy", "", (words.NOT_MEASURED,) * len(result.rules), True))
    return lines


def conclusion(run: ReportedRun) -> str:
    """What a run found, in one sentence, under its first decision rule."""
    result, header = run.result, run.result.header
    model = "the purified classifier" if words.defended(header) else "the classifier"
    how = str(result.rules[0]) + (f", mean over {len(result.seeds)} seeds" if len(result.seeds) > 1 else "")
    images = f"{len(result.indices):,} images"
    if not result.attacks:
        kind, what = "Without attack", ""
        if words.from_file(header):  # somebody may have attacked the images before
            kind, what = "Without a further attack", " read from a file"
        rate = f"{result.cell(CLEAN)} of {images}{what}"
        return f"{kind} {model} is correct on {rate} ({how}); robust accuracy: {words.NOT_MEASURED}."
    attack = strongest(result)
    head, comma, rest = run.title(attack).partition(", ")
    if " + " in rest:  # a suite: the commas belong to its parts
        head, rest = head + comma + rest, ""
    how_strong = ", ".join(filter(None, (words.threat(header), rest)))
    several = len(result.attacks) > 1
    which = f", the strongest of {len(result.attacks)} attacks," if several else ""
    worst = f", and {result.cell(WORST)} in the worst case per image" if several else ""
    against = f"against {result.cell(CLEAN)} without attack ({how})"
    return f"Under {head} ({how_strong}){which} {model} keeps {result.cell(attack)} of {images}{worst}, {against}."


GLANCE: Final = ("run", "no attack", "worst case per image", "under its strongest attack", "attack", "images", "rule")


def glance(run: ReportedRun) -> tuple[str, ...]:
    """A run in one line, with the columns of `GLANCE` after its name, under its first decision rule."""
    result = run.result
    robust = (words.NOT_MEASURED, words.NOT_MEASURED, "none")
    if result.attacks:
        attack = strongest(result)
        robust = (result.cell(WORST), result.cell(attack), f"{run.title(attack)}, {words.threat(result.header)}")
    return result.cell(CLEAN), *robust, f"{len(result.indices):,}", str(result.rules[0])


def facts(run: ReportedRun) -> list[tuple[str, str]]:
    """What was evaluated, on what, when and at what cost; a threat belongs to attacks."""
    result, header = run.result, run.result.header
    seeds = result.seeds
    found = [("Model", header["model"]["title"]), ("Images", words.images(header))]
    found += [("Threat", words.threat(header))] if result.attacks else []
    found.append((f"Seed{'s' if len(seeds) > 1 else ''}", words.ranges(seeds)))
    found.append(("Date", words.date(header)))
    spent = result.spent()
    network = spent["network"] + spent["network_gradient"]
    counts = {"gradients": spent["gradients"], "queries": spent["queries"], "network calls": network}
    cost = [f"{count:,.0f} {what}" for what, count in counts.items() if count]
    return [*found, ("Cost", ", ".join([*cost, f"{spent['seconds']:,.1f} seconds"]))]


def shown_attacks(run: ReportedRun) -> tuple[str, ...]:
    """What the table of images has predictions under: no attack, and the strongest one."""
    return (CLEAN, strongest(run.result)) if run.result.attacks else (CLEAN,)


def about_images(run: ReportedRun) -> str:
    """What the table of images shows, and of how many."""
    result = run.result
    count = len(result.indices)
    seed = f", seed {result.seeds[0]}" if len(result.seeds) > 1 else ""
    some = f" The first {LISTED:,} of {count:,}; the rows of the run hold all of them." if count > LISTED else ""
    return f"The class of each image under the rule {result.rules[0]}{seed} (✓ correct, ✗ misclassified).{some}"


def images(run: ReportedRun) -> list[ImageLine]:
    """The images of a run's first seed in their order, judged by its first decision rule."""
    result = run.result
    rule, shown = result.rules[0], shown_attacks(run)
    rows = {(row.attack, row.image): row for row in result.rows if row.seed == result.seeds[0]}
    lines = []
    for index in result.indices[:LISTED]:
        own = {what: rows[what, index] for what in (CLEAN, *result.attacks)}
        classes = tuple((run.class_name(predicted(own[what], rule)), rule.right(own[what])) for what in shown)
        wrong = tuple(TITLES.get(what, what) for what, row in own.items() if not rule.right(row))
        lines.append(ImageLine(index, run.class_name(own[CLEAN].label), classes, wrong))
    return lines


def predicted(row: Row, rule: Rule) -> int:
    """The class that a decision rule gives an image; the worst of N is the first sample that is wrong, if one is."""
    samples: Sequence[int] = row.predictions[: rule.n]
    if len(row.predictions) == 1 or rule.kind == "one-shot":
        return samples[0]
    if rule.kind == "average":
        return row.averages[rule.n]
    if rule.kind == "worst":
        return next((k for k in samples if k != row.label), row.label)
    return Counter(samples).most_common(1)[0][0]

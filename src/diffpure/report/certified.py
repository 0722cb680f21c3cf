"""A report about certificates: certified accuracy by radius, as a plot and in numbers, and every image's radius."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from diffpure.report import panels, plots, words
from diffpure.report.template import render
from diffpure.report.texts import cell, marked
from diffpure.results.certificates import Certification

MEANING: Final = (
    "A certificate says that no perturbation whatever of an ℓ2 norm below the radius changes the class that the "
    "smoothed classifier gives, with probability at least 1 − α over the draws that made the certificate. It says "
    "nothing of a single answer of the defence, of larger perturbations or of other norms."
)
CAPTION: Final = "Certified accuracy against the ℓ2 radius, 95 % intervals; dotted: the most that the draws allow."
IMAGES: Final = ("dataset index", "label", "class", "draws for it", "lower bound of its probability", "ℓ2 radius")
LISTED: Final = 1000  # images of a run that a page lists
COLUMNS: Final = (
    "run",
    "date",
    "model",
    "sigma",
    "n",
    "alpha",
    "votes",
    "radius",
    "images",
    "certified",
    "low",
    "high",
)


@final
@dataclass(frozen=True)
class CertifiedRun:
    """A finished run of certificates under the name that a page gives it."""

    name: str
    result: Certification


def _named(runs: Sequence[Certification]) -> list[CertifiedRun]:
    return [CertifiedRun(f"{words.name(run.header, run.name)}, σ = {run.sigma:g}", run) for run in runs]


def html(runs: Sequence[Certification]) -> str:
    """The page."""
    plot = panels.data_url(plots.encoded(plots.certified(runs)))
    texts = {"meaning": MEANING, "caption": CAPTION, "columns": IMAGES}
    views = {"conclusion": conclusion, "by_radius": by_radius, "facts": facts, "images": images}
    return render("certified.html", runs=_named(runs), plot=plot, **texts, **views)


def conclusion(run: CertifiedRun) -> str:
    """What a run found, in one sentence."""
    result = run.result
    inside = [radius for radius in result.radii if 0 < radius < result.largest_radius][:3]
    kept = ", ".join(f"{result.certified(radius)} within ℓ2 {radius:g}" for radius in inside)
    return (
        f"The smoothed classifier is right on {result.certified(0)} of {len(result.rows):,} images"
        f"{f' and provably stays so on {kept}' if kept else ''}; it abstains from {result.abstained}."
    )


def by_radius(runs: Sequence[CertifiedRun]) -> list[tuple[str, list[str]]]:
    """The certified accuracies of all runs, radius by radius."""
    radii = sorted({radius for run in runs for radius in run.result.radii})
    lines = [(f"{radius:g}", [run.result.cell(radius) for run in runs]) for radius in radii]
    lines.append(("mean radius", [f"{run.result.mean_radius:.3f}" for run in runs]))
    return [*lines, ("abstained", [str(run.result.abstained) for run in runs])]


def facts(run: CertifiedRun) -> list[tuple[str, str]]:
    """What was certified, on what, how, when and at what cost."""
    result, header = run.result, run.result.header
    spent, votes = result.spent(), header["votes"]
    draws = f"{header['n0']:,} choose the class, {header['n']:,} others count it"
    chains = f", each the majority of {votes} reverse chains" if votes > 1 else ""
    return [
        ("Model", str(header["model"]["title"])),
        ("Images", words.images(header)),
        ("Noise", f"σ = {result.sigma:g} on images in [0, 1], which is t* = {header.get('t_star')}"),
        ("Draws per image", draws + chains),
        ("α per image", f"{header['alpha']:g}"),
        ("Largest radius", f"{result.largest_radius:.3f}, where all draws agree"),
        ("Seed", str(header["seed"])),
        ("Date", words.date(header)),
        ("Cost", f"{spent['network']:,} network calls, {spent['seconds']:,.1f} seconds"),
    ]


def images(run: CertifiedRun) -> list[tuple[tuple[str, ...], bool]]:
    """The images in their order with the columns `IMAGES`, and whether each is right."""
    header = run.result.header
    lines: list[tuple[tuple[str, ...], bool]] = []
    for row in run.result.rows[:LISTED]:
        mark = "✓ " if row.right else "✗ "
        said = "abstained" if row.prediction is None else mark + words.class_name(header, row.prediction)
        radius = "" if row.prediction is None else f"{row.radius:.3f}"
        counted = (f"{row.count:,} of {row.n:,}", f"{row.p:.4f}", radius)
        lines.append(((str(row.image), words.class_name(header, row.label), said, *counted), row.right))
    return lines


def markdown(runs: Sequence[Certification]) -> str:
    """A table of certified accuracies by radius, and a section per run."""
    named = _named(runs)
    lines = ["| ℓ2 radius | " + " | ".join(marked(run.name) for run in named) + " |", "|---" * (len(named) + 1) + "|"]
    lines += [f"| {radius} | {' | '.join(cells)} |" for radius, cells in by_radius(named)]
    for run in named:
        lines += ["", f"## {marked(run.name)}", "", marked(conclusion(run)), ""]
        lines += [f"- {term}: {marked(said)}" for term, said in facts(run)]
    return "\n".join([*lines, "", MEANING]) + "\n"


def comma_separated(runs: Sequence[Certification]) -> str:
    """Every certified accuracy as a line of CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in _named(runs):
        header = run.result.header
        about = (cell(run.name), cell(words.date(header)), cell(str(header["model"]["title"])))
        settings = tuple(header[key] for key in ("sigma", "n", "alpha", "votes"))
        for radius in run.result.radii:
            rate = run.result.certified(radius)
            writer.writerow((*about, *settings, radius, rate.total, rate.value, *rate.interval))
    return out.getvalue()


def as_json(runs: Sequence[Certification]) -> str:
    """Every number as JSON, with the conclusion."""
    found: list[dict[str, Any]] = [
        {"name": run.name, "conclusion": conclusion(run), **run.result.summary()} for run in _named(runs)
    ]
    return json.dumps(found, indent=1) + "\n"


FORMATS: Final[dict[str, Callable[[Sequence[Certification]], str]]] = {
    "html": html,
    "md": markdown,
    "csv": comma_separated,
    "json": as_json,
}

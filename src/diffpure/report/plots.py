"""Plots of runs in one style: accuracy along an axis, without attack against the worst case, certified by radius."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from diffpure.report import words
from diffpure.report.runs import ReportedRun
from diffpure.results.certificates import Certification
from diffpure.results.result import TITLES
from diffpure.results.rows import CLEAN, WORST, Rate

STANDARD, ROBUST = "#1f6feb", "#c62828"
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 10,
}


def along(axis: str, points: Sequence[tuple[float, ReportedRun]]) -> Figure:
    """Accuracy under no attack and in the worst case, with intervals, along an axis."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
        lines = ((CLEAN, STANDARD), (WORST, ROBUST))
        for what, colour in lines if all(run.result.attacks for _, run in points) else lines[:1]:
            rates = [run.result.rate(what) for _, run in points]
            values = [value for value, _ in points]
            heights = [100 * rate.value for rate in rates]
            ax.errorbar(values, heights, yerr=_bars(rates), fmt="o-", color=colour, capsize=3, label=TITLES[what])
        ax.set(xlabel=_literal(axis), ylabel="accuracy (%)", ylim=(-3, 103))
        ax.legend(frameon=False)
    return figure


def trade_off(runs: Sequence[ReportedRun]) -> Figure:
    """Accuracy under no attack against the worst case per image, one point per run."""
    with plt.rc_context(STYLE):
        names = [textwrap.fill(_literal(run.name), 75) for run in runs]
        lines = sum(1 + name.count("\n") for name in names)
        figure, ax = plt.subplots(figsize=(5.2, 3.4 + 0.17 * lines), layout="constrained")
        for run, name in zip(runs, names, strict=True):
            clean, robust = run.result.clean(), run.result.robust()
            point = ([100 * clean.value], [100 * robust.value])
            ax.errorbar(*point, xerr=_bars([clean]), yerr=_bars([robust]), fmt="o", capsize=3, label=name)
        across, up = (f"accuracy, {TITLES[what]} (%)" for what in (CLEAN, WORST))
        ax.set(xlabel=across, ylabel=up, xlim=(-3, 103), ylim=(-3, 103))
        figure.legend(loc="outside lower left", frameon=False, fontsize=8)  # names may be longer than the plot is wide
    return figure


def certified(runs: Sequence[Certification]) -> Figure:
    """Certified accuracy against the ℓ2 radius, with its interval as a band, one line per run."""
    with plt.rc_context(STYLE):
        names = [textwrap.fill(_literal(f"{words.name(r.header, r.name)}, σ = {r.sigma:g}"), 75) for r in runs]
        lines = sum(1 + name.count("\n") for name in names)
        figure, ax = plt.subplots(figsize=(5.2, 3.4 + 0.17 * lines), layout="constrained")
        for run, name in zip(runs, names, strict=True):
            # The accuracy falls just above the radius of each image, and is 0 above the largest.
            radii = sorted({0.0, *(row.radius for row in run.rows if row.right)})
            rates = [run.certified(radius) for radius in radii]
            low, high = ([100 * rate.interval[end] for rate in rates] for end in (0, 1))
            (line,) = ax.step(radii, [100 * rate.value for rate in rates], where="pre", label=name)
            ax.fill_between(radii, low, high, step="pre", alpha=0.2, color=line.get_color(), linewidth=0)
            ax.axvline(run.largest_radius, color=line.get_color(), linestyle=":", linewidth=1)
        ax.set(xlabel="ℓ2 radius (images in [0, 1])", ylabel="certified accuracy (%)", ylim=(-3, 103))
        ax.set_xlim(left=0)
        figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    return figure


def errors(lines: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Relative errors against step sizes in logarithmic axes, one line per name.

    A name is a gradient and a case, such as "Exact(), σ0² = 0.1": a case has a colour, a gradient a style of lines, so
    that gradients which agree are seen through each other.
    """
    gradients = list(dict.fromkeys(name.partition(", ")[0] for name in lines))
    cases = list(dict.fromkeys(name.partition(", ")[2] for name in lines))
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        for name, line in lines.items():
            gradient, _, case = name.partition(", ")
            style = ("-", "--", ":", "-.")[gradients.index(gradient) % 4]
            how = {"color": f"C{cases.index(case)}", "linestyle": style, "linewidth": 3.0 if style == "-" else 1.5}
            ax.loglog(line["step sizes"], line["errors"], alpha=0.6 if style == "-" else 1, label=_literal(name), **how)
        ax.set(xlabel="step size", ylabel="relative error of the gradient")
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _literal(text: str) -> str:
    """A text that is drawn as it is: no mathematics, and no leading underscore, which would hide it from a legend."""
    return ("\N{NO-BREAK SPACE}" if text.startswith("_") else "") + text.replace("$", r"\$")


def _bars(rates: Sequence[Rate]) -> list[list[float]]:
    below = [100 * (rate.value - rate.interval[0]) for rate in rates]
    above = [100 * (rate.interval[1] - rate.value) for rate in rates]
    return [below, above]


def encoded(figure: Figure, kind: str = "png") -> bytes:
    """The figure as a PNG or PDF; it is closed."""
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=140, facecolor="white")
    plt.close(figure)
    return out.getvalue()

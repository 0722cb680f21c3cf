"""Plots of runs in one style: accuracy along an axis, and standard against robust accuracy."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from diffpure.evaluation.rows import CLEAN, WORST, Rate
from diffpure.report.runs import Run

STANDARD, ROBUST = "#1f6feb", "#c62828"
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 10,
}


def along(axis: str, points: Sequence[tuple[float, Run]]) -> Figure:
    """Standard and worst-case accuracy with intervals along an axis."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
        lines = ((CLEAN, STANDARD, "standard"), (WORST, ROBUST, "robust, worst case"))
        for what, colour, name in lines if all(run.result.attacks for _, run in points) else lines[:1]:
            rates = [run.result.rate(what) for _, run in points]
            values = [value for value, _ in points]
            heights = [100 * rate.value for rate in rates]
            ax.errorbar(values, heights, yerr=_bars(rates), fmt="o-", color=colour, capsize=3, label=name)
        ax.set(xlabel=axis, ylabel="accuracy (%)", ylim=(-3, 103))
        ax.legend(frameon=False)
    return figure


def trade_off(runs: Sequence[Run]) -> Figure:
    """Standard against worst-case accuracy, one point a run."""
    with plt.rc_context(STYLE):
        names = [textwrap.fill(run.name, 75) for run in runs]
        lines = sum(1 + name.count("\n") for name in names)
        figure, ax = plt.subplots(figsize=(5.2, 3.4 + 0.17 * lines), layout="constrained")
        for run, name in zip(runs, names, strict=True):
            clean, robust = run.result.clean(), run.result.robust()
            place = ([100 * clean.value], [100 * robust.value])
            ax.errorbar(*place, xerr=_bars([clean]), yerr=_bars([robust]), fmt="o", capsize=3, label=name)
        ax.set(xlabel="standard accuracy (%)", ylabel="robust accuracy (%)", xlim=(-3, 103), ylim=(-3, 103))
        figure.legend(loc="outside lower left", frameon=False, fontsize=8)  # names may be longer than the plot is wide
    return figure


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

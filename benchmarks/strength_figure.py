"""Accuracy left against gradients per image and against time, as a picture, from the lines of `strength.py`.

    python benchmarks/strength_figure.py [--rows results/strength.jsonl] [--out docs/images/strength.png]

A column is a defence, a colour an attack. A point is the mean over images and seeds; with seeds that `dp.strong` has,
too, it is that of `dp.strong` plus their difference, and the bar is the 95 % bootstrap interval of this difference,
paired by image. Time is what the attack took in that of `dp.strong` with as many gradients, where both were taken in
turn, so that lines of several machines can stand in one picture: its unit is one gradient of `dp.strong` per image.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from strength import Row, by_image, differences, interval_of, ratio, read

from diffpure.report.plots import STYLE, plt

DEFENCES = {
    "ancestral": "Ancestral(0.1, steps=3)",
    "few-step": "FewStep(0.1, steps=3, end=0.02)",
    "ancestral-at": "the first before cifar10-resnet-at",
    "resnet-at": "cifar10-resnet-at, not random",
}
ATTACKS = {  # colours that stay apart for every eye (Okabe and Ito)
    "strong": ("dp.strong", "#d55e00", "o"),
    "diffhammer": ("DiffHammer", "#009e73", "s"),
    "apgd": ("APGD-CE", "#0072b2", "^"),
    "pgd": ("PGD", "#56b4e9", "v"),
    "public": ("public APGD-CE", "#999999", "D"),
}
IMAGES = 64  # lines with other images belong to other comparisons
Groups = dict[tuple[str, str], dict[int, list[Row]]]


class Point(NamedTuple):
    gradients: float
    time: float
    left: float
    low: float
    high: float


def grouped(rows: list[Row]) -> Groups:
    """The lines of the first images by defence, attack and budget."""
    groups: Groups = {}
    for row in rows:
        if row["stop"] <= IMAGES and row["stop"] - row["start"] == IMAGES // 2 and row["budget"]:
            budgets = groups.setdefault((row["defence"], row["attack"]), {})
            budgets.setdefault(row["budget"], []).append(row)
    return groups


def points(own: dict[int, list[Row]], strong: dict[int, list[Row]]) -> list[Point]:
    """One point for each budget of an attack that `dp.strong` was measured with, too."""
    return [point(budget, own[budget], strong[budget]) for budget in sorted(own) if budget in strong]


def point(budget: int, own: list[Row], strong: list[Row]) -> Point:
    base = by_image(strong)
    left = float(np.mean([np.mean(list(seeds.values())) for seeds in base.values()]))
    apart = differences(by_image(own), base)
    low, high = interval_of(apart)
    time = budget * float(ratio(own, strong) or "nan")  # a point without a time is not drawn against it
    return Point(budget, time, left + float(apart.mean()), left + low, left + high)


def drawn(groups: Groups) -> Any:
    with plt.rc_context(STYLE):
        size = {"figsize": (11, 5.6), "layout": "constrained"}
        figure, axes = plt.subplots(2, len(DEFENCES), sharey="col", **size)
        for column, (defence, title) in zip(axes.T, DEFENCES.items(), strict=True):
            strong = groups.get((defence, "strong"), {})
            for attack, (label, colour, marker) in ATTACKS.items():
                found = points(groups.get((defence, attack), {}), strong)
                for ax, across in zip(column, ("gradients", "time"), strict=True):
                    line(ax, found, across, {"color": colour, "marker": marker, "label": label})
            column[0].set_title(title, fontsize=10)
        for row, across in zip(axes, ("gradients per image", "time, in gradients of dp.strong"), strict=True):
            row[0].set_ylabel("accuracy left")
            for ax in row:
                ax.set_xlabel(across)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(ATTACKS), frameon=False)
    return figure


def line(ax: Any, found: list[Point], across: str, style: dict[str, Any]) -> None:
    """An attack's points on a logarithmic axis."""
    left = [point.left for point in found]
    bars = [[point.left - point.low for point in found], [point.high - point.left for point in found]]
    ax.errorbar([getattr(point, across) for point in found], left, yerr=bars, capsize=2, linewidth=1.2, ms=4, **style)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks := [20, 40, 80, 160, 320, 640], [str(tick) for tick in ticks])
    ax.minorticks_off()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path("results/strength.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/strength.png"))
    given = parser.parse_args()
    drawn(grouped(list(read(given.rows).values()))).savefig(given.out, dpi=110)


if __name__ == "__main__":
    main()

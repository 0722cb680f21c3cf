"""Strips of images: one row a stage (clean, attacked, diffused, purified), one column an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RIGHT, WRONG = "#1a7f37", "#c62828"


def save_strip(
    file: Path,
    stages: Mapping[str, NDArray[Any]],
    captions: Mapping[str, Sequence[tuple[str, bool]]] | None = None,
) -> None:
    """Write a picture of stages, each (N, C, H, W) in about [0, 1], with a caption (text, right?) under each image."""
    columns = max(len(images) for images in stages.values())
    figure, axes = plt.subplots(
        len(stages), columns, figsize=(1.15 * columns + 0.8, 1.42 * len(stages)), squeeze=False, layout="constrained"
    )
    for row, (stage, images) in zip(axes, stages.items(), strict=True):
        for column, ax in enumerate(row):
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
            if column < len(images):
                ax.imshow(np.clip(images[column].transpose(1, 2, 0), 0, 1), interpolation="nearest")
                if captions and stage in captions:
                    text, right = captions[stage][column]
                    ax.set_xlabel(text, fontsize=8, color=RIGHT if right else WRONG, labelpad=2)
        row[0].set_ylabel(stage, fontsize=9)
    figure.savefig(file, dpi=150, facecolor="white")
    plt.close(figure)

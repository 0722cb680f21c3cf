"""Strips of images: one row per stage (clean, attacked, diffused, purified), one column per image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffpure.pictures.gallery import eight_bits

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RIGHT, WRONG = "#1a7f37", "#c62828"


def save_strip(
    file: Path,
    stages: Mapping[str, NDArray[Any]],
    captions: Mapping[str, Sequence[tuple[str, bool]]] | None = None,
    *,
    across: bool = False,
) -> None:
    """Write a PNG of stages, each (N, C, H, W) in about [0, 1], with a caption (text, right?) under each image.

    across: stages run from left to right, not from top to bottom.
    """
    count = max(len(images) for images in stages.values())
    shape = (count, len(stages)) if across else (len(stages), count)
    size = (1.15 * shape[1] + 0.8, 1.42 * shape[0])
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained")
    for row, (stage, images) in zip(axes.T if across else axes, stages.items(), strict=True):
        for column, ax in enumerate(row):
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
            if column < len(images):
                ax.imshow(np.clip(images[column].transpose(1, 2, 0), 0, 1), interpolation="nearest")
                if captions and stage in captions:
                    text, right = captions[stage][column]
                    ax.set_xlabel(text, fontsize=8, color=RIGHT if right else WRONG, labelpad=2)
        row[0].set_title(stage, fontsize=9) if across else row[0].set_ylabel(stage, fontsize=9)
    figure.savefig(file, format="png", dpi=150, facecolor="white")
    plt.close(figure)


def save_gif(file: Path | BinaryIO, states: Sequence[NDArray[Any]], milliseconds: int = 250) -> None:
    """Write an animation of states, each (C, H, W) in about [0, 1], enlarged to at least 128 pixels."""
    factor = -(-128 // min(states[0].shape[1:]))
    frames = []
    for state in states:
        image = Image.fromarray(eight_bits(state.transpose(1, 2, 0)))
        frames.append(image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST))
    rest = [*frames[1:], frames[-1], frames[-1]]  # the last stays a while
    frames[0].save(file, "GIF", save_all=True, append_images=rest, duration=milliseconds, loop=0)

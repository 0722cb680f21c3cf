"""The pictures of a run as panels of a page: one per image, its stages side by side, class and confidence under each.

    no attack → attacked → perturbation, amplified → diffused → purified

The perturbation is the difference of the first two, times one whole factor for all images of the run, around grey.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffpure.pictures.gallery import ATTACKED, GIVEN, Gallery
from diffpure.report.runs import ReportedRun
from diffpure.results.result import TITLES
from diffpure.results.rows import CLEAN

STAGES: Final = {CLEAN: TITLES[CLEAN], GIVEN: "image"}  # what a stage is called where its name is another
_SMALL: Final = 100  # pictures narrower than this many pixels are enlarged without smoothing
_GREY: Final = 128


@final
@dataclass(frozen=True)
class Frame:
    """One picture of a panel: its stage, what the classifier says of it (nothing of noise), and whether correctly."""

    stage: str
    words: str
    correct: bool
    url: str
    small: bool


@final
@dataclass(frozen=True)
class Panel:
    """One image in its stages, under its dataset index and label."""

    index: int
    label: str
    frames: tuple[Frame, ...]


def panels(run: ReportedRun) -> list[Panel]:
    """A panel per image; none for a run without pictures."""
    gallery = run.gallery
    if gallery is None:
        return []
    added = perturbation(gallery)
    return [
        Panel(index, run.class_name(int(gallery.labels[i])), _frames(gallery, i, added))
        for i, index in enumerate(run.result.indices[: len(gallery.labels)])
    ]


def about(run: ReportedRun) -> str:
    """What the pictures are and what stands under them."""
    gallery = run.gallery
    if gallery is None or not len(gallery.labels):
        return run.remark
    shown = "" if gallery.stages[0] == GIVEN else f" under {run.title(gallery.attack)}"
    said = "Under each picture: the class that the classifier alone gives it, and its confidence"
    if "purified" in gallery.stages:
        said += "; the class of the purified picture is the answer of the defence"
    if np.isnan(gallery.confidence).any():
        said = f"{run.remark} Under each picture: the class of the model's first sample".lstrip()
    added = perturbation(gallery)
    noise = f" The perturbation is amplified {added[0]} times, around grey." if added else ""
    many = f"The first {len(gallery.labels)} images" if len(gallery.labels) > 1 else "The first image"
    return f"{many}{shown}. {said} (✓ correct, ✗ misclassified).{noise} A click enlarges a picture."


def perturbation(gallery: Gallery) -> tuple[int, NDArray[np.uint8]] | None:
    """The largest whole factor that cuts nothing off, and what the attack added to each image times it, around grey."""
    if not {CLEAN, ATTACKED} <= set(gallery.stages):
        return None
    return amplified(*(gallery.pictures[gallery.stages.index(stage)] for stage in (CLEAN, ATTACKED)))


def amplified(clean: NDArray[np.uint8], attacked: NDArray[np.uint8]) -> tuple[int, NDArray[np.uint8]]:
    """The largest whole factor that cuts nothing off, and the difference of 8-bit pictures times it, around grey."""
    added = attacked.astype(np.int16) - clean
    factor = max(1, (_GREY - 1) // max(1, int(np.abs(added).max(initial=0))))
    return factor, np.clip(_GREY + factor * added, 0, 255).astype(np.uint8)


def _frames(gallery: Gallery, image: int, added: tuple[int, NDArray[np.uint8]] | None) -> tuple[Frame, ...]:
    frames = []
    for i, stage in enumerate(gallery.stages):
        said, correct = gallery.caption(i, image)
        frames.append(_frame(STAGES.get(stage, stage), said, correct, gallery.pictures[i, image]))
        if stage == ATTACKED and added is not None:
            factor, pictures = added
            frames.append(_frame(f"perturbation ×{factor}", "", True, pictures[image]))
    return tuple(frames)


def _frame(stage: str, said: str, correct: bool, picture: NDArray[Any]) -> Frame:
    return Frame(stage, said, correct, data_url(png(picture)), picture.shape[-1] < _SMALL)


def png(picture: NDArray[Any]) -> bytes:
    """A picture (1 or 3, H, W), 8-bit, as a PNG file."""
    out = io.BytesIO()
    pixels = picture.transpose(1, 2, 0)
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(out, "PNG")
    return out.getvalue()


def data_url(file: bytes, kind: str = "png") -> str:
    """A picture file as the source of an img element, inside the page."""
    return f"data:image/{kind};base64," + base64.b64encode(file).decode()

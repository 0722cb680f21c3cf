"""The pictures of a run as cards of a page: one an image, its stages side by side, class and confidence under each."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffpure.evaluation.gallery import GIVEN, Gallery
from diffpure.report.runs import Run

STYLE: Final = """
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--wide)), 1fr)); gap: .75rem; }
.card { background: var(--soft); border-radius: .5rem; padding: .6rem; margin: 0; }
.card > b { font-size: .85rem; } .stages { display: flex; gap: .5rem; margin-top: .3rem; }
.stages figure { flex: 0 1 7rem; min-width: 0; margin: 0; font-size: .7rem; line-height: 1.3; }
.stages figcaption { padding-top: .15rem; }
.stages img { width: 100%; display: block; border-radius: .25rem; }
.stages img.small { image-rendering: pixelated; }
.right { color: var(--right); } .wrong { color: var(--wrong); }
"""


def cards(run: Run) -> str:
    """The cards, with a sentence that says what is under the pictures; nothing for a run without pictures."""
    gallery = run.gallery
    if gallery is None:
        return f'<p class="small">{escape(run.remark)}</p>' if run.remark else ""
    each = "".join(_card(gallery, i) for i in range(len(gallery.labels)))
    words, wide = escape(_about(run, gallery)), f"--wide: {5.4 * len(gallery.stages)}rem"
    return f'<h3>Pictures</h3><p class="small">{words}</p><div class="cards" style="{wide}">{each}</div>'


def _about(run: Run, gallery: Gallery) -> str:
    shown = "as they were given" if gallery.stages[0] == GIVEN else f"under {gallery.attack}"
    said = "Under each picture: what the classifier says of that picture alone, and how sure it is"
    if "purified" in gallery.stages:
        said += "; what it says of the purified one is the answer of the defence"
    if np.isnan(gallery.confidence).any():
        said = f"{run.remark} Under each picture: the answer of the model's first draw".lstrip()
    return f"The first {len(gallery.labels)} images {shown}. {said} (✓ right, ✗ wrong)."


def _card(gallery: Gallery, image: int) -> str:
    stages = "".join(_stage(gallery, s, image) for s in range(len(gallery.stages)))
    label = escape(gallery.class_name(int(gallery.labels[image])))
    return f'<div class="card"><b>{label}</b><div class="stages">{stages}</div></div>'


def _stage(gallery: Gallery, stage: int, image: int) -> str:
    words, right = gallery.caption(stage, image)
    mark, kind = ("✓", "right") if right else ("✗", "wrong")
    name, picture = gallery.stages[stage], gallery.pictures[stage, image]
    small = ' class="small"' if picture.shape[-1] < 100 else ""
    alt = escape(f"{name}: {words}, {kind}")
    return (
        f'<figure><img{small} alt="{alt}" src="{data_url(_png(picture))}"><figcaption>{name} '
        f'<span class="{kind}">{mark}<br>{escape(words)}</span></figcaption></figure>'
    )


def _png(picture: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    pixels = picture.transpose(1, 2, 0)
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(out, "PNG")
    return out.getvalue()


def data_url(png: bytes) -> str:
    """A picture as the source of an img element, inside the page."""
    return "data:image/png;base64," + base64.b64encode(png).decode()

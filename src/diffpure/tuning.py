"""Tune a purifier to the classifier behind it, which stays as it is, with images that need no labels.

A score learns to denoise in the mean square, which keeps what is large in an image and blurs fine detail that a
classifier looks at. Tuned, it learns besides that the classifier f should say of a purified image what it says of the
clean one,

    CE(f(P(x)), softmax f(x)) + w(t) |ε̂ - ε|²,      P: one step from t*, drawn anew for each image,

or half of the time the reverse SDE in a few steps (`few_steps`), for samplers of many: what a score trained for one
step makes of an image misleads its own next step. With a threat it learns the same of images after one step of an
attack through P (`training.objectives` has the equations), or after three steps of one on f alone, by an attacker who
does not know of P (`transferred`; denoisers are trained so by Liao et al. 2018). What comes out is made for this
classifier; docs/photographs.md and docs/results.md say what that brought, and what an attacker who knows of it still
takes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from diffpure.data import photos
from diffpure.data.photos import Photos
from diffpure.diffusion.score import EpsilonScore
from diffpure.errors import InputError
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from diffpure.threats import AnyThreat, threat_of
from diffpure.training.adversarial import FAST_LINF, Adversary
from diffpure.training.purifier import PHOTOGRAPHS, PurifierConfig, train_purifier
from diffpure.validate import as_images


def tune(
    model: Defense,
    images: Any,
    *,
    threat: AnyThreat | None = None,
    transferred: bool = False,
    times: tuple[float, float] | None = None,
    few_steps: int = 0,
    examples: int = 1600,
    batch: int = 8,
    rate: float = 3e-4,
    crop: int = 224,
    out: str | Path | None = None,
    seed: int = 0,
    threads: int | None = None,
    precision: str = "auto",
    progress: bool = False,
) -> Defense:
    """The defence with a copy of its score that was tuned to its classifier; what was given stays as it is.

    images: (N, C, H, W) in [0, 1], or a folder or tar archive of photographs of any sizes; never those that it is
    measured on.   threat: attack the images through the purifier while it learns, once each.   transferred: attack them
    through the classifier alone.   times: between which t* is drawn; half of the sampler's and a fifth more than it by
    default.   few_steps: half of the steps of training purify by `FewStep` in so many, for samplers of many steps;
    three are enough.   examples, batch: images seen in all and per step.   crop: side of the squares that are cut from
    larger images.   out: a folder for checkpoints and log; the same call goes on there.   precision: float32, bfloat16,
    or auto for the faster.   progress: a bar on standard error.
    """
    purifier, score, classifier = _parts(model)
    shown = photos.read(images) if isinstance(images, str | Path) else _stored(images)
    low, high = times or _times(purifier)
    attacked = threat is not None
    if transferred and not attacked:
        raise InputError("A transferred attack needs a threat, such as threat='linf 4/255'.")
    chosen = {
        "examples": examples, "batch": min(batch, len(shown)), "rate": rate, "t_min": low, "t_max": high,
        "few_steps": few_steps, "seed": seed, "threads": threads, "precision": precision,
        "crop": _side(shown, score.size, crop),
        "adversary": _adversary(threat, transferred), "knows": "classifier" if transferred else "purifier",
        "attacked": float(attacked), "clean": float(not attacked),
    }  # fmt: skip
    config = PurifierConfig(**{**PHOTOGRAPHS, **chosen})
    console = Console(stderr=True) if progress else None
    state, _ = train_purifier(score, classifier, shown, config, folder=Path(out) if out else None, console=console)
    score.load_state_dict(state)
    return model.with_purifier(purifier.with_score(score))


def _parts(model: Defense) -> tuple[Purifier, EpsilonScore, nn.Module]:
    """The purifier of a defence and copies of its networks, or a sentence that says why it cannot be tuned."""
    purifier, classifier = model.purifier, model.classifier
    if not isinstance(purifier, Purifier) or not isinstance(purifier.score, EpsilonScore):
        raise InputError("Only a diffusion purifier whose score is a network that predicts noise can be tuned.")
    if not isinstance(classifier, nn.Module):
        raise InputError("A purifier is tuned to a classifier that is an nn.Module, as its gradient is needed.")
    return purifier, copy.deepcopy(purifier.score), copy.deepcopy(classifier)


def _stored(images: Any) -> Photos:
    """Images in [0, 1] as 8-bit pixels, which is what a training keeps."""
    return Photos(tuple((as_images(images) * 255).round().clamp(0, 255).to(torch.uint8)))


def _times(purifier: Purifier) -> tuple[float, float]:
    t_star = getattr(purifier.sampler, "t_star", None)
    if t_star is None:
        raise InputError(f"{purifier.title} has no t*; say between which `times` images are diffused.")
    return t_star / 2, min(1.0, 1.2 * t_star)


def _side(shown: Photos, size: int | None, crop: int) -> int:
    """The side of the squares: that of the score and so of the images, or `crop`, or less where all are smaller."""
    sides = [image.shape[1:] for image in shown.pixels]
    if size is None:
        return min(crop, max(min(side) for side in sides))  # smaller images are continued by their reflections
    if any(tuple(side) != (size, size) for side in sides):
        raise InputError(f"This score was made for images of {size}×{size} pixels; tune it with images of that size.")
    return size


def _adversary(threat: AnyThreat | None, transferred: bool) -> Adversary:
    """One step of 1.25 budgets from a random start; three of half a budget where the attack is on the classifier alone.

    Beside the purifier the classifier is cheap.
    """
    if threat is None:
        return FAST_LINF  # nothing is attacked
    given = threat_of(threat)
    iterations, share = (3, 0.5) if transferred else (1, 1.25)
    return Adversary(threat=given, iterations=iterations, step_size=share * given.eps)

"""Advice on t*: what theory bounds and what is measured, for your score model on your images.

A larger t* washes perturbations out (Theorem 1) and loses the image (Theorem 2). The bound of Theorem 2 holds for any
score and is loose; beside it stands the distance that purification really moves the images and, with a classifier, the
accuracy that is left. The suggestion is the largest t* that costs at most `tolerance` of the best clean accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from diffpure.diffusion.samplers import ReverseSDE, Sampler
from diffpure.diffusion.score import ScoreModel
from diffpure.diffusion.sde import Schedule
from diffpure.errors import InputError
from diffpure.noise import Seeds
from diffpure.purifiers.diffusion import Purifier
from diffpure.theory import distance_bound, kl_bound_of_perturbation
from diffpure.validate import as_labels


@final
@dataclass(frozen=True)
class AdviceRow:
    """One t*: bounds and measurements, distances as of images in [-1, 1]."""

    t_star: float
    kl_bound: float  # on KL(p_t* ‖ q_t*), for the given perturbation
    distance_bound: float  # Theorem 2, with the largest score met on the way
    distance: float  # mean of the measured ‖x̂(0) - x‖
    accuracy: float | None


@final
@dataclass(frozen=True)
class Advice:
    """The table of a sweep over t*, and what it suggests."""

    rows: tuple[AdviceRow, ...]
    images: int
    perturbation: float
    tolerance: float

    @property
    def suggestion(self) -> float | None:
        """The largest t* within `tolerance` of the best clean accuracy; None without a classifier."""
        measured = [(row.t_star, row.accuracy) for row in self.rows if row.accuracy is not None]
        if not measured:
            return None
        best = max(accuracy for _, accuracy in measured)
        return max(t for t, accuracy in measured if accuracy >= best - self.tolerance)

    def __str__(self) -> str:
        head = "    t*   KL bound   distance bound   distance   accuracy"
        lines = [
            f"{r.t_star:6.3f} {r.kl_bound:10.3g} {r.distance_bound:16.2f} {r.distance:10.3f}   "
            + ("       –" if r.accuracy is None else f"{r.accuracy:8.3f}")
            for r in self.rows
        ]
        notes = f"{self.images} images, perturbation ‖ε‖₂ = {self.perturbation:.3g} in [-1, 1]"
        found = "no classifier, no suggestion" if self.suggestion is None else f"suggested t* = {self.suggestion:g}"
        return "\n".join([head, *lines, f"{notes}; {found}"])


@final
class _Loudest:
    """A score model that remembers the largest norm that it returned for an image."""

    def __init__(self, score: ScoreModel) -> None:
        self.score, self.size, self.largest = score, score.size, 0.0

    @property
    def sde(self) -> Schedule:
        return self.score.sde

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        score = self.score(x, t)
        self.largest = max(self.largest, score.flatten(1).norm(dim=1).max().item())
        return score


@torch.no_grad()
def suggest_t_star(
    score: ScoreModel,
    images: Tensor,
    classifier: Callable[[Tensor], Tensor] | None = None,
    labels: Tensor | None = None,
    *,
    candidates: Sequence[float] = (0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.2),
    sampler: Callable[[float], Sampler] = ReverseSDE,
    perturbation: float = 0.0,
    tolerance: float = 0.05,
    delta: float = 0.05,
    seeds: Seeds = None,
) -> Advice:
    """Sweep t* on sample images (B, C, H, W) in [0, 1]; `sampler` makes a sampler from a t*.

    perturbation: the ℓ2 norm of the attack to wash out, of images in [-1, 1] (twice that of images in [0, 1]).
    """
    if (classifier is None) != (labels is None):
        raise InputError("Accuracy needs both a classifier and labels; give both or neither.")
    if labels is not None:
        labels = as_labels(labels, len(images))
    rows = []
    for t_star in candidates:
        recorder = _Loudest(score)
        purified = Purifier(recorder, sampler(t_star))(images, seeds)
        moved = 2 * (purified - images).flatten(1).norm(dim=1)
        right = None
        if classifier is not None and labels is not None:
            right = classifier(purified).argmax(1).eq(labels).double().mean().item()
        bound = distance_bound(score.sde, t_star, images[0].numel(), perturbation, 2 * recorder.largest, delta)
        kl = kl_bound_of_perturbation(score.sde, t_star, perturbation)
        rows.append(AdviceRow(t_star, kl, bound, moved.mean().item(), right))
    return Advice(tuple(rows), len(images), perturbation, tolerance)

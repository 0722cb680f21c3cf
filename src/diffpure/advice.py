"""Advice on t*: what theory bounds and what is measured, for your score model and classifier on your images.

A larger t* washes perturbations out (Theorem 1) and loses the image (Theorem 2), so a t* can be chosen only against a
threat. Beside the bounds, which hold for any score and are loose, stand the distance that purification moves the images
and the accuracy on clean and on attacked images, with Wilson's intervals; the attack is made on the undefended
classifier and transferred. The suggestion is the t* with the highest attacked accuracy; without attack there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from diffpure.attacks.base import Attack
from diffpure.attacks.pgd import PGD
from diffpure.diffusion.samplers import ReverseSDE, Sampler
from diffpure.diffusion.score import ScoreModel, ScoreWrapper, as_score
from diffpure.diffusion.sde import STEPS
from diffpure.errors import InputError
from diffpure.named import brief
from diffpure.noise import Noise, Seeds
from diffpure.purifiers.diffusion import Purifier
from diffpure.results.rows import Rate
from diffpure.theory import distance_bound, kl_bound_of_perturbation
from diffpure.threats import L2, AnyThreat, Linf, ThreatModel, threat_of
from diffpure.validate import as_images, as_labels

Classifier = Callable[[Tensor], Tensor]

PGD_20: Final = PGD(iterations=20)


@final
@dataclass(frozen=True)
class Accuracies:
    """The share of images classified correctly, clean and attacked, as far as they were measured."""

    clean: Rate | None = None
    attacked: Rate | None = None

    def as_dict(self) -> dict[str, Any]:
        """Counts, shares and intervals as numbers, for JSON."""
        return {
            name: None if rate is None else {**asdict(rate), "value": rate.value, "interval": rate.interval}
            for name, rate in (("clean", self.clean), ("attacked", self.attacked))
        }

    def __str__(self) -> str:
        return "  ".join(f"{'–' if rate is None else str(rate):>21}" for rate in (self.clean, self.attacked))


@final
@dataclass(frozen=True)
class AdviceRow:
    """One t*: bounds and measurements, distances as of images in [-1, 1]."""

    t_star: float
    kl_bound: float  # on KL(p_t* ‖ q_t*), for the given perturbation
    distance_bound: float  # Theorem 2, with the largest score met on the way
    distance: float  # mean of the measured ‖x̂(0) - x‖
    accuracy: Accuracies

    def as_dict(self) -> dict[str, Any]:
        """Everything as numbers, for JSON."""
        return {**asdict(self), "accuracy": self.accuracy.as_dict()}


@final
@dataclass(frozen=True)
class Advice:
    """The table of a sweep over t*, and what it suggests; `undefended` is the classifier alone.

    threat: in words, empty without one.   perturbation: its largest ℓ2 norm, of images in [-1, 1].
    """

    rows: tuple[AdviceRow, ...]
    images: int
    threat: str
    perturbation: float
    undefended: Accuracies

    @property
    def suggestion(self) -> float | None:
        """The t* with the highest attacked accuracy (then clean accuracy, then t*); None without attacked images."""
        best = self._best()
        return None if best is None else best.t_star

    @property
    def alternatives(self) -> tuple[float, ...]:
        """The other t* whose interval of attacked accuracy overlaps the suggestion's: more images would tell."""
        best = self._best()
        if best is None or best.accuracy.attacked is None:
            return ()
        low, _ = best.accuracy.attacked.interval
        others = [(row.t_star, row.accuracy.attacked) for row in self.rows if row is not best]
        return tuple(t for t, rate in others if rate is not None and rate.interval[1] >= low)

    def _best(self) -> AdviceRow | None:
        measured = [
            (row.accuracy.attacked.correct, row.accuracy.clean.correct if row.accuracy.clean else 0, row.t_star, row)
            for row in self.rows
            if row.accuracy.attacked is not None
        ]
        return max(measured, key=lambda found: found[:3])[-1] if measured else None

    def as_dict(self) -> dict[str, Any]:
        """Everything as numbers and strings, for JSON."""
        return {
            "suggestion": self.suggestion,
            "alternatives": list(self.alternatives),
            "images": self.images,
            "threat": self.threat,
            "perturbation": self.perturbation,
            "undefended": self.undefended.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        head = f"{'t*':>10} {'KL bound':>9} {'distance bound':>15} {'distance':>9}  {'clean':>21}  {'attacked':>21}"
        bare = f"{'undefended':>10} {'–':>9} {'–':>15} {'–':>9}  {self.undefended}"
        lines = [
            f"{r.t_star:10.3f} {r.kl_bound:9.3g} {r.distance_bound:15.2f} {r.distance:9.3f}  {r.accuracy}"
            for r in self.rows
        ]
        size = f", ‖ε‖₂ ≤ {self.perturbation:.3g} in [-1, 1]" if self.perturbation else ""
        threat = f"{self.threat or 'no threat'}{size}"
        return "\n".join([head, bare, *lines, f"{self.images} images; {threat}", f"suggested t*: {self._verdict()}"])

    def _verdict(self) -> str:
        if self.suggestion is None:
            missing = "threat, such as threat=dp.Linf(8/255)" if self.undefended.clean else "classifier with labels"
            return f"none, as that takes a {missing}"
        close = ", ".join(f"{t:g}" for t in self.alternatives)
        doubt = f"; with so few images {close} cannot be told from it" if close else ""
        return f"{self.suggestion:g} (highest attacked accuracy{doubt}); an adaptive attack leaves less"


@final
class _Loudest(ScoreWrapper):
    """A score model that remembers the largest norm of the scores that it returned."""

    largest = 0.0

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self._hear(super().forward(x, t), 1.0)

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        std = self.sde.std((i.to(torch.float64) + 1) / STEPS)
        return self._hear(super().epsilon_step(x, i), std.min().item())

    def _hear(self, out: Tensor, std: float) -> Tensor:
        self.largest = max(self.largest, out.flatten(1).norm(dim=1).max().item() / std)
        return out


@torch.no_grad()
def suggest_t_star(
    score: ScoreModel,
    images: Tensor,
    classifier: Classifier | None = None,
    labels: Tensor | None = None,
    *,
    threat: AnyThreat | None = None,
    attack: Attack = PGD_20,
    attacked: Tensor | None = None,
    candidates: Sequence[float] = (0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.2),
    sampler: Callable[[float], Sampler] = ReverseSDE,
    perturbation: float | None = None,
    delta: float = 0.05,
    seeds: Seeds = None,
) -> Advice:
    """Sweep t* on sample images (B, C, H, W) in [0, 1]; `sampler` makes a sampler from a t*.

    threat: what to defend against, such as "linf 8/255"; `attack` is then run on the classifier alone, unless
    `attacked` gives the attacked images.   perturbation: the ℓ2 norm for the bounds, of images in [-1, 1] (twice that
    of images in [0, 1]); that of the threat unless given.
    """
    score, images = as_score(score), as_images(images)
    threat = None if threat is None else threat_of(threat)
    if (classifier is None) != (labels is None):
        raise InputError("Accuracy needs both a classifier and labels; give both or neither.")
    if not candidates:
        raise InputError("Advice needs at least one candidate t*, got none.")
    if labels is not None:
        labels = as_labels(labels, len(images))
    if attacked is None and threat is not None and classifier is not None and labels is not None:
        attacked = threat.apply(images, attack(classifier, images, labels, threat, seeds=seeds))
    if attacked is not None:
        attacked = as_images(attacked, dtype=images.dtype)
        if attacked.shape != images.shape:
            wanted, got = tuple(images.shape), tuple(attacked.shape)
            raise InputError(f"Attacked images have the shape of the images, {wanted}, got {got}.")
    if perturbation is None:
        perturbation = 2 * _l2_size(threat, images, attacked)

    seeds = Noise.of(seeds, len(images)).seeds

    def accuracies(clean: Tensor, attacked: Tensor | None) -> Accuracies:
        if classifier is None or labels is None:
            return Accuracies()
        return Accuracies(*(None if x is None else _rate(classifier(x), labels) for x in (clean, attacked)))

    rows = []
    for t_star in candidates:
        recorder = _Loudest(score)
        purifier = Purifier(recorder, sampler(t_star))
        clean, treated = purifier(images, seeds), None if attacked is None else purifier(attacked, seeds)
        moved = 2 * (clean - images).flatten(1).norm(dim=1)
        bound = distance_bound(score.sde, t_star, images[0].numel(), perturbation, 2 * recorder.largest, delta)
        kl = kl_bound_of_perturbation(score.sde, t_star, perturbation)
        rows.append(AdviceRow(t_star, kl, bound, moved.mean().item(), accuracies(clean, treated)))
    return Advice(tuple(rows), len(images), _words(threat, attacked), perturbation, accuracies(images, attacked))


def _rate(logits: Tensor, labels: Tensor) -> Rate:
    return Rate(int(logits.argmax(1).eq(labels).sum()), len(labels))


def _l2_size(threat: ThreatModel | None, images: Tensor, attacked: Tensor | None) -> float:
    """The largest ℓ2 norm of a perturbation of images in [0, 1]: the norm balls' own, else what was measured."""
    if isinstance(threat, Linf):
        return threat.eps * math.sqrt(images[0].numel())
    if isinstance(threat, L2):
        return threat.eps
    return 0.0 if attacked is None else (attacked - images).flatten(1).norm(dim=1).max().item()


def _words(threat: ThreatModel | None, attacked: Tensor | None) -> str:
    if threat is None:
        return "" if attacked is None else "attacked images as given"
    return brief(threat)

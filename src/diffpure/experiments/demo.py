"""The demonstration: what an attack does to a classifier, what purification brings back, and what an attacker who
knows the defence still breaks. Everything is inside the package: 500 test images, a small classifier, a small score.

The adaptive attack is PGD with expectation over the defence's noise and its exact gradient, on few images: it shows
the effect honestly, and is no substitute for an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from diffpure.attacks import EOT, PGD, Run
from diffpure.classifiers.load import load_classifier
from diffpure.data.cifar10 import CLASSES
from diffpure.data.samples import samples
from diffpure.evaluation.results import Rate
from diffpure.purify import Defense, Purifier
from diffpure.samplers import Ancestral
from diffpure.scores.load import load_score
from diffpure.threats import Linf

Progress = Callable[[str, int, int], None]  # (what, done, of)
EPS = 8 / 255


@final
@dataclass(frozen=True)
class DemoRow:
    """One line of the table: how many images were classified correctly, and under what."""

    model: str
    attack: str
    rate: Rate


@final
@dataclass(frozen=True)
class Demo:
    """The table, and images for a picture: clean, attacked, diffused, purified (each (N, 3, 32, 32))."""

    rows: tuple[DemoRow, ...]
    strips: dict[str, Tensor]
    predictions: dict[str, tuple[int, ...]]
    labels: tuple[int, ...]
    notes: str

    def captions(self) -> dict[str, list[tuple[str, bool]]]:
        """What the classifier says of each image of the picture, and whether it is right."""
        return {
            stage: [(CLASSES[k], k == label) for k, label in zip(found, self.labels, strict=True)]
            for stage, found in self.predictions.items()
        }


@final
@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """How much to do; the defaults take about a minute on two cores."""

    images: int = 100
    adaptive_images: int = 16
    iterations: int = 10
    draws: int = 8
    t_star: float = 0.1
    steps: int = 5
    seed: int = 0
    shown: int = 8


def run_demo(config: DemoConfig | None = None, progress: Progress = lambda *_: None) -> Demo:
    """Classify, attack the bare classifier, purify, attack the defence."""
    config = config or DemoConfig()
    classifier, score = load_classifier("cifar10-resnet"), load_score("cifar10-small")
    defense = Defense(Purifier(score, Ancestral(t_star=config.t_star, steps=config.steps)), classifier)
    x, y = samples(config.images)
    seeds = [config.seed * 1_000_003 + i for i in range(len(x))]
    threat = Linf(EPS)

    plain = PGD(iterations=20)
    attacked = threat.apply(
        x, plain(classifier, x, y, threat, seeds=seeds, on_step=_tell(progress, "attack classifier"))
    )
    rows = [
        DemoRow("classifier", "none", _rate(classifier(x), y)),
        DemoRow("classifier", "PGD-20", _rate(classifier(attacked), y)),
    ]
    views = {"clean": x, "attacked": attacked}
    logits = {name: _batched(defense, view, seeds, progress, f"purify {name}") for name, view in views.items()}
    rows.append(DemoRow("purified", "none", _rate(logits["clean"], y)))
    rows.append(DemoRow("purified", "PGD-20 on the classifier", _rate(logits["attacked"], y)))

    few = slice(0, config.adaptive_images)
    adaptive = PGD(iterations=config.iterations, eot=EOT(config.draws, rows=64))
    z = adaptive(defense, x[few], y[few], threat, seeds=seeds[few], on_step=_tell(progress, "attack defence"))
    name = f"PGD-{config.iterations}, EOT {config.draws}, exact gradient"
    broken = _batched(defense, threat.apply(x[few], z), [s + 500_009 for s in seeds[few]], progress, "judge")
    rows.append(DemoRow("purified", name, _rate(broken, y[few])))
    return _picture(config, defense, attacked, x, y, seeds, tuple(rows))


def _picture(
    config: DemoConfig,
    defense: Defense,
    attacked: Tensor,
    x: Tensor,
    y: Tensor,
    seeds: Sequence[int],
    rows: tuple[DemoRow, ...],
) -> Demo:
    shown = slice(0, config.shown)
    states = defense.purifier.trajectory(attacked[shown], [config.t_star, 0.0], seeds[shown])
    strips = {"clean": x[shown], "attacked": attacked[shown], "diffused": states[0], "purified": states[1]}
    with torch.no_grad():
        predictions = {name: tuple(defense.classifier(view).argmax(1).tolist()) for name, view in strips.items()}
    sampler = f"ancestral sampler in {config.steps} steps"
    notes = f"l-inf 8/255, t* = {config.t_star:g}, {sampler}, seed {config.seed}"
    return Demo(rows, strips, predictions, tuple(y[shown].tolist()), notes)


def _tell(progress: Progress, what: str) -> Callable[[Run], None]:
    return lambda run: progress(what, run.step, run.steps)


def _rate(logits: Tensor, y: Tensor) -> Rate:
    return Rate(int(logits.argmax(1).eq(y).sum()), len(y))


@torch.no_grad()
def _batched(model: Defense, x: Tensor, seeds: Sequence[int], progress: Progress, what: str, batch: int = 25) -> Tensor:
    parts = []
    for i in range(0, len(x), batch):
        parts.append(model(x[i : i + batch], seeds[i : i + batch]))
        progress(what, min(i + batch, len(x)), len(x))
    return torch.cat(parts)

"""A small evaluation, a model with a known answer, and a loader of small models, for the tests of evaluations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from diffpure.attacks import APGD, EOT, PGD, Attack, Square
from diffpure.data.sources import Dataset
from diffpure.diffusion.samplers import ReverseSDE
from diffpure.evaluation.evaluate import evaluate
from diffpure.evaluation.setup import Evaluation, Settings, set_up
from diffpure.experiments.load import Loader
from diffpure.experiments.spec import EvaluationSpec, ModelSpec
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense, PurifierBase
from diffpure.results.result import Result
from diffpure.results.rows import Row
from diffpure.threats import Linf
from problems import images, tiny_classifier, tiny_unet

RULES = ("one-shot", "average of 3", "worst of 4", "majority of 3")
COUNT, BATCH = 5, 2  # three batches, the last one partial
THREAT = Linf(8 / 255)


class Linear(nn.Module):
    """Two classes, logits ±(⟨w, x⟩ - c): under ℓ∞ the margin falls by exactly 2 ε ‖w‖₁ and no more."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        w = torch.linspace(-1, 1, 3 * size * size).reshape(3, size, size)
        self.w = nn.Parameter(w, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = ((x - 0.5) * self.w).flatten(1).sum(1)
        return torch.stack([-z, z], 1)


def line_up(model: Linear, distances: list[float]) -> tuple[Tensor, Tensor]:
    """Images whose signed margins ⟨w, x - ½⟩/‖w‖₁ are these distances, and their true labels."""
    along = model.w.sign() / 1.0
    x = 0.5 + torch.tensor(distances)[:, None, None, None] * along
    return x, (torch.tensor(distances) > 0).long()


def defense() -> Defense:
    return Defense(Purifier(tiny_unet(8), ReverseSDE(t_star=0.05, steps=3)), tiny_classifier())


def attacks() -> tuple[Attack, ...]:
    return PGD(iterations=2, eot=EOT(2)), APGD(iterations=2, loss="dlr", eot=EOT(2)), Square(queries=3)


@functools.cache
def problem(count: int = COUNT) -> tuple[Tensor, Tensor]:
    x = images(count)
    return x, defense()(x, seeds=range(count)).argmax(1)


def settle(out: Path | None = None, **changes: object) -> Result:
    x, y = problem()
    options = {"rules": RULES, "batch": BATCH, "per_call": 8, "out": out, **changes}
    return evaluate(defense(), x, y, THREAT, attacks(), **options)  # type: ignore[arg-type]


def ready(model: nn.Module | None = None, tried: Sequence[Attack] | None = None, **changes: object) -> Evaluation:
    """The same evaluation, checked but not begun."""
    x, y = problem()
    settings = Settings(**{"rules": RULES, "batch": BATCH, "per_call": 8, **changes})  # type: ignore[arg-type]
    return set_up(model or defense(), x, y, THREAT, attacks() if tried is None else tried, settings)


def timeless(rows: tuple[Row, ...] | list[Row]) -> list[Row]:
    return [replace(row, seconds=0.0) for row in rows]


def spec_of(**changes: object) -> EvaluationSpec:
    return EvaluationSpec.of({"model": {"classifier": "cifar10-resnet"}, **changes})


def two_photographs(folder: Path) -> None:
    """A user's own folder of ImageNet: two images and their classes in a CSV."""
    folder.mkdir()
    for i in range(2):
        Image.new("RGB", (256, 300), (200, 100 * i, 0)).save(folder / f"{i}.png")
    (folder / "labels.csv").write_text("file,class\n0.png,3\n1.png,7\n")


class TinyLoader(Loader):  # type: ignore[misc]  # final for everybody else
    """The spec's own images, cut small, with small networks for the ones it names."""

    def model(self, spec: ModelSpec) -> nn.Module:
        classifier = tiny_classifier()
        return Defense(self._purifier(spec), classifier) if spec.defended else classifier

    def data(self, spec: EvaluationSpec) -> Dataset:
        found = super().data(spec)
        small = found.images[:, :, 8:16, 8:16].contiguous()
        return replace(found, images=small, labels=found.labels % 5, class_names=found.class_names[:5])

    def _purifier(self, spec: ModelSpec) -> PurifierBase:
        if spec.score is None:
            return super()._purifier(spec)
        return Purifier(tiny_unet(8), spec.sampler, spec.gradient, rounds=spec.rounds)


TINY = TinyLoader()

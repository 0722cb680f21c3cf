"""int8 by post-training quantisation (NNCF, for OpenVINO), and how far its purified images are from float32's.

The convolutions' weights (per channel) and inputs become 8-bit integers whose ranges are taken from calibration inputs.
These are the states that the network is asked about while images are purified, at every noise level that the sampler
visits: a range that was seen at t* alone is wrong near t = 0. The first and the last convolution, which see the image
and write the noise, and all that is no convolution stay in float32. With the norms and the noise level's part in int8
as well, 40 images purified by cifar10-small (DDIM, five steps, t* = 0.1) differed from float32's by 5.6/255 on average
and 11 of them changed class; with the convolutions alone by 0.26/255, and none did.

int8 changes results. `compare` says by how much, on images with the same noise.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from diffpure.diffusion.samplers import AnySampler
from diffpure.diffusion.score import ScoreModel, ScoreWrapper
from diffpure.diffusion.sde import STEPS
from diffpure.errors import InputError
from diffpure.exporting.make import export_score, to_openvino
from diffpure.models.runtime import package
from diffpure.purifiers.diffusion import Purifier
from diffpure.scores.exported import ExportedScore

STATES: Final = 300  # states of images, at most, that are looked at
ROWS: Final = 10  # of them together
CONVOLUTION: Final = "Convolution"  # OpenVINO's name


def quantise(score: ScoreModel, sampler: AnySampler, images: Tensor, seeds: Sequence[int]) -> ExportedScore:
    """The score in int8, calibrated on the states of a purification of images (B, C, H, W) in [0, 1]."""
    nncf = package("nncf", "openvino")
    logging.getLogger("nncf").setLevel(logging.ERROR)
    exported, _ = export_score(score, "openvino")
    states = path_states(score, sampler, images, seeds)
    inputs = [{name: value.numpy() for name, value in exported.inputs(x, t).items()} for x, t in states]

    def to_int8(model: Any) -> Any:
        return nncf.quantize(
            model,
            nncf.Dataset(inputs),
            subset_size=len(inputs),
            preset=nncf.QuantizationPreset.MIXED,  # activations are not symmetric
            ignored_scope=_kept(nncf, model),
        )

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # NNCF draws bars
            return ExportedScore(to_openvino(exported.network, to_int8))
    except InputError:
        raise
    except Exception as error:  # NNCF raises whatever it meets
        raise InputError(f"NNCF cannot quantise {type(score).__name__} ({error}).") from error


@torch.no_grad()
def path_states(
    score: ScoreModel, sampler: AnySampler, images: Tensor, seeds: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """What a purification asks the score, x (B, C, H, W) and t (B,), evenly chosen from all levels and images."""
    heard = _Listening(score)
    Purifier(heard, sampler)(images, list(seeds))
    asked = [(x[k : k + ROWS], t[k : k + ROWS]) for x, t in heard.asked for k in range(0, len(x), ROWS)]
    every = max(1, -(-len(asked) * ROWS // STATES))
    return asked[::every]


@final
class _Listening(ScoreWrapper):
    """A score that remembers what it was asked."""

    def __init__(self, inner: ScoreModel) -> None:
        super().__init__(inner)
        self.asked: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.asked.append((x, t))
        return super().forward(x, t)

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        self.asked.append((x, (i.to(torch.float64) + 1) / STEPS))
        return super().epsilon_step(x, i)


def _kept(nncf: Any, model: Any) -> Any:
    """What stays in float32: the first and the last convolution, and all that is no convolution."""
    nodes = model.get_ordered_ops()
    convolutions = [node.get_friendly_name() for node in nodes if node.get_type_name() == CONVOLUTION]
    others = sorted({node.get_type_name() for node in nodes} - {CONVOLUTION, "Constant", "Parameter", "Result"})
    names = [convolutions[0], convolutions[-1]] if convolutions else []
    return nncf.IgnoredScope(names=names, types=others, validate=False)


@final
@dataclass(frozen=True)
class Difference:
    """How far purified images are from float32's with the same noise, and what a classifier says of both."""

    images: int
    mean: float  # absolute difference of a pixel in [0, 1]
    largest: float
    agree: int | None = None  # images that the classifier gives the same class
    correct: tuple[int, int] | None = None  # images that it classifies rightly: float32, other

    def __str__(self) -> str:
        mean, most = f"{255 * self.mean:.2f}/255", f"{255 * self.largest:.0f}/255"
        text = f"{self.images} purified images differ by {mean} on average and {most} at most"
        if self.agree is not None:
            text += f"; the same class for {self.agree} of {self.images}"
        if self.correct is not None:
            text += f"; correct {self.correct[0]} before, {self.correct[1]} after"
        return text + "."


@torch.no_grad()
def compare(
    score: ScoreModel,
    other: ScoreModel,
    sampler: AnySampler,
    images: Tensor,
    seeds: Sequence[int],
    classifier: Callable[[Tensor], Tensor] | None = None,
    labels: Tensor | None = None,
) -> Difference:
    """Purify the same images (B, C, H, W) in [0, 1] with the same noise by both scores."""
    first, second = (Purifier(each, sampler)(images, list(seeds)) for each in (score, other))
    away = (first - second).abs()
    if not torch.isfinite(away).all():
        raise InputError("The other score purifies to values that are not finite.")
    agree, correct = None, None
    if classifier is not None:
        a, b = (classifier(purified).argmax(1) for purified in (first, second))
        agree = int((a == b).sum())
        correct = None if labels is None else (int((a == labels).sum()), int((b == labels).sum()))
    return Difference(len(images), away.mean().item(), away.max().item(), agree, correct)

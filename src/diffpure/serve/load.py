"""From a spec or the options of the command line to a service: plain values, which a replica elsewhere loads, too."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from diffpure.data.sources import DataSpec
from diffpure.diffusion.score import ScoreModel, ScoreWrapper
from diffpure.errors import InputError
from diffpure.experiments.load import Loader
from diffpure.experiments.spec import EvaluationSpec, ModelSpec
from diffpure.exporting.make import backend_score
from diffpure.files.tiles import Fit
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from diffpure.serve.limits import Limits
from diffpure.serve.model import Computer, Model
from diffpure.serve.service import Service

DRAWS: Final = 8  # per classified image, where neither the caller nor the model says


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is served: a model, how it is loaded, and the limits of a request.

    data: the images that the classifier is for; it names the classes.   draws: purifications per classified image, by
    default those of the model where it votes itself, else 8.
    backend: what computes the score: torch, onnx or openvino.   size: the side that classified images are brought to,
    by default that of the data, or of the score model.
    """

    model: ModelSpec
    data: DataSpec | None = None
    base: Path | None = None
    device: str = "cpu"
    allow_code: bool = False
    draws: int | None = None
    fit: Fit = "auto"
    backend: str = "torch"
    size: int | None = None
    limits: Limits = field(default_factory=Limits)

    def service(self, model: Computer | None = None) -> Service:
        """The service, with its model loaded in this process unless it is given."""
        model = model or self.computer()
        size = self.size or (self.data.size if self.data else None) or model.size
        return Service(model, self.limits, size=size)

    def computer(self) -> Model:
        """The model, ready to answer batches."""
        model, names = self.defense(), self._names()
        draws = DRAWS if self.draws is None and not model.vote else self.draws
        return Model(model, batch=self.limits.batch, draws=draws, fit=self.fit, names=names, device=self.device)

    def defense(self) -> Defense:
        """The model itself."""
        model = self._loader.model(self.model)
        if not isinstance(model, Defense):
            raise InputError("A service purifies, so that its [model] needs a score or a purifier.")
        return model if self.backend == "torch" else _computed(model, self.backend)

    @property
    def _loader(self) -> Loader:
        return Loader(base=self.base, device=self.device, allow_code=self.allow_code)

    def _names(self) -> tuple[str, ...]:
        """The names of the classes, where the images of the spec are at hand to tell them."""
        if self.data is None:
            return ()
        with contextlib.suppress(InputError):
            spec = EvaluationSpec(model=self.model, data=replace(self.data, images="0", subset=None))
            return self._loader.data(spec).class_names
        return ()


@final
class Even(ScoreWrapper):
    """A score that is only called with 1, 2, 4, 8 … images, the last one repeated: OpenVINO compiles for each count."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.inner(_padded(x), _padded(t.expand(len(x))))[: len(x)]

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        return self.inner.epsilon_step(_padded(x), _padded(i.expand(len(x))))[: len(x)]


def _padded(x: Tensor) -> Tensor:
    """The rows of x (B, ...) and copies of the last one, up to a power of two."""
    more = (1 << (len(x) - 1).bit_length()) - len(x)
    return torch.cat([x, x[-1:].expand(more, *x.shape[1:])]) if more else x


def _computed(model: Defense, backend: str) -> Defense:
    """The same defence with its score computed by another runtime."""
    purifier = model.purifier
    if not isinstance(purifier, Purifier):
        raise InputError(f"A backend computes a score model, which {purifier.title} has not; leave --backend out.")
    score: ScoreModel = backend_score(purifier.score, backend)
    score = Even(score) if backend == "openvino" else score
    other = Purifier(score, purifier.sampler, rounds=purifier.rounds, autocast=purifier.autocast, fit=purifier.fit)
    return model.with_purifier(other)

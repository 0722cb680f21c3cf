"""From a spec or the options of the command line to a service: plain values, which a replica elsewhere loads, too."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from diffpure.data.sources import DataSpec
from diffpure.errors import InputError
from diffpure.experiments.load import Loader
from diffpure.experiments.spec import EvaluationSpec, ModelSpec
from diffpure.files.tiles import Fit
from diffpure.purify import Defense
from diffpure.serve.limits import Limits
from diffpure.serve.service import Service


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is served: a model, how it is loaded, and the limits of a request.

    data: the images that the classifier is for; it names the classes.   draws: purifications per classified image.
    size: the side that classified images are brought to, by default that of the data, or of the score model.
    """

    model: ModelSpec
    data: DataSpec | None = None
    base: Path | None = None
    device: str = "cpu"
    allow_code: bool = False
    draws: int = 8
    fit: Fit = "auto"
    size: int | None = None
    limits: Limits = field(default_factory=Limits)

    def service(self) -> Service:
        """The service, with its model loaded."""
        loader = Loader(base=self.base, device=self.device, allow_code=self.allow_code)
        model = loader.model(self.model)
        if not isinstance(model, Defense):
            raise InputError("A service purifies, so that its [model] needs a score or a purifier.")
        size = self.size or (self.data.size if self.data else None) or model.purifier.size
        return Service(
            model, self.limits, draws=self.draws, fit=self.fit, size=size, names=self._names(loader), device=self.device
        )

    def _names(self, loader: Loader) -> tuple[str, ...]:
        """The names of the classes, where the images of the spec are at hand to tell them."""
        if self.data is None:
            return ()
        with contextlib.suppress(InputError):
            spec = EvaluationSpec(model=self.model, data=replace(self.data, images="0", subset=None))
            return loader.data(spec).class_names
        return ()

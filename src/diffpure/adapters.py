"""Defences as other people's attacks want them.

A `Defense` is a plain module: foolbox, ART, torchattacks and the public AutoAttack attack it as it is, one fresh draw
a call. What they lack is the expectation over samples (`Averaged`), a name for the range of the images (foolbox) and a
preprocessor whose gradient is the purifier's own instead of the identity (ART). Foreign packages are imported when
they are asked for.
"""

from __future__ import annotations

import importlib
from typing import Any, final

import torch
from torch import Tensor, nn

from diffpure.errors import InputError
from diffpure.noise import Noise, Seeds


@final
class Averaged(nn.Module):
    """The mean logits of several fresh samples a call, so that an attack without EOT has the gradient of the mean."""

    stochastic = True

    def __init__(self, model: nn.Module, samples: int = 20) -> None:
        super().__init__()
        if samples < 1:
            raise InputError(f"Averaged needs one draw or more, got {samples}.")
        self.model = model
        self.samples = samples

    def forward(self, images: Tensor, seeds: Seeds = None) -> Tensor:
        """Logits (B, classes); the samples of an image follow from its seed."""
        drawn = Noise.of(seeds, len(images)).draws(self.samples).seeds
        repeated = images.repeat_interleave(self.samples, 0)
        logits: Tensor = self.model(repeated, seeds=drawn)
        return logits.reshape(len(images), self.samples, -1).mean(1)


def foolbox_model(model: nn.Module, samples: int = 1) -> Any:
    """The model for foolbox: images in [0, 1], each call the mean of so many samples if the model is random."""
    foolbox = _imported("foolbox")
    random = getattr(model, "stochastic", False)
    return foolbox.PyTorchModel((Averaged(model, samples) if random else model).eval(), bounds=(0, 1))


def art_preprocessor(purifier: nn.Module) -> Any:
    """The purifier as a preprocessing defence of ART's PyTorchClassifier, with its own gradient, not the identity's."""
    base = _imported("art.defences.preprocessor.preprocessor").PreprocessorPyTorch

    class PurifierPreprocessor(base):  # type: ignore[misc, valid-type]
        """ART calls `forward` on tensors where it wants gradients."""

        def __init__(self) -> None:
            super().__init__(is_fitted=True, apply_fit=False, apply_predict=True)

        @property
        def device(self) -> torch.device:
            return next((p.device for p in purifier.parameters()), torch.device("cpu"))

        def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            return purifier(x), y

    return PurifierPreprocessor()


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = {"art": "adversarial-robustness-toolbox"}.get(name.split(".")[0], name.split(".")[0])
        raise InputError(f"This adapter needs the package {package!r}, which is not installed: {error}.") from error

"""Defences as other people's attacks want them, and as our own attacks along the path want them.

A `Defense` is a plain module: foolbox, ART, torchattacks and the public AutoAttack attack it as it is, one fresh draw
a call. What they lack is the expectation over samples (`Averaged`), a name for the range of the images (foolbox) and a
preprocessor whose gradient is the purifier's own instead of the identity (ART). Foreign packages are imported when
they are asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Self, final

import torch
from torch import Tensor, nn

from diffpure.attacks import APGD, EOT, Transfer
from diffpure.diffusion.paths import Path
from diffpure.diffusion.sde import over
from diffpure.errors import InputError
from diffpure.noise import Noise, mix
from diffpure.purify import Defense, Purifier, Seeds


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
        drawn = [mix(seed, d) for seed in Noise.of(seeds, len(images)).seeds for d in range(self.samples)]
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


@final
@dataclass(frozen=True)
class Segment(Path):
    """The steps first … last - 1 of a path, as a path."""

    path: Path
    first: int
    last: int
    context: Tensor | None = None

    @property
    def score(self) -> Callable[[Tensor, Tensor], Tensor]:  # type: ignore[override]
        """The whole path's score."""
        return self.path.score

    def __len__(self) -> int:
        return self.last - self.first

    def step(self, x: Tensor, i: int) -> Tensor:
        path = self.path if self.context is None else replace(self.path, context=self.context)  # type: ignore[type-var]
        return path.step(x, self.first + i)

    def time(self, i: int) -> Tensor:
        return self.path.time(self.first + i)

    def coarser(self, steps: int) -> Self:
        raise InputError("A segment of a path has no coarser form; attack along the path with the exact gradient.")


@final
class PathDeviation(nn.Module):
    """A defence that also says how far its reverse path is from the forward one: images → (logits, deviation).

        deviation = Σ_k α(t_k) mean (x(t_k) - x̂(t_k))²,      x(t) = √α(t) x + std(t) ε with the ε of the start,

    at `states` times spread over the path, the purified image being the last: what DiffAttack (Kang et al. 2023)
    raises beside the classification loss, `APGD(loss="deviated")`. Each piece of the path keeps the exact gradient.
    """

    def __init__(self, defence: Defense, states: int = 4) -> None:
        super().__init__()
        if states < 1 or defence.purifier.rounds != 1:
            raise InputError("PathDeviation needs one state or more, and a purifier of one round.")
        self.defence = defence
        self.states = states

    @property
    def stochastic(self) -> bool:
        """As the defence is."""
        return self.defence.stochastic

    def forward(self, images: Tensor, seeds: Seeds = None) -> tuple[Tensor, Tensor]:
        """Logits (B, classes) and deviations (B,)."""
        purifier: Purifier = self.defence.purifier
        sde, x = purifier.score.sde, purifier._enter(images)
        state, path = purifier.sampler(purifier.score, x, Noise.of(seeds, len(images)).child(0))
        t = path.time(0)
        # A sampler without diffusion (Langevin) starts at x itself, at time 0.
        noise = (state - over(sde.alpha(t).sqrt(), x) * x) / over(sde.std(t).clamp_min(1e-12), x)
        deviation = images.new_zeros(len(images))
        for first, last in pairwise(torch.linspace(0, len(path), self.states + 1).round().int().tolist()):
            state = purifier.gradient(Segment(path, first, last, path.context), state)
            t = path.time(last)
            away = (sde.diffuse(x, t, noise) - state).square().flatten(1).mean(1)
            deviation = deviation + over(sde.alpha(t), away) * away
        return self.defence.classifier(purifier._leave(state, images)), deviation


# DiffAttack (Kang et al. 2023): crafted along the path, judged on the defence.
DIFFATTACK: Final = Transfer(attack=APGD(loss="deviated", eot=EOT(20)), part=PathDeviation, eot=EOT(20))

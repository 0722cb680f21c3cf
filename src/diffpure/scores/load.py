"""`load_score`: a score model by name, file, folder, hub repository or function, ready to use.

The schemes of names are those of `models.resolve`; a file holds weights of a model that has a card, a folder is one of
diffusers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from torch import nn

from diffpure.diffusion.score import EpsilonScore, ScoreModel, ScoreWrapper, as_score
from diffpure.errors import InputError
from diffpure.models.resolve import Family, resolve
from diffpure.scores import hf
from diffpure.scores.ddpm import DDPMScore
from diffpure.scores.ddpmpp import DDPMppScore
from diffpure.scores.exported import PROGRAMS
from diffpure.scores.guided import GuidedScore
from diffpure.scores.photos import PhotoUNet
from diffpure.scores.small import SmallUNet


def load_score(
    name: str | Path,
    *,
    like: str | None = None,
    half: bool = False,
    allow_code: bool = False,
    arguments: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> ScoreModel:
    """A frozen score model by name, path, hub repository or `python:` function.

    like: the card of the model a file is read as, where its name does not say.   half: the blocks' convolutions in
    float16, as guided diffusion runs them.   allow_code: load what runs code of its own.   arguments: of the
    function.   base: the folder that relative paths start from.
    """
    score = resolve(name, SCORES, like=like, allow_code=allow_code, arguments=arguments, base=base)
    if half:
        if not isinstance(score, GuidedScore):
            raise InputError(f"Half precision belongs to guided diffusion, not to {type(score).__name__}.")
        score.network.half_convolutions()
    return cast(ScoreModel, score)


def _adopt(made: Any, name: str) -> nn.Module:
    """What a user's function returned, if it is a score model."""
    try:
        score = as_score(made)
    except InputError as error:
        raise InputError(
            f"{name} returned {type(made).__name__}, but a score model is wanted; dp.DenoiserScore makes one of a "
            "denoiser, and a network that predicts the noise derives from dp.EpsilonScore."
        ) from error
    return score if isinstance(score, nn.Module) else ScoreWrapper(score)


# Architectures by the name that a card calls them; a card's arguments or configuration are their keywords.
ARCHITECTURES: Final[dict[str, Callable[..., EpsilonScore]]] = {
    "SmallUNet": SmallUNet,
    "PhotoUNet": PhotoUNet,
    "ncsnpp": DDPMppScore.from_config,
    "guided_unet": GuidedScore.from_config,
    "ddpm": DDPMScore.from_config,
}
SCORES: Final = Family(
    kind="score",
    architectures=ARCHITECTURES,
    adopt=_adopt,
    programs=PROGRAMS,
    folder=hf.load_folder,
    hub=hf.load_hub,
)

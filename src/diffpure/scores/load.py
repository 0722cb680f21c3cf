"""`load_score`: a score model by name, file, folder or hub repository, ready to use.

A name is a model inside the package, or an official checkpoint described in cards.toml; a path is a user's own file of
such a checkpoint, or a diffusers folder; `owner/name` is a repository of the Hugging Face hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffpure.diffusion.score import EpsilonScore
from diffpure.errors import InputError, unknown
from diffpure.models import weights
from diffpure.models.cards import Card, card_of_file, cards, local_file
from diffpure.models.checkpoints import LAYOUTS, frozen, load_state, read
from diffpure.scores import hf, small
from diffpure.scores.ddpm import DDPMScore
from diffpure.scores.ddpmpp import DDPMppScore
from diffpure.scores.guided import GuidedScore


def load_score(name: str | Path, *, like: str | None = None, half: bool = False) -> EpsilonScore:
    """A frozen score model by name, path or hub repository.

    like: the card of the model a file is read as, where its name does not say.   half: the blocks' convolutions in
    float16, as guided diffusion runs them.
    """
    score = frozen(_find(name, like))
    if half:
        if not isinstance(score, GuidedScore):
            raise InputError(f"Half precision belongs to guided diffusion, not to {type(score).__name__}.")
        score.network.half_convolutions()
    return score


def _find(name: str | Path, like: str | None) -> EpsilonScore:
    path = Path(name)
    ours = [key for key, card in weights.cards().items() if card["kind"] == "score"]
    official = cards("score")
    if name in ours:
        return _embedded(str(name))
    if name in official:
        return _from_card(official[str(name)], local_file(official[str(name)]))
    if path.is_dir():
        return hf.load_folder(path)
    if path.is_file():
        return _embedded(like, path) if like in ours else _from_card(card_of_file(path, "score", like), path)
    if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.suffix:
        return hf.load_hub(name)
    raise unknown("score model", str(name), [*ours, *official, "a file or folder", "a hub repository owner/name"])


def _embedded(name: str, path: Path | None = None) -> EpsilonScore:
    """A model of the package, or the same network with the weights of a user's own file."""
    card, state = (weights.cards()[name], read(path)) if path else weights.embedded(name)
    score = small.ARCHITECTURES[card["architecture"]](**card["arguments"])
    load_state(score, state, path.name if path else name)
    return score


def _from_card(card: Card, path: Path) -> EpsilonScore:
    score = ARCHITECTURES[card.architecture](card.config)
    load_state(score.network, LAYOUTS[card.layout](read(path), score.network), path.name)
    return score


ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], DDPMppScore | GuidedScore | DDPMScore]] = {
    "ncsnpp": DDPMppScore.from_config,
    "guided_unet": GuidedScore.from_config,
    "ddpm": DDPMScore.from_config,
}

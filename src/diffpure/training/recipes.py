"""How the models inside the package are made: one recipe per model, which is the whole command of its card, and
`cifar10-base`, a larger score that is not inside.

`follow` builds the network from the seed, trains it on CIFAR-10's training set or on photographs and returns it with
its averaged weights; a run that was killed goes on when the same recipe is followed in the same folder. `harden` trains
the networks of a defence further, against attacks. `export` writes the file that an embedded model is read from and
gives the part of the card that follows from the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch
from rich.console import Console
from torch import nn

from diffpure.classifiers.load import CLASSIFIERS
from diffpure.classifiers.small import SmallResNet, small_vit
from diffpure.data import cifar10, photos
from diffpure.data.cifar10 import Images
from diffpure.data.photos import Photos
from diffpure.diffusion.score import EpsilonScore, ScoreModel
from diffpure.errors import InputError, unknown
from diffpure.models.cards import card, local_file
from diffpure.models.weights import pack
from diffpure.scores.load import load_score
from diffpure.scores.photos import PhotoUNet
from diffpure.scores.small import SmallUNet, widened
from diffpure.training.adversarial import FAST_LINF
from diffpure.training.classifier import ClassifierConfig, train_classifier
from diffpure.training.cost import multiply_adds, parameters
from diffpure.training.purifier import PurifierConfig, train_purifier
from diffpure.training.score import ScoreConfig, train_score

HELD_OUT: Final = 500  # the last training images, which a score is watched on and never trained on
HELD_OUT_PHOTOS: Final = 50  # the same of photographs, which are larger, as squares of so many pixels for a score:
SQUARE: Final = 128


@final
@dataclass(frozen=True)
class Recipe:
    """A network, built for the training images, how to train it, and how to read what it is trained on."""

    build: Callable[[Any], nn.Module]
    config: ScoreConfig | ClassifierConfig
    read: Callable[[Path | None], Images | Photos] = lambda path: cifar10.load("train", path)


def find(name: str) -> Recipe:
    """A recipe by its name, or one sentence that says which there are."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def follow(
    name: str, images: Images | Photos, folder: Path | None, console: Console | None = None, **changes: Any
) -> nn.Module:
    """The network of a recipe, trained on `images`; `changes` replace fields of its configuration."""
    recipe = find(name)
    config = replace(recipe.config, **changes)
    torch.manual_seed(config.seed)
    model = recipe.build(images)
    if isinstance(config, ScoreConfig):
        assert isinstance(model, EpsilonScore)
        training, validation = _held_out(images)
        state = train_score(model, training, config, validation, folder, console)
    else:
        assert isinstance(images, Images)
        state = train_classifier(model, images, config, folder, console)
    model.load_state_dict(state)
    return model.eval()


def harden(
    score: ScoreModel,
    classifier: nn.Module,
    images: Images | Photos,
    config: PurifierConfig,
    folder: Path | None,
    console: Console | None = None,
) -> dict[str, nn.Module]:
    """A score and the classifier behind it, by these names, trained as the configuration says: those that learned."""
    if not isinstance(score, EpsilonScore):
        raise InputError(f"Only a network that predicts noise can be trained, and {type(score).__name__} is none.")
    training, validation = _held_out(images, config.crop)
    trained: dict[str, nn.Module] = {"score": score, "classifier": classifier}
    states = train_purifier(score, classifier, training, config, validation, folder, console)
    for model, state in zip(trained.values(), states, strict=True):
        model.load_state_dict(state)
    return {name: model for name, model in trained.items() if config.learn in ("both", name)}


def _held_out(images: Images | Photos, square: int = SQUARE) -> tuple[Images | Photos, Images]:
    """The images to train a score on, and the last ones, to watch it on."""
    if isinstance(images, Images):
        return images[:-HELD_OUT], images[-HELD_OUT:]
    squares = images[-HELD_OUT_PHOTOS:].squares(square)
    return images[:-HELD_OUT_PHOTOS], Images(squares, torch.zeros(len(squares), dtype=torch.int64))


def export(name: str, model: nn.Module, folder: Path) -> dict[str, Any]:
    """Write NAME.safetensors in half precision; returns what its card says of the file and of the network's cost."""
    data = pack(model.state_dict())
    file = folder / f"{name}.safetensors"
    file.write_bytes(data)
    x = torch.zeros(1, 3, 32, 32)
    inputs = (x, torch.tensor([0.1])) if isinstance(model, EpsilonScore) else (x,)
    return {
        "file": file.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "kind": "score" if isinstance(model, EpsilonScore) else "classifier",
        "parameters": parameters(model),
        "multiply_adds": multiply_adds(model, *inputs),
    }


def _whitened(images: Images) -> SmallResNet:
    model = SmallResNet()
    model.fit_whitening(images[:5000].float())
    return model


def photographs(path: Path | None) -> Photos:
    if path is None:
        raise InputError("Photographs have no place in the cache; give a folder or a tar archive of them as data.")
    return photos.read(path)


def _wider(name: str) -> SmallUNet:
    """A network twice as wide as an embedded score, which begins as that one."""
    known = load_score(name)
    assert isinstance(known, SmallUNet)
    return widened(known)


def _shipped(name: str) -> nn.Module:
    """An embedded classifier to go on from: adversarial training from trained weights needs half the epochs."""
    about = card(name, "classifier")
    return CLASSIFIERS.read(about, local_file(about))


RECIPES: Final[dict[str, Recipe]] = {
    "cifar10-small": Recipe(lambda _: SmallUNet(), ScoreConfig()),
    "cifar10-base": Recipe(
        lambda _: _wider("cifar10-small"),
        ScoreConfig(optimiser="muon", rate=4e-3, examples=160_000),
    ),
    "photos-small": Recipe(
        lambda _: PhotoUNet(),
        ScoreConfig(
            examples=64_000,
            batch=4,
            rate=2e-3,
            t_max=0.25,
            power=1.5,
            weighting="relative",
            crop=64,
            checkpoint_seconds=300.0,
        ),
        photographs,
    ),
    "cifar10-resnet": Recipe(_whitened, ClassifierConfig()),
    "cifar10-resnet-at": Recipe(
        lambda _: _shipped("cifar10-resnet"),
        ClassifierConfig(adversary=FAST_LINF, epochs=6, batch=256, rate=6, decay=0.99, smoothing=0.0),
    ),
    "cifar10-vit-tiny": Recipe(
        lambda _: small_vit(),
        ClassifierConfig(
            optimiser="adamw", rate=1e-3, weight_decay=0.05, epochs=9, batch=128, smoothing=0.1, decay=0.998
        ),
    ),
}

"""Training a purifier against attacks, with the classifier behind it, or one of the two alone.

What is trained is what a defence computes in one step or in a few; `training.objectives` has the equations. y there is
the label of an image, or what the undefended classifier says of it while it is clean (`labels = "classifier"`: its
probabilities). Then images need no labels, and a purifier is tuned to a classifier that stays as it is.

Statistics of normalisation stay what they were: fine-tuning begins with trained networks, whose running averages are
better than those of a small batch, and a purifier is the same function in training as it is when it is deployed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from rich.console import Console
from torch import Tensor, nn

from diffpure.attacks.pgd import PGD
from diffpure.data.cifar10 import Images
from diffpure.data.photos import Photos
from diffpure.diffusion.score import EpsilonScore
from diffpure.errors import InputError, unknown
from diffpure.models.checkpoints import digest
from diffpure.noise import Noise
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from diffpure.training.adversarial import FAST_LINF, Adversary
from diffpure.training.classifier import Augmented, ClassifierConfig
from diffpure.training.loop import State, cosine, generator, run_of, train
from diffpure.training.objectives import END, OBJECTIVES, Guarded, Rows, deployed, learns
from diffpure.training.score import WEIGHTINGS, shown, spread

LEARN: Final = ("both", "score", "classifier")
LABELS: Final = ("given", "classifier")
KNOWS: Final = ("noise", "purifier", "classifier")
PHOTOGRAPHS: Final[Mapping[str, Any]] = {  # what a purifier of photographs is trained with, if nothing else is said
    "learn": "score", "labels": "classifier", "examples": 1600, "batch": 8, "decay": 0.99, "watched": 8
}  # fmt: skip
STEPS: Final = 5  # of the attack on the validation images of a checkpoint


@final
@dataclass(frozen=True, kw_only=True)
class PurifierConfig:
    """What a training of a purifier depends on, beside its data and the networks that it begins with."""

    objective: str = "classifier"
    learn: str = "both"  # which of the two networks: "both", "score" or "classifier"
    examples: int = 64_000  # images seen in all
    batch: int = 64
    rate: float = 3e-4  # of the score, at its peak
    classifier_rate: float = 1e-4
    clip: float = 1.0
    decay: float = 0.999
    t_min: float = 0.02
    t_max: float = 0.1
    few_steps: int = 0  # half of the steps of training purify in so many, the others in one call; 0: all in one call
    adversary: Adversary = FAST_LINF
    knows: str = (
        "noise"  # what the attack knows beside the classifier: the purifier and its noise, the first, or neither
    )
    attacked: float = 1.0  # weight of the attacked images; without it nothing is attacked
    clean: float = 0.0  # weight of the clean images, which cost as much as the attacked ones without the attack
    denoising: float = 1.0  # weight of |ε̂ - ε*|² against the cross-entropy, which costs nothing
    weighting: str = "edm"
    smoothing: float = 0.0
    labels: str = "given"  # or "classifier": what the undefended classifier says of the clean image
    translate: int = 2
    flip: bool = True
    crop: int = 224  # side of the squares that are cut from photographs
    rescale: float = 1.15  # how much larger a square may be before it is reduced to that
    seed: int = 0
    threads: int | None = None
    precision: str = "float32"
    checkpoint_seconds: float = 300.0
    watched: int = 64  # validation images that a checkpoint is attacked on

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise unknown("objective", self.objective, OBJECTIVES)
        if self.learn not in LEARN:
            raise unknown("part to learn", self.learn, LEARN)
        if self.objective != "classifier":
            self._check_denoiser()
        if self.knows not in KNOWS:
            raise unknown("knowledge of an attack", self.knows, KNOWS)
        if self.labels not in LABELS:
            raise unknown("kind of labels", self.labels, LABELS)
        if self.labels == "classifier" and self.learn != "score":
            raise InputError("What a classifier says cannot teach a classifier that learns: learn is 'score' then.")
        if self.weighting not in WEIGHTINGS:
            raise unknown("weighting", self.weighting, WEIGHTINGS)
        if self.crop < 1 or self.rescale < 1 or self.watched < 1:
            raise InputError("The side of crops, how far they are reduced, and the images watched are 1 or more.")
        if not 0 < self.t_min <= self.t_max <= 1:
            raise InputError(f"Times need 0 < t_min <= t_max <= 1, got {self.t_min} and {self.t_max}.")
        if self.few_steps != int(self.few_steps) or self.few_steps < 0:
            raise InputError(f"few_steps is a whole number from 0 on, got {self.few_steps}.")
        if self.few_steps and self.t_min <= END:
            raise InputError(f"few_steps lead down to t = {END:g} and need a larger t_min, got {self.t_min:g}.")
        if min(self.attacked, self.clean, self.denoising) < 0:
            raise InputError("The weights of attacked images, of clean ones and of denoising are not negative.")
        if self.attacked + self.clean == 0:
            raise InputError("Attacked images, clean ones or both have a weight above zero.")
        if self.adversary.trades is not None:
            raise InputError("A purifier is trained against plain attacks, without β of TRADES.")

    def _check_denoiser(self) -> None:
        """Refuse what an objective without a classifier's loss would pass over."""
        if self.learn != "score":
            raise InputError(f"The objective {self.objective!r} trains the score alone, so learn is 'score'.")
        for name in ("few_steps", "knows", "attacked", "clean", "denoising", "smoothing"):
            if getattr(self, name) != getattr(type(self), name):
                raise InputError(f"{name} belongs to the objective 'classifier', and {self.objective!r} has none.")


def train_purifier(
    score: EpsilonScore,
    classifier: nn.Module,
    images: Images | Photos,
    config: PurifierConfig,
    validation: Images | None = None,
    folder: Path | None = None,
    console: Console | None = None,
) -> tuple[State, State]:
    """Train score and classifier in place; returns the averaged weights of each, the ones to keep.

    With validation images, the log gets their clean and attacked accuracy at every checkpoint. Photographs have no
    labels but those of the classifier.
    """
    if isinstance(images, Photos) and config.labels == "given":
        raise InputError("Photographs have no labels: let the classifier give them (labels 'classifier').")
    options = {"score": digest(*score.state_dict().values()), "classifier": digest(*classifier.state_dict().values())}
    model = Guarded(score, classifier)
    score.requires_grad_(config.learn != "classifier")
    classifier.requires_grad_(config.learn != "score")
    objective = OBJECTIVES[config.objective]

    def loss(replica: Guarded, *tensors: Tensor) -> Tensor:
        rows = Rows(*tensors)
        if config.labels == "classifier":
            rows = replace(rows, y=_answers(replica.classifier, rows.x))
        return objective(replica, config, rows)

    run = run_of(config, images, max(1, config.examples // config.batch), folder, **options)
    rates = ((score, config.rate), (classifier, config.classifier_rate))
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in rates if learns(part)]
    if not groups:
        raise InputError(f"{type(classifier).__name__} has no weights that could learn.")
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
    report = partial(_watch, config, _watched(validation, classifier, config)) if validation else None
    state = train(model, optimiser, _batches(images, config), loss, cosine(), run, report, console)
    return _part(state, "score."), _part(state, "classifier.")


def _part(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


@torch.no_grad()
def _answers(classifier: nn.Module, x: Tensor) -> Tensor:
    """The probabilities (B, K) that the undefended classifier gives clean images (B, C, H, W) in [0, 1]."""
    probabilities: Tensor = classifier(x).float().softmax(1)
    return probabilities


def _watched(validation: Images, classifier: nn.Module, config: PurifierConfig) -> Images:
    """The validation images that checkpoints are watched on, with the labels that the training has."""
    chosen = validation[: config.watched]
    if config.labels == "given":
        return chosen
    return Images(chosen.pixels, _answers(classifier.eval(), chosen.float()).argmax(1))


def _batches(images: Images | Photos, config: PurifierConfig) -> Callable[[int], tuple[Tensor, ...]]:
    """The rows of a step, as a pure function of it."""
    if isinstance(images, Images):
        options = ClassifierConfig(batch=config.batch, translate=config.translate, flip=config.flip, seed=config.seed)
        source = Augmented(images, options)

    def batch(step: int) -> tuple[Tensor, ...]:
        random = generator(config.seed, step, 4)
        if isinstance(images, Images):
            x, y = source(step)
        else:
            x = shown(images, config, step, random) / 255
            y = torch.zeros(len(x), dtype=torch.int64)
        t = config.t_min + (config.t_max - config.t_min) * spread(len(x), random)
        eps = torch.randn(x.shape, generator=random)
        seeds = torch.randint(1 << 62, (len(x),), generator=random)
        steps = config.few_steps * torch.randint(2, (1,), generator=random)
        return x, y, t, eps, seeds, steps.expand(len(x))

    return batch


def _watch(config: PurifierConfig, images: Images, model: nn.Module) -> str:
    """Clean and attacked accuracy from the middle of the times, each image with fresh noise."""
    assert isinstance(model, Guarded)
    parts = copy.deepcopy(model)  # a purifier freezes its score, and this one has to learn on
    t_star = (config.t_min + config.t_max) / 2
    defense = Defense(Purifier(parts.score, deployed(t_star, config.few_steps)), parts.classifier)
    x, y, seeds = images.float(), images.labels, Noise.of(config.seed, len(images))
    threat = config.adversary.threat
    z = PGD(iterations=STEPS)(defense, x, y, threat, seeds=seeds.child(0).seeds)
    with torch.no_grad():
        right = [
            (defense(shown, seeds.child(1).seeds).argmax(1) == y).double().mean().item()
            for shown in (x, threat.apply(x, z))
        ]
    return f"accuracy clean {right[0]:.1%} attacked {right[1]:.1%} ({len(x)} images, PGD-{STEPS}, t* = {t_star:g})"

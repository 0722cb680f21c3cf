"""Training a purifier against attacks, with the classifier behind it, or one of the two alone.

What is trained is what a defence computes in one step: an image x in [0, 1] is diffused to a time t* and denoised,

    P(x) = (D(x_t) + 1)/2,    x_t = √α(t) (2x - 1) + std(t) ε,    D(x_t) = (x_t - std(t) ε̂(x_t, t)) / √α(t),

with t* spread evenly over [t_min, t_max], one per image. An attack on f(P(x)) goes through the purifier with exact
gradients. An objective says which state x_t it makes of an image and an attack, and what it asks of the networks there.
All of them ask for the noise that leads back to the clean image, ε* = (x_t - √α(t) (2x - 1)) / std(t), which is
denoising score matching where nothing is attacked:

    classifier   x_t diffused from x' = x + δ at t = t*:         CE(f(P(x')), y) + d · w(t) |ε̂(x_t, t) - ε*|²
    bridge       x_t + 2δ (1 - α(t))/√α(t) · α(t*)/(1 - α(t*)):  w(t) |ε̂(x_t, t) - ε*|² at all t below t*
    rank         ε = √(1 - γ²) z + γ g, γ = min(0.03/σ(t), 0.3): the same

"classifier" is adversarial training of the defence; it can see clean images, too. "bridge" (ADBM: Li et al. 2025) leads
from the attacked image at t* to the clean one at 0. "rank" (ADDT: Liu et al. 2024) attacks with noise that is Gaussian
in each channel: g has sorted Gaussian numbers in the order of the gradient of CE(f(P(x)), y), summed over iterations.

y is the label of an image, or what the undefended classifier says of it while it is clean (`labels = "classifier"`: its
probabilities). Then images need no labels, and a purifier is tuned to a classifier that stays as it is.

Statistics of normalisation stay what they were: fine-tuning begins with trained networks, whose running averages are
better than those of a small batch, and a purifier is the same function in training as it is when it is deployed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Self, final

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from diffpure.attacks.pgd import PGD
from diffpure.data.cifar10 import Images
from diffpure.data.photos import Photos
from diffpure.diffusion.samplers import OneShot
from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import Schedule, over
from diffpure.errors import InputError, unknown
from diffpure.models.checkpoints import digest
from diffpure.noise import Noise
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from diffpure.training.adversarial import FAST_LINF, Adversary
from diffpure.training.classifier import Augmented, ClassifierConfig
from diffpure.training.loop import State, cosine, generator, run_of, train
from diffpure.training.score import WEIGHTINGS, epsilon_loss, shown, spread

LEARN: Final = ("both", "score", "classifier")
LABELS: Final = ("given", "classifier")
STEPS: Final = 5  # of the attack on the validation images of a checkpoint
TIME: Final = 0  # steps of the noise of a row: a time, ranks and fresh noise by iteration
RANKS: Final = 1
FRESH: Final = 1000


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
    adversary: Adversary = FAST_LINF
    same_noise: bool = True  # whether the attack knows the noise of the purification that the loss is computed on
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
        for name in ("same_noise", "attacked", "clean", "denoising", "smoothing"):
            if getattr(self, name) != getattr(type(self), name):
                raise InputError(f"{name} belongs to the objective 'classifier', and {self.objective!r} has none.")


@final
class Guarded(nn.Module):
    """A score and the classifier behind it, as one module: what is trained, saved and averaged together."""

    def __init__(self, score: EpsilonScore, classifier: nn.Module) -> None:
        super().__init__()
        self.score, self.classifier = score, classifier
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, the one that is deployed."""
        return super().train(False)

    def diffuse(self, x: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        """The states (B, C, H, W) of images in [0, 1] at times t (B,)."""
        return self.score.sde.diffuse(2 * x - 1, t, eps)

    def purified(self, state: Tensor, t: Tensor, predicted: Tensor) -> Tensor:
        """The images near [0, 1] that a state becomes when the predicted noise is taken away."""
        return (self.score.sde.denoised(state, t, -predicted / over(self.score.sde.std(t), state)) + 1) / 2

    def missed(self, x: Tensor, state: Tensor, t: Tensor, predicted: Tensor, weighting: str) -> Tensor:
        """The mean of w(t) |ε̂ - ε*|², a scalar: ε* is the noise that leads from the images x in [0, 1] to the state."""
        sde = self.score.sde
        noise = (state - over(torch.exp(-sde.gamma(t)), x) * (2 * x - 1)) / over(sde.std(t), x)
        return epsilon_loss(sde, t, predicted, noise, weighting)

    def forward(self, state: Tensor, t: Tensor) -> Tensor:
        """The logits (B, K) of a purified state."""
        logits: Tensor = self.classifier(self.purified(state, t, self.score.epsilon(state, t)))
        return logits


@final
@dataclass(frozen=True)
class Rows:
    """What an objective sees of a batch: images (B, C, H, W) in [0, 1], labels, times and noise, a row per image."""

    x: Tensor
    y: Tensor  # classes (B,), or probabilities (B, K)
    t: Tensor  # t* (B,) float64
    eps: Tensor  # the noise of the purification
    seeds: Tensor  # of everything else

    @property
    def noise(self) -> Noise:
        """Further random numbers, which are those of the seeds."""
        return Noise.of(self.seeds, len(self.seeds))

    def below(self) -> Tensor:
        """Times (B,) uniform in (0, t*]."""
        return self.t * (1 - self.noise.uniform(TIME))


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
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in rates if _learns(part)]
    if not groups:
        raise InputError(f"{type(classifier).__name__} has no weights that could learn.")
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
    report = partial(_watch, config, _watched(validation, classifier, config)) if validation else None
    state = train(model, optimiser, _batches(images, config), loss, cosine(), run, report, console)
    return _part(state, "score."), _part(state, "classifier.")


def _learns(part: nn.Module) -> bool:
    return any(weight.requires_grad for weight in part.parameters())


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
        return x, y, t, eps, torch.randint(1 << 62, (len(x),), generator=random)

    return batch


def _watch(config: PurifierConfig, images: Images, model: nn.Module) -> str:
    """Clean and attacked accuracy in one step from the middle of the times, each image with fresh noise."""
    assert isinstance(model, Guarded)
    parts = copy.deepcopy(model)  # a purifier freezes its score, and this one has to learn on
    t_star = (config.t_min + config.t_max) / 2
    defense = Defense(Purifier(parts.score, OneShot(t_star)), parts.classifier)
    x, y, seeds = images.float(), images.labels, Noise.of(config.seed, len(images))
    threat = config.adversary.threat
    z = PGD(iterations=STEPS)(defense, x, y, threat, seeds=seeds.child(0).seeds)
    with torch.no_grad():
        right = [
            (defense(shown, seeds.child(1).seeds).argmax(1) == y).double().mean().item()
            for shown in (x, threat.apply(x, z))
        ]
    return f"accuracy clean {right[0]:.1%} attacked {right[1]:.1%} ({len(x)} images, PGD-{STEPS}, t* = {t_star:g})"


# --------------------------------------------------------------------------------------------------------- objectives


def _classifier(model: Guarded, config: PurifierConfig, rows: Rows) -> Tensor:
    """The cross-entropy of purified images, attacked and clean, and how far the noise was missed."""
    x, y, t, eps = rows.x, rows.y, rows.t, rows.eps
    denoising = config.denoising if _learns(model.score) else 0.0

    def of(shown: Tensor) -> Tensor:
        state = model.diffuse(shown, t, eps)
        predicted = model.score.epsilon(state, t)
        logits = model.classifier(model.purified(state, t, predicted))
        value = F.cross_entropy(logits, y, label_smoothing=config.smoothing)
        return value + denoising * model.missed(x, state, t, predicted, config.weighting) if denoising else value

    parts = []
    if config.attacked:
        known = eps if config.same_noise else rows.noise(FRESH, eps)
        attack = config.adversary.attacked
        attacked = attack(lambda moved: F.cross_entropy(model(model.diffuse(moved, t, known), t), y), x, rows.seeds)
        parts.append(config.attacked * of(attacked))
    if config.clean:
        parts.append(config.clean * of(x))
    return sum(parts[1:], parts[0])


def _bridge(model: Guarded, config: PurifierConfig, rows: Rows) -> Tensor:
    """The noise missed on the bridge from the attacked image at t* to the clean one."""
    x, t = rows.x, rows.below()

    def state(moved: Tensor) -> Tensor:
        return bridge(model.score.sde, 2 * x - 1, 2 * moved - 1, t, rows.t, rows.eps)

    attack = config.adversary.attacked
    met = state(attack(lambda moved: F.cross_entropy(model(state(moved), t), rows.y), x, rows.seeds))
    return model.missed(x, met, t, model.score.epsilon(met, t), config.weighting)


def bridge(sde: Schedule, x: Tensor, attacked: Tensor, t: Tensor, t_star: Tensor, eps: Tensor) -> Tensor:
    """The state (B, C, H, W) at t of the bridge from the diffused attacked image at t* to x; images in [-1, 1]."""
    # α/(1 - α) = 1/σ², so the share of the attack is √α(t) σ(t)²/σ(t*)².
    share = torch.exp(-sde.gamma(t)) * (sde.sigma(t) / sde.sigma(t_star)) ** 2
    return sde.diffuse(x, t, eps) + over(share, x) * (attacked - x)


def _rank(model: Guarded, config: PurifierConfig, rows: Rows) -> Tensor:
    """The noise missed where a part of it is what the attack would add, if it had to look Gaussian."""
    x, t, noise = rows.x, rows.below(), rows.noise
    gamma = over((0.03 / model.score.sde.sigma(t)).clamp(max=0.3), x)
    gradient = torch.zeros_like(x)

    def state(hostile: Tensor, plain: Tensor) -> Tensor:
        return model.diffuse(x, t, (1 - gamma**2).sqrt() * plain + gamma * hostile)

    hostile = noise(RANKS, x)
    for i in range(config.adversary.iterations):
        hostile.requires_grad_()
        loss = F.cross_entropy(model(state(hostile, noise(FRESH + i, x)), t), rows.y)
        gradient += torch.autograd.grad(loss, hostile)[0]
        hostile = ranked(gradient, noise(RANKS + 1 + i, x))
    met = state(hostile, rows.eps)
    return model.missed(x, met, t, model.score.epsilon(met, t), config.weighting)


def ranked(values: Tensor, gaussian: Tensor) -> Tensor:
    """The Gaussian numbers of each channel in the order of the values there; both (B, C, H, W)."""
    order = values.flatten(2).argsort(2)
    return torch.empty_like(gaussian).flatten(2).scatter(2, order, gaussian.flatten(2).sort(2)[0]).view_as(gaussian)


Objective = Callable[[Guarded, PurifierConfig, Rows], Tensor]
OBJECTIVES: Final[dict[str, Objective]] = {"classifier": _classifier, "bridge": _bridge, "rank": _rank}

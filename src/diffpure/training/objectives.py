"""What a training asks of a purifier and of the classifier behind it: the objectives, by name.

What is trained is what a defence computes in one step: an image x in [0, 1] is diffused to a time t* and denoised,

    P(x) = (D(x_t) + 1)/2,    x_t = √α(t) (2x - 1) + std(t) ε,    D(x_t) = (x_t - std(t) ε̂(x_t, t)) / √α(t),

with t* spread evenly over [t_min, t_max], one per image. With `few_steps`, half of the steps of training, chosen by
chance, purify in so many steps of the reverse SDE instead, from x_t* to a state at t = 0.02 that is denoised
(`FewStep`). An attack on f(P(x)) goes through the purifier with exact gradients. An objective says which state x_t it
makes of an image and an attack, and what it asks of the networks there.
All of them ask for the noise that leads back to the clean image, ε* = (x_t - √α(t) (2x - 1)) / std(t), which is
denoising score matching where nothing is attacked:

    classifier   x_t diffused from x' = x + δ at t = t*:         CE(f(P(x')), y) + d · w(t) |ε̂(x_t, t) - ε*|²
    bridge       x_t + 2δ (1 - α(t))/√α(t) · α(t*)/(1 - α(t*)):  w(t) |ε̂(x_t, t) - ε*|² at all t below t*
    rank         ε = √(1 - γ²) z + γ g, γ = min(0.03/σ(t), 0.3): the same

"classifier" is adversarial training of the defence; it can see clean images, too, and its attack can be one on f alone,
which knows of no purification. "bridge" (ADBM: Li et al. 2025) leads from the attacked image at t* to the clean one at
0. "rank" (ADDT: Liu et al. 2024) attacks with noise that is Gaussian in each channel: g has sorted Gaussian numbers in
the order of the gradient of CE(f(P(x)), y), summed over iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.diffusion.gradients import walk
from diffpure.diffusion.grids import time_grid
from diffpure.diffusion.samplers import FewStep, OneShot, Sampler
from diffpure.diffusion.score import EpsilonScore, ScoreWrapper
from diffpure.diffusion.sde import Schedule, over
from diffpure.noise import Noise, NoiseSource
from diffpure.training.score import epsilon_loss

if TYPE_CHECKING:
    from diffpure.training.purifier import PurifierConfig

TIME: Final = 0  # steps of the noise of a row: a time, ranks and fresh noise by iteration
RANKS: Final = 1
FRESH: Final = 1000
WALK: Final = 0x3A1C  # the child whose noise the steps of a purification have; the attack's own is its child again
END: Final = 0.02  # where the last of several calls denoises, as in the recommended `FewStep(steps=5, end=0.02)`
UNUSED: Final = Noise(())  # of a purification in one call


def deployed(t_star: float, few_steps: int) -> Sampler:
    """How a defence purifies from t* in the steps that were trained, or in one call where there are none."""
    return FewStep(t_star=t_star, steps=few_steps, end=END) if few_steps else OneShot(t_star)


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

    def missed(self, x: Tensor, state: Tensor, t: Tensor, predicted: Tensor, weighting: str) -> Tensor:
        """The mean of w(t) |ε̂ - ε*|², a scalar: ε* is the noise that leads from the images x in [0, 1] to the state."""
        sde = self.score.sde
        noise = (state - over(torch.exp(-sde.gamma(t)), x) * (2 * x - 1)) / over(sde.std(t), x)
        return epsilon_loss(sde, t, predicted, noise, weighting)

    def purify(self, state: Tensor, t: Tensor, steps: int = 0, noise: NoiseSource = UNUSED) -> tuple[Tensor, Tensor]:
        """The images near [0, 1] that a state at t (B,) becomes in so many steps, and the first call's ε̂."""
        heard = _Heard(self.score)
        sampler = FewStep(end=END)
        times = time_grid(self.score.sde, t, END, steps, sampler.spacing) if steps else t[None]
        x = walk(sampler.path(heard, times, noise), state)
        assert heard.first is not None
        return (x + 1) / 2, over(-self.score.sde.std(t), state) * heard.first

    def forward(self, state: Tensor, t: Tensor, steps: int = 0, noise: NoiseSource = UNUSED) -> Tensor:
        """The logits (B, K) of a purified state."""
        logits: Tensor = self.classifier(self.purify(state, t, steps, noise)[0])
        return logits


@final
class _Heard(ScoreWrapper):
    """A score that keeps its first answer."""

    first: Tensor | None = None

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        answer = super().forward(x, t)
        if self.first is None:
            self.first = answer
        return answer


@final
@dataclass(frozen=True)
class Rows:
    """What an objective sees of a batch: images (B, C, H, W) in [0, 1], labels, times and noise, a row per image."""

    x: Tensor
    y: Tensor  # classes (B,), or probabilities (B, K)
    t: Tensor  # t* (B,) float64
    eps: Tensor  # the noise of the purification
    seeds: Tensor  # of everything else
    steps: Tensor  # of the purification, the same number in all rows; none where one call denoises

    @property
    def noise(self) -> Noise:
        """Further random numbers, which are those of the seeds."""
        return Noise.of(self.seeds, len(self.seeds))

    def below(self) -> Tensor:
        """Times (B,) uniform in (0, t*]."""
        return self.t * (1 - self.noise.uniform(TIME))


def learns(part: nn.Module) -> bool:
    """Whether any weight of a network learns."""
    return any(weight.requires_grad for weight in part.parameters())


def _classifier(model: Guarded, config: PurifierConfig, rows: Rows) -> Tensor:
    """The cross-entropy of purified images, attacked and clean, and how far the noise was missed."""
    x, y, t, eps, steps, noise = rows.x, rows.y, rows.t, rows.eps, int(rows.steps[0]), rows.noise
    denoising = config.denoising if learns(model.score) else 0.0
    way = noise.child(WALK)

    def of(shown: Tensor) -> Tensor:
        state = model.diffuse(shown, t, eps)
        images, predicted = model.purify(state, t, steps, way)
        value = F.cross_entropy(model.classifier(images), y, label_smoothing=config.smoothing)
        return value + denoising * model.missed(x, state, t, predicted, config.weighting) if denoising else value

    parts = []
    if config.attacked:
        knows = config.knows == "noise"
        known, its = (eps, way) if knows else (noise(FRESH, eps), way.child(FRESH))

        def answer(moved: Tensor) -> Tensor:
            alone = config.knows == "classifier"
            logits: Tensor = model.classifier(moved) if alone else model(model.diffuse(moved, t, known), t, steps, its)
            return logits

        attacked = config.adversary.attacked(lambda moved: F.cross_entropy(answer(moved), y), x, rows.seeds)
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


Objective = Callable[[Guarded, "PurifierConfig", Rows], Tensor]
OBJECTIVES: Final[dict[str, Objective]] = {"classifier": _classifier, "bridge": _bridge, "rank": _rank}

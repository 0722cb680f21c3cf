"""A defence as the base classifier of randomised smoothing: the forward diffusion is the smoothing noise.

A purifier that diffuses x in [0, 1] to t* starts from

    x(t*) = √α (2x - 1) + √(1 - α) ε = √α (2 (x + δ) - 1),      δ = ε √(1 - α) / (2 √α) ~ N(0, σ² I),

so that it sees x + δ only, with α(t*) = 1/(1 + 4σ²) on the score's own schedule. With one denoising call (`OneShot`)
this is diffusion denoised smoothing (Carlini et al. 2023); with several reverse chains from the same x(t*), and the
majority of their K classes as one decision, it is the vote of DensePure (Xiao et al. 2023). Whatever the way back
draws is part of the base classifier, which may be random.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from diffpure.diffusion.samplers import AnySampler, FewStep, OneShot, ProbabilityFlow, ReverseSDE, sampler_of
from diffpure.diffusion.score import ScoreModel, as_score
from diffpure.diffusion.sde import Schedule
from diffpure.errors import InputError
from diffpure.noise import Noise, mix
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense

SAMPLERS: Final = (OneShot, ReverseSDE, ProbabilityFlow, FewStep)  # those that diffuse with α(t*) itself
NOISELESS: Final = (OneShot, ProbabilityFlow)  # those whose way back draws nothing
NONE: Final = -1  # a draw whose chains have no majority decides for no class


def t_star_of(sde: Schedule, sigma: float) -> float:
    """The t* at which a schedule adds noise of σ to images in [0, 1]: B(t*) = log(1 + 4σ²)."""
    if not 0 < sigma < math.inf:
        raise InputError(f"sigma, the noise on images in [0, 1], is above 0, got {sigma}.")
    t = float(sde.time_of_integral(torch.tensor(math.log1p(4 * sigma**2), dtype=torch.float64)))
    if not 0 < t <= 1:
        largest = float(sde.sigma(1.0)) / 2
        raise InputError(f"The schedule of the score ends at t = 1, where sigma is {largest:.4g}; got sigma {sigma}.")
    return t


def sigma_of(sde: Schedule, t_star: float) -> float:
    """The noise on images in [0, 1] that a schedule adds by t*: σ = √(1 - α)/(2√α)."""
    return float(sde.sigma(t_star)) / 2


def same_noise(a: float, b: float) -> bool:
    """Whether two σ are the same but for the rounding of their t*."""
    return math.isclose(a, b, rel_tol=1e-9)


def smoothed(
    score: ScoreModel,
    classifier: Callable[[Tensor], Tensor],
    sigma: float = 0.25,
    sampler: AnySampler = "one-shot",
    *,
    name: str = "",
) -> Defense:
    """The defence whose forward diffusion is Gaussian noise of σ on images in [0, 1], for `certify`.

    sampler: the way back, by name, table or value; its t* is replaced by the one that σ means.   name: of the results.
    """
    score, back = as_score(score), sampler_of(sampler)
    if not isinstance(back, SAMPLERS):
        raise InputError(_refusal(type(back).__name__))
    return Defense(Purifier(score, replace(back, t_star=t_star_of(score.sde, sigma))), classifier, name=name)


def smoothing_noise(model: Any, images: Tensor, votes: int) -> float:
    """σ of the smoothing noise that a defence adds to images (B, C, H, W); refuses one that adds another noise."""
    purifier = getattr(model, "purifier", None)
    if not isinstance(model, Defense) or not isinstance(purifier, Purifier):
        raise InputError(
            "A certificate needs a Defense with a diffusion purifier, whose forward noise is the smoothing noise; "
            f"`smoothed(score, classifier, sigma)` makes one, got {type(model).__name__}."
        )
    sampler, size = purifier.sampler, purifier.size
    if not isinstance(sampler, SAMPLERS):
        raise InputError(_refusal(type(sampler).__name__))
    if sampler.jitter or getattr(sampler, "forward", "continuous") != "continuous":
        raise InputError("A certificate needs a fixed t* and the continuous forward diffusion: no jitter, no chain.")
    if model.draws != 1:
        raise InputError(f"A certificate counts single draws, which are its own vote; use draws=1, got {model.draws}.")
    if purifier.rounds != 1:
        raise InputError(f"A certificate is of one round of purification, got {purifier.rounds} rounds.")
    if size is not None and images.shape[-2:] != (size, size):
        height, width = images.shape[-2:]
        raise InputError(
            f"A certificate needs images of the score's own size, {size}×{size}, got {height}×{width}: resizing or "
            "tiles would change the noise."
        )
    if votes > 1 and isinstance(sampler, NOISELESS):
        raise InputError(
            f"Votes differ by the noise of the way back, and {type(sampler).__name__} has none; use votes=1, or a "
            "sampler such as few-step."
        )
    # To twelve digits, which undoes the rounding of t*: a model for σ = 0.25 has 0.25.
    return float(f"{sigma_of(purifier.score.sde, sampler.t_star):.12g}")


def _refusal(name: str) -> str:
    known = ", ".join(sampler.__name__ for sampler in SAMPLERS)
    return f"A certificate needs a sampler that diffuses with α(t*) in continuous time, one of {known}; got {name}."


@torch.no_grad()
def decisions(
    model: Defense,
    image: Tensor,
    seeds: Sequence[int],
    votes: int,
    per_call: int,
    on_call: Callable[[int], None] = lambda _: None,
) -> dict[int, int]:
    """How many draws, one per seed, decide for each class of an image (C, H, W), in the order the classes first came.

    The forward noise of a draw is that of `model(x, seeds=[seed])`. Its `votes` reverse chains start from there, the
    first with the noise of that call and each other with noise of its own; the class of most chains is the decision,
    and a tie is none. At most `per_call` images are in one call of the model; `on_call` hears how many it had.
    """
    purifier, classes, total = model.purifier, list[int](), len(seeds) * votes
    for a in range(0, total, per_call):
        chains = [(seeds[j // votes], j % votes) for j in range(a, min(a + per_call, total))]
        x = image.expand(len(chains), *image.shape)
        forward, reverse = (Noise(tuple(mix(seed, k * way) for seed, k in chains)) for way in (0, 1))
        with purifier.precision(x):
            state, path = purifier.begin(x, forward)
            state = purifier.gradient(replace(path, noise=reverse), state)  # type: ignore[type-var]
        classes += model.classify(purifier.finish(state, x)).argmax(1).tolist()
        on_call(len(chains))
    drawn = Counter(majority(classes[i : i + votes]) for i in range(0, total, votes))
    return {k: count for k, count in drawn.items() if k != NONE}


def majority(classes: Sequence[int]) -> int:
    """The class that is there more often than any other; a tie is no majority, as in every decision rule."""
    (first, most), *others = Counter(classes).most_common(2)
    return NONE if others and others[0][1] == most else first

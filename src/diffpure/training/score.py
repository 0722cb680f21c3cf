"""Training a score network by denoising score matching (Vincent 2011; Song et al. 2021).

Each step takes clean images x₀ in [-1, 1], times t in (0, t_max] and noise ε, and descends

    w(t) · |ε̂(√α(t) x₀ + std(t) ε, t) - ε|²,

whose minimum is the score of the diffused data. Purification to t* needs no time beyond t*, so all capacity goes
below t_max: t = t_max · u^power with u spread evenly over the batch, which halves the variance of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, final

import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

from diffpure.data.cifar10 import Images
from diffpure.data.photos import Photos
from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import Schedule, over
from diffpure.errors import InputError, unknown
from diffpure.models.checkpoints import load_state
from diffpure.scores.load import load_score
from diffpure.training.loop import CHECKPOINT, State, batch_indices, cosine, generator, run_of, train
from diffpure.training.optimisers import OPTIMISERS

TIMES: Final = (0.01, 0.02, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
WEIGHTINGS: Final[dict[str, Callable[[Schedule, Tensor], Tensor]]] = {
    "epsilon": lambda sde, t: torch.ones_like(t),  # every time counts alike in units of its noise
    "edm": lambda sde, t: 1 + 4 * torch.exp(-2 * sde.log_snr(t)),  # (σ² + σ_d²)/σ_d²: the network's own error
    "relative": lambda sde, t: 4 * sde.sigma(t),  # ε-errors of photographs fall like 1/σ: every time counts alike in dB
    "likelihood": lambda sde, t: sde.beta(t) / sde.std(t) ** 2,  # g²/std²: the bound on the likelihood
}


@final
@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """What a training of a score depends on, beside its data; the defaults are those of `cifar10-small`."""

    examples: int = 544_000  # images seen in all, mirrored ones included
    batch: int = 64
    optimiser: str = "adam"  # or "muon", whose steps take a twelfth longer and learn more
    rate: float = 3e-3
    clip: float = 1.0
    decay: float = 0.999
    t_max: float = 0.3
    power: float = 2.0  # t = t_max · u^power: 1 is uniform, more trains more at small times
    weighting: str = "edm"
    flip: bool = True
    crop: int = 64  # pixels of the side of the squares that photographs are cut into; other images are seen whole
    rescale: float = 1.25  # every second square is up to this much larger and reduced to `crop`
    start: str = ""  # whose weights this run begins with: a folder of another run, or a name that `load_score` knows
    seed: int = 0
    threads: int | None = None
    precision: str = "float32"  # or "bfloat16", or "auto": the faster
    checkpoint_seconds: float = 180.0

    def __post_init__(self) -> None:
        if self.optimiser not in OPTIMISERS:
            raise unknown("optimiser", self.optimiser, OPTIMISERS)
        if self.weighting not in WEIGHTINGS:
            raise unknown("weighting", self.weighting, WEIGHTINGS)
        if not 0 < self.t_max <= 1 or self.power <= 0:
            raise InputError(f"Times need 0 < t_max <= 1 and power > 0, got {self.t_max} and {self.power}.")
        if self.crop < 1 or self.rescale < 1:
            raise InputError(f"Crops need crop >= 1 and rescale >= 1, got {self.crop} and {self.rescale}.")


def train_score(
    model: EpsilonScore,
    images: Images | Photos,
    config: ScoreConfig,
    validation: Images | None = None,
    folder: Path | None = None,
    console: Console | None = None,
) -> State:
    """Train `model` in place on images (pixels of any even size); returns the averaged weights, the ones to keep.

    With validation images, the log gets their ε-error by t at every checkpoint, and `folder` a picture of clean,
    noisy and denoised images.
    """
    if config.start:
        _begin_with(model, config.start)
    model.train()

    def loss(replica: EpsilonScore, x0: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        predicted = replica.epsilon(replica.sde.diffuse(x0, t, eps), t)
        return epsilon_loss(replica.sde, t, predicted, eps, config.weighting)

    def report(averaged: nn.Module) -> str:
        assert isinstance(averaged, EpsilonScore)
        assert validation
        if folder:
            picture(averaged, validation).save(folder / "denoised.png")
        errors = epsilon_error(averaged, validation, TIMES[::2])
        return "ε-error " + " ".join(f"{t:g}:{error:.4f}" for t, error in errors.items())

    run = run_of(config, images, max(1, config.examples // config.batch), folder)
    optimiser = OPTIMISERS[config.optimiser](model, config.rate)
    batch = partial(drawn, images, config)
    return train(model, optimiser, batch, loss, cosine(), run, report if validation else None, console)


def epsilon_loss(sde: Schedule, t: Tensor, predicted: Tensor, eps: Tensor, weighting: str) -> Tensor:
    """The mean of w(t) |ε̂ - ε|² a pixel, a scalar; t (B,), predicted and eps (B, C, H, W)."""
    error = (predicted - eps).square().mean((1, 2, 3))
    return (over(WEIGHTINGS[weighting](sde, t), error) * error).mean()


def _begin_with(model: EpsilonScore, start: str) -> None:
    """Give the model the averaged weights of another run, or those of a model that has a name."""
    file = Path(start) / CHECKPOINT
    if file.is_file():
        load_state(model, torch.load(file, weights_only=True)["average"], start)
        return
    try:
        known = load_score(start)
    except InputError as error:
        raise InputError(
            f"There is no {file} to start with, and no score model of the name {start}; give the folder of a "
            "training of the same network, or the name of an embedded model."
        ) from error
    assert isinstance(known, EpsilonScore)
    grown = {**model.state_dict(), **known.state_dict()}  # further blocks of a deeper network are silent at first
    load_state(model, grown, start)
    x, t = torch.randn(2, model.channels or 3, 32, 32), torch.full((2,), 0.1, dtype=torch.float64)
    with torch.no_grad():
        if not torch.allclose(model.epsilon(x, t), known.epsilon(x, t), atol=1e-4):
            raise InputError(f"{start} is another network than the one to be trained, and cannot start it.")


def drawn(images: Images | Photos, config: ScoreConfig, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """The clean images (B, C, H, W) in [-1, 1], the times (B,) float64 and the noise of one step."""
    random = generator(config.seed, step, 4)
    x = shown(images, config, step, random) / 127.5 - 1
    t = config.t_max * spread(len(x), random) ** config.power
    return x, t, torch.randn(x.shape, generator=random)


class _Showing(Protocol):
    """What a configuration says of how images are shown."""

    @property
    def batch(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def flip(self) -> bool: ...
    @property
    def crop(self) -> int: ...
    @property
    def rescale(self) -> float: ...


def shown(images: Images | Photos, config: _Showing, step: int, random: torch.Generator) -> Tensor:
    """The images (B, C, H, W) float32 in [0, 255] of one step, mirrored at random; random squares of photographs."""
    _, index = batch_indices(config.seed, step, len(images), config.batch)
    if isinstance(images, Photos):
        x = images.crops(index, config.crop, config.rescale, random)
    else:
        x = images[index].pixels.float()
    if config.flip:
        mirrored = torch.rand(len(x), generator=random) < 0.5
        x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
    return x


def spread(count: int, random: torch.Generator) -> Tensor:
    """Numbers (count,) float64, each uniform in (0, 1], never zero, and all of them evenly apart."""
    places = torch.rand((), generator=random, dtype=torch.float64) + torch.arange(count, dtype=torch.float64) / count
    return 1 - places % 1


def to_range(images: Images) -> Tensor:
    """The pixels as float32 in [-1, 1], the range of score models."""
    return images.pixels.float() / 127.5 - 1


@torch.no_grad()
def epsilon_error(
    model: EpsilonScore, images: Images, times: Sequence[float] = TIMES, seed: int = 0, batch: int = 250
) -> dict[float, float]:
    """E|ε̂ - ε|² a pixel at each time, over the images with noise that depends on the seed and the time alone."""
    errors = {}
    for time in times:
        random = generator(seed, round(1e6 * time), 5)
        total = 0.0
        for first in range(0, len(images), batch):
            x = to_range(images[first : first + batch])
            eps = torch.randn(x.shape, generator=random)
            t = torch.full((len(x),), time, dtype=torch.float64)
            error = model.epsilon(model.sde.diffuse(x, t, eps), t) - eps
            total += error.square().mean((1, 2, 3)).sum().item()
        errors[time] = total / len(images)
    return errors


@torch.no_grad()
def picture(model: EpsilonScore, images: Images, times: Sequence[float] = (0.05, 0.1, 0.2)) -> Image.Image:
    """Rows of clean, noisy and denoised images, one pair of rows a time."""
    x = to_range(images[:12])
    rows = [x]
    for time in times:
        t = torch.full((len(x),), time, dtype=torch.float64)
        noisy = model.sde.diffuse(x, t, torch.randn(x.shape, generator=generator(0, 0, 6)))
        rows += [noisy, model.sde.denoised(noisy, t, model(noisy, t))]
    sheet = torch.cat([torch.cat(list(row), 2) for row in rows], 1)
    pixels = ((sheet + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
    return Image.fromarray(pixels.squeeze(2).numpy())

"""What an attack maximises, one number per image, from the outputs of all samples at once.

With logits z, label y and their order z_π1 ≥ z_π2 ≥ …:

    margin          max_{k≠y} z_k - z_y                                       positive where the image is misclassified
    ce              log mean_draws CE, CE = softplus(log Σ_{k≠y} e^{z_k} - z_y)
    dlr             (max_{k≠y} z_k - z_y) / (z_π1 - z_π3)                      Croce & Hein 2020
    dlr-targeted    (z_t - z_y) / (z_π1 - (z_π3 + z_π4)/2)
    difference      z_t - z_y                                                 towards one class t, without a scale
    reconstruction  mean (purified - input)²                                  the paper's attack on the diffusion alone
    deviated        ce + weight · Σ_t w_t mean (x_t - x'_t)²                   DiffAttack, along the path

Cross-entropy saturates: at a margin of 20 its float32 value and gradient are exactly zero. The logarithm of its mean
over the samples ranks images and points uphill exactly as the mean itself does, and never saturates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from diffpure.errors import InputError, unknown
from diffpure.meter import CLASSIFIER, count
from diffpure.validate import as_labels, check_logits

Model = Callable[..., Any]  # images (N, C, H, W) in [0, 1] -> logits (N, classes), with `seeds=` if it is stochastic


def call(model: Model, images: Tensor, seeds: Sequence[int]) -> Any:
    """The model on images; a model that says it is stochastic is given one seed per image.

    A model with parts (a defence, a purifier) reports their calls itself; any other counts as one classifier.
    """
    if not hasattr(model, "parts"):
        count(CLASSIFIER, images)
    return model(images, seeds=seeds) if getattr(model, "stochastic", False) else model(images)


def pick(logits: Tensor, index: Tensor) -> Tensor:
    """The logit of one class per image: logits (B, D, K), index (B,) -> (B, D)."""
    return logits.gather(-1, index[:, None, None].expand(-1, logits.shape[1], 1)).squeeze(-1)


def others(logits: Tensor, y: Tensor) -> Tensor:
    """The logits with the label's own at -inf: (B, D, K)."""
    own = F.one_hot(y, logits.shape[-1]).bool()
    return logits.masked_fill(own[:, None], -torch.inf)


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{k≠y} z_k - z_y of logits (B, K): (B,), positive where the image is misclassified."""
    return _margin(logits[:, None], y, y)


def _margin(logits: Tensor, y: Tensor, _: Tensor) -> Tensor:
    return (others(logits, y).amax(-1) - pick(logits, y)).mean(1)


def _wrong(logits: Tensor, y: Tensor, _: Tensor) -> Tensor:
    return (others(logits, y).amax(-1) > pick(logits, y)).to(logits.dtype).mean(1)


def _difference(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return (pick(logits, target) - pick(logits, y)).mean(1)


def _log_cross_entropy(logits: Tensor, y: Tensor, _: Tensor) -> Tensor:
    odds = torch.logsumexp(others(logits, y), -1) - pick(logits, y)
    # log softplus(l) = l + O(e^l): below -20 the difference is less than float32 can show, and log(0) is avoided.
    log_ce = torch.where(odds < -20, odds, F.softplus(odds.clamp_min(-20)).log())
    return torch.logsumexp(log_ce, 1)


def _dlr(logits: Tensor, y: Tensor, _: Tensor) -> Tensor:
    top = logits.topk(3, -1).values
    return ((others(logits, y).amax(-1) - pick(logits, y)) / (top[..., 0] - top[..., 2] + 1e-12)).mean(1)


def _dlr_targeted(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    top = logits.topk(4, -1).values
    scale = top[..., 0] - (top[..., 2] + top[..., 3]) / 2 + 1e-12
    return ((pick(logits, target) - pick(logits, y)) / scale).mean(1)


class Objective(ABC):
    """What is asked of the model, and the number that is maximised."""

    targeted: bool = False

    @abstractmethod
    def output(self, model: Model, images: Tensor, seeds: Sequence[int]) -> Tensor:
        """What the model says, one row per image: (N, F)."""

    @abstractmethod
    def loss(self, output: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """The number to maximise, (B,), from the outputs of all samples (B, D, F)."""

    def logits(self, output: Tensor) -> Tensor | None:
        """The part of the output that decides the class, or None where there is none."""
        return output


@final
@dataclass(frozen=True)
class LogitLoss(Objective):
    """A loss of the logits alone."""

    name: str
    of: Callable[[Tensor, Tensor, Tensor], Tensor]
    classes: int = 2
    targeted: bool = False

    def output(self, model: Model, images: Tensor, seeds: Sequence[int]) -> Tensor:
        return check_logits(call(model, images, seeds), len(images))

    def loss(self, output: Tensor, y: Tensor, target: Tensor) -> Tensor:
        if output.shape[-1] < self.classes:
            raise InputError(f"The loss {self.name!r} needs {self.classes} classes or more, got {output.shape[-1]}.")
        as_labels(y, len(output), output.shape[-1])
        return self.of(output, y, target)


@final
@dataclass(frozen=True)
class Reconstruction(Objective):
    """mean (purified - input)² of a purifier, a model from images to images (paper, appendix C.7)."""

    def output(self, model: Model, images: Tensor, seeds: Sequence[int]) -> Tensor:
        purified = call(model, images, seeds)
        if not isinstance(purified, Tensor) or purified.shape != images.shape:
            raise InputError("The reconstruction loss needs a model that returns images of the shape it was given.")
        return (purified - images).square().flatten(1).mean(1, keepdim=True)

    def loss(self, output: Tensor, y: Tensor, target: Tensor) -> Tensor:
        return output[..., 0].mean(1)

    def logits(self, output: Tensor) -> None:
        return None


@final
@dataclass(frozen=True)
class Deviated(Objective):
    """Cross-entropy plus the deviation of the reverse path from the forward one (DiffAttack, Kang et al. 2023).

    The model returns (logits, deviation), the deviation Σ_t w_t mean (x_t - x'_t)² one number per image.
    """

    weight: float = 1.0

    def output(self, model: Model, images: Tensor, seeds: Sequence[int]) -> Tensor:
        said = call(model, images, seeds)
        if not isinstance(said, tuple) or len(said) != 2 or said[1].shape != (len(images),):
            raise InputError("The deviated loss needs a model that returns (logits, one deviation an image).")
        return torch.cat([check_logits(said[0], len(images)), said[1][:, None].to(said[0].dtype)], 1)

    def loss(self, output: Tensor, y: Tensor, target: Tensor) -> Tensor:
        as_labels(y, len(output), output.shape[-1] - 1)
        ce = _log_cross_entropy(output[..., :-1], y, target)
        return ce + self.weight * output[..., -1].mean(1)

    def logits(self, output: Tensor) -> Tensor:
        return output[..., :-1]


MARGIN: Final = LogitLoss("margin", _margin)
WRONG: Final = LogitLoss("wrong", _wrong)  # the share of samples that are misclassified; it has no gradient
DIFFERENCE: Final = LogitLoss("difference", _difference, targeted=True)

LOSSES: Final[dict[str, Objective]] = {
    "ce": LogitLoss("ce", _log_cross_entropy),
    "dlr": LogitLoss("dlr", _dlr, classes=3),
    "dlr-targeted": LogitLoss("dlr-targeted", _dlr_targeted, classes=4, targeted=True),
    "margin": MARGIN,
    "difference": DIFFERENCE,
    "reconstruction": Reconstruction(),
    "deviated": Deviated(),
}


def objective(loss: str | Objective) -> Objective:
    """A loss by name, or the given one."""
    if isinstance(loss, Objective):
        return loss
    if loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    return LOSSES[loss]

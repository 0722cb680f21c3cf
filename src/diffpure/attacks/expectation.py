"""Expectation over transformation: how an attack looks at a model whose answer is random (Athalye et al. 2018).

One look at B images asks the model for D samples of each, batched up to `rows` images a call:

    average = "gradients":   loss = mean_d L(f(x; d))            the mean of the samples' gradients
    average = "logits":      loss = L(mean_d f(x; d))            the gradient of the loss of averaged logits

Loss and logits are those of all the samples, so an iterate is ranked on their mean and never on its last draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

import torch
from torch import Tensor

from diffpure.attacks.losses import Model, Objective
from diffpure.attacks.seeds import sample_seeds
from diffpure.errors import InputError, unknown
from diffpure.threats import wide


@final
@dataclass(frozen=True)
class EOT:
    """samples an image and look, how they are averaged, how many images one call of the model may hold, and whether
    the defence's noise is known and fixed."""

    samples: int = 1
    average: Literal["gradients", "logits"] = "gradients"
    rows: int = 256
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1 or self.rows < 1:
            raise InputError(f"EOT needs samples and rows of at least 1, got {self.samples} and {self.rows}.")
        if self.average not in ("gradients", "logits"):
            raise unknown("EOT average", self.average, ("gradients", "logits"))


ONE_SAMPLE: Final = EOT()


@final
@dataclass(frozen=True)
class Expectation:
    """What one look saw: the loss (B,), the mean logits (B, K) if there are any, the gradient (B, C, H, W) if asked."""

    loss: Tensor
    logits: Tensor | None
    gradient: Tensor | None = None


def expect(
    model: Model,
    images: Tensor,
    y: Tensor,
    objective: Objective,
    eot: EOT,
    seeds: Sequence[int],
    step: int,
    *,
    target: Tensor | None = None,
    gradient: bool = False,
) -> Expectation:
    """The expectation at images (B, C, H, W), with as many whole images per call as `eot.rows` holds; seeds (B,) and
    step name the samples."""
    group = max(1, eot.rows // eot.samples)
    targets = y if target is None else target
    random = getattr(model, "stochastic", False)
    parts = []
    for a in range(0, len(images), group):
        b = min(a + group, len(images))
        sampled = sample_seeds(seeds[a:b], step, eot.samples, fixed=eot.fixed) if random else ()
        parts.append(_look_at_group(model, images[a:b], y[a:b], targets[a:b], objective, eot, sampled, gradient))
    if len(parts) == 1:
        return parts[0]
    logits, gradients = [p.logits for p in parts], [p.gradient for p in parts]
    return Expectation(torch.cat([p.loss for p in parts]), _join(logits), _join(gradients))


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [p for p in parts if p is not None]
    return torch.cat(tensors) if tensors else None


def _look_at_group(
    model: Model,
    x: Tensor,
    y: Tensor,
    target: Tensor,
    objective: Objective,
    eot: EOT,
    sampled: Sequence[int],
    wanted: bool,
) -> Expectation:
    """Some whole images with all their samples; if even one image's samples exceed `rows`, they are asked in pieces,
    first for their outputs, then (the loss may mix the samples) for their share of the gradient."""
    with torch.set_grad_enabled(wanted):
        images = x.detach().repeat_interleave(eot.samples, 0)
        pieces = [slice(a, a + eot.rows) for a in range(0, len(images), eot.rows)]
        whole = len(pieces) == 1
        if whole and wanted:
            output = objective.output(model, images.requires_grad_(), sampled)
        else:
            with torch.no_grad():
                output = torch.cat([objective.output(model, images[p], sampled[p]) for p in pieces])
        said = wide(output.detach()).reshape(len(x), eot.samples, -1).requires_grad_(wanted)
        loss = objective.loss(said.mean(1, keepdim=True) if eot.average == "logits" else said, y, target)
        mean = objective.logits(said.detach().mean(1))
        if not wanted:
            return Expectation(loss, mean)
        (weight,) = torch.autograd.grad(loss.sum(), said)
        weight = weight.reshape(output.shape).to(output.dtype)
        if whole:
            grad = _pull(output, images, weight)
        else:
            grads = []
            for p in pieces:
                piece = images[p].requires_grad_()
                grads.append(_pull(objective.output(model, piece, sampled[p]), piece, weight[p]))
            grad = torch.cat(grads)
    return Expectation(loss.detach(), mean, grad.reshape(len(x), eot.samples, *x.shape[1:]).sum(1))


def _pull(output: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    """The gradient of ⟨weight, output⟩ with respect to the images."""
    if not output.requires_grad:
        raise InputError("The model gives no gradient with respect to the image; the Square attack needs none.")
    (grad,) = torch.autograd.grad(output, images, weight)
    return grad

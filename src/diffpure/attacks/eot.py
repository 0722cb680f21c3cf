"""Expectation over transformation: how an attack looks at a model whose answer is random (Athalye et al. 2018).

One look at B images asks the model for D draws of each, batched up to `rows` images a call:

    average = "gradients":   loss = mean_d L(f(x; d))            the mean of the draws' gradients
    average = "logits":      loss = L(mean_d f(x; d))            the gradient of the loss of averaged logits

Loss and logits are those of all the draws, so an iterate is ranked on their mean and never on its last draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

import torch
from torch import Tensor

from diffpure.attacks.draws import draw_seeds
from diffpure.attacks.losses import Model, Objective
from diffpure.errors import InputError, unknown
from diffpure.threats import wide


@final
@dataclass(frozen=True)
class EOT:
    """draws an image and look, how they are averaged, how many images one call of the model may hold, and whether
    the defence's noise is known and fixed."""

    draws: int = 1
    average: Literal["gradients", "logits"] = "gradients"
    rows: int = 256
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.draws < 1 or self.rows < 1:
            raise InputError(f"EOT needs draws and rows of at least 1, got {self.draws} and {self.rows}.")
        if self.average not in ("gradients", "logits"):
            raise unknown("EOT average", self.average, ("gradients", "logits"))


ONE_DRAW: Final = EOT()


@final
@dataclass(frozen=True)
class Look:
    """What one look saw: the loss (B,), the mean logits (B, K) if there are any, the gradient (B, C, H, W) if asked."""

    loss: Tensor
    logits: Tensor | None
    gradient: Tensor | None = None


def look(
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
) -> Look:
    """Look at images (B, C, H, W) once, as many whole images a call as `eot.rows` holds; seeds (B,) and step name
    the draws."""
    group = max(1, eot.rows // eot.draws)
    targets = y if target is None else target
    random = getattr(model, "stochastic", False)
    parts = []
    for a in range(0, len(images), group):
        b = min(a + group, len(images))
        drawn = draw_seeds(seeds[a:b], step, eot.draws, fixed=eot.fixed) if random else ()
        parts.append(_look_at_group(model, images[a:b], y[a:b], targets[a:b], objective, eot, drawn, gradient))
    if len(parts) == 1:
        return parts[0]
    logits, gradients = [p.logits for p in parts], [p.gradient for p in parts]
    return Look(torch.cat([p.loss for p in parts]), _join(logits), _join(gradients))


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
    drawn: Sequence[int],
    wanted: bool,
) -> Look:
    """Some whole images with all their draws; if even one image's draws exceed `rows`, they are asked in pieces,
    first for their outputs, then (the loss may mix the draws) for their share of the gradient."""
    with torch.set_grad_enabled(wanted):
        images = x.detach().repeat_interleave(eot.draws, 0)
        pieces = [slice(a, a + eot.rows) for a in range(0, len(images), eot.rows)]
        whole = len(pieces) == 1
        if whole and wanted:
            output = objective.output(model, images.requires_grad_(), drawn)
        else:
            with torch.no_grad():
                output = torch.cat([objective.output(model, images[p], drawn[p]) for p in pieces])
        said = wide(output.detach()).reshape(len(x), eot.draws, -1).requires_grad_(wanted)
        loss = objective.loss(said.mean(1, keepdim=True) if eot.average == "logits" else said, y, target)
        mean = objective.logits(said.detach().mean(1))
        if not wanted:
            return Look(loss, mean)
        (weight,) = torch.autograd.grad(loss.sum(), said)
        weight = weight.reshape(output.shape).to(output.dtype)
        if whole:
            grad = _pull(output, images, weight)
        else:
            grads = []
            for p in pieces:
                piece = images[p].requires_grad_()
                grads.append(_pull(objective.output(model, piece, drawn[p]), piece, weight[p]))
            grad = torch.cat(grads)
    return Look(loss.detach(), mean, grad.reshape(len(x), eot.draws, *x.shape[1:]).sum(1))


def _pull(output: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    """The gradient of ⟨weight, output⟩ with respect to the images."""
    if not output.requires_grad:
        raise InputError("The model gives no gradient with respect to the image; the Square attack needs none.")
    (grad,) = torch.autograd.grad(output, images, weight)
    return grad

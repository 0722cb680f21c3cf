"""Expectation over transformation: how an attack evaluates a model whose answer is random (Athalye et al. 2018).

One expectation at B images asks the model for D samples of each, batched up to `per_call` images per call:

    average = "gradients":   loss = mean_d L(f(x; d))            the mean of the samples' gradients
    average = "logits":      loss = L(mean_d f(x; d))            the gradient of the loss of averaged logits

Loss and logits are those of all the samples, so an iterate is ranked on their mean and never on its last sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, final

import torch
from torch import Tensor

from diffpure.attacks.losses import Model, Objective
from diffpure.attacks.seeds import sample_seeds
from diffpure.errors import InputError, unknown
from diffpure.meter import CALLS, metered
from diffpure.named import changed, check_fields, construct
from diffpure.threats import wide


@final
@dataclass(frozen=True)
class EOT:
    """How a random defence is sampled.

    samples: per image and step.   average: "gradients", or "logits" before the loss.   per_call: how many images one
    call of the model may hold.   fixed: the defence's noise is known to the attacker and fixed.
    """

    samples: int = 1
    average: Literal["gradients", "logits"] = "gradients"
    per_call: int = 256
    fixed: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.samples < 1 or self.per_call < 1:
            raise InputError(f"EOT needs samples and per_call of at least 1, got {self.samples} and {self.per_call}.")
        if self.average not in ("gradients", "logits"):
            raise unknown("EOT average", self.average, ("gradients", "logits"))

    @classmethod
    def of(cls, value: int | Mapping[str, Any] | EOT, old: EOT | None = None) -> EOT:
        """EOT from a number of samples, a table of its fields (over an older value), or as it is."""
        if isinstance(value, EOT):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return replace(old or cls(), samples=value)
        if not isinstance(value, Mapping):
            raise InputError(
                f"eot is a number of samples or a table such as {{samples = 20, average = 'logits'}}, got {value!r}."
            )
        made: EOT = construct(cls, {**(changed(old) if old else {}), **value}, "key of eot")
        return made

    def spending(self, gradient: bool) -> tuple[int, int]:
        """The evaluations of the model that one expectation costs per image: (with, without) a gradient."""
        if not gradient:
            return 0, self.samples
        # More samples than a call holds are asked in pieces: first for their outputs, then for the gradient.
        return self.samples, 0 if self.samples <= self.per_call else self.samples


ONE_SAMPLE: Final = EOT()


@final
@dataclass(frozen=True)
class Expectation:
    """The loss (B,), the mean logits (B, K) if there are any, the gradient (B, C, H, W) if it was asked for, and what
    it cost per image: evaluations of the model and the calls that `diffpure.meter` counts."""

    loss: Tensor
    logits: Tensor | None
    gradient: Tensor | None = None
    spent: Mapping[str, int] = field(default_factory=dict)


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
    """The expectation at images (B, C, H, W), as many whole images per call as `eot.per_call` holds; seeds (B,) and
    step name the samples."""
    group = max(1, eot.per_call // eot.samples)
    targets = y if target is None else target
    random = getattr(model, "stochastic", False)
    parts = []
    with metered() as calls:
        for a in range(0, len(images), group):
            b = min(a + group, len(images))
            sampled = sample_seeds(seeds[a:b], step, eot.samples, fixed=eot.fixed) if random else ()
            parts.append(_of_group(model, images[a:b], y[a:b], targets[a:b], objective, eot, sampled, gradient))
    gradients, queries = eot.spending(gradient)
    spent = {"gradients": gradients, "queries": queries, **{key: calls[key] // len(images) for key in CALLS}}
    loss, logits = torch.cat([p.loss for p in parts]), _join([p.logits for p in parts])
    return Expectation(loss, logits, _join([p.gradient for p in parts]), spent)


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [p for p in parts if p is not None]
    return torch.cat(tensors) if tensors else None


def _of_group(
    model: Model,
    x: Tensor,
    y: Tensor,
    target: Tensor,
    objective: Objective,
    eot: EOT,
    sampled: Sequence[int],
    wanted: bool,
) -> Expectation:
    """Some whole images with all their samples; if even one image's samples exceed `per_call`, they are
    asked in pieces, first for their outputs, then (the loss may mix the samples) for their share of the gradient."""
    with torch.set_grad_enabled(wanted):
        images = x.detach().repeat_interleave(eot.samples, 0)
        pieces = [slice(a, a + eot.per_call) for a in range(0, len(images), eot.per_call)]
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
        raise InputError(
            "The model gives no gradient with respect to the image; use gradient='bpda' or the Square attack."
        )
    (grad,) = torch.autograd.grad(output, images, weight)
    return grad

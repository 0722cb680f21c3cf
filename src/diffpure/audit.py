"""A gradient audit: is what autograd returns the gradient of what the defence computes?

Two independent references, both with the noise held fixed by seeds:

    backprop      plain autograd through every step (for a `Purifier` or `Defense`, whose gradient mode can be changed)
    differences   central differences (L(x + hv) - L(x - hv)) / 2h along random directions v, for any module

The audit runs in float64 on a copy, so that rounding does not blur the answer; only the model under audit is asked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffpure.errors import InputError
from diffpure.noise import Noise, Seeds
from diffpure.validate import as_images

Objective = Callable[[Tensor], Tensor]  # model output -> one number an image (B,)


@final
@dataclass(frozen=True)
class Agreement:
    """How well a gradient agrees with a reference: the mean over images, and over directions for differences."""

    cosine: float
    relative_error: float
    sign_agreement: float

    @classmethod
    def between(cls, gradient: Tensor, reference: Tensor) -> Agreement:
        """Compare (B, n) with (B, n), image by image."""
        size = reference.norm(dim=1).clamp(min=torch.finfo(reference.dtype).tiny)
        return cls(
            F.cosine_similarity(gradient, reference, dim=1, eps=1e-300).mean().item(),
            ((gradient - reference).norm(dim=1) / size).mean().item(),
            (gradient.sign() == reference.sign()).to(gradient.dtype).mean().item(),
        )

    def __str__(self) -> str:
        signs = f"{100 * self.sign_agreement:.1f} % of signs"
        return f"cosine {self.cosine:.6f}, relative error {self.relative_error:.2e}, {signs}"


@final
@dataclass(frozen=True)
class Audit:
    """The result of an audit; `passed` means that both references agree to `tolerance`."""

    gradient: str
    backprop: Agreement | None
    differences: Agreement
    images: int
    directions: int
    tolerance: float

    @property
    def passed(self) -> bool:
        found = [a for a in (self.backprop, self.differences) if a is not None]
        return all(a.relative_error <= self.tolerance for a in found)

    def __str__(self) -> str:
        lines = [f"gradient audit of {self.gradient}: {'passed' if self.passed else 'FAILED'}"]
        if self.backprop is not None:
            lines.append(f"  against backprop:    {self.backprop}")
        lines.append(f"  against differences: {self.differences}")
        lines.append(f"  {self.images} images, {self.directions} directions, fixed noise, float64")
        return "\n".join(lines)


def audit_gradient(
    model: nn.Module,
    images: Tensor,
    objective: Objective | None = None,
    *,
    seeds: Seeds = None,
    directions: int = 8,
    step: float = 1e-7,
    tolerance: float = 1e-4,
) -> Audit:
    """Audit the input gradient of any module from images (B, C, H, W) in [0, 1].

    objective: from the model's output to one number an image; without one, the log-odds of logits against the model's
    own prediction, or the sum of an image weighted by fixed noise.
    """
    images = as_images(images)
    if directions < 1 or not step > 0:
        raise InputError(f"An audit needs at least one direction and a positive step, got {directions} and {step}.")
    noise = Noise.of(seeds, len(images))
    model = copy.deepcopy(model).double()
    x = _generic(images.double(), noise, step)
    call = _with_fixed_noise(model, noise)
    with torch.no_grad():
        objective = objective or _default_objective(call(x), noise)
    gradient = _gradient(call, objective, x)
    reference = None
    if hasattr(model, "with_gradient"):
        backprop = _gradient(_with_fixed_noise(model.with_gradient("backprop"), noise), objective, x)
        reference = Agreement.between(gradient.flatten(1), backprop.flatten(1))
    along, measured = [], []
    for k in range(directions):
        v = _signs(noise.child(k), x)
        with torch.no_grad():
            measured.append((objective(call(x + step * v)) - objective(call(x - step * v))) / (2 * step))
        along.append((gradient * v).flatten(1).sum(1))
    differences = Agreement.between(torch.stack(along, 1), torch.stack(measured, 1))
    return Audit(_name(model), reference, differences, len(images), directions, tolerance)


def _with_fixed_noise(model: nn.Module, noise: Noise) -> Callable[[Tensor], Tensor]:
    if getattr(model, "stochastic", False):
        return lambda x: model(x, seeds=noise.seeds)
    return lambda x: model(x)


def _gradient(call: Callable[[Tensor], Tensor], objective: Objective, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(objective(call(x)).sum(), x)[0]


def _default_objective(output: Tensor, noise: Noise) -> Objective:
    if output.ndim == 2:
        # Not the cross-entropy: of a confident prediction it is so small that differences of it are rounding errors.
        own = F.one_hot(output.argmax(1), output.shape[1]).bool()
        return lambda out: out.masked_fill(own, -torch.inf).logsumexp(1) - out[own]
    weights = noise.child(-1)(0, output)
    return lambda out: (out * weights).flatten(1).sum(1)


def _generic(x: Tensor, noise: Noise, step: float) -> Tensor:
    """The images, moved a little: no two pixels are equal, as at a tie a maximum has no gradient, and both sides of a
    difference stay inside the box."""
    room = max(step, 1e-3)
    return (1 - 4 * room) * x + room * (2 + torch.erf(noise.child(-2)(0, x)))


def _signs(noise: Noise, x: Tensor) -> Tensor:
    """A random corner direction an image: ±1 a pixel."""
    return noise(0, x).sign()


def _name(model: nn.Module) -> str:
    purifier = getattr(model, "purifier", model)
    return str(getattr(purifier, "gradient", type(model).__name__))

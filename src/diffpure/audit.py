"""A gradient audit: is what autograd returns the gradient of what the defence computes?

Two independent references, both with the noise held fixed by seeds:

    backprop      plain autograd through every step (for a model whose gradient mode can be changed)
    differences   central differences D = (L(x + hv) - L(x - hv)) / 2h along random directions v, for any model

A ReLU or a maximum has kinks, and a step that crosses one measures a mixture of two slopes. The two one-sided
differences then disagree: with one kink inside the step, half of their disagreement is exactly the error of D. So the
step of each image and direction is chosen by

    |L(x + hv) - 2 L(x) + L(x - hv)| / 2h + rounding / h

alone, never by the gradient under audit; a difference that no step resolves is left out, and counted. The audit runs in
float64 on a copy, and float32 tensors that a function holds are widened where they meet float64. A model that computes
in float32 even so is audited there, with larger steps and a tolerance that shows gross errors only; the result says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from diffpure.errors import InputError
from diffpure.noise import Noise, Seeds
from diffpure.validate import as_images

Model = Callable[..., Tensor]
Objective = Callable[[Tensor], Tensor]  # model output -> one number per image (B,)


@final
@dataclass(frozen=True)
class Precision:
    """The floats of an audit, the steps of its differences in the order in which they are tried, and its tolerance."""

    dtype: torch.dtype
    steps: tuple[float, ...]
    tolerance: float

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


# In float64 the first or the second step resolves most networks; smaller steps are for kinks, larger ones for flat
# functions. In float32 rounding and kinks leave up to a seventh of the slope open.
DOUBLE: Final = Precision(torch.float64, (1e-8, 1e-9, 1e-7, 1e-10), 1e-4)
SINGLE: Final = Precision(torch.float32, (1e-3, 3e-3, 3e-4, 1e-2), 0.25)
AGAINST_BACKPROP: Final = 1e-3  # the widest tolerance there: only the differences suffer from a coarse output
ROUNDING: Final = 8  # units in the last place by which an output is taken to be off


@final
@dataclass(frozen=True)
class Agreement:
    """How well a gradient agrees with a reference: the mean over images, and over directions for differences."""

    cosine: float
    relative_error: float
    sign_agreement: float

    @classmethod
    def between(cls, gradient: Tensor, reference: Tensor, size: Tensor | None = None) -> Agreement:
        """Compare (B, n) with (B, n), image by image; errors are relative to `size` (B,), else to the reference's."""
        size = reference.norm(dim=1) if size is None else size
        return cls(
            F.cosine_similarity(gradient, reference, dim=1, eps=1e-300).mean().item(),
            ((gradient - reference).norm(dim=1) / size.clamp(min=torch.finfo(size.dtype).tiny)).mean().item(),
            (gradient.sign() == reference.sign()).to(gradient.dtype).mean().item(),
        )

    def __str__(self) -> str:
        signs = f"{100 * self.sign_agreement:.1f} % of signs"
        return f"cosine {self.cosine:.6f}, relative error {self.relative_error:.2e}, {signs}"


@final
@dataclass(frozen=True)
class Audit:
    """The result of an audit; `passed` means that both references agree to `tolerance`.

    unresolved: how many of the images × directions differences no step resolved; they are left out of `differences`,
    and if they are more than half, nothing was shown and the audit fails.   note: why the audit is not in float64.
    """

    gradient: str
    backprop: Agreement | None
    differences: Agreement
    images: int
    directions: int
    unresolved: int
    precision: str
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        limit = min(self.tolerance, AGAINST_BACKPROP)
        same = self.backprop is None or self.backprop.relative_error <= limit
        return self.resolved and same and self.differences.relative_error <= self.tolerance

    @property
    def resolved(self) -> bool:
        """Whether at least half of the differences could be taken."""
        return 2 * self.unresolved <= self.images * self.directions

    def as_dict(self) -> dict[str, Any]:
        """Everything as numbers and strings, for JSON."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        lines = [f"gradient audit of {self.gradient}: {'passed' if self.passed else 'FAILED'}"]
        if self.backprop is not None:
            lines.append(f"  against backprop:    {self.backprop}")
        lines.append(f"  against differences: {self.differences}")
        settings = f"fixed noise, {self.precision}, tolerance {self.tolerance:g}"
        lines.append(f"  {self.images} images, {self.directions} directions, {settings}")
        if self.unresolved:
            total = self.images * self.directions
            lines.append(f"  {self.unresolved} of {total} differences left out: kinks or rounding at every step size")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)


def audit_gradient(
    model: Model,
    images: Tensor,
    objective: Objective | None = None,
    *,
    seeds: Seeds = None,
    directions: int = 8,
    steps: Sequence[float] | None = None,
    tolerance: float | None = None,
) -> Audit:
    """Audit the input gradient of any module or function from images (B, C, H, W) in [0, 1].

    objective: from the model's output to one number per image; without one, the log-odds of logits against the model's
    own prediction, or the sum of an image weighted by fixed noise.   steps: those of the
    differences in float64.   tolerance: that of the precision unless given.
    """
    images = as_images(images)
    if directions < 1 or (steps is not None and not (steps and all(0 < h <= 0.1 for h in steps))):
        raise InputError(f"An audit needs at least one direction and steps in (0, 0.1], got {directions} and {steps}.")
    noise = Noise.of(seeds, len(images))

    def audit(model: Model, precision: Precision, note: str = "") -> Audit:
        chosen = replace(precision, tolerance=tolerance or precision.tolerance)
        return _audit(model, images.to(chosen.dtype), objective, noise, directions, chosen, note)

    reason, coarse = "", None
    for widened in (nullcontext(), _Widened()):
        try:
            double = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
            with widened:
                found = audit(double, replace(DOUBLE, steps=tuple(steps or DOUBLE.steps)))
        except (RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split("\n")[0].split()).rstrip(".")
            continue
        if found.resolved:
            return found
        reason, coarse = "its output is too coarse for small steps", found
    try:
        return audit(model, SINGLE, f"Audited in float32, as in float64: {reason}.")
    except (RuntimeError, TypeError) as error:  # a model in float64 from the start, or one that fails anyway
        if coarse is None:
            raise InputError(f"The model cannot be audited, as it fails on these images: {reason}.") from error
        return coarse


def _audit(
    model: Model,
    images: Tensor,
    objective: Objective | None,
    noise: Noise,
    directions: int,
    precision: Precision,
    note: str,
) -> Audit:
    """One audit in one precision."""
    x = _generic(images, noise, max(precision.steps))
    call = _with_fixed_noise(model, noise)
    with torch.no_grad():
        output = call(x)
    if precision.dtype == torch.float64 and _is_single(output):
        raise TypeError("its output has the digits of float32 only")
    objective = objective or _default_objective(output, noise)
    gradient = _gradient(call, objective, x)
    reference = None
    if hasattr(model, "with_gradient"):
        backprop = _gradient(_with_fixed_noise(model.with_gradient("backprop"), noise), objective, x)
        reference = Agreement.between(gradient.flatten(1), backprop.flatten(1))
    vectors = [_signs(noise.child(k), x) for k in range(directions)]
    along = torch.stack([_wide(gradient * v).flatten(1).sum(1) for v in vectors], 1)
    size = _wide(gradient).flatten(1).norm(dim=1)  # a direction of random signs meets a slope of this size
    found = [_slope(lambda z: objective(call(z)), x, v, size, precision) for v in vectors]
    measured, resolved = (torch.stack(part, 1) for part in zip(*found, strict=True))
    return Audit(
        _name(model),
        reference,
        _compare(along, measured, resolved, size),
        len(x),
        directions,
        int((~resolved).sum()),
        str(precision),
        precision.tolerance,
        note,
    )


def _slope(
    function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, size: Tensor, precision: Precision
) -> tuple[Tensor, Tensor]:
    """The slope of each image's number along v, and whether a step resolved it: (B,) float64, (B,) bool.

    size (B,): what is small beside it needs no resolution.
    """
    rounding = ROUNDING * torch.finfo(precision.dtype).eps
    slope, error = torch.zeros_like(size), torch.full_like(size, torch.inf)
    resolved = torch.zeros_like(size, dtype=torch.bool)
    with torch.no_grad():
        middle = _wide(function(x))
        for h in precision.steps:
            up, down = _wide(function(x + h * v)), _wide(function(x - h * v))
            found = (up - down) / (2 * h)
            doubt = (up - 2 * middle + down).abs() / (2 * h) + rounding * middle.abs() / h
            slope, error = torch.where(doubt < error, found, slope), torch.where(doubt < error, doubt, error)
            resolved = error <= precision.tolerance / 2 * torch.maximum(slope.abs(), size)
            if resolved.all():
                break
    return slope, resolved


def _wide(x: Tensor) -> Tensor:
    """In float64, on the CPU, as not every device has it."""
    return x.cpu().double()


def _is_single(output: Tensor) -> bool:
    """Whether the numbers are those of float32, whatever they are stored in; NumPy, as `_Widened` must not see it."""
    digits = output.numpy(force=True)
    return np.array_equal(digits, digits.astype(np.float32))


def _compare(along: Tensor, measured: Tensor, resolved: Tensor, size: Tensor) -> Agreement:
    """The agreement of slopes (B, directions) where they were resolved, relative to the larger of the gradient's size
    (B,) and the measured slopes': a gradient that happens to lie across all directions is not divided by nothing."""
    count = resolved.sum(1).clamp(min=1)
    rms = (measured.square() * resolved).sum(1).div(count).sqrt()
    return Agreement.between(along, torch.where(resolved, measured, along), torch.maximum(size, rms) * count.sqrt())


@final
class _Widened(TorchFunctionMode):
    """A function of float64 and float32 tensors is computed in float64, and a cast from float64 to float32 is left out.

    So a function whose float32 weights nobody can reach, in a closure or a module inside one, runs in float64 too. A
    float32 tensor that is written into stays what it is.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in tree_leaves((args, kwargs))):
            if func is Tensor.float:
                return args[0]
            name = getattr(func, "__name__", "")
            written = int(
                name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            )  # its first argument
            args = (*args[:written], *tree_map(_widen, args[written:]))
            kwargs = tree_map(_widen, kwargs)
        return func(*args, **kwargs)


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value


def _with_fixed_noise(model: Model, noise: Noise) -> Model:
    if getattr(model, "stochastic", False):
        return lambda x: model(x, seeds=noise.seeds)
    return model


def _gradient(call: Model, objective: Objective, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        value = objective(call(x)).sum()
        found = torch.autograd.grad(value, x, allow_unused=True)[0] if value.requires_grad else None
    if found is None:
        raise InputError("The model's output has no gradient with respect to the images, so there is none to audit.")
    return found


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
    """A random corner direction per image: ±1 per pixel."""
    return noise(0, x).sign()


def _name(model: Model) -> str:
    purifier = getattr(model, "purifier", model)
    return str(getattr(purifier, "gradient", getattr(model, "__name__", type(model).__name__)))

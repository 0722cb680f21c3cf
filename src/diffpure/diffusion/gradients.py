"""Ways to run a path: they all give the same states, and differ in the gradient that comes back.

    exact       the gradient of the computation itself, from stored states and one vector-Jacobian product per step
    backprop    the same by plain autograd, keeping every graph: the oracle
    adjoint     the paper's Proposition 1, the augmented SDE solved backwards: constant memory, approximate
    surrogate   the gradient of a coarser path (Lee & Kim)
    bpda        the identity (Athalye et al.)

The noise of the reverse SDE is additive, so x_{i+1} = x_i + h f(x_i, t_i) + √|h| g(t_i) z_i has
∂x_{i+1}/∂x_i = I + h ∂f(x_i, t_i)/∂x: the stored x_i are all that an exact backward pass needs. It costs what the
adjoint costs, and the adjoint's error (it evaluates the Jacobians at other states) is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from diffpure.diffusion.memory import saved_bytes
from diffpure.diffusion.paths import EulerPath, Path, for_batch, reading
from diffpure.diffusion.sde import over
from diffpure.errors import InputError, unknown
from diffpure.named import make

Calls = tuple[int, int]  # of the network, per image: without a graph, and with one


class GradientMode(ABC):
    """A way to run a path; `approximate` says whether what comes back is not the gradient of what was computed."""

    approximate: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, path: Path, x: Tensor) -> Tensor:
        """The end of the path that starts at x (B, ...)."""

    @abstractmethod
    def calls(self, path: Path, x: Tensor) -> Calls:
        """The network calls of a forward and a backward pass, per image."""

    @property
    def name(self) -> str:
        """What tables call it."""
        return type(self).__name__.lower()


def network_calls(path: Path, first: int = 0) -> int:
    """The network calls of the steps from `first` on, per image."""
    return sum(path.calls(i) for i in range(first, len(path)))


def walk(path: Path, x: Tensor, first: int = 0) -> Tensor:
    """All steps of the path from x on, with whatever gradient tracking is on."""
    for i in range(first, len(path)):
        x = path.step(x, i)
    return x


def _wants_gradient(path: Path, x: Tensor) -> bool:
    context = path.context is not None and path.context.requires_grad
    return torch.is_grad_enabled() and (x.requires_grad or context)


def _without_gradient(path: Path, x: Tensor) -> Tensor:
    with torch.no_grad():
        return walk(path, x)


def _precision(x: Tensor) -> torch.autocast:
    """The autocast setting in force, so that a backward pass recomputes what the forward pass computed."""
    device = x.device.type
    return torch.autocast(device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))


def _leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_()


# ---------------------------------------------------------------------------------------------------------- exact


@final
@dataclass(frozen=True)
class Exact(GradientMode):
    """The exact gradient from the stored states, recomputing each step's graph when it is needed.

    memory: a budget in bytes for states and graphs together; None is no limit.

    The graphs of as many of the last steps as fit are kept from the forward pass and spare their recomputation; the
    backward pass uses and frees them first, so the peak is the larger of the budget and what no backward pass can do
    without: the states and one graph.
    """

    memory: int | None = 0
    approximate = False

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 0:
            raise InputError(f"memory is a number of bytes, at least 0, or None for no limit, got {self.memory}.")

    def __call__(self, path: Path, x: Tensor) -> Tensor:
        if not _wants_gradient(path, x) or not len(path):
            return _without_gradient(path, x)
        out: Tensor = _StoredStates.apply(path, self.memory, x, path.context)  # type: ignore[no-untyped-call]
        return out

    def calls(self, path: Path, x: Tensor) -> Calls:
        kept = _steps_that_fit(path, x, self.memory)
        measured = path.calls(0) if _room(path, x, self.memory) else 0
        again = network_calls(path) - network_calls(path, len(path) - kept)
        return again, network_calls(path) + measured


@final
@dataclass
class _Graph:
    """One step with its graph: out = step(x, context)."""

    x: Tensor
    context: Tensor | None
    out: Tensor

    @classmethod
    def of(cls, path: Path, x: Tensor, i: int) -> _Graph:
        with torch.enable_grad():
            leaf, context = x.detach().requires_grad_(), _leaf(path.context)
            return cls(leaf, context, reading(path, context).step(leaf, i))

    def pull_back(self, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradients with respect to x and context, given the one with respect to out."""
        if not self.out.requires_grad:
            raise InputError("A step of the purifier gives no gradient; attack it with gradient='bpda'.")
        inputs = (self.x,) if self.context is None else (self.x, self.context)
        grads = torch.autograd.grad(self.out, inputs, grad, allow_unused=True)
        at_x = torch.zeros_like(self.x) if grads[0] is None else grads[0]
        return at_x, grads[1] if len(grads) > 1 else None


class _StoredStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, path: Path, memory: int | None, x: Tensor, context: Tensor | None) -> Tensor:
        recomputed = len(path) - _steps_that_fit(path, x, memory)
        states, graphs = [], []
        for i in range(len(path)):
            states.append(x)
            if i < recomputed:
                x = path.step(x, i)
            else:
                graphs.append(_Graph.of(path, x, i))
                x = graphs[-1].out.detach()
        ctx.save_for_backward(*states)
        ctx.path, ctx.graphs, ctx.precision = path, graphs, _precision(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        path, states = ctx.path, ctx.saved_tensors
        graphs, ctx.graphs = ctx.graphs, []  # each kept graph serves once; a second backward recomputes
        at_context = None if path.context is None else torch.zeros_like(path.context)
        for i in reversed(range(len(path))):
            with ctx.precision:
                graph = graphs.pop() if graphs else _Graph.of(path, states[i], i)
            grad, more = graph.pull_back(grad)
            del graph
            if at_context is not None and more is not None:
                at_context += more
        return None, None, grad, at_context


def _steps_that_fit(path: Path, x: Tensor, memory: int | None) -> int:
    """How many steps' graphs fit into a budget beside all the states."""
    if memory is None:
        return len(path)
    room = _room(path, x, memory)
    # A graph's own input is one of the states and is not counted again.
    return min(len(path), room // max(1, graph_bytes(path, x) - x.element_size() * x.nelement())) if room else 0


def _room(path: Path, x: Tensor, memory: int | None) -> int:
    """The bytes that a budget leaves for graphs beside all the states; 0 where it leaves none or there is no limit."""
    return 0 if memory is None else max(0, memory - len(path) * x.element_size() * x.nelement())


def graph_bytes(path: Path, x: Tensor) -> int:
    """The bytes that autograd saves for one step (the first) beside the network's weights."""
    return saved_bytes(lambda: _Graph.of(path, x, 0), path.weights())


# -------------------------------------------------------------------------------------------------------- adjoint


@final
@dataclass(frozen=True)
class Adjoint(GradientMode):
    """Proposition 1: the state and its gradient, solved backwards together from x̂(0) by Euler–Maruyama.

        x_i = x_{i+1} - h f(x_{i+1}, τ_i) - √|h| g(τ_i) z_i,      a_i = a_{i+1} + h (∂f(x_{i+1}, τ_i)/∂x)ᵀ a_{i+1}

    It stores nothing but x̂(0), and rebuilds the states with an error of first order in h. times = "grid" takes the
    coefficients at the forward pass's own times, τ_i = t_i; "end" takes them where the backward step starts,
    τ_i = t_{i+1}, as the authors' code does: its first step asks the score at the end time (1e-5), which the forward
    pass never visits.
    """

    times: Literal["grid", "end"] = "grid"  # the times of the coefficients; "end" as the authors' code does
    approximate = True

    def __post_init__(self) -> None:
        if self.times not in ("grid", "end"):
            raise unknown("times of the adjoint", self.times, ("grid", "end"))

    def __call__(self, path: Path, x: Tensor) -> Tensor:
        if not isinstance(path, EulerPath):
            name = type(path).__name__
            raise InputError(
                f"The adjoint needs an equation solved by Euler steps, not {name}; use the exact gradient."
            )
        if not _wants_gradient(path, x) or not len(path):
            return _without_gradient(path, x)
        out: Tensor = _AugmentedSDE.apply(path, self.times, x, path.context)  # type: ignore[no-untyped-call]
        return out

    def calls(self, path: Path, x: Tensor) -> Calls:
        return network_calls(path), network_calls(path)


class _AugmentedSDE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, path: EulerPath, times: str, x: Tensor, context: Tensor | None) -> Tensor:
        steps = len(path.times) - 1
        for i in range(steps):
            x = path.step(x, i)
        ctx.path, ctx.times, ctx.precision = path, times, _precision(x)
        ctx.save_for_backward(x)
        return walk(path, x, first=steps)  # the final denoising, where there is one, is no part of the SDE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        path, (x,) = ctx.path, ctx.saved_tensors
        steps = len(path.times) - 1
        at_context = None if path.context is None else torch.zeros_like(path.context)
        if path.denoise:
            with ctx.precision:
                graph = _Graph.of(path, x, steps)
            grad, _ = graph.pull_back(grad)
        for i in reversed(range(steps)):
            t = path.times[i] if ctx.times == "grid" else path.times[i + 1]
            h = path.times[i + 1] - path.times[i]
            leaf, context = x.detach().requires_grad_(), _leaf(path.context)
            with ctx.precision, torch.enable_grad():
                f = path.drift(leaf, for_batch(t, x), context)
            at_x, more = _Graph(leaf, context, f).pull_back(grad)
            if at_context is not None and more is not None:
                at_context += over(h, x) * more
            grad = grad + over(h, x) * at_x
            x = x - over(h, x) * f.detach()
            if path.diffusion is not None:
                x = x - over(h.abs().sqrt() * path.diffusion(t), x) * path.noise(i + 1, x)
        return None, None, grad, at_context


# ---------------------------------------------------------------------------------------------------- other modes


@final
@dataclass(frozen=True)
class Backprop(GradientMode):
    """Plain autograd through every step: exact, with the memory of every graph."""

    approximate = False

    def __call__(self, path: Path, x: Tensor) -> Tensor:
        return walk(path, x)

    def calls(self, path: Path, x: Tensor) -> Calls:
        return 0, network_calls(path)


@final
@dataclass(frozen=True)
class Surrogate(GradientMode):
    """The value of the path with the exact gradient of a coarser one over the same times (Lee & Kim, ICCV 2023)."""

    steps: int = 5  # of the coarser path
    approximate = True

    def __call__(self, path: Path, x: Tensor) -> Tensor:
        value = _without_gradient(path, x)
        if not _wants_gradient(path, x):
            return value
        coarse = Exact()(path.coarser(self.steps), x)
        return coarse + (value - coarse).detach()

    def calls(self, path: Path, x: Tensor) -> Calls:
        coarse = network_calls(path.coarser(self.steps))
        return network_calls(path) + coarse, coarse


@final
@dataclass(frozen=True)
class BPDA(GradientMode):
    """The value of the path with the gradient of the identity: backward-pass differentiable approximation.

    A purifier takes the identity from its images to its purified images, whatever its state is (Athalye et al. 2018).
    """

    approximate = True

    def __call__(self, path: Path, x: Tensor) -> Tensor:
        return x + (_without_gradient(path, x) - x).detach()

    def calls(self, path: Path, x: Tensor) -> Calls:
        return network_calls(path), 0


GRADIENT_MODES: Final[dict[str, type[GradientMode]]] = {
    "exact": Exact,
    "adjoint": Adjoint,
    "backprop": Backprop,
    "surrogate": Surrogate,
    "bpda": BPDA,
}


Gradient = str | Mapping[str, Any] | GradientMode  # a name, a table such as {kind = "surrogate", steps = 5}, or a mode


def gradient_mode(mode: Gradient) -> GradientMode:
    """A mode by name or table, or the given one."""
    made: GradientMode = make(mode, GradientMode, GRADIENT_MODES, "gradient mode")
    return made

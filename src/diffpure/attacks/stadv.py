"""StAdv: move the pixels instead of changing them (Xiao et al. 2018), as Laidlaw et al. 2021 bound it.

Adam on the flow z, projected into its bound after every step, ascends

    margin(x moved by z) - (0.0025 / bound) · Σ_p Σ_{q next to p} ‖z(p) - z(q)‖.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from diffpure.attacks.losses import Objective
from diffpure.attacks.pgd import RestartedAttack
from diffpure.attacks.seeds import starts
from diffpure.attacks.state import Problem, State, usable
from diffpure.errors import InputError
from diffpure.threats import Flow


@final
@dataclass(frozen=True, kw_only=True)
class StAdv(RestartedAttack):
    """Starts at no flow (restarts at a random one); smoothness is the regulariser's weight times the bound."""

    loss: str | Objective = "margin"
    lr: float = 0.01  # of Adam
    smoothness: float = 0.0025  # the weight of the regulariser, times the bound
    betas: tuple[float, float] = (0.9, 0.999)  # of Adam

    @property
    def kind(self) -> str:
        return "stadv"

    @property
    def title(self) -> str:
        return self.titled(f"StAdv-{self.iterations}")

    def start(self, problem: Problem, state: State) -> State:
        if not isinstance(problem.threat, Flow):
            raise InputError(f"StAdv works on the threat Flow, not on {type(problem.threat).__name__}.")
        z = problem.threat.zeros(problem.x)
        return {**state, **dict.fromkeys(("z", "gradient", "mean", "square"), z)}

    def begin(self, problem: Problem, state: State, i: int, run: int) -> State:
        threat = problem.threat
        z = threat.random(problem.x, starts(problem.seeds), run) if run else threat.zeros(problem.x)
        return self._after(problem, {**state, **dict.fromkeys(("mean", "square"), torch.zeros_like(z))}, z, i)

    def iterate(self, problem: Problem, state: State, i: int, k: int) -> State:
        (b1, b2), g = self.betas, state["gradient"]
        mean, square = b1 * state["mean"] + (1 - b1) * g, b2 * state["square"] + (1 - b2) * g.square()
        uphill = (mean / (1 - b1**k)) / ((square / (1 - b2**k)).sqrt() + 1e-8)
        z = problem.threat.project(problem.x, state["z"] + self.lr * uphill)
        return self._after(problem, {**state, "mean": mean, "square": square}, z, i)

    def _after(self, problem: Problem, state: State, z: Tensor, i: int) -> State:
        state, seen = self.evaluate(problem, state, z, i)
        if seen.gradient is None:
            return {**state, "z": z}
        return {**state, "z": z, "gradient": usable(seen) - self._roughness_gradient(z, problem.threat.eps)}

    def _roughness_gradient(self, z: Tensor, bound: float) -> Tensor:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (g,) = torch.autograd.grad(Flow.roughness(z).sum(), z)
        return self.smoothness / bound * g

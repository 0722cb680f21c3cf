"""Auto-PGD (Croce & Hein 2020): gradient ascent with momentum that halves its own step size.

    u   = project(z + η ascend(∇loss)),        z' = project(z + a (u - z) + (1 - a)(z - z_old)),     a = 0.75, η₀ = 2 ε

At checkpoints w_j = ⌈p_j N⌉, p_0 = 0, p_1 = 0.22, p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06), an image's η is
halved, and its iterate returns to its best, if since the last checkpoint

    1. fewer than 75 % of the steps (ρ) raised the loss (no more than 75 %, exactly), or
    2. neither η changed at that checkpoint nor has the best loss improved since.

Of a random model the best loss is mostly the luckiest: returning to it would reuse one lucky gradient and never average
the noise, so there only η is halved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from diffpure.attacks.pgd import RestartedAttack
from diffpure.attacks.seeds import starts
from diffpure.attacks.state import Problem, State, choose, usable
from diffpure.threats import per_image


@dataclass(frozen=True, kw_only=True)
class AdaptiveAttack(RestartedAttack):
    """The steps of APGD along whatever gradient its subclass takes."""

    rho: float = 0.75  # ρ: the share of steps that must raise the loss
    momentum: float = 0.75  # the momentum: μ of `momentum`, a of APGD

    def start(self, problem: Problem, state: State) -> State:
        z = problem.threat.zeros(problem.x)
        images = dict.fromkeys(("z", "old", "top", "gradient", "top_gradient"), z)
        numbers = ("loss", "top_loss", "top_before", "eta", "raised", "halved")
        return {**state, **images, **dict.fromkeys(numbers, torch.zeros_like(state["rank"]))}

    def begin(self, problem: Problem, state: State, i: int, run: int) -> State:
        z = problem.threat.random(problem.x, starts(problem.seeds), run)
        state, seen = self.evaluate(problem, state, z, i)
        gradient, loss = usable(seen), seen.loss
        return {
            **state,
            **dict.fromkeys(("z", "old", "top"), z),
            **dict.fromkeys(("gradient", "top_gradient"), gradient),
            **dict.fromkeys(("loss", "top_loss", "top_before"), loss),
            "eta": torch.full_like(loss, 2 * problem.threat.eps),
            "raised": torch.zeros_like(loss),
            "halved": torch.ones_like(loss),
        }

    def iterate(self, problem: Problem, state: State, i: int, k: int) -> State:
        z = self._next(problem, state, 1.0 if k == 1 else self.momentum)
        old = state["z"]
        state, seen = self.evaluate(problem, state, z, i)
        gradient = torch.zeros_like(z) if seen.gradient is None else self.direction(state, usable(seen), k)
        loss = seen.loss
        better = loss > state["top_loss"]
        state = {
            **state,
            "z": z,
            "old": old,
            "gradient": gradient,
            "loss": loss,
            "raised": state["raised"] + (loss > state["loss"]).to(loss.dtype),
            "top": choose(better, z, state["top"]),
            "top_gradient": choose(better, gradient, state["top_gradient"]),
            "top_loss": torch.where(better, loss, state["top_loss"]),
        }
        window = checkpoints(self.iterations).get(k)
        returns = not getattr(problem.model, "stochastic", False)
        return state if window is None else self._checkpoint(state, window, returns)

    def direction(self, state: State, gradient: Tensor, k: int) -> Tensor:
        """What iteration k goes along, given its gradient."""
        return gradient

    def _next(self, problem: Problem, state: State, a: float) -> Tensor:
        threat, x, z = problem.threat, problem.x, state["z"]
        u = threat.project(x, z + per_image(state["eta"], z) * threat.ascend(state["gradient"]))
        return threat.project(x, z + a * (u - z) + (1 - a) * (z - state["old"]))

    def _checkpoint(self, state: State, window: int, returns: bool) -> State:
        """Halve η, and return to the best where wanted, where progress was poor over the last `window` steps."""
        oscillates = state["raised"] <= self.rho * window
        stalls = (state["halved"] == 0) & (state["top_before"] >= state["top_loss"])
        halve = oscillates | stalls
        return {
            **state,
            "z": choose(halve & returns, state["top"], state["z"]),
            "gradient": choose(halve & returns, state["top_gradient"], state["gradient"]),
            "eta": torch.where(halve, state["eta"] / 2, state["eta"]),
            "halved": halve.to(state["eta"].dtype),
            "top_before": state["top_loss"],
            "raised": torch.zeros_like(state["raised"]),
        }


@final
@dataclass(frozen=True, kw_only=True)
class APGD(AdaptiveAttack):
    """loss "ce" and "dlr" are APGD-CE and APGD-DLR; "dlr-targeted" is APGD-T, one run for each of nine targets."""


def checkpoints(iterations: int) -> dict[int, int]:
    """The steps w_j after which η is reconsidered, each with the number of steps since the last; p_j in per cent."""
    out, p, stride, last = {}, 22, 22, 0
    while p < 100:
        w = -(-p * iterations // 100)
        if w > last:
            out[w] = w - last
            last = w
        stride = max(stride - 3, 6)
        p += stride
    return out

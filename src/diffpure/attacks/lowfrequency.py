"""LF, the low-frequency attack (Kassis et al., "DiffBreak", NeurIPS 2025): change colours, then blur along edges.

A diffusion purifier removes fine noise, so this attack makes smooth changes, bounded by how they look and by no norm.
Its variables are a change δ of the image in the space of arctanh and, for each filter of a chain, one kernel per pixel:

    y = (tanh(arctanh(2x - 1) + δ) + 1) / 2
    y(p) ← Σ_q K_pq y(q) / Σ_q K_pq,      K_pq = softmax_q(G + ω_p)(q) · exp(-‖x(p) - x(q)‖₁² / 2σ²)     for each filter

The colour kernel is that of the clean image x, so edges stay; G is the logarithm of a narrow Gaussian, almost the
identity; ω_p is free for a quarter of the window and mirrored into the rest. What the chain does to x at δ = ω = 0 is
subtracted, so that it begins at x. Adam ascends the loss while the image looks near enough and else descends
the distance; gradients of δ and of ω are clipped to length one, image by image.

Written from the paper and the published steps. Other than there: an iterate that looks too far is evaluated after
scaling its change down to the bound (`Perceptual.project`), so that every iterate is valid; no image stops at the first
success; the distance is that of the threat. It is no ℓp attack: its rows say a perceptual size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from diffpure.attacks.expectation import EOT
from diffpure.attacks.losses import Objective
from diffpure.attacks.pgd import RestartedAttack
from diffpure.attacks.seeds import starts
from diffpure.attacks.state import Problem, State, usable
from diffpure.errors import InputError
from diffpure.threats import Perceptual, per_image

SIXTEEN_SAMPLES: Final = EOT(16)
NARROW: Final = 0.2  # σ of the Gaussian that a kernel begins as
COLOUR: Final = 0.05  # σ of the colour kernel


@final
@dataclass(frozen=True, kw_only=True)
class LowFrequency(RestartedAttack):
    """LF of DiffBreak, in the threat `perceptual`.

    lr: of Adam for the colours.   filter_lr: of Adam for the kernels.   sizes: of the windows of the filters, odd.
    betas: of Adam.
    """

    loss: str | Objective = "margin"
    eot: EOT = SIXTEEN_SAMPLES
    lr: float = 0.008
    filter_lr: float = 0.05
    sizes: tuple[int, ...] = (5, 7, 5, 3)
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(size < 1 or size % 2 == 0 for size in self.sizes):
            raise InputError(f"LowFrequency needs odd window sizes of at least 1, got {list(self.sizes)}.")

    @property
    def kind(self) -> str:
        return "low-frequency"

    @property
    def title(self) -> str:
        return self.titled(f"LF-{self.iterations}")

    def start(self, problem: Problem, state: State) -> State:
        if not isinstance(problem.threat, Perceptual):
            raise InputError(f"LowFrequency works on the threat Perceptual, not on {type(problem.threat).__name__}.")
        x = problem.x
        if min(x.shape[-2:]) <= max(self.sizes, default=1) // 2:
            raise InputError(f"The windows {list(self.sizes)} do not fit into images of {tuple(x.shape[-2:])}.")
        kernels = x.new_zeros(len(x), sum((size // 2 + 1) ** 2 for size in self.sizes), *x.shape[-2:])
        colours = dict.fromkeys(("colours", "colours/mean", "colours/square", "gradient"), torch.zeros_like(x))
        return {**state, **colours, **dict.fromkeys(("kernels", "kernels/mean", "kernels/square"), kernels)}

    def begin(self, problem: Problem, state: State, i: int, run: int) -> State:
        fresh = {key: torch.zeros_like(state[key]) for key in state if key.startswith(("colours", "kernels"))}
        if run:
            fresh["colours"] = 0.1 * starts(problem.seeds)(run, problem.x)
        return self._after(problem, {**state, **fresh}, i)

    def iterate(self, problem: Problem, state: State, i: int, k: int) -> State:
        threat = problem.threat
        assert isinstance(threat, Perceptual)
        with torch.enable_grad():
            leaves = [state[name].detach().requires_grad_() for name in ("colours", "kernels")]
            image = self.render(problem.x, *leaves)
            away = threat.distance(problem.x, image)
            gain = (image * state["gradient"]).flatten(1).sum(1)
            uphill = torch.autograd.grad(torch.where(away < threat.eps, gain, -away).sum(), leaves)
        (b1, b2), moved = self.betas, dict[str, Tensor]()
        for name, g, lr in zip(("colours", "kernels"), uphill, (self.lr, self.filter_lr), strict=True):
            g = torch.nan_to_num(g)
            g = g / per_image(g.flatten(1).norm(dim=1).clamp_min(1.0), g)
            mean = b1 * state[f"{name}/mean"] + (1 - b1) * g
            square = b2 * state[f"{name}/square"] + (1 - b2) * g.square()
            step = (mean / (1 - b1**k)) / ((square / (1 - b2**k)).sqrt() + 1e-8)
            moved |= {name: state[name] + lr * step, f"{name}/mean": mean, f"{name}/square": square}
        return self._after(problem, {**state, **moved}, i)

    def _after(self, problem: Problem, state: State, i: int) -> State:
        threat = problem.threat
        assert isinstance(threat, Perceptual)
        with torch.no_grad():
            image = self.render(problem.x, state["colours"], state["kernels"])
            z = threat.project(problem.x, threat.change(problem.x, image))
        state, seen = self.evaluate(problem, state, z, i)
        return state if seen.gradient is None else {**state, "gradient": usable(seen).chunk(2, 1)[0]}

    def render(self, x: Tensor, colours: Tensor, kernels: Tensor) -> Tensor:
        """The image in [0, 1] of x (B, C, H, W) that δ, shaped like x, and ω (B, quarters, H, W) make."""
        changed = torch.tanh(torch.atanh(0.999999 * (2 * x - 1)) + colours) / 2 + 0.5
        at_rest = x - self._filtered(x, x, torch.zeros_like(kernels))
        return (self._filtered(x, changed, kernels) + at_rest).clamp(0, 1)

    def _filtered(self, x: Tensor, image: Tensor, kernels: Tensor) -> Tensor:
        first = 0
        for size in self.sizes:
            count = (size // 2 + 1) ** 2
            image, first = filtered(x, image, kernels[:, first : first + count], size), first + count
        return image


def filtered(x: Tensor, image: Tensor, logits: Tensor, size: int) -> Tensor:
    """One filter of a chain: an image (B, C, H, W) with a kernel of its own at every pixel, guided by x's colours."""
    half = size // 2
    away = (torch.arange(size, device=x.device) - half).abs()
    quarter = (away[:, None] * (half + 1) + away).flatten()  # the entry of the quarter that each tap mirrors
    gauss = (-(away[:, None].square() + away.square()) / (2 * NARROW**2)).exp().clamp(1e-5, 0.999999).log()
    taps = torch.softmax(gauss.to(x.dtype).reshape(1, -1, 1, 1) + logits[:, quarter], 1)
    near = (windows(x, size) - x[:, :, None]).abs().sum(1).square()
    weights = taps * (-near / (2 * COLOUR**2)).exp()
    weights = weights / weights.sum(1, keepdim=True)
    return (windows(image, size) * weights[:, None]).sum(2)


def windows(x: Tensor, size: int) -> Tensor:
    """Each pixel's window, reflected at the edges: (B, C, size², H, W)."""
    b, c, h, w = x.shape
    padded = F.pad(x, [size // 2] * 4, mode="reflect")
    return F.unfold(padded, size).reshape(b, c, size * size, h, w)

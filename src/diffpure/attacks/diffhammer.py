"""DiffHammer (Wang et al., NeurIPS 2024): of several purified samples, go for those that fall together.

Some samples of a random defence can be misclassified by one perturbation, others not; averaging over all of them wastes
the step on the latter. At each step, with N purified samples p_i of the image, their losses ℓ_i (zero where all classes
are equally likely) and the classifier's gradients g_i = ∇_p ℓ at them,

    s_ij = ℓ_i + ε ⟨ascend(g_j), g_i⟩                    the loss of sample i after the best step for sample j
    j    = argmax_j Σ_i ELU(s_ij)                        the sample whose step serves most of them
    w_i  = logistic(λ s_ij),   r = Σ w_i g_i / Σ w_i     those that fall with it
    g    = J_jᵀ r                                        one back-propagation through the purifier ("grafting")
    G   ← g / √k + (1 - 1/√k) G                          smoothing over the steps k = 1, 2, …

and G is followed by the steps of APGD. So a step costs N purifications without a graph, N gradients of the classifier
and one of the purifier.

Written from the paper and the published steps, without what is wrong in the published code: ε stands in the weights as
it does in the choice of j; the momentum is that of the last step and not of the start; an ℓ2 start is inside the ball;
the purifier that is attacked is the one that defends; and no iterate is chosen, and no image stopped, by the samples
that produced it: a run on a random model gives its last iterate, as every attack here does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from diffpure.attacks.apgd import AdaptiveAttack
from diffpure.attacks.base import Cost, Spending
from diffpure.attacks.compose import Suite
from diffpure.attacks.expectation import EOT, Expectation
from diffpure.attacks.losses import Objective, call
from diffpure.attacks.seeds import sample_seeds
from diffpure.attacks.state import Problem, State
from diffpure.errors import InputError
from diffpure.meter import CALLS, metered
from diffpure.threats import Norm, wide
from diffpure.validate import check_logits

TEN_SAMPLES: Final = EOT(10)


@final
@dataclass(frozen=True, kw_only=True)
class DiffHammer(AdaptiveAttack):
    """The steps of APGD on the samples that fall together; eot: N, the purified samples per step.

    graft: one back-propagation through the purifier for all samples; without, each has its own.   weights: choose and
    weigh samples by how near they are to being misclassified; without, all weigh the same and the first stands for
    them.   sharpness: λ of the weights.
    """

    iterations: int = 50
    loss: str | Objective = "margin"
    eot: EOT = TEN_SAMPLES
    graft: bool = True
    weights: bool = True
    sharpness: float = 5.0
    part: ClassVar[str] = "purifier"  # it cannot do without

    @property
    def title(self) -> str:
        missing = [name for name in ("graft", "weights") if not getattr(self, name)]
        return self.titled(f"DiffHammer-{self.iterations} on {self.loss_name}", *(f"no {name}" for name in missing))

    @property
    def _pulled(self) -> int:
        """Back-propagations through the purifier per step."""
        return 1 if self.graft else self.eot.samples

    def price(self) -> Cost:
        return Cost(self.eot.samples + self._pulled, self.eot.samples)

    def steps_account(self, classes: int) -> tuple[Spending, ...]:
        n, steps = self.eot.samples, self.runs(classes) * self.iterations
        purifier = Spending(steps * self._pulled, steps * n, self.mode, "purifier")
        return purifier, Spending(steps * n, 0, self.mode, "classifier"), self.spending(0, self.runs(classes))

    def start(self, problem: Problem, state: State) -> State:
        if not isinstance(problem.threat, Norm):
            raise InputError(f"DiffHammer works in a norm such as Linf or L2, not in {type(problem.threat).__name__}.")
        if not all(callable(getattr(problem.model, name, None)) for name in ("purifier", "classifier")):
            raise InputError("DiffHammer needs a defence, with a purifier and a classifier.")
        return super().start(problem, state)

    def direction(self, state: State, gradient: Tensor, k: int) -> Tensor:
        share = 1 / math.sqrt(k + 1)  # the start was the first
        return share * gradient + (1 - share) * state["gradient"]

    def ask(self, problem: Problem, z: Tensor, eot: EOT, i: int, target: Tensor, gradient: bool) -> Expectation:
        if not gradient:
            return super().ask(problem, z, eot, i, target, gradient)
        b, n = len(z), eot.samples
        images = problem.threat.apply(problem.x, z)
        random = getattr(problem.model, "stochastic", False)
        seeds = sample_seeds(problem.seeds, i, n, fixed=eot.fixed) if random else (0,) * (b * n)
        with metered() as calls:
            logits, losses, grads = self._samples(problem, images, seeds, target)
            chosen, weights = self._weigh(problem, losses, grads)
            shares = weights.reshape(b, n, 1, 1, 1).to(grads.dtype) * grads
            rows = torch.arange(b * n)
            if self.graft:
                rows, shares = rows.reshape(b, n).gather(1, chosen[:, None].cpu()), shares.sum(1, keepdim=True)
            pulled = self._pull(problem, images, seeds, rows.flatten().tolist(), shares.flatten(0, 1))
        found = pulled.reshape(b, -1, *images.shape[1:]).sum(1)
        spent = {"gradients": n + self._pulled, "queries": n, **{key: calls[key] // b for key in CALLS}}
        pulled_back = problem.threat.pullback(problem.x, z, found)
        return Expectation((weights * losses).sum(1), logits.mean(1), pulled_back, spent)

    def _samples(
        self, problem: Problem, images: Tensor, seeds: Sequence[int], target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of N purified samples of each image: logits (B, N, K), losses (B, N), gradients at them (B, N, C, H, W)."""
        model: Any = problem.model
        n, loss, found = self.eot.samples, self.objective.loss, []
        for piece in pieces(len(seeds), self.eot.per_call):
            of = torch.arange(len(seeds), device=images.device)[piece] // n
            with torch.no_grad():
                purified = call(model.purifier, images[of], seeds[piece])
            with torch.enable_grad():
                leaf = purified.detach().requires_grad_()
                said = wide(check_logits(call(model.classifier, leaf, ()), len(leaf)))[:, None]
                losses = loss(said, problem.y[of], target[of])
                (grads,) = torch.autograd.grad(losses.sum(), leaf)
            losses = losses.detach() - loss(torch.zeros_like(said), problem.y[of], target[of])
            found.append((said.detach(), losses, torch.nan_to_num(grads)))
        joined = (torch.cat(parts) for parts in zip(*found, strict=True))
        logits, losses, grads = (part.reshape(len(images), n, *part.shape[1:]) for part in joined)
        return logits.squeeze(2), losses, grads

    def _weigh(self, problem: Problem, losses: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
        """The sample that stands for the others (B,), and the weights (B, N), which sum to one."""
        if not self.weights:
            return losses.new_zeros(len(losses), dtype=torch.int64), torch.full_like(losses, 1 / losses.shape[1])
        up = problem.threat.ascend(grads.flatten(0, 1)).view_as(grads)
        after = losses[:, None] + problem.threat.eps * wide(up).flatten(2) @ wide(grads).flatten(2).mT  # (B, j, i)
        chosen = F.elu(after).sum(2).argmax(1)
        own = after.take_along_dim(chosen[:, None, None], 1).squeeze(1)
        # By logarithms: where every sample is far from being misclassified, all logistic weights round to zero.
        return chosen, F.logsigmoid(self.sharpness * own).softmax(1)

    def _pull(
        self, problem: Problem, images: Tensor, seeds: Sequence[int], rows: Sequence[int], shares: Tensor
    ) -> Tensor:
        """J_rᵀ share of some samples r, each a row of images × samples: (R, C, H, W)."""
        model: Any = problem.model
        found = []
        for piece in pieces(len(rows), self.eot.per_call):
            with torch.enable_grad():
                leaf = images[[row // self.eot.samples for row in rows[piece]]].detach().requires_grad_()
                purified = call(model.purifier, leaf, [seeds[row] for row in rows[piece]])
                found.append(torch.autograd.grad(purified, leaf, shares[piece].to(purified.dtype))[0])
        return torch.cat(found)


def pieces(count: int, size: int) -> list[slice]:
    """The rows 0 … count in pieces of at most `size`."""
    return [slice(a, min(a + size, count)) for a in range(0, count, size)]


# Three runs, one for each of the published losses, of which every image keeps the strongest perturbation.
DIFFHAMMER: Final = Suite(label="diffhammer", attacks=tuple(DiffHammer(loss=loss) for loss in ("margin", "ce", "dlr")))

"""Adversarial training: the loss of a batch against an attack that is repeated while the network learns.

    PGD     min_θ  CE(f(x'), y),                      x' = argmax CE(f(x'), y)              (Madry et al. 2018)
    TRADES  min_θ  CE(f(x), y) + β KL(f(x) ‖ f(x')),  x' = argmax KL(f(x) ‖ f(x'))          (Zhang et al. 2019)

The maximum is sought by the steps of PGD inside the project's threats; a single step of 1.25 ε from a random start is
the fast form of Wong, Rice & Kolter (2020). Unlike the attack `PGD`, which keeps the best of all its iterates and so
evaluates the first and the last of them too, training wants the last iterate only: a step costs one gradient of the
input and nothing else. The attacker sees the model in evaluation mode and leaves no trace in its statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.attacks.seeds import starts
from diffpure.errors import InputError
from diffpure.threats import Linf, ThreatModel

Loss = Callable[[Tensor], Tensor]  # images (B, C, H, W) in [0, 1] -> a scalar to ascend


@final
@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Against whom to train: a threat, the steps inside it, and β of TRADES (None: plain adversarial training)."""

    threat: ThreatModel
    iterations: int = 10
    step_size: float | None = None  # in the units of the threat; 2.5 eps / iterations unless given
    trades: float | None = None

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise InputError(f"An adversary makes at least one move, got {self.iterations}.")
        if self.step_size is not None and self.step_size <= 0:
            raise InputError(f"A move of an adversary has a positive size, got {self.step_size}.")
        if self.trades is not None and self.trades <= 0:
            raise InputError(f"β of TRADES is positive, got {self.trades}.")

    def loss(self, model: nn.Module, x: Tensor, y: Tensor, seeds: Tensor, smoothing: float) -> Tensor:
        """The loss to descend, a scalar; x (B, C, H, W) in [0, 1], y (B,), seeds (B,)."""
        if self.trades is None:
            with _evaluating(model):
                attacked = self.attacked(lambda moved: F.cross_entropy(model(moved), y), x, seeds)
            return F.cross_entropy(model(attacked), y, label_smoothing=smoothing)
        logits = model(x)
        reference = logits.detach()
        with _evaluating(model):
            attacked = self.attacked(lambda moved: _divergence(reference, model(moved)), x, seeds)
        clean = F.cross_entropy(logits, y, label_smoothing=smoothing)
        return clean + self.trades * _divergence(logits, model(attacked))

    def attacked(self, loss: Loss, x: Tensor, seeds: Tensor) -> Tensor:
        """The images (B, C, H, W) in [0, 1] after the attack's last step from a random start; seeds (B,)."""
        threat, size = self.threat, self.step_size or 2.5 * self.threat.eps / self.iterations
        z = threat.random(x, starts(seeds.tolist()))
        for _ in range(self.iterations):
            z.requires_grad_()
            # Autograd computes what it is asked for: no gradient of the weights, which other threads are using.
            (gradient,) = torch.autograd.grad(loss(threat.apply(x, z)), z)
            z = threat.project(x, z.detach() + size * threat.ascend(gradient))
        return threat.apply(x, z)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and then in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """The mean of KL(softmax(p) ‖ softmax(q)) over the rows of logits (B, K)."""
    return F.kl_div(q.log_softmax(1), p.log_softmax(1), log_target=True, reduction="batchmean")


FAST_LINF: Final = Adversary(threat=Linf(8 / 255), iterations=1, step_size=10 / 255)

"""Adversarial training: the loss of a batch against the project's own attacks.

    PGD     min_θ  CE(f(x'), y),                      x' = argmax CE(f(x'), y)              (Madry et al. 2018)
    TRADES  min_θ  CE(f(x), y) + β KL(f(x) ‖ f(x')),  x' = argmax KL(f(x) ‖ f(x'))          (Zhang et al. 2019)

The maximum is sought inside the threat by PGD; a single step of 1.25 ε from a random start is the fast form of Wong,
Rice & Kolter (2020). The attack sees the model in evaluation mode, so it leaves no trace in its statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.attacks.eot import EOT
from diffpure.attacks.losses import Model, Objective, call
from diffpure.attacks.pgd import PGD
from diffpure.errors import InputError
from diffpure.threats import Linf, ThreatModel


@final
@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Against whom to train: a threat, an attack inside it, and β of TRADES (None: plain adversarial training)."""

    threat: ThreatModel
    attack: PGD
    trades: float | None = None

    def __post_init__(self) -> None:
        if self.trades is not None and self.trades <= 0:
            raise InputError(f"β of TRADES is positive, got {self.trades}.")

    def loss(self, model: nn.Module, x: Tensor, y: Tensor, seeds: Tensor, smoothing: float) -> Tensor:
        """The loss to descend, a scalar; x (B, C, H, W) in [0, 1], y (B,), seeds (B,)."""
        if self.trades is None:
            return F.cross_entropy(model(self.attacked(model, x, y, seeds)), y, label_smoothing=smoothing)
        logits, attacked = model(x), model(self.attacked(model, x, y, seeds))
        clean = F.cross_entropy(logits, y, label_smoothing=smoothing)
        return clean + self.trades * _divergence(logits, attacked).mean()

    def attacked(self, model: nn.Module, x: Tensor, y: Tensor, seeds: Tensor) -> Tensor:
        """The attacked images x' (B, C, H, W) in [0, 1]."""
        was_training = model.training
        model.eval()
        attack = self.attack
        if self.trades is not None:
            # One call for the whole batch, so that its rows are those of the reference.
            attack = replace(attack, loss=Divergence(model(x).detach()), eot=EOT(rows=len(x)))
        z = attack(model, x, y, self.threat, seeds=seeds)
        model.train(was_training)
        return self.threat.apply(x, z).detach()


@final
@dataclass(frozen=True, eq=False)
class Divergence(Objective):
    """KL(softmax(reference) ‖ softmax(f(x'))), which TRADES maximises; reference (B, K) are the clean logits."""

    reference: Tensor

    def output(self, model: Model, images: Tensor, seeds: Sequence[int]) -> Tensor:
        logits: Tensor = call(model, images, seeds)
        return logits

    def loss(self, output: Tensor, y: Tensor, target: Tensor) -> Tensor:
        return _divergence(self.reference[:, None].to(output.dtype), output).mean(1)

    def logits(self, output: Tensor) -> Tensor | None:
        return None  # perturbations are ranked by the divergence, not by the margin


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(softmax(p) ‖ softmax(q)) over the last axis."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


FAST_LINF: Final = Adversary(threat=Linf(8 / 255), attack=PGD(iterations=1, step_size=10 / 255))

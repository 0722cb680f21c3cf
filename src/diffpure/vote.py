"""A vote: what a random defence decides from several draws of its noise, D draws of each image, as logits again.

With the logits z_d of draw d, their probabilities p_d = softmax(z_d), and n_k the draws whose largest logit is class k:

    average     log p̄,      p̄ = 1/D Σ_d p_d
    majority    log (n_k + p̄_k) / (D + 1)        the gradient is that of the average

Probabilities are averaged, and not logits, because p̄ is the probability of each class under a draw that nobody knows
yet, and because every draw then weighs the same: the logits have no bound, so a single draw that is sure beyond measure
would decide for all the others. The logarithm is what a classifier's logits are up to a constant (its softmax is p̄),
and by log Σ exp it neither saturates nor loses the gradient where p̄ rounds to 0 or 1.

The majority is the share of the draws, with one vote more that is split as p̄ is. So no share is zero, and of classes
with equally many draws the one with the larger p̄ wins; a class with fewer draws never does, as p̄ is a single vote. The
counts have no gradient: it is zero wherever there is one, so an attack that followed it would stand still, and the
defence would look robust because its gradient is masked. An attack is given the gradient of the average, straight
through: raising another class's p̄ is what turns draws to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F

from diffpure.errors import InputError
from diffpure.named import check_fields

VoteRule = Literal["average", "majority"]


@final
@dataclass(frozen=True)
class Vote:
    """How many draws decide, and how.

    draws: of the purifier's noise per image.   rule: "average" of their probabilities, or "majority" of their classes.
    """

    draws: int = 1
    rule: VoteRule = "average"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.draws < 1:
            raise InputError(f"draws is a whole number of at least 1, got {self.draws}.")

    @property
    def approximate(self) -> bool:
        """Whether its gradient is that of something else than its value."""
        return self.rule == "majority"

    def __str__(self) -> str:
        return f"{self.rule} of {self.draws} draws"

    def __call__(self, logits: Tensor) -> Tensor:
        """Log-probabilities (B, classes) from the logits of all draws (B · draws, classes), image after image."""
        said = logits.reshape(-1, self.draws, logits.shape[1])
        said = said.to(torch.promote_types(said.dtype, torch.float32))  # halves have too few digits to be averaged
        average = said.log_softmax(2).logsumexp(1) - math.log(self.draws)
        if self.rule == "average":
            return average
        counts = F.one_hot(said.argmax(2), said.shape[2]).sum(1)
        shares = torch.logaddexp(counts.to(average).log(), average) - math.log(self.draws + 1)
        return average + (shares - average).detach()

"""Randomised smoothing: what a vote over Gaussian noise guarantees (Cohen et al. 2019), in closed form. No torch here.

The smoothed classifier answers with the class that a base classifier f gives most often under noise,

    g(x) = argmax_c P(f(x + δ) = c),      δ ~ N(0, σ² I).

If P(f(x + δ) = c) ≥ p > ½, then g(x + z) = c for every ‖z‖₂ < σ Φ⁻¹(p). The base classifier may itself be random, as
the theorem only needs the probability of c at each point: Φ⁻¹ of its average under the noise is 1/σ-Lipschitz.

p is unknown, so it is estimated: n₀ draws choose c, and n others, which never chose anything, count it. With k of n
votes the one-sided lower bound of Clopper and Pearson is the p with

    P(Bin(n, p) ≥ k) = α,       p = 0 for k = 0,       p = α^{1/n} for k = n,

and with probability at least 1 - α over the draws it lies below the truth. It is solved by bisection and rounded
towards zero, without SciPy, which is an optional package and rounds to the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, final

from diffpure.errors import InputError

MOST: Final = 10_000_000  # draws: more would leave the bound fewer digits than they are worth
_SLACK: Final = 1e-14  # of log P(Bin(n, p) ≥ k) per draw: what logarithms of factorials may have lost
_ROUNDED: Final = 1 - 1e-12  # a radius is rounded towards zero by more than Φ⁻¹ may have lost


def lower_bound(k: int, n: int, alpha: float) -> float:
    """The Clopper–Pearson lower bound of a probability at level 1 - α, from k successes in n draws; never above it."""
    if not 0 <= k <= n or n < 1:
        raise InputError(f"A count is in 0 … n with n of at least 1, got {k} of {n}.")
    check_alpha(alpha)
    low, high, limit = 0.0, k / n, alpha * (1 - _SLACK * n)
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _tail(k, n, middle) <= limit else (low, middle)
    return low


def check_alpha(alpha: float) -> None:
    """Refuse a probability of failure that no certificate has."""
    if not 0 < alpha < 0.5:
        raise InputError(f"alpha, the probability that a certificate is wrong, is in (0, 1/2), got {alpha}.")


def _tail(k: int, n: int, p: float) -> float:
    """P(Bin(n, p) ≥ k) for 0 < p < k/n, where its terms fall: the first one times the sum of the ratios."""
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p)
    total = term = 1.0
    for j in range(k, n):
        term *= (n - j) / (j + 1) * p / (1 - p)
        total += term
        if term < 1e-18 * total:
            break
    return math.exp(log + (n - k) * math.log1p(-p)) * total


def radius(sigma: float, p: float) -> float:
    """σ Φ⁻¹(p), rounded towards zero: the ℓ2 radius within which the class cannot change; 0 for p ≤ ½."""
    return sigma * NormalDist().inv_cdf(p) * _ROUNDED if p > 0.5 else 0.0


def largest_radius(sigma: float, n: int, alpha: float) -> float:
    """σ Φ⁻¹(α^{1/n}): the radius where all of n draws agree, which n draws cannot exceed."""
    return radius(sigma, lower_bound(n, n, alpha))


@final
@dataclass(frozen=True)
class Vote:
    """What draws decided: the class that n₀ draws chose, its count in n others, and what follows from it.

    selected: None where no draw of the selection decided for a class.   prediction: None is an abstention.
    """

    selected: int | None
    count: int
    p: float
    radius: float
    prediction: int | None


def certify_counts(selection: Mapping[int, int], counts: Mapping[int, int], n: int, sigma: float, alpha: float) -> Vote:
    """The certificate that follows from the draws by class: those that select, and the n that count.

    Of classes that the selection gave equally often, the one that it gave first is chosen, whatever its number.
    """
    selected = max(selection, key=lambda k: selection[k], default=None)
    count = 0 if selected is None else counts.get(selected, 0)
    p = lower_bound(count, n, alpha)
    abstains = p < 0.5
    return Vote(selected, count, p, 0.0 if abstains else radius(sigma, p), None if abstains else selected)

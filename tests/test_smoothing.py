"""The bound of Clopper and Pearson and the radius: against SciPy, exact fractions and closed forms; never above."""

from __future__ import annotations

import math
from fractions import Fraction
from statistics import NormalDist

import pytest

from diffpure.errors import InputError
from diffpure.smoothing import certify_counts, largest_radius, lower_bound, radius

ALPHAS = (1e-12, 1e-3, 0.05, 0.4)


@pytest.mark.parametrize("n", [1, 2, 10, 100, 1000, 10_000, 100_000])
def test_the_bound_is_that_of_scipy(n):
    beta = pytest.importorskip("scipy.stats").beta
    for k in sorted({0, 1, 2, n // 4, n // 2, 3 * n // 4, n - 2, n - 1, n} & set(range(n + 1))):
        for alpha in ALPHAS:
            wanted = beta.ppf(alpha, k, n - k + 1) if k else 0.0
            assert lower_bound(k, n, alpha) == pytest.approx(wanted, rel=1e-8, abs=0.0)


def tail(k: int, n: int, p: float) -> Fraction:
    """P(Bin(n, p) ≥ k), exactly."""
    q = Fraction(p)
    return sum((math.comb(n, j) * q**j * (1 - q) ** (n - j) for j in range(k, n + 1)), Fraction())


@pytest.mark.parametrize("n", [1, 3, 20, 60])
def test_the_bound_is_never_too_high_and_hardly_too_low(n):
    for k in range(1, n + 1):
        for alpha in ALPHAS:
            p = lower_bound(k, n, alpha)
            assert tail(k, n, p) <= Fraction(alpha)
            assert tail(k, n, p * (1 + 1e-10)) > Fraction(alpha)


@pytest.mark.parametrize("n", [1, 100, 1000, 100_000, 10_000_000])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_extremes_have_closed_forms(n, alpha):
    assert lower_bound(0, n, alpha) == 0
    all_agree = math.exp(math.log(alpha) / n)
    assert lower_bound(n, n, alpha) == pytest.approx(all_agree, rel=1e-12)
    assert lower_bound(n, n, alpha) <= all_agree < 1
    # 1 - p keeps its digits where p is nearly 1: P(no success missed) = α, so 1 - p = -expm1(log α / n).
    assert 1 - lower_bound(n, n, alpha) == pytest.approx(-math.expm1(math.log(alpha) / n), rel=1e-6)


def test_the_bound_grows_with_the_count_and_with_alpha():
    bounds = [lower_bound(k, 50, 0.001) for k in range(51)]
    assert bounds == sorted(bounds)
    assert lower_bound(40, 50, 1e-4) < lower_bound(40, 50, 1e-3) < 40 / 50


def test_the_published_radii_of_unanimous_draws():
    assert [round(largest_radius(1.0, n, 0.001), 2) for n in (1000, 10_000, 100_000)] == [2.46, 3.2, 3.81]


def test_the_radius_is_rounded_towards_zero_and_zero_below_one_half():
    for p in (0.5000001, 0.6, 0.9, 0.999, 1 - 1e-9, math.nextafter(1, 0)):
        exact = 0.25 * NormalDist().inv_cdf(p)
        assert exact * (1 - 1e-11) < radius(0.25, p) < exact
    assert radius(0.25, 0.5) == radius(0.25, 0.3) == 0


def test_a_class_is_certified_by_the_draws_that_did_not_choose_it():
    vote = certify_counts({3: 60, 1: 40}, {1: 990, 3: 10}, 1000, 0.25, 0.001)
    assert (vote.selected, vote.count, vote.prediction, vote.radius) == (3, 10, None, 0.0)
    vote = certify_counts({3: 60, 1: 40}, {3: 990, 1: 10}, 1000, 0.25, 0.001)
    assert (vote.selected, vote.count, vote.prediction) == (3, 990, 3)
    assert vote.radius == radius(0.25, lower_bound(990, 1000, 0.001))


def test_a_tie_of_the_selection_goes_to_the_class_that_came_first():
    assert certify_counts({7: 5, 2: 5}, {}, 10, 0.25, 0.001).selected == 7
    assert certify_counts({2: 5, 7: 5}, {}, 10, 0.25, 0.001).selected == 2


def test_a_selection_without_a_class_is_an_abstention():
    vote = certify_counts({}, {1: 10}, 10, 0.25, 0.001)
    assert (vote.selected, vote.count, vote.p, vote.radius, vote.prediction) == (None, 0, 0.0, 0.0, None)


def test_the_abstention_begins_where_one_half_is_not_shown():
    """Of 100 draws at α = 0.001, 65 do not show that a class has more than one half, and 66 do."""
    found = {k: certify_counts({0: 1}, {0: k}, 100, 0.25, 0.001).prediction for k in (65, 66)}
    exact = {k: sum(math.comb(100, j) for j in range(k, 101)) / 2**100 > 0.001 for k in (65, 66)}
    assert exact == {65: True, 66: False}
    assert found == {65: None, 66: 0}


@pytest.mark.parametrize(("k", "n", "alpha"), [(-1, 10, 0.1), (11, 10, 0.1), (0, 0, 0.1), (1, 2, 0.0), (1, 2, 0.5)])
def test_impossible_counts_and_levels_are_one_sentence(k, n, alpha):
    with pytest.raises(InputError, match=r"A count is in 0 … n|alpha, the probability"):
        lower_bound(k, n, alpha)

"""Theorem 1 and Theorem 2 as functions, against golden constants, quadrature, sampling and the theorem itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffpure.advice import suggest_t_star
from diffpure.diffusion.gradients import walk
from diffpure.diffusion.samplers import FewStep, ReverseSDE
from diffpure.diffusion.sde import VPSDE
from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.scores import GaussianScore
from diffpure.theory import (
    Mixture,
    c_delta,
    distance_bound,
    kl_bound_of_perturbation,
    kl_diffused,
    kl_gaussians,
    kl_mixtures,
)
from problems import images, tiny_classifier, tiny_unet

SDE = VPSDE()
CLEAN = Mixture((0.4, 0.6), (-0.8, 0.5), (0.02, 0.05))
ATTACKED = Mixture((0.4, 0.6), (-0.7, 0.58), (0.02, 0.05))


def test_quadrature_agrees_with_the_closed_form():
    p, q = Mixture((1.0,), (0.3,), (0.2,)), Mixture((1.0,), (-0.1,), (0.5,))
    assert kl_mixtures(p, q) == pytest.approx(kl_gaussians(0.3, 0.2, -0.1, 0.5), rel=1e-9)
    alpha, noise = SDE.alpha(0.1).item(), SDE.std(0.1).item() ** 2
    known = kl_gaussians(alpha**0.5 * 0.3, noise + alpha * 0.2, -(alpha**0.5) * 0.1, noise + alpha * 0.5)
    assert kl_diffused(SDE, 0.1, p, q) == pytest.approx(known, rel=1e-9)


def test_theorem_1_kl_falls_with_t():
    times = [1e-6, 0.01, 0.03, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0]
    values = [kl_diffused(SDE, t, CLEAN, ATTACKED) for t in times]
    assert all(later < earlier for earlier, later in itertools.pairwise(values))


@settings(max_examples=25, deadline=None)
@given(st.floats(-1, 1), st.floats(0.01, 1), st.floats(-1, 1), st.floats(0.01, 1), st.floats(0.001, 0.5))
def test_theorem_1_for_any_gaussians(mean_p, var_p, mean_q, var_q, t):
    p, q = Mixture((1.0,), (mean_p,), (var_p,)), Mixture((1.0,), (mean_q,), (var_q,))
    assert kl_diffused(SDE, 1.5 * t, p, q) <= kl_diffused(SDE, t, p, q) + 1e-12


def test_the_rate_is_the_fisher_divergence():
    """∂KL/∂t = -½ β(t) E_p ‖∇log p_t - ∇log q_t‖², by differences and quadrature."""
    t, h = 0.05, 1e-5
    rate = (kl_diffused(SDE, t + h, CLEAN, ATTACKED) - kl_diffused(SDE, t - h, CLEAN, ATTACKED)) / (2 * h)
    x = torch.linspace(-4, 4, 40_001, dtype=torch.float64, requires_grad=True)
    log_p, log_q = CLEAN.diffused(SDE, t).log_density(x), ATTACKED.diffused(SDE, t).log_density(x)
    (difference,) = torch.autograd.grad((log_p - log_q).sum(), x)
    fisher = torch.trapezoid(log_p.detach().exp() * difference**2, x.detach())
    assert rate == pytest.approx((-SDE.beta(t) / 2 * fisher).item(), rel=1e-4)


def test_the_bound_of_a_moved_distribution_holds():
    for t in (0.01, 0.1, 0.3):
        assert kl_diffused(SDE, t, CLEAN, ATTACKED) <= kl_bound_of_perturbation(SDE, t, 0.1)


def test_golden_theorem_2(paper):
    sde = paper.sde
    for row in paper.numbers["theorem2"]:
        assert c_delta(row["d"], row["delta"]) == pytest.approx(row["C_delta"], rel=1e-12)
        for term in row["terms"]:
            assert sde.gamma(term["t_star"]).item() == pytest.approx(term["gamma"], rel=1e-12)
            found = distance_bound(sde, term["t_star"], row["d"], delta=row["delta"])
            assert found == pytest.approx(term["noise_term"], rel=1e-12)
            more = distance_bound(sde, term["t_star"], row["d"], 1.5, 10.0, row["delta"])
            assert more == pytest.approx(1.5 + term["noise_term"] + 10 * term["gamma"], rel=1e-12)


def test_theorem_2_holds_on_gaussian_data():
    """The distance of purified images stays below the bound for all but a share δ of them."""
    score, noise = GaussianScore(0.0, 0.25), Noise.of(range(200), 200)
    x = 0.5 * Noise.of(range(1000, 1200), 200)(0, torch.empty(200, 1, 8, 8, dtype=torch.float64))
    start, path = ReverseSDE(t_star=0.1, dt=2e-3)(score, x, noise)
    largest, state = 0.0, start
    for i in range(len(path)):
        largest = max(largest, score(state, path.time(i).expand(200)).flatten(1).norm(dim=1).max().item())
        state = path.step(state, i)
    bound = distance_bound(SDE, 0.1, 64, 0.0, 2 * largest, delta=0.05)
    assert ((state - x).flatten(1).norm(dim=1) <= bound).double().mean() >= 0.95
    assert torch.equal(state, walk(path, start))


def test_advice_reports_bound_distance_and_accuracy():
    x, classifier = images(6, 8), tiny_classifier()
    labels = classifier(x).argmax(1)
    advice = suggest_t_star(
        tiny_unet(),
        x,
        classifier,
        labels,
        candidates=(0.01, 0.2),
        sampler=lambda t: FewStep(t, steps=3),
        seeds=range(6),
    )
    near, far = advice.rows
    assert near.distance < far.distance
    assert all(row.distance <= row.distance_bound for row in advice.rows)
    assert near.accuracy is not None
    assert advice.suggestion in (0.01, 0.2)
    assert "suggested t*" in str(advice)
    alone = suggest_t_star(tiny_unet(), x, candidates=(0.01,), perturbation=1.0)
    assert alone.suggestion is None
    assert alone.rows[0].kl_bound == pytest.approx(kl_bound_of_perturbation(SDE, 0.01, 1.0))
    assert "no suggestion" in str(alone)


def test_bad_input():
    with pytest.raises(InputError, match="sum to 1"):
        Mixture((0.5,), (0.0,), (1.0,))
    with pytest.raises(InputError, match="one weight"):
        Mixture((1.0,), (0.0, 1.0), (1.0,))
    with pytest.raises(InputError, match="delta"):
        c_delta(10, 0.0)
    with pytest.raises(InputError, match="both a classifier and labels"):
        suggest_t_star(tiny_unet(), images(), tiny_classifier())
    with pytest.raises(InputError, match="integer tensor"):
        suggest_t_star(tiny_unet(), images(), tiny_classifier(), torch.zeros(3))

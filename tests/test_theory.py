"""Theorem 1 and Theorem 2 as functions, against golden constants, quadrature, sampling and the theorem itself."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffpure.advice import suggest_t_star
from diffpure.attacks import PGD
from diffpure.diffusion.gradients import walk
from diffpure.diffusion.samplers import DDIM, FewStep, OneShot, ReverseSDE
from diffpure.diffusion.sde import VPSDE
from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.results.rows import Rate
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
from diffpure.threats import L2, Flow, Linf
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


def advise(**options):
    x, classifier = images(6, 8), tiny_classifier()
    given = {"candidates": (0.01, 0.2), "sampler": lambda t: FewStep(t, steps=3), "seeds": range(6)}
    return suggest_t_star(tiny_unet(), x, classifier, classifier(x).argmax(1), **{**given, **options})


def test_advice_reports_bound_distance_and_accuracy():
    advice = advise()
    near, far = advice.rows
    assert near.distance < far.distance
    assert all(row.distance <= row.distance_bound for row in advice.rows)
    assert advice.undefended.clean == Rate(6, 6)
    assert near.accuracy.clean is not None
    assert near.accuracy.clean.total == 6


def test_samplers_that_count_steps_are_heard_too():
    """DDIM asks for ε̂ at steps: the largest score, and so the bound, is that of the same network in time."""
    rows = [advise(sampler=make, candidates=(0.1,)).rows[0] for make in (lambda t: DDIM(t, steps=1), OneShot)]
    assert rows[0].distance_bound == pytest.approx(rows[1].distance_bound, rel=0.02)


def test_without_a_threat_or_a_classifier_nothing_is_suggested():
    advice = advise()
    assert advice.suggestion is None
    assert advice.alternatives == ()
    assert advice.perturbation == 0
    assert "suggested t*: none, as that takes a threat" in str(advice)
    alone = suggest_t_star(tiny_unet(), images(), candidates=(0.01,), perturbation=1.0)
    assert alone.suggestion is None
    assert alone.rows[0].kl_bound == pytest.approx(kl_bound_of_perturbation(SDE, 0.01, 1.0))
    assert "suggested t*: none, as that takes a classifier with labels" in str(alone)


@pytest.mark.parametrize(
    ("threat", "size"), [(Linf(8 / 255), 2 * 8 / 255 * (3 * 64) ** 0.5), (L2(0.5), 1.0), (Flow(0.1), None)]
)
def test_the_size_of_the_threat_is_that_of_images_in_minus_one_to_one(threat, size):
    advice = advise(threat=threat, candidates=(0.05,), attack=PGD(iterations=2))
    assert advice.suggestion == 0.05
    assert advice.perturbation > 0
    if size is not None:
        assert advice.perturbation == pytest.approx(size)
        assert advice.rows[0].kl_bound == pytest.approx(kl_bound_of_perturbation(SDE, 0.05, size))
        alone = suggest_t_star(tiny_unet(), images(), candidates=(0.05,), threat=threat)
        assert alone.perturbation == pytest.approx(2 * threat.eps * (1 if isinstance(threat, L2) else (3 * 64) ** 0.5))


def test_the_suggestion_is_the_best_on_attacked_images_and_names_what_cannot_be_told_from_it():
    """Data near 0.6 pull every pixel upwards: dark images become bright, and correct, at a large t* only."""
    clean, attacked = torch.full((40, 1, 4, 4), 0.8), torch.full((40, 1, 4, 4), 0.2)
    score, labels = GaussianScore(0.6, 0.05), torch.ones(40, dtype=torch.long)

    def classifier(x):  # class 1 is brighter than one half
        bright = x.flatten(1).mean(1)
        return torch.stack([0.5 - bright, bright - 0.5], 1)

    given = {"candidates": (0.001, 0.3, 0.5), "sampler": lambda t: OneShot(t), "seeds": range(40)}
    advice = suggest_t_star(score, clean, classifier, labels, attacked=attacked, **given)
    assert advice.undefended.clean == Rate(40, 40)
    assert advice.undefended.attacked == Rate(0, 40)
    assert [row.accuracy.clean for row in advice.rows] == [Rate(40, 40)] * 3
    small, middle, large = (row.accuracy.attacked for row in advice.rows)
    assert small == Rate(0, 40)
    assert middle == large == Rate(40, 40)
    assert advice.suggestion == 0.5  # of equals the larger t*
    assert advice.alternatives == (0.3,)
    assert "0.3 cannot be told from it" in str(advice)
    assert "100.0 % [91.2, 100.0]" in str(advice)
    assert advice.perturbation == pytest.approx(2 * 0.6 * 4)
    data = json.loads(json.dumps(advice.as_dict()))
    assert data["suggestion"] == 0.5
    assert data["rows"][0]["accuracy"]["attacked"]["correct"] == 0
    assert data["rows"][1]["accuracy"]["attacked"]["interval"] == pytest.approx([0.912, 1], abs=1e-3)


def test_the_threat_is_attacked_by_transfer():
    """PGD on the undefended linear classifier fools it; the attack never sees the purifier."""
    advice = advise(threat="linf 0.2", seeds=range(6))
    assert advice.undefended.attacked is not None
    assert advice.undefended.attacked.correct < 6
    assert advice.suggestion in (0.01, 0.2)
    assert "Linf(eps=0.2)" in str(advice)


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
    with pytest.raises(InputError, match="Attacked images have the shape of the images"):
        suggest_t_star(tiny_unet(), images(), attacked=images(2))
    with pytest.raises(InputError, match="at least one candidate"):
        suggest_t_star(tiny_unet(), images(), candidates=())

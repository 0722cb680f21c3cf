"""What a random defence does to attacks: samples and their means, known noise, and a real one on digits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from diffpure.attacks import APGD, DIFFUSION_ONLY, EOT, LOSSES, PGD, Suite, Transfer, TwoStage, expect, sample_seeds
from diffpure.attacks.seeds import uniforms
from diffpure.evaluation.checks import attacked, fewer
from diffpure.noise import Noise
from diffpure.threats import L2, Linf
from victims import Noisy, problem

FEW = EOT(4)
MODES = ("exact", "surrogate", "bpda")  # gradient modes, the best first


# -------------------------------------------------------------------------------------------------------------- samples


def test_sample_seeds_are_recorded_fresh_and_of_the_image_alone():
    first = sample_seeds([7, 8], 3, 4)
    assert len(set(first)) == 8
    assert sample_seeds([8], 3, 4) == first[4:]
    assert not set(sample_seeds([7, 8], 4, 4)) & set(first)
    assert sample_seeds([7, 8], 3, 2, fixed=True) == sample_seeds([7, 8], 9, 2, fixed=True)
    assert sample_seeds([7, 8], 3, 1, fixed=True) == (7, 8)
    u = uniforms(range(200), 0, 50)
    assert 0 <= u.min() <= u.max() < 1
    assert abs(u.mean().item() - 0.5) < 0.01
    assert torch.equal(uniforms([5], 0, 50)[0], u[5])


@pytest.mark.parametrize("average", ["gradients", "logits"])
@pytest.mark.parametrize("loss", ["ce", "dlr", "margin"])
def test_an_expectation_is_the_mean_over_all_samples_in_any_batching(average, loss):
    x, y = problem(3)
    model, x = Noisy(sigma=0.3), x.double()
    seen = {
        per_call: expect(model, x, y, LOSSES[loss], EOT(5, average, per_call), (1, 2, 3), 0, gradient=True)
        for per_call in (1, 4, 10, 99)
    }
    leaf = x.clone().requires_grad_()
    seeds = sample_seeds((1, 2, 3), 0, 5)
    logits = model(leaf.repeat_interleave(5, 0), seeds=seeds).reshape(3, 5, -1)
    value = LOSSES[loss].loss(logits.mean(1, keepdim=True) if average == "logits" else logits, y, y)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    for found in seen.values():
        torch.testing.assert_close(found.loss, value.detach())
        torch.testing.assert_close(found.logits, logits.detach().mean(1))
        torch.testing.assert_close(found.gradient, gradient)


def test_a_known_noise_is_attacked_to_the_letter():
    x, y = problem(40)
    model, threat, seeds = Noisy(sigma=0.5), Linf(0.02), list(range(100, 140))
    attack = APGD(iterations=15, eot=EOT(1, fixed=True))
    run = attack.run(model, x, y, threat, seeds=seeds)
    wrong = model(threat.apply(x, run.z), seeds=seeds).argmax(1) != y
    assert torch.equal(wrong, run.misclassified)
    suite = Suite(attacks=(attack,)).run(model, x, y, threat, seeds=seeds)
    assert torch.equal(suite.z, run.z)
    fresh = APGD(iterations=15)(model, x, y, threat, seeds=seeds)
    assert wrong.sum() >= (model(threat.apply(x, fresh), seeds=seeds).argmax(1) != y).sum()


def test_iterates_are_ranked_on_all_their_samples_and_not_on_the_last():
    x, y = problem(20)
    model, threat, fresh_seeds = Noisy(sigma=1.0), Linf(0.02), tuple(range(20))
    means = []
    for samples in (1, 20):
        z = APGD(iterations=15, eot=EOT(samples))(model, x, y, threat, seeds=range(20))
        seen = expect(model, threat.apply(x, z), y, LOSSES["margin"], EOT(200), fresh_seeds, 1 << 30)
        means.append(seen.loss.mean())
    assert means[1] > means[0]


def test_the_two_stage_rule_needs_both_means_to_fail():
    x, y = problem(30)
    model, threat = Noisy(sigma=1.0), Linf(0.01)
    attack = TwoStage(attack=PGD(iterations=8, step_size=0.004, eot=EOT(2, "logits")), defence_samples=60)
    run = attack.run(model, x, y, threat, seeds=range(30))
    one_stage = run.state["inner/rank"] > 0
    assert one_stage[run.misclassified].all()
    assert run.misclassified.sum() < one_stage.sum()  # means of 2 samples fail more often than means of 60
    confirmed = expect(model, threat.apply(x, run.z), y, LOSSES["margin"], EOT(400, "logits"), run.seeds, 1 << 30)
    assert (confirmed.loss[run.misclassified] > -0.3).all()


def test_the_diffusion_alone_is_driven_away_from_its_input():
    x, y = problem()
    model, threat = Noisy(sigma=0.05), Linf(0.1)
    attack = replace(DIFFUSION_ONLY, attack=APGD(iterations=10, loss="reconstruction", eot=FEW))
    z = attack.run(model, x, y, threat, seeds=range(6)).state["inner/best"]
    seeds = tuple(range(6))
    error = lambda images: (model.purifier(images, seeds) - images).square().mean()  # noqa: E731
    assert error(threat.apply(x, z)) > error(threat.apply(x, threat.random(x, Noise(seeds))))
    assert error(threat.apply(x, z)) > error(x)


# ----------------------------------------------------------------------------------------------------- a real defence


@pytest.fixture(scope="module", name="orders")
def _orders() -> dict[str, list[bool]]:
    """The survivors of attacks on digits behind their diffusion, by the gradient that the attacker has."""
    digits = pytest.importorskip("digits", reason="needs scikit-learn")
    x, y = digits.held_out(40)
    threat, eot = L2(1.5), EOT(4)
    white = APGD(iterations=10, eot=eot)
    model = digits.defence()
    out = {mode: attacked(replace(white, gradient=mode), model, x, y, threat, range(40), 16) for mode in MODES}
    out["transfer"] = attacked(Transfer(attack=APGD(iterations=10), eot=eot), model, x, y, threat, range(40), 16)
    return out


def test_better_gradients_leave_fewer_survivors(orders):
    """exact ≤ surrogate ≤ BPDA ≤ transfer, unless by chance; and the ends are far apart."""
    for stronger, weaker in pairwise([*MODES, "transfer"]):
        assert not fewer(orders[stronger], orders[weaker], random=True), (stronger, weaker)
    assert fewer(orders["transfer"], orders["exact"], random=True)

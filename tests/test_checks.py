"""The checks: each is silent on a sound evaluation and speaks on the fault it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from diffpure.attacks import APGD, EOT, FAB, PGD, Square, Suite, Transfer, TwoStage
from diffpure.diffusion.samplers import ReverseSDE
from diffpure.evaluation import checks
from diffpure.noise import Noise
from diffpure.threats import L2, Linf
from victims import Linear, problem

T, F = True, False


@pytest.mark.parametrize(
    ("quiet", "loud", "word"),
    [
        (checks.bad_gradients(0, 0, 10), checks.bad_gradients(3, 0, 10), "exactly zero"),
        (checks.bad_gradients(0, 0, 10), checks.bad_gradients(0, 1, 10), "NaN"),
        (
            checks.black_box_beats_white_box([T, F, F], [T, T, T], random=F),
            checks.black_box_beats_white_box([T, T, F], [F, T, T], random=F),
            "broke 1 images that the white-box",
        ),
        (
            checks.still_falling("samples", 4, 16, [T] * 9, [T] * 9, random=T),
            checks.still_falling("samples", 4, 16, [T] * 9, [T] * 2 + [F] * 7, random=T),
            "16 samples instead of 4 broke 7 more of 9",
        ),
        (checks.unbounded_survivors([F, F]), checks.unbounded_survivors([F, T]), "1 of 2 images survived"),
        (checks.budget_exceeded([T, T]), checks.budget_exceeded([T, F]), "1 of 2 perturbations exceeded"),
        (checks.not_probed(8), checks.not_probed(0), "Not tried: whether more EOT samples"),
    ],
)
def test_a_check_is_silent_or_one_sentence(quiet, loud, word):
    assert quiet is None
    assert word in loud
    assert loud.endswith(".")
    assert ". " not in loud
    assert checks.doubts([quiet, loud, loud]) == (loud,)


def test_a_difference_on_a_random_model_has_to_be_more_than_chance():
    before, after = [T] * 10, [F] * 3 + [T] * 7
    assert checks.fewer(before, after, random=F) == 3
    assert checks.fewer(before, after, random=T) == 0  # P(3 of 3 heads) = 1/8
    assert checks.fewer([T] * 10, [F] * 5 + [T] * 5, random=T) == 5  # 1/32
    assert checks.fewer(after, before, random=F) == 0


def test_a_sound_attack_raises_no_doubt():
    x, y = problem()
    assert checks.probe(APGD(iterations=10), Linear(5, 64), x, y, Linf(0.02), range(6)) == ()


def test_a_random_defence_whose_attack_has_too_few_samples_is_doubted():
    class Dropping(nn.Module):
        """Shows a fifth of the pixels: one sample has no gradient for the others."""

        stochastic = True

        def forward(self, x: Tensor, seeds=None) -> Tensor:
            shown = Noise.of(seeds, len(x))(0, x) > 0.8
            return Linear(5, 64)(0.5 + (x - 0.5) * shown / 0.21)

    x, y = problem(40)
    found = checks.probe(PGD(iterations=2, step_size=0.03), Dropping(), x, y, Linf(0.03), range(40))
    assert any("4 EOT samples instead of 1 broke 17 more of 40" in text for text in found)


def test_an_attack_that_stops_too_early_is_doubted():
    x, y = problem(20)
    lazy = PGD(iterations=1, step_size=0.004, random_start=False)
    found = checks.probe(lazy, Linear(5, 64), x, y, Linf(0.02), range(20))
    assert any("2 times the steps" in text for text in found)
    assert any("without a budget" in text for text in found)


def test_masked_gradients_are_doubted():
    class Steps(nn.Module):
        """Rounds its input, and hides it: the gradient is zero everywhere."""

        def forward(self, x: Tensor) -> Tensor:
            return Linear(5, 64)(x + (torch.round(20 * x) / 20 - x).detach() - x + x.detach())

    x, y = problem()
    run = PGD(iterations=5).run(Steps(), x, y, Linf(0.05), seeds=range(6))
    gradients = int(run.state["gradients"].sum())
    assert "exactly zero" in checks.bad_gradients(
        int(run.state["zero"].sum()), int(run.state["nonfinite"].sum()), gradients
    )
    still = PGD(iterations=5, random_start=False)
    assert any("without a budget" in text for text in checks.probe(still, Steps(), x, y, Linf(0.05), range(6)))
    white = checks.attacked(PGD(iterations=5), Steps(), x, y, Linf(0.05), range(6))
    black = checks.attacked(Square(queries=300, horizon=300), Steps(), x, y, Linf(0.05), range(6))
    assert "black-box" in checks.black_box_beats_white_box(white, black, random=False)


def test_a_saturated_cross_entropy_is_reported_and_does_not_stop_the_attack():
    x, y = problem()
    steep = Linear(5, 64, scale=1e5)
    assert checks.saturated_cross_entropy(Linear(5, 64), x, y) is None
    assert "images is zero in float32" in checks.saturated_cross_entropy(steep, x, y)
    assert not any(checks.attacked(APGD(iterations=20), steep, x, y, Linf(0.05), range(6)))


def test_every_attack_can_be_strengthened():
    harder = checks.strengthened(Suite(attacks=(APGD(eot=EOT(5)), FAB(), Square(queries=10))), samples=4, steps=2)
    apgd, fab, square = harder.attacks
    assert (apgd.eot.samples, apgd.iterations, fab.iterations, square.queries) == (20, 200, 200, 20)
    wrapped = checks.strengthened(TwoStage(attack=PGD(eot=EOT(5))), samples=2)
    assert wrapped.attack.eot.samples == 10
    assert checks.strengthened(Transfer(attack=PGD()), steps=2).attack.iterations == 200


def test_a_real_diffusion_that_masks_its_gradient_is_found_out():
    """Four steps from t* = 0.2 snap every image to a seen digit: the exact gradient leads nowhere, BPDA's does."""
    digits = pytest.importorskip("digits", reason="needs scikit-learn")
    x, y = digits.held_out(12)
    attack, threat = APGD(iterations=6, eot=EOT(4)), L2(1.5)
    model = digits.defence("exact", ReverseSDE(t_star=0.2, steps=4))
    white = checks.attacked(attack, model, x, y, threat, range(12), 16)
    identity = checks.attacked(replace(attack, gradient="bpda"), model, x, y, threat, range(12), 16)
    assert checks.fewer(white, identity, random=True)
    assert checks.unbounded_survivors(checks.attacked(attack, model, x, y, threat.unbounded(x), range(12), 16))

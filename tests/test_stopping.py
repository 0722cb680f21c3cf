"""A suite that stops at confirmed images: its error rate against the closed form, what it spends, and what it says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from diffpure.attacks import PGD, TWO_LOSSES, Suite, attacks_of
from diffpure.errors import InputError
from diffpure.evaluation.evaluate import evaluate
from diffpure.noise import Noise
from diffpure.threats import Linf
from victims import Linear, Noisy, problem

TWO = Suite(attacks=(PGD(iterations=1), PGD(iterations=2)), stop=0.05)


class Coin(nn.Module):
    """Misclassifies class 0 with a chance that is the first pixel, whatever an attack does."""

    stochastic = True

    def forward(self, x: Tensor, seeds=None) -> Tensor:
        heads = Noise.of(seeds, len(x)).uniform(0).to(x) < x[:, 0, 0, 0].detach()
        return torch.stack([0 * x.sum((1, 2, 3)), heads * 2.0 - 1.0], 1)


@pytest.mark.parametrize(("share", "stop"), [(1.0, 0.05), (0.9, 0.05), (0.95, 0.01), (0.5, 0.05)])
def test_of_a_thousand_images_as_many_are_stopped_as_the_closed_form_says(share, stop):
    """share^n of images whose samples are misclassified with that chance; at 0.9 and below no more than `stop`."""
    suite = replace(TWO, stop=stop, attacks=(PGD(iterations=1, eot=32), PGD(iterations=1)))
    x = torch.full((1000, 1, 1, 1), share)
    run = suite.run(Coin(), x, torch.zeros(1000, dtype=torch.int64), Linf(1e-6), seeds=range(1000))
    n = suite.confirmations
    assert n == math.ceil(math.log(stop) / math.log(0.9))
    expected = share**n * (run.state["rank"] > 0).float().mean().item()
    spread = math.sqrt(expected * (1 - expected) / 1000)
    stopped = run.state["stopped"].float().mean().item()
    assert abs(stopped - expected) <= 4 * spread
    assert share > 0.9 or stopped <= stop + 3 * math.sqrt(stop * (1 - stop) / 1000)


def test_a_stopped_image_keeps_its_perturbation_and_spends_no_more_gradients():
    x, y = problem()
    model, threat = Noisy().double(), Linf(0.05)
    x = x.double()
    run = TWO.run(model, x, y, threat, seeds=range(6))
    stopped = run.state["stopped"]
    assert 0 < stopped.sum() < 6
    assert (run.state["gradients"][stopped] == 1).all()
    assert (run.state["gradients"][~stopped] == 3).all()
    first = replace(TWO, attacks=TWO.attacks[:1]).run(model, x, y, threat, seeds=range(6))
    assert torch.equal(run.z[stopped], first.z[stopped])
    never = replace(TWO, stop=0.0).run(model, x, y, threat, seeds=range(6))
    assert torch.equal(run.z[~stopped], never.z[~stopped])
    most = sum(s.queries for s in TWO.account(5))
    assert (run.state["queries"] <= most).all()


def test_one_sample_confirms_on_a_model_that_is_not_random():
    x, y = problem()
    run = TWO.run(Linear(5, 64), x, y, Linf(0.05), seeds=range(6))
    first = replace(TWO, attacks=TWO.attacks[:1]).run(Linear(5, 64), x, y, Linf(0.05), seeds=range(6))
    assert torch.equal(run.state["stopped"], first.misclassified)
    assert run.state["stopped"].any()


def test_a_result_counts_the_images_that_were_stopped_and_says_the_error_rate():
    x, y = problem()
    found = evaluate(Noisy(), x, y, Linf(0.05), TWO, rules=["worst of 20"])
    (told,) = [text for text in found.warnings if "left alone" in text]
    most = max(row.gradients for row in found.rows)
    stopped = [row for row in found.rows if row.attack != "clean" and row.gradients < most]
    assert f"{len(stopped)} of 6 images were left alone" in told
    assert "chance of at most 5 %" in told
    assert f"% of {20 * len(stopped)} evaluation samples are right" in told
    quiet = evaluate(Noisy(), x, y, Linf(0.05), replace(TWO, stop=0.0), rules=["worst of 20"])
    assert not any("left alone" in text for text in quiet.warnings)


def test_stopping_is_opt_in_and_its_rate_is_checked():
    assert TWO_LOSSES.stop == 0
    (asked,) = attacks_of({"kind": "two-losses", "stop": 0.05})
    assert asked == replace(TWO_LOSSES, stop=0.05)
    assert asked.confirmations == 29
    with pytest.raises(InputError, match=r"a stop in \[0, 1\)"):
        replace(TWO_LOSSES, stop=1.0)

"""What a run will cost: what units are said to spend, the time that follows, and how many images fit into a call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diffpure.attacks import APGD, EOT, PGD, Suite, strong
from diffpure.attacks.base import Spending
from diffpure.diffusion.gradients import BPDA, Exact, saved_bytes
from diffpure.evaluation import cost
from diffpure.evaluation.cost import duration, images_per_call
from diffpure.meter import CALLS
from diffpure.results.rows import CLEAN
from evaluations import COUNT, defense, ready
from problems import images, tiny_classifier


def test_an_account_is_known_by_hand():
    assert PGD(iterations=2, eot=EOT(2)).account(5) == (Spending(0, 2), Spending(4, 2))
    nested = Suite(attacks=(PGD(iterations=2), APGD(iterations=3, loss="dlr-targeted", gradient="bpda")))
    assert nested.account(5) == (Spending(0, 1), Spending(2, 1), Spending(12, 4, BPDA()))
    pieces = PGD(iterations=2, eot=EOT(10, per_call=4))  # first the outputs of all samples, then their gradients
    assert pieces.account(5) == (Spending(0, 10), Spending(20, 20 + 10))


def test_seconds_are_those_of_the_calls_that_are_made(monkeypatch):
    """Seconds of a call by its kind and size, whatever this machine needs: 1 s per image and 10 s per call."""
    sizes = []

    def seconds(model, one, size, *, gradient):
        sizes.append(size)
        plain, graph = {"network": 1.0, "classifier": 0.5}, {"network_gradient": 100.0, "classifier_gradient": 50.0}
        return {key: value + 10 / size for key, value in (graph if gradient else plain).items()}

    monkeypatch.setattr(cost, "_seconds", seconds)
    work = ready(tried=[PGD(iterations=2, eot=EOT(3))], rules=["worst of 2"], batch=COUNT, per_call=6)
    said = work.estimate()
    assert set(sizes) == {6}  # 5 images × 2 samples and 2 images × 3 samples, at most 6 in a call
    network, graph = 3 * (2 * 3 + 2 * 3) + 2 * 3 * 2, 3 * 2 * 3  # per image: forward passes, and backward ones
    assert said.calls["network"] == COUNT * network
    assert said.calls["network_gradient"] == COUNT * graph
    assert (said.images, said.gradients, said.queries, said.per_call) == (COUNT, COUNT * 6, COUNT * 6, 6)
    calls = [said.calls[key] for key in CALLS]
    price = (1.0, 100.0, 0.5, 50.0)
    assert said.seconds == pytest.approx(sum(n * (p + 10 / 6) for n, p in zip(calls, price, strict=True)))
    assert f"{COUNT * (network + graph):,} network calls" in str(said)


def test_gradients_are_timed_in_calls_of_the_samples_that_are_followed():
    """Momentum follows one sample per image and ranks with eight."""
    work = ready(tried=[strong(2)], batch=2, per_call=64)
    sizes = {unit.attack: cost._call_sizes(work.job, unit) for unit in work.units if unit.stop - unit.start == 2}
    assert sizes["strong"] == (16, 2)


def test_an_estimate_measures_this_machine():
    work = ready()
    said = work.estimate()
    assert said.seconds > 0
    clean = work.estimate([unit for unit in work.units if unit.attack == CLEAN])
    assert (clean.gradients, clean.queries, clean.images) == (0, 0, COUNT)
    assert clean.calls["network"] == COUNT * 4 * 3
    assert clean.seconds < said.seconds


def test_as_many_images_as_memory_holds_are_in_a_call():
    wide = nn.Sequential(nn.Flatten(), nn.Linear(192, 4096), nn.ReLU(), nn.Linear(4096, 5)).requires_grad_(False)
    one, attacks = images(1), (PGD(),)
    each = 2 * saved_bytes(lambda: wide(one.clone().requires_grad_()))
    assert each >= 2 * 4 * 4096  # what the rectification keeps
    for memory, held in ((0, 1), (each - 1, 1), (7 * each + 1, 7), (10**12, cost.MOST)):
        assert images_per_call(wide, attacks, one, memory) == held


def test_a_gradient_mode_that_keeps_every_graph_fits_fewer_images():
    one, memory = images(1), 10_000_000
    held = {
        name: images_per_call(defense(), (PGD(gradient=mode),), one, memory)
        for name, mode in (("one", "exact"), ("all", "backprop"), ("unlimited", Exact(memory=None)))
    }
    assert held["one"] > held["all"]
    assert held["all"] == held["unlimited"]
    plain = images_per_call(tiny_classifier(), (), one, memory)
    assert plain >= held["one"]


def test_a_gradient_of_the_attack_is_part_of_the_account():
    """The same attack through the exact gradient and through the identity: BPDA needs no graph of the network."""
    work = ready(tried=[PGD(iterations=2, gradient=mode) for mode in ("exact", "bpda", "backprop")])
    spent = {unit.attack: cost.account(work.job, unit, 5, images(1)) for unit in work.units[1:4]}
    exact, bpda, backprop = (spent[f"pgd-ce@{mode}"] for mode in ("exact", "bpda", "backprop"))
    assert exact["network_gradient"] == backprop["network_gradient"] == 2 * 2 * 3  # two images, two gradients
    assert bpda["network_gradient"] == 0
    assert exact["network"] == bpda["network"] == backprop["network"] + 2 * 2 * 3
    assert exact["classifier_gradient"] == bpda["classifier_gradient"] == 4


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (119, "119 s"), (150, "2.5 minutes"), (9e4, "25.0 hours")])
def test_a_time_in_words(seconds, text):
    assert duration(seconds) == text


def test_an_estimate_leaves_the_threads_and_the_gradients_of_weights_alone():
    before = torch.get_num_threads()
    work = ready()
    work.estimate()
    assert torch.get_num_threads() == before
    assert all(p.grad is None for p in work.job.model.parameters())  # type: ignore[attr-defined]

"""LF and its threat: filters against formulas written out, a distance that is one, a bound that holds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import diffpure as dp
from diffpure.attacks import LowFrequency
from diffpure.attacks.lowfrequency import COLOUR, NARROW, filtered
from diffpure.classifiers.features import activations, network
from diffpure.data.samples import samples
from diffpure.errors import InputError
from diffpure.evaluation.evaluate import evaluate
from diffpure.noise import Noise
from diffpure.threats import Linf, Perceptual, threat_of
from problems import images
from victims import Linear

THREAT = Perceptual(0.1)


def test_a_filter_is_the_formula():
    """Every pixel's weights by hand: a mirrored softmax times the colours' likeness in the clean image."""
    x, y, size = images(1, 6, torch.float64), images(1, 6, torch.float64, seed=1), 3
    logits = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    found = filtered(x, y, logits, size)
    grown_x, grown_y = (F.pad(z, [1] * 4, mode="reflect") for z in (x, y))
    for row, column in ((0, 0), (2, 3), (5, 4)):
        taps, wanted = [], []
        for i in (-1, 0, 1):
            for j in (-1, 0, 1):
                gauss = math.log(min(max(math.exp(-(i * i + j * j) / (2 * NARROW**2)), 1e-5), 0.999999))
                taps.append(math.exp(gauss + logits[0, 2 * abs(i) + abs(j), row, column].item()))
                near = (grown_x[0, :, row + 1 + i, column + 1 + j] - x[0, :, row, column]).abs().sum()
                wanted.append(
                    (math.exp(-(near.item() ** 2) / (2 * COLOUR**2)), grown_y[0, :, row + 1 + i, column + 1 + j])
                )
        weights = [tap / sum(taps) * colour for tap, (colour, _) in zip(taps, wanted, strict=True)]
        by_hand = sum(w * value for w, (_, value) in zip(weights, wanted, strict=True)) / sum(weights)
        torch.testing.assert_close(found[0, :, row, column], by_hand)


def test_it_begins_at_the_image_and_a_filter_keeps_a_flat_one():
    x, attack = images(2, 8), LowFrequency()
    kernels = torch.zeros(2, 9 + 16 + 9 + 4, 8, 8)
    torch.testing.assert_close(attack.render(x, torch.zeros_like(x), kernels), x, rtol=0, atol=2e-6)
    flat = torch.full_like(x, 0.3)
    torch.testing.assert_close(attack.render(flat, torch.zeros_like(x), kernels + torch.rand(kernels.shape)), flat)


def test_the_distance_is_one():
    x, y, z = (images(3, 32, seed=seed) for seed in (0, 1, 2))
    apart = THREAT.distance(x, y)
    torch.testing.assert_close(apart, THREAT.distance(y, x))
    assert (THREAT.distance(x, x) < 1e-6).all()
    assert (apart <= THREAT.distance(x, z) + THREAT.distance(z, y) + 1e-6).all()
    net = network(THREAT.features, x.dtype, x.device)
    torch.testing.assert_close(apart, (activations(net, x) - activations(net, y)).norm(dim=1))
    torch.testing.assert_close(activations(net, x).square().sum(1), torch.full((3,), 3.0))  # one for each stage


def test_the_bound_holds_after_projection_and_the_image_is_part_of_the_perturbation():
    x = samples(4)[0]
    far = THREAT.change(x, x + 0.3 * Noise((1, 2, 3, 4))(0, x))
    assert not THREAT.within(x, far).any()
    near = THREAT.project(x, far)
    assert THREAT.within(x, near).all()
    assert (THREAT.size(near) > 0.9 * THREAT.eps).all()
    assert torch.equal(THREAT.apply(x, THREAT.zeros(x)), x)
    assert torch.equal(THREAT.project(x, THREAT.zeros(x)), THREAT.zeros(x))
    assert not THREAT.within(x.flip(0), near).any()  # another clean image
    assert threat_of({"kind": "perceptual", "eps": 0.1}) == THREAT


def test_a_bound_is_calibrated_by_another_threat():
    x = samples(5)[0]
    noise = Noise(tuple(range(5)))
    made = Perceptual.like(Linf(8 / 255), x, noise)
    sizes = THREAT.distance(x, Linf(8 / 255).apply(x, Linf(8 / 255).random(x, noise)))
    assert made.eps == pytest.approx(sizes.median().item(), rel=1e-5)


def test_it_raises_the_loss_with_smooth_changes_and_an_evaluation_keeps_its_size():
    classifier = dp.load_classifier("cifar10-resnet")
    x, y = samples(3)
    attack = LowFrequency(iterations=8, lr=0.05, eot=1)
    run = attack.run(classifier, x, y, Perceptual(0.3), seeds=range(3))
    before = classifier(x).gather(1, y[:, None])
    after = classifier(Perceptual(0.3).apply(x, run.z)).gather(1, y[:, None])
    assert (after < before).all()
    linf, l2 = Perceptual(0.3).norms(run.z)
    change = (Perceptual(0.3).apply(x, run.z) - x).double().flatten(1)
    torch.testing.assert_close((linf, l2), (change.abs().amax(1), change.norm(dim=1)), rtol=1e-4, atol=1e-5)
    found = evaluate(classifier, x, y, Perceptual(0.3), [replace(attack, iterations=1)])
    assert any("bounds no ℓp norm" in text for text in found.warnings)
    assert all(row.within and 0 <= row.size <= 0.3 for row in found.rows)


def test_it_says_what_it_needs():
    x, y = images(1, 8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(InputError, match="threat Perceptual"):
        LowFrequency()(Linear(5, 192), x, y, Linf(0.1))
    with pytest.raises(InputError, match="odd window sizes"):
        LowFrequency(sizes=(4,))
    with pytest.raises(InputError, match="do not fit"):
        LowFrequency(sizes=(17,))(Linear(5, 192), x, y, THREAT)
    with pytest.raises(InputError, match="with `stages`"):
        Perceptual(0.1, "cifar10-vit-tiny").distance(x, x)

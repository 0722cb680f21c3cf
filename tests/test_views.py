"""Two views of an image: the average by hand, its gradient, and what specs and runs make of it."""

from __future__ import annotations

import pytest
import torch

import diffpure as dp
from diffpure.experiments.load import PLAIN, run_folder, run_spec
from diffpure.experiments.table import finished
from diffpure.models.identity import identify
from evaluations import Linear, spec_of
from problems import images, tiny_classifier, tiny_unet

MODEL = {"classifier": "cifar10-resnet", "score": "cifar10-small", "sampler": {"kind": "one-shot", "t_star": 0.1}}


def test_the_average_is_that_of_the_probabilities_of_both_views():
    classifier, x = tiny_classifier(), images(3)
    x.requires_grad_()
    expected = ((classifier(x).softmax(1) + classifier(x.flip(3)).softmax(1)) / 2).log()
    found = dp.FlipAverage(classifier)(x)
    assert torch.allclose(found, expected, atol=1e-6)
    (wanted,), (got,) = (torch.autograd.grad(values[:, 1].sum(), x, retain_graph=True) for values in (expected, found))
    assert torch.allclose(got, wanted, atol=1e-6)


def test_a_classifier_that_sees_nothing_but_the_side_is_undecided_and_has_no_gradient():
    model = Linear()
    model.w.copy_(model.w - model.w.flip(2))  # the flip of an image has the opposite logits
    x = images(4, 4).requires_grad_()
    found = dp.FlipAverage(model)(x)
    assert torch.allclose(found, torch.full_like(found, 0.5).log(), atol=1e-6)
    assert torch.autograd.grad(found[:, 0].sum(), x)[0].abs().max() < 1e-5
    even = Linear()
    even.w.copy_(even.w + even.w.flip(2))  # and one that sees both sides alike is as it was
    assert torch.allclose(dp.FlipAverage(even)(x).softmax(1), even(x).softmax(1), atol=1e-6)


def test_the_flip_of_an_image_gets_the_same_answer():
    model, x = dp.FlipAverage(tiny_classifier()), images(3)
    assert torch.allclose(model(x), model(x.flip(3)), atol=1e-6)


def test_it_stands_behind_a_purifier_and_votes_with_its_draws():
    classifier, x = tiny_classifier(), images(3)
    purifier = dp.Purifier(tiny_unet(8), dp.OneShot(0.1))
    model = dp.Defense(purifier, dp.FlipAverage(classifier), draws=2)
    rows, seeds = model.drawn(x, 7)
    purified = purifier(rows, seeds)
    views = torch.stack([classifier(purified).softmax(1), classifier(purified.flip(3)).softmax(1)])
    assert torch.allclose(model(x, 7), views.mean(0).view(3, 2, -1).mean(1).log(), atol=1e-5)
    assert "average with the horizontal flip" in model.title


def test_it_is_another_model_than_the_classifier_alone():
    classifier = tiny_classifier()
    assert identify(dp.FlipAverage(classifier)) != identify(classifier)
    assert identify(dp.FlipAverage(classifier)) == identify(dp.FlipAverage(tiny_classifier()))


def test_a_spec_asks_for_it_and_other_specs_keep_their_names():
    spec = spec_of(model={**MODEL, "flip": True})
    assert spec_of(model={**MODEL, "flip": False}).hash == spec_of(model=MODEL).hash != spec.hash
    assert isinstance(PLAIN.model(spec.model).classifier, dp.FlipAverage)
    alone = spec_of(model={"classifier": "cifar10-resnet", "flip": True})
    assert isinstance(PLAIN.model(alone.model), dp.FlipAverage)


def test_a_finished_run_with_the_flip_is_found_again_by_a_table(tmp_path):
    spec = spec_of(model={"classifier": "cifar10-resnet", "flip": True}, data={"images": "0-1"}, attacks=["pgd"]).tiny()
    run_spec(spec, run_folder(spec, tmp_path))
    assert finished(spec, tmp_path) is not None


def test_what_is_no_classifier_is_refused():
    with pytest.raises(dp.InputError, match="A classifier is called with images and returns logits, got int"):
        dp.FlipAverage(7)

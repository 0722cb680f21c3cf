"""Purifiers by name, anybody's callable as one, what a blur computes, and randomness that is the classifier's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from diffpure.attacks import PGD, TwoStage
from diffpure.diffusion.samplers import ReverseSDE
from diffpure.errors import InputError
from diffpure.evaluation.evaluate import evaluate
from diffpure.purifiers import PURIFIERS, make_purifier
from diffpure.purifiers.blur import Blur
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense, as_purifier
from evaluations import timeless
from problems import images, tiny_classifier, tiny_unet
from test_purifier_contract import Rounding, Shaking, contrast


def test_purifiers_by_name():
    assert set(PURIFIERS) == {"diffusion", "blur"}
    blur = make_purifier("blur", {"sigma": 2.0, "gradient": "bpda", "rounds": 2})
    assert (blur.title, blur.rounds, blur.gradient.name) == ("Blur(sigma=2), 2 rounds", 2, "bpda")
    with pytest.raises(InputError, match="did you mean 'blur'"):
        make_purifier("blurr", {})
    with pytest.raises(InputError, match="'blur' does not take these arguments"):
        make_purifier("blur", {"width": 2})
    with pytest.raises(InputError, match="sigma above 0"):
        make_purifier("blur", {"sigma": "wide"})


def test_anything_that_is_called_with_images_is_a_purifier():
    x = images(2)
    blur = Blur()
    assert as_purifier(blur) is blur
    assert torch.equal(as_purifier(contrast)(x), contrast(x))
    assert as_purifier(contrast).title == "contrast"
    assert as_purifier(Shaking()).title == "shaking"
    assert as_purifier(Rounding()).title == "Rounding"
    with pytest.raises(InputError, match="called with images and returns images, got int"):
        as_purifier(5)
    for wrong in (lambda x: x[:, :1], lambda x: None, lambda x: x.flatten(1)):
        with pytest.raises(InputError, match="returns images of the shape it was given"):
            as_purifier(wrong)(x)


def test_a_blur_is_its_convolution():
    """An impulse becomes g ⊗ g, and a constant image stays as it is."""
    x = torch.zeros(1, 3, 15, 15)
    x[:, :, 7, 7] = 1
    g = torch.exp(-(torch.arange(-3, 4) ** 2) / 2)
    g = g / g.sum()
    torch.testing.assert_close(Blur(1.0)(x)[0, 1, 4:11, 4:11], g[:, None] * g)
    torch.testing.assert_close(Blur(2.0)(torch.full((1, 1, 5, 5), 0.3)), torch.full((1, 1, 5, 5), 0.3))


def test_a_random_classifier_behind_a_purifier_is_seeded():
    """A defence whose randomness is the classifier's: two evaluations with one seed agree."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_classifier()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 0.3 * torch.randn(len(x), 5)

    x = images(3)
    for purifier in (Blur(), Purifier(tiny_unet(8), ReverseSDE(t_star=0.05, steps=2))):
        model = Defense(purifier, Dropping())
        options = {"rules": ["one-shot", "worst of 4"], "batch": 2, "per_call": 4}
        attacks = [PGD(iterations=1, eot=2), TwoStage(attack=PGD(iterations=1, eot=2), defence_samples=3)]
        one, other = (evaluate(model, x, [0, 1, 2], "linf 8/255", attacks, **options) for _ in range(2))
        assert one.header["model"]["stochastic"]
        assert "seeded image by image" in one.header["model"]["title"]
        assert timeless(one.rows) == timeless(other.rows)
        assert len({row.predictions for row in one.rows}) > 1
        fewer = evaluate(model, x[1:], [1, 2], "linf 8/255", attacks, **{**options, "indices": [1, 2]})
        assert timeless(fewer.rows) == [row for row in timeless(one.rows) if row.image > 0]
        account = [replace(row, seconds=0).network + row.network_gradient for row in one.rows]
        assert all(account)

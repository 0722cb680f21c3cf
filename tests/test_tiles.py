"""A purifier that cuts images into tiles: cutting and blending are exact, and everything else of the contract holds."""

from __future__ import annotations

import pytest
import torch

import diffpure as dp
from diffpure.meter import metered
from diffpure.purifiers.tiles import blend, corners, cut
from problems import tiny_unet


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 3, 8, 21), (2, 1, 30, 17), (1, 3, 5, 3)])
def test_blending_what_was_cut_gives_the_image_back(shape):
    x = torch.rand(shape, dtype=torch.float64)
    tiles = cut(x, 8)
    assert tiles.shape == (shape[0] * len(corners(*shape[2:], 8)), shape[1], 8, 8)
    torch.testing.assert_close(blend(tiles, shape), x, rtol=0, atol=1e-12)


def tiled(gradient: str = "exact", fit: str = "tiles") -> dp.Purifier:
    score = tiny_unet(8, dtype=torch.float64)
    score.size = 8
    return dp.Purifier(score, dp.ReverseSDE(t_star=0.05, steps=2), gradient, fit=fit)


def test_tiles_belong_to_the_image_and_its_seed():
    x = torch.rand(2, 3, 12, 18, dtype=torch.float64)
    both = tiled()(x, [5, 6])
    torch.testing.assert_close(tiled()(x[1:], [6]), both[1:], rtol=0, atol=1e-12)
    assert not torch.allclose(both, tiled()(x, [7, 6]))
    native = x[..., :8, :8]
    assert torch.equal(tiled()(native, [1, 2]), tiled(fit="resize")(native, [1, 2]))


def test_the_gradient_through_tiles_is_exact_and_counted():
    x = torch.rand(1, 3, 10, 13, dtype=torch.float64)
    gradients = []
    for mode in ("exact", "backprop"):
        leaf, purifier = x.clone().requires_grad_(), tiled(mode)
        with metered() as calls:
            (g,) = torch.autograd.grad(purifier(leaf, [3]).square().sum(), leaf)
        assert (calls["network"], calls["network_gradient"]) == purifier.calls(x, gradient=True)
        gradients.append(g)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_the_title_tells_tiles_and_precision_apart():
    score = tiny_unet(8)
    titles = {dp.Purifier(score).title, dp.Purifier(score, fit="tiles").title}
    titles.add(dp.Purifier(score, autocast=torch.float16).title)
    assert len(titles) == 3


def test_an_unknown_fit_is_one_sentence():
    with pytest.raises(dp.InputError, match="Unknown fit 'tile'; did you mean 'tiles'"):
        dp.Purifier(tiny_unet(8), fit="tile")

"""Antithetic samples: mirrored noise, the samplers that follow it, and the attack that takes its steps in pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import diffpure as dp
from diffpure.attacks import MomentumPGD
from diffpure.noise import Noise, mirrored
from problems import SAMPLERS, GaussianScore, tiny_unet
from victims import Linear, problem


def test_mirrored_noise_is_the_negative_and_stays_it():
    like = torch.zeros(3, 2, 4, 4)
    plain = Noise((1, 2, 3))
    with mirrored():
        other = Noise((1, 2, 3))
    assert torch.equal(other(5, like), -plain(5, like))
    assert torch.equal(other.child(7)(0, like), -plain.child(7)(0, like))  # a child that is made later
    assert torch.equal(other.draws(1)(0, like), -plain.draws(1)(0, like))
    assert torch.equal(other.uniform(0) + plain.uniform(0), torch.full((3,), 1 - 2**-53, dtype=torch.float64))
    assert not Noise((1,)).mirrored


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "jitter" not in name and name != "ode"])
def test_a_pair_cancels_the_noise_of_a_linear_sampler(name):
    """With the score of Gaussian data all samplers are linear, so the mean of a pair is the result without noise."""
    purifier = dp.Purifier(GaussianScore(0.3, 0.05), SAMPLERS[name])
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def pair(seeds: tuple[int, ...]) -> Tensor:
        with mirrored():
            other = purifier(x, seeds)
        assert not torch.equal(other, purifier(x, seeds)) or not purifier.stochastic
        return (purifier(x, seeds) + other) / 2

    assert torch.allclose(pair((1, 2)), pair((3, 4)), atol=1e-12)


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_exact_gradient_draws_mirrored_noise_again(rounds):
    """Its backward pass makes the noise anew, here after the mirror is gone."""
    found = []
    for gradient in ("exact", "backprop"):
        purifier = dp.Purifier(tiny_unet(8), SAMPLERS["sde"], gradient=gradient, rounds=rounds)
        x = torch.full((2, 3, 8, 8), 0.4, dtype=torch.float64, requires_grad=True)
        with mirrored():
            out = purifier(x, (1, 2))
        found.append(torch.autograd.grad(out.square().sum(), x)[0])
    assert torch.allclose(*found, rtol=1e-9)


class Recorded(nn.Module):
    """A random model that writes down its seeds and whether its noise is mirrored."""

    stochastic = True

    def __init__(self, mirrors: bool) -> None:
        super().__init__()
        self.mirrors, self.inner, self.asked = mirrors, Linear(5, 64), list[tuple[tuple[int, ...], bool]]()

    def forward(self, x: Tensor, seeds: tuple[int, ...]) -> Tensor:
        noise = Noise.of(seeds, len(x))
        self.asked.append((noise.seeds, noise.mirrored))
        return self.inner(x + 0.1 * noise(0, x))


@pytest.mark.parametrize("mirrors", [True, False])
def test_antithetic_steps_come_in_pairs_where_the_model_can_mirror(mirrors):
    x, y = problem(2)
    model = Recorded(mirrors)
    MomentumPGD(iterations=4, antithetic=True)(model, x, y, "linf 8/255", seeds=[1, 2])
    asked = [call for call in model.asked if len(call[0]) == 2][-4:]  # one sample per image: the steps
    assert [flag for _, flag in asked] == ([False, True] * 2 if mirrors else [False] * 4)
    assert len({seeds for seeds, _ in asked}) == (2 if mirrors else 4)
    assert not model.asked[-1][1]  # the last iterate is evaluated with fresh samples


def test_a_defence_mirrors_if_its_purifier_does():
    classifier = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    assert dp.Defense(dp.Purifier(tiny_unet(8), dp.OneShot()), classifier).mirrors
    assert not dp.Defense(nn.AvgPool2d(3, 1, 1), classifier).mirrors

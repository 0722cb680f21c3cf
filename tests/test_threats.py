"""Threats: budgets are kept for any shape, size and dtype, and every direction and projection is the known one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.threats import L2, THREATS, Flow, Linf, Norm, ThreatModel, threat_of

shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 9), st.integers(2, 9))
sizes = st.floats(1e-3, 2.0)
dtypes = st.sampled_from([torch.float32, torch.float64])


def images(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return torch.where(x < 0.1, 0.0, torch.where(x > 0.9, 1.0, x)).to(dtype)  # some pixels on the walls


BALLS = (Linf, L2, Flow)  # bounds of the perturbation itself


@pytest.mark.parametrize("kind", BALLS)
@settings(max_examples=25, deadline=None)
@given(shape=shapes, eps=sizes, dtype=dtypes, seed=st.integers(0, 2**64 - 1))
def test_starts_and_projections_keep_the_budget(kind, shape, eps, dtype, seed):
    eps = min(eps, 0.9) if kind is Linf else eps  # an ℓ∞ budget above 1 is refused
    x, world = images(shape, dtype), kind(eps)
    noise = Noise.of(range(seed, seed + len(x)), len(x))
    far = 10 * eps * noise(7, world.zeros(x))
    for z in (world.zeros(x), world.random(x, noise, 3), world.project(x, far), world.ascend(far) * eps):
        moved = world.apply(x, z)
        assert z.dtype == dtype
        assert world.within(x, z).all()
        assert moved.min() >= 0
        assert moved.max() <= 1
    assert torch.equal(world.project(x, world.zeros(x)), world.zeros(x))
    assert not world.within(x, far.clamp_min(2 * eps)).any()


@pytest.mark.parametrize("eps", [0.1, 1.0, 7.0])
def test_projections_of_large_images_keep_the_budget_to_the_last_bit(eps):
    x, world = images((8, 3, 64, 64), torch.float64), L2(eps)
    for step in range(20):
        assert world.within(x, world.project(x, 3 * eps * world.ascend(Noise(tuple(range(8)))(step, x)))).all()


@pytest.mark.parametrize("kind", BALLS)
def test_a_random_start_does_not_depend_on_the_batch(kind):
    x = images((4, 3, 8, 8), torch.float32)
    together = kind(0.1).random(x, Noise((5, 6, 7, 8)))
    assert torch.equal(kind(0.1).random(x[2:3], Noise((7,))), together[2:3])
    assert not torch.equal(kind(0.1).random(x, Noise((5, 6, 7, 8)), 1), together)


def test_a_random_start_has_full_size_and_the_distribution_of_the_public_attacks():
    x = torch.full((40, 3, 8, 8), 0.5, dtype=torch.float64)  # the box is far away
    noise = Noise(tuple(range(40)))
    uniform, round_ = (world.random(x, noise) / 0.1 for world in (Linf(0.1), L2(0.1)))
    torch.testing.assert_close(Linf(1.0).size(uniform), torch.ones(40).double())
    quartiles = torch.quantile(uniform.flatten(), torch.tensor([0.25, 0.5, 0.75]).double())
    torch.testing.assert_close(quartiles, torch.tensor([-0.5, 0.0, 0.5]).double(), atol=0.03, rtol=0)
    torch.testing.assert_close(L2(1.0).size(round_), torch.ones(40).double())
    kurtosis = round_.pow(4).mean() / round_.square().mean() ** 2
    assert kurtosis.item() == pytest.approx(3.0, abs=0.25)  # a normal distribution, so no direction is preferred


def test_steepest_ascent_is_the_maximiser_of_the_linear_gain():
    g = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    gain = lambda d: (g * d).flatten(1).sum(1)  # noqa: E731
    torch.testing.assert_close(gain(Linf(1.0).ascend(g)), g.flatten(1).abs().sum(1))  # the dual norms
    torch.testing.assert_close(gain(L2(1.0).ascend(g)), g.flatten(1).norm(dim=1))
    tiny = L2(1.0).ascend(g * 1e-30)
    torch.testing.assert_close(tiny, L2(1.0).ascend(g))  # squares of such gradients are zero in float32
    assert torch.equal(L2(1.0).ascend(torch.zeros_like(g)), torch.zeros_like(g))


@pytest.mark.parametrize("world", [Linf(0.1), L2(0.7)])
def test_the_nearest_point_of_a_plane_is_the_one_a_fine_search_finds(world: Norm):
    gen = torch.Generator().manual_seed(1)
    x, w = torch.rand(6, 1, 4, 4, generator=gen).double(), torch.randn(6, 1, 4, 4, generator=gen).double()
    w[:, :, 0, 0] = 0.0
    reach = torch.where(w > 0, 1 - x, x).mul(w.abs()).flatten(1).sum(1)
    c = torch.tensor([0.1, -0.1, 0.5, 0.9, 0.99, 0.0]).double()
    c = torch.where(c < 0, -torch.where(w < 0, 1 - x, x).mul(w.abs()).flatten(1).sum(1) * 0.1, c * reach)
    d = world.to_hyperplane(x, w, c)
    torch.testing.assert_close((w * d).flatten(1).sum(1), c)
    assert (x + d).min() >= -1e-12
    assert (x + d).max() <= 1 + 1e-12
    # By its size: bisection over the size of the best linear gain inside ball and box.
    rate = world.rate(w.flatten(1))
    room = torch.where((w * c.reshape(-1, 1, 1, 1)) > 0, 1 - x, x).flatten(1)
    low, high = torch.zeros(6).double(), torch.full((6,), 1e3).double()
    for _ in range(100):
        lam = (low + high) / 2
        short = (w.flatten(1).abs() * torch.minimum(lam[:, None] * rate, room)).sum(1) < c.abs()
        low, high = torch.where(short, lam, low), torch.where(short, high, lam)
    best = torch.minimum(high[:, None] * rate, room).reshape_as(x)
    torch.testing.assert_close(world.size(d), world.size(best), atol=1e-9, rtol=1e-6)


def test_a_plane_out_of_reach_is_approached_as_far_as_the_box_allows():
    x, w = torch.full((1, 1, 2, 2), 0.5), torch.tensor([[[[1.0, -1.0], [0.0, 2.0]]]])
    far = torch.tensor([100.0])
    for world in (Linf(0.1), L2(0.1)):
        assert torch.equal(world.to_hyperplane(x, w, far), torch.tensor([[[[0.5, -0.5], [0.0, 0.5]]]]))
        assert torch.equal(world.to_hyperplane(x, 0 * w, far), torch.zeros_like(x))  # no gradient, no way


def test_eight_bit_images_are_compared_in_whole_levels():
    x = torch.randint(0, 256, (4, 3, 6, 6), generator=torch.Generator().manual_seed(2)) / 255
    for world in (Linf(8 / 255), L2(0.5)):
        z = world.random(x, Noise((1, 2, 3, 4)))
        rounded = world.quantise(x, z)
        levels = (world.apply(x, rounded) * 255).double()
        assert (levels - levels.round()).abs().max() < 1e-3
        assert world.within(x, rounded, eight_bit=True).all()
        assert world.within(x, rounded).all()
    full = Linf(8 / 255).project(x, torch.full_like(x, 8 / 255))
    assert torch.equal(Linf(8 / 255).quantise(x, full).mul(255).round(), full.mul(255).round())  # no level is lost
    assert not Linf(7.9 / 255).within(x, full, eight_bit=True).any()


def test_a_flow_moves_pixels_and_its_gradient_is_that_of_bilinear_sampling():
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(3)).double()
    world = Flow(0.5)
    torch.testing.assert_close(world.apply(x, world.zeros(x)), x)
    one_pixel = world.zeros(x)
    one_pixel[..., 0] = 2 / 8  # every pixel is fetched from its right neighbour
    torch.testing.assert_close(world.apply(x, one_pixel)[..., :-1], x[..., 1:])
    z = world.random(x, Noise((1, 2))) / 10
    g = torch.rand(x.shape, generator=torch.Generator().manual_seed(4)).double()
    d = torch.randn(z.shape, generator=torch.Generator().manual_seed(5)).double()
    h = 1e-6
    slope = ((world.apply(x, z + h * d) - world.apply(x, z - h * d)) * g).sum() / (2 * h)
    torch.testing.assert_close((world.pullback(x, z, g) * d).sum(), slope, rtol=1e-5, atol=1e-8)
    assert world.roughness(torch.ones(1, 4, 4, 2)).item() < 1e-4  # a shift is smooth
    bent = torch.zeros(1, 1, 2, 2)
    bent[0, 0, 1] = torch.tensor([3.0, 4.0])
    assert world.roughness(bent).item() == pytest.approx(10.0)  # one pair, 5 apart, seen from both ends


@pytest.mark.parametrize("eps", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("kind", THREATS.values())
def test_a_bad_size_is_one_sentence(kind: type[ThreatModel], eps: float):
    with pytest.raises(InputError, match="needs a finite eps > 0"):
        kind(eps)


def test_threats_by_name():
    assert threat_of("Linf 0.1") == threat_of({"kind": "linf", "eps": 0.1}) == Linf(0.1)
    assert threat_of("l2 128/255") == L2(128 / 255)
    with pytest.raises(InputError, match="did you mean 'linf'"):
        threat_of("l-inf 0.1")
    x = images((1, 3, 4, 4), torch.float32)
    assert Linf(0.1).unbounded(x).eps == 1
    assert L2(0.1).unbounded(x).eps == pytest.approx(48**0.5)


def test_the_l2_projection_is_the_nearest_point_of_ball_and_box():
    gen = torch.Generator().manual_seed(6)
    x = images((5, 1, 4, 4), torch.float64, 7)
    z = torch.randn(x.shape, generator=gen).double() * torch.tensor([0.01, 0.1, 0.5, 1.0, 3.0]).reshape(-1, 1, 1, 1)
    world = L2(0.6)
    nearest = world.project(x, z)
    for _ in range(200):  # no other feasible point is nearer: ⟨z - nearest, other - nearest⟩ ≤ 0
        other = (torch.rand(x.shape, generator=gen).double() - x).mul(torch.rand(5, 1, 1, 1, generator=gen).double())
        other = other * (0.6 / other.flatten(1).norm(dim=1).clamp_min(0.6)).reshape(-1, 1, 1, 1)
        assert ((z - nearest) * (other - nearest)).flatten(1).sum(1).max() <= 1e-9
    assert torch.equal(world.project(x, nearest * 0.5), nearest * 0.5)

"""The schedule against 50-digit numbers and closed forms; noise as a pure function of (seed, step)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from diffpure.diffusion.sde import VPSDE, DiscreteVP
from diffpure.errors import InputError
from diffpure.noise import Noise, mix

SDE = VPSDE()


def test_golden_schedule(paper):
    sde = paper.sde
    for row in paper.numbers["schedule"]:
        t = row["t"]
        assert sde.beta(t).item() == pytest.approx(row["beta"], rel=1e-12)
        assert sde.integral(t).item() == pytest.approx(row["integral_beta"], rel=1e-12)
        assert sde.gamma(t).item() == pytest.approx(row["gamma"], rel=1e-12)
        assert sde.alpha(t).item() == pytest.approx(row["alpha"], rel=1e-12)
        assert sde.std(t).item() == pytest.approx(row["sqrt_one_minus_alpha"], rel=1e-12)


def test_integral_is_the_integral_of_beta():
    for sde in (SDE, SDE.discrete()):
        for t in (0.01, 0.1, 0.5, 1.0):
            midpoints = (torch.arange(100_000, dtype=torch.float64) + 0.5) * t / 100_000
            assert sde.integral(t).item() == pytest.approx(sde.beta(midpoints).mean().item() * t, rel=1e-9)


def test_std_keeps_its_digits_at_small_times():
    t = 1e-9
    assert SDE.std(t).item() ** 2 == pytest.approx(SDE.integral(t).item(), rel=1e-9)
    naive = 1 - torch.exp(-SDE.integral(t).float())
    assert naive.item() == 0.0  # what float32 subtraction gives


@given(st.floats(1e-6, 1.0))
def test_inverses(t):
    time = torch.tensor(t, dtype=torch.float64)
    for sde in (SDE, SDE.discrete()):
        assert sde.time_of_integral(sde.integral(time)).item() == pytest.approx(t, rel=1e-9)
        assert sde.time_of_log_snr(sde.log_snr(time)).item() == pytest.approx(t, rel=1e-7)
        assert sde.sigma(time).item() == pytest.approx((sde.std(time) / sde.alpha(time).sqrt()).item(), rel=1e-12)


def test_discrete_chain_and_its_continuous_time():
    chain = SDE.discrete()
    product = 1.0
    for i, beta in enumerate(chain.betas):
        product *= 1 - beta
        assert chain.alpha_bar(i).item() == pytest.approx(product, rel=1e-12)
        # The SDE that runs through the chain has exactly its marginals.
        assert chain.alpha((i + 1) / 1000).item() == pytest.approx(product, rel=1e-12)
    assert chain.alpha_bar(-1).item() == 1.0
    assert chain.alpha_bar(99).item() == pytest.approx(0.89702, abs=5e-6)
    assert SDE.alpha(0.1).item() == pytest.approx(0.89628, abs=5e-6)


def test_golden_discrete_chain(paper):
    chain = paper.sde.discrete(paper.steps)
    for row in paper.numbers["discrete_forward"]:
        assert chain.alpha_bar(row["index"]).item() == pytest.approx(row["alpha_bar_float64"], rel=1e-12)
        alpha = paper.sde.alpha(row["noise_level"] / paper.steps).item()
        assert alpha == pytest.approx(row[f"alpha_continuous_at_n_over_{paper.steps}"], rel=1e-12)


def test_chain_tends_to_the_sde_at_first_order():
    errors = [abs(SDE.discrete(n).integral(0.1).item() / SDE.integral(0.1).item() - 1) for n in (1000, 2000, 4000)]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.1)


def test_diffuse_and_tweedie_are_inverse():
    x, eps = torch.randn(3, 2, 4, 4, dtype=torch.float64), torch.randn(3, 2, 4, 4, dtype=torch.float64)
    t = torch.tensor([1e-5, 0.1, 0.9], dtype=torch.float64)
    noisy = SDE.diffuse(x, t, eps)
    score_of_the_draw = -eps / SDE.std(t).reshape(-1, 1, 1, 1)
    assert torch.allclose(SDE.denoised(noisy, t, score_of_the_draw), x, atol=1e-10)


def test_noise_depends_on_seed_and_step_only():
    like = torch.empty(4, 3, 8, 8)
    noise = Noise.of([7, 8, 9, 7], 4)
    z = noise(5, like)
    assert torch.equal(z[0], z[3])
    assert torch.equal(Noise((9,))(5, like[:1])[0], z[2])
    assert torch.equal(noise(5, like), z)
    assert not torch.equal(noise(6, like), z)
    assert not torch.equal(noise.child(0)(5, like), z)
    assert not torch.equal(noise.child(0)(5, like), noise.child(1)(5, like))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_the_same_with_any_number_of_threads(dtype):
    like, noise, before = torch.empty(7, 3, 96, 96, dtype=dtype), Noise(tuple(range(7))), torch.get_num_threads()
    alone = torch.cat([Noise((seed,))(5, like[:1]) for seed in range(7)])
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            assert torch.equal(noise(5, like), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_a_forked_process_draws_noise_with_threads_of_its_own():
    code = (
        "import os, torch; from diffpure.noise import Noise\n"
        "torch.set_num_threads(2); like = torch.empty(8, 3, 96, 96)\n"
        "draw = lambda: Noise(tuple(range(8)))(1, like).numpy().tobytes(); drawn = draw(); child = os.fork()\n"
        "if child == 0: os._exit(draw() != drawn)\n"
        "raise SystemExit(os.waitpid(child, 0)[1])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_noise_is_standard_normal():
    z = Noise.of(range(64), 64)(3, torch.empty(64, 3, 16, 16)).flatten()
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-4
    u = Noise.of(range(4000), 4000).uniform(1)
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4


def test_noise_is_the_same_in_another_process():
    code = "import torch; from diffpure.noise import Noise; print(Noise((2**63 + 5,))(2, torch.empty(1, 8)).tolist())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(other) == Noise((2**63 + 5,))(2, torch.empty(1, 8)).tolist()


def test_seeds_beyond_32_bits_and_negative_ones_count():
    like = torch.empty(1, 16)
    assert not torch.equal(Noise.of([5], 1)(0, like), Noise.of([5 + 2**32], 1)(0, like))
    assert not torch.equal(Noise.of([-1], 1)(0, like), Noise.of([1], 1)(0, like))


def test_without_seeds_noise_is_unpredictable():
    like = torch.empty(2, 16)
    torch.manual_seed(0)
    first = Noise.of(None, 2)(0, like)
    torch.manual_seed(0)
    assert not torch.equal(first, Noise.of(None, 2)(0, like))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_children_differ_from_their_parents(seed, tag):
    assert 0 <= mix(seed, tag) < 2**64
    assert mix(seed, tag) != mix(seed, tag + 1)


def test_bad_arguments():
    with pytest.raises(InputError, match="one per image: got 3 seeds for 2"):
        Noise.of([1, 2, 3], 2)
    with pytest.raises(InputError, match="beta_min"):
        VPSDE(0.0, 1.0)
    with pytest.raises(InputError, match="every beta"):
        DiscreteVP((0.1, 1.5))
    assert math.isfinite(VPSDE(1.0, 1.0).time_of_integral(torch.tensor(0.5)).item())

"""Every sampler: one contract over a table, moments on Gaussian data, closed forms and golden numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torchdiffeq import odeint

from diffpure.diffusion.gradients import Exact, walk
from diffpure.diffusion.samplers import (
    DDIM,
    Ancestral,
    FewStep,
    Langevin,
    OneShot,
    ProbabilityFlow,
    ReverseSDE,
    time_grid,
)
from diffpure.diffusion.sde import VPSDE
from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.scores import GaussianScore
from goldens import runs, score_of
from problems import SAMPLERS, GaussianWorld, tiny_unet

VARIANCES = (0.01, 0.05, 0.1, 0.5, 1.0)


def purify(sampler, score, x, noise):
    start, path = sampler(score, x, noise)
    return walk(path, start)


@pytest.mark.parametrize("name", SAMPLERS)
def test_contract(name):
    """Shape, finiteness, seeds, independence of the batch, times that fall, and a coarser path."""
    sampler, score = SAMPLERS[name], tiny_unet(dtype=torch.float64)
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64).clamp(-1, 1)
    noise = Noise.of([3, 1, 2], 3)
    out = purify(sampler, score, x, noise)
    assert out.shape == x.shape
    assert out.isfinite().all()
    assert torch.equal(out, purify(sampler, score, x, noise))
    order = [2, 0, 1]
    shuffled = purify(sampler, score, x[order], Noise.of([2, 3, 1], 3))
    assert torch.allclose(shuffled, out[order], atol=1e-12)
    assert torch.allclose(purify(sampler, score, x[1:2], Noise.of([1], 1)), out[1:2], atol=1e-12)
    differs = not torch.allclose(purify(sampler, score, x, Noise.of([7, 8, 9], 3)), out)
    assert differs == sampler.stochastic
    _, path = sampler(score, x, noise)
    times = torch.stack([path.time(i).expand(3) for i in range(len(path) + 1)])
    rising = isinstance(sampler, Langevin)
    assert ((times.diff(dim=0) >= 0) if rising else (times.diff(dim=0) <= 0)).all()
    assert len(path.coarser(2)) <= max(3, len(path))
    assert walk(path.coarser(1), x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samplers_keep_the_dtype(dtype):
    x = torch.zeros(1, 3, 8, 8, dtype=dtype)
    for sampler in SAMPLERS.values():
        assert purify(sampler, tiny_unet(dtype=dtype), x, Noise((1,))).dtype == dtype


# How much of the variance each may miss by its steps alone (DDPM's posterior variance is right for a point).
STOCHASTIC = {
    "sde": (ReverseSDE(denoise=True), 0.015),
    "few-1": (FewStep(steps=50, order=1), 0.02),
    "few-2": (FewStep(steps=10), 0.01),
    "ancestral": (Ancestral(), 0.05),
    "ddim-1": (DDIM(steps=50, eta=1.0), 0.08),
    "sde-jitter": (ReverseSDE(steps=100, jitter=0.05, denoise=True), 0.015),
}


@pytest.mark.parametrize("name", STOCHASTIC)
def test_moments_of_purified_gaussian_data(name):
    """Data N(0.3, 0.05) diffused and brought back is N(0.3, 0.05) again, within sampling error and the known bias."""
    (sampler, bias), n = STOCHASTIC[name], 64 * 1024
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = 0.3 + math.sqrt(0.05) * torch.randn(64, 1, 32, 32, dtype=torch.float64)
    out = purify(sampler, GaussianScore(0.3, 0.05), x, Noise.of(range(64), 64))
    assert out.mean().item() == pytest.approx(0.3, abs=4 * math.sqrt(0.05 / n) + 1e-3)
    assert out.var().item() == pytest.approx(0.05, rel=4 * math.sqrt(2 / n) + bias)
    if "jitter" not in name:  # what the steps make of it exactly
        world = GaussianWorld(0.05)
        a, v = world.moments(sampler)
        assert out.var().item() == pytest.approx(a**2 * world.marginal + v, rel=4 * math.sqrt(2 / n) + 2e-3)


def test_langevin_samples_the_posterior_of_its_energy():
    """LD-SDE with η = 1 has the stationary density ∝ p(x) N(x_a; x, σ²), a Gaussian for Gaussian data."""
    score = GaussianScore(0.0, 0.5)
    sampler = Langevin(variance=0.5, rate=20.0, eta=1.0, score_time=1e-4, steps=500)
    x_a = torch.full((32, 1, 32, 32), 0.8, dtype=torch.float64)
    out = purify(sampler, score, x_a, Noise.of(range(32), 32))
    assert out.mean().item() == pytest.approx(0.4, abs=0.02)
    assert out.var().item() == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("variance", VARIANCES)
def test_ten_few_steps_reach_what_euler_needs_a_hundred_for(variance):
    world = GaussianWorld(variance)
    assert world.distance(FewStep(steps=10)) <= world.distance(ReverseSDE(steps=100))
    assert world.distance(FewStep(steps=10)) < world.distance(ReverseSDE(steps=90))


@pytest.mark.parametrize("variance", VARIANCES)
def test_orders_of_convergence(variance):
    """Halving the step halves the error of first order, and quarters that of second order."""
    world = GaussianWorld(variance)
    first = [world.distance(FewStep(steps=n, order=1, end=1e-7)) for n in (200, 400)]
    second = [world.distance(FewStep(steps=n, order=2, end=1e-7)) for n in (40, 80)]
    euler = [world.distance(ReverseSDE(steps=n, end=1e-9)) for n in (200, 400)]
    assert math.log2(first[0] / first[1]) == pytest.approx(1, abs=0.25)
    assert math.log2(second[0] / second[1]) == pytest.approx(2, abs=0.4)
    assert math.log2(euler[0] / euler[1]) == pytest.approx(1, abs=0.25)


def test_probability_flow_is_the_known_map():
    """The ODE carries N(μ_t, σ_t²) to N(μ0, σ0²) by the affine map x ↦ μ0 + σ0 (x - μ_t)/σ_t."""
    score = GaussianScore(0.3, 0.05)
    sampler = ProbabilityFlow(t_star=0.1, dt=1e-4, end=1e-6)
    start, path = sampler(score, torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(1, 1, 4, 4), Noise((1,)))
    alpha = VPSDE().alpha(0.1)
    sigma_t = (1 - alpha + alpha * 0.05).sqrt()
    known = 0.3 + math.sqrt(0.05) * (start - alpha.sqrt() * 0.3) / sigma_t
    assert torch.allclose(walk(path, start), known, atol=2e-3)


def test_probability_flow_against_torchdiffeq():
    score = tiny_unet(dtype=torch.float64)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    start, path = ProbabilityFlow(t_star=0.1, steps=10, end=0.02)(score, x, Noise.of([1, 2], 2))

    def drift(t, state):
        return -score.sde.beta(t) / 2 * (state + score(state, t.expand(2)))

    known = odeint(drift, start, path.times, method="euler")[-1]
    assert torch.allclose(walk(path, start), known, atol=1e-12)


@pytest.mark.parametrize("run", runs(), ids=lambda run: run.name)
def test_golden_euler_maruyama(run):
    """One purification by torchsde, replayed with its recorded increments: x(0), and the exact gradient."""
    (score, _), data = score_of(run.network), run.tensors
    times = torch.cat([1 - data["input/t_prime_start"].double(), 1 - data["input/t_prime_end"][-1:].double()])

    def noise(step, like):
        return data["input/dW"][step - 1] / (times[step - 1] - times[step]).sqrt().to(like.dtype)

    x = data["input/x_tstar"].clone().requires_grad_()
    path = ReverseSDE(t_star=run.about["t_star"]).path(score, times, noise)
    out = Exact()(path, x)
    assert (out - data["output/x0"]).abs().max() < 5e-5
    assert (out - data["output/x0"]).norm() / data["output/x0"].norm() < 1e-4
    (gradient,) = torch.autograd.grad((out * data["input/w"]).sum(), x)
    exact, adjoint = data["grad/exact"], data["grad/adjoint_approximate"]
    assert (gradient - exact).norm() / exact.norm() < 1e-4
    assert (gradient - exact).abs().max() < 1e-4 * exact.abs().max()
    assert (adjoint - exact).norm() / exact.norm() > 0.1  # what torchsde's adjoint gave on the same path


def test_the_papers_grid():
    """t* = 0.1 at dt = 1e-3 is a hundred steps, score asked at 0.1, …, 0.001, ending at 1e-5."""
    _, path = ReverseSDE()(GaussianScore(), torch.zeros(1, 1, 2, 2), Noise((1,)))
    assert len(path) == 100
    assert path.times[0].item() == pytest.approx(0.1)
    assert path.times[99].item() == pytest.approx(0.001)
    assert path.times[100].item() == 1e-5


def test_grids_are_uniform_in_their_variable():
    sde, start = VPSDE(), torch.tensor(0.2, dtype=torch.float64)
    variables = {"t": lambda t: t, "log_snr": sde.log_snr, "root_sigma": lambda t: sde.sigma(t).sqrt()}
    for spacing, variable in variables.items():
        times = time_grid(sde, start, 1e-3, 9, spacing)
        steps = variable(times).diff()
        assert torch.allclose(steps, steps[0].expand(9), rtol=1e-6)
        assert times[0] == start
        assert times[-1] == 1e-3


def test_jitter_is_uniform_and_for_the_whole_process():
    sampler = ReverseSDE(t_star=0.1, steps=5, jitter=0.03)
    noise = Noise.of(range(500), 500)
    start, path = sampler(GaussianScore(), torch.zeros(500, 1, 16, 16, dtype=torch.float64), noise)
    t = path.times[0]
    assert t.min() >= 0.07
    assert t.max() <= 0.13
    assert t.mean().item() == pytest.approx(0.1, abs=0.003)
    assert t.std().item() == pytest.approx(0.06 / math.sqrt(12), rel=0.1)
    # The forward diffusion of each image went to its own t*.
    ratio = start.flatten(1).std(1) / VPSDE().std(t)
    assert ratio.mean().item() == pytest.approx(1, abs=0.01)


def test_discrete_start_uses_the_chain():
    x = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    noise = Noise((5,))
    continuous, _ = ReverseSDE()(GaussianScore(), x, noise)
    discrete, _ = ReverseSDE(forward="discrete")(GaussianScore(), x, noise)
    z = noise(0, x)
    assert torch.allclose(continuous, VPSDE().alpha(0.1).sqrt() * x + VPSDE().std(0.1) * z)
    bar = VPSDE().discrete().alpha_bar(99)
    assert torch.allclose(discrete, bar.sqrt() * x + (1 - bar).sqrt() * z)


def test_ancestral_is_ddpm_step_by_step():
    """mean = (x - β/√(1-ᾱ) ε̂)/√(1-β), variance (1-ᾱ_{i-1})/(1-ᾱ_i) β, written out as in DDPM."""
    score, chain = tiny_unet(dtype=torch.float64), VPSDE().discrete()
    noise = Noise.of([4, 5], 2)
    x, path = Ancestral(t_star=0.006)(score, torch.randn(2, 3, 8, 8, dtype=torch.float64), noise)
    state = x
    for k, i in enumerate(range(5, -1, -1)):
        beta, bar, before = chain.beta_of_step(i), chain.alpha_bar(i), chain.alpha_bar(i - 1)
        eps = score.epsilon_step(x, torch.full((2,), i))
        x = (x - beta / (1 - bar).sqrt() * eps) / (1 - beta).sqrt()
        if i > 0:
            x = x + ((1 - before) / (1 - bar) * beta).sqrt() * noise(k + 1, x)
        state = path.step(state, k)
        assert torch.allclose(state, x, atol=1e-9)


def test_ddim_at_one_is_ancestral():
    score, x = tiny_unet(dtype=torch.float64), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    noise = Noise.of([1, 2], 2)
    assert torch.equal(purify(DDIM(steps=7, eta=1.0), score, x, noise), purify(Ancestral(steps=7), score, x, noise))


def test_one_shot_is_the_posterior_mean():
    world = GaussianWorld(0.05)
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64)
    start, path = OneShot(t_star=0.1)(world.score, x, Noise((1,)))
    assert torch.allclose(walk(path, start), world.phi * start)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReverseSDE(t_star=0.0), "t\\* is a time in \\(0, 1\\], got 0.0"),
        (lambda: ReverseSDE(t_star=1.5), "t\\* is a time"),
        (lambda: OneShot(t_star=-1), "t\\* is a time"),
        (lambda: ReverseSDE(t_star=0.1, dt=0.2), "dt is a step inside"),
        (lambda: ReverseSDE(dt=1e-3, steps=5), "dt or steps, not both"),
        (lambda: ReverseSDE(steps=0), "at least 1"),
        (lambda: ReverseSDE(steps=5, spacing="logsnr"), "did you mean 'log_snr'"),
        (lambda: ReverseSDE(dt=1e-3, spacing="log_snr"), "give steps"),
        (lambda: ReverseSDE(forward="descrete"), "did you mean 'discrete'"),
        (lambda: ReverseSDE(end=0.5), "end is a time in"),
        (lambda: ReverseSDE(jitter=0.2), "stays in"),
        (lambda: FewStep(order=3), "order is 1 or 2"),
        (lambda: DDIM(eta=2), "eta is in"),
        (lambda: Ancestral(t_star=1e-4), "at least 1/1000"),
        (lambda: Ancestral(steps=0), "at least 1"),
        (lambda: Langevin(variance=0), "variance > 0"),
        (lambda: Langevin(score_time=0), "score_time"),
        (lambda: Langevin(variance=0.001, rate=1.0), "at least 250 steps are needed, got 100"),
    ],
)
def test_bad_arguments_get_one_sentence(make, message):
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert str(caught.value).count("\n") == 0

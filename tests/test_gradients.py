"""Gradient modes: exact equals backprop for every sampler, memory is what is promised, approximations are measured."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffpure.diffusion.gradients import (
    BPDA,
    GRADIENT_MODES,
    Adjoint,
    Backprop,
    Exact,
    Surrogate,
    gradient_mode,
    graph_bytes,
)
from diffpure.diffusion.samplers import FewStep, Langevin, ProbabilityFlow, ReverseSDE
from diffpure.errors import InputError
from diffpure.noise import Noise
from problems import EULER, SAMPLERS, GaussianWorld, images, tiny_unet

VARIANCES = (0.01, 0.05, 0.1, 0.5, 1.0)


def value_and_gradient(mode, sampler, score, x, seeds=(1, 2, 3, 4)):
    """x̂(0) and the gradient of a fixed weighted sum of it, with respect to the input of the sampler."""
    x = x.clone().requires_grad_()
    start, path = sampler(score, x, Noise(seeds[: len(x)]))
    out = mode(path, start)
    weights = Noise.of(range(len(x)), len(x))(99, x)
    return out.detach(), torch.autograd.grad((out * weights).sum(), x)[0]


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("memory", [0, 300_000, None])
def test_exact_equals_backprop_for_every_sampler(name, dtype, tolerance, memory):
    score, x = tiny_unet(dtype=dtype), 2 * images(dtype=dtype) - 1
    known = value_and_gradient(Backprop(), SAMPLERS[name], score, x)
    found = value_and_gradient(Exact(memory=memory), SAMPLERS[name], score, x)
    assert relative(found[0], known[0]) <= tolerance
    assert relative(found[1], known[1]) <= tolerance


@pytest.mark.parametrize("mode", [Exact(), Exact(memory=None), Adjoint(), Backprop(), Surrogate(3), BPDA()])
def test_every_mode_has_the_same_value_with_and_without_gradient(mode):
    score, x = tiny_unet(dtype=torch.float64), 2 * images(dtype=torch.float64) - 1
    value, gradient = value_and_gradient(mode, SAMPLERS["sde"], score, x)
    known, _ = value_and_gradient(Backprop(), SAMPLERS["sde"], score, x)
    assert torch.allclose(value, known, atol=1e-14)
    assert gradient.isfinite().all()
    with torch.no_grad():
        start, path = SAMPLERS["sde"](score, x, Noise((1, 2, 3, 4)))
        plain = mode(path, start)
    assert torch.allclose(plain, known, atol=1e-14)
    assert not plain.requires_grad


def test_a_second_backward_recomputes():
    score, x = tiny_unet(dtype=torch.float64), (2 * images(dtype=torch.float64) - 1).requires_grad_()
    start, path = SAMPLERS["sde"](score, x, Noise((1, 2, 3, 4)))
    out = Exact(memory=None)(path, start).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, x)[0], first)


# ------------------------------------------------------------------------------------------------------------ memory


def saved_bytes(mode, width, steps=8, size=16):
    """The bytes that autograd keeps between forward and backward, beside the network's weights."""
    score, x = tiny_unet(width), (2 * images(2, size) - 1).requires_grad_()
    weights = {w.untyped_storage().data_ptr() for w in score.parameters()}
    start, path = ReverseSDE(t_star=0.05, steps=steps)(score, x, Noise((1, 2)))
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.ndim:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = mode(path, start)
    assert out.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("width", [16, 64])
def test_exact_keeps_the_states_and_nothing_else(width):
    steps, state = 8, 2 * 3 * 16 * 16 * 4
    assert saved_bytes(Exact(), width, steps) <= (steps + 1) * state
    assert saved_bytes(Backprop(), width, steps) > 20 * steps * state  # what it saves us


def test_the_adjoint_keeps_one_state():
    assert saved_bytes(Adjoint(), 64) <= 2 * 3 * 16 * 16 * 4


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_a_budget_is_used_and_never_exceeded(share):
    """Between a budget and what is kept lies less than one more step's graph."""
    everything = saved_bytes(Exact(memory=None), 32)
    start, path = ReverseSDE(t_star=0.05, steps=8)(tiny_unet(32), 2 * images(2, 16) - 1, Noise((1, 2)))
    graph = graph_bytes(path, start)
    budget = math.ceil(share * everything)
    kept = saved_bytes(Exact(memory=budget), 32)
    # The count includes the graph of the step that was measured and dropped again, which is not kept.
    assert kept - graph <= budget
    assert budget - kept < graph


def test_a_larger_budget_recomputes_less():
    """Score calls in the backward pass: all steps without a budget, none when every graph fits."""
    calls = []

    class Counting:
        def __init__(self, score):
            self.score, self.sde, self.size = score, score.sde, None

        def __call__(self, x, t):
            calls.append(torch.is_grad_enabled())
            return self.score(x, t)

    counts = {}
    for memory in (0, None):
        calls.clear()
        x = (2 * images(2) - 1).requires_grad_()
        start, path = ReverseSDE(t_star=0.05, steps=8)(Counting(tiny_unet()), x, Noise((1, 2)))
        out = Exact(memory=memory)(path, start)
        before = len(calls)
        out.sum().backward()
        counts[memory] = (before, len(calls) - before)
    assert counts == {0: (8, 8), None: (8, 0)}


def test_the_weights_get_no_gradient():
    score, x = tiny_unet(), (2 * images() - 1).requires_grad_()
    start, path = SAMPLERS["sde"](score, x, Noise((1, 2, 3, 4)))
    Exact()(path, start).sum().backward()
    assert x.grad is not None
    assert all(w.grad is None for w in score.parameters())


AUTOCAST = """
import torch
from diffpure import FewStep, Purifier
from problems import images, tiny_unet

x, found = images(2), {}
for mode in ("backprop", "exact"):
    leaf = x.clone().requires_grad_()
    out = Purifier(tiny_unet(), FewStep(t_star=0.1, steps=3), mode, autocast=torch.DTYPE)(leaf, seeds=[1, 2])
    found[mode] = (out.detach(), torch.autograd.grad(out.sum(), leaf)[0])
full = Purifier(tiny_unet(), FewStep(t_star=0.1, steps=3))(x, seeds=[1, 2])
assert torch.equal(found["exact"][0], found["backprop"][0])
assert torch.allclose(found["exact"][1], found["backprop"][1], rtol=1e-4, atol=1e-5)
assert 0 < (full - found["exact"][0]).abs().max() < 0.1  # half precision was used, and is close
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_backward_pass_recomputes_in_the_precision_of_the_forward_pass(dtype):
    code = AUTOCAST.replace("DTYPE", dtype)
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    if run.returncode == -signal.SIGILL:
        pytest.skip(f"this machine reports {dtype} instructions that it does not have")
    assert run.returncode == 0, run.stderr


# ---------------------------------------------------------------------------------------------------- Gaussian world


def phi(mode, world, dt, end=1e-12):
    """∂x(0)/∂x(t*) through the solver in the Gaussian world of appendix B.5."""
    x = torch.ones(1, 1, 1, 1, dtype=torch.float64, requires_grad=True)
    _, path = ReverseSDE(t_star=world.t_star, dt=dt, end=end)(world.score, x, Noise((1,)))
    return torch.autograd.grad(mode(path, x).sum(), x)[0].item()


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("mode", [Exact(), Adjoint(), Adjoint(times="end")])
def test_gradient_error_falls_at_first_order(variance, mode):
    """|φ_num - φ_ana| / |φ_ana| is tenfold smaller for a tenfold smaller step (the paper's figure)."""
    world = GaussianWorld(variance)
    errors = [abs(phi(mode, world, dt) / world.phi - 1) for dt in (1e-2, 1e-3, 1e-4)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.15)


def test_golden_analytic_gradients(paper):
    for row in paper.numbers["analytic_gradient"]:
        world = GaussianWorld(row["sigma0_sq"], row["t_star"], paper.sde)
        assert world.phi == pytest.approx(row["phi_ana"], rel=1e-12)
        for dt, known in row["euler_maruyama"].items():
            if float(dt) < 1e-3:
                continue
            found = phi(Exact(), world, float(dt))
            assert found == pytest.approx(known["phi_em"], rel=1e-9)


# ---------------------------------------------------------------------------------------------------- approximations


@pytest.mark.parametrize("name", EULER)
def test_the_adjoint_is_close_and_not_exact(name):
    score, x = tiny_unet(dtype=torch.float64), 2 * images(dtype=torch.float64) - 1
    exact = value_and_gradient(Exact(), SAMPLERS[name], score, x)[1]
    adjoint = value_and_gradient(Adjoint(), SAMPLERS[name], score, x)[1]
    assert relative(adjoint, exact) < 0.1
    if name != "one-shot":
        assert relative(adjoint, exact) > 1e-6


def test_the_adjoint_tends_to_the_exact_gradient():
    score, x = tiny_unet(dtype=torch.float64), 2 * images(dtype=torch.float64) - 1
    for make in (lambda n: ProbabilityFlow(t_star=0.1, steps=n, end=0.02), lambda n: Langevin(steps=n, eta=0.0)):
        errors = []
        for steps in (10, 40):
            exact = value_and_gradient(Exact(), make(steps), score, x)[1]
            errors.append(relative(value_and_gradient(Adjoint(), make(steps), score, x)[1], exact))
        assert errors[0] / errors[1] > 3


def test_where_the_adjoint_starts_matters():
    """Asking the score at 1e-5, which the forward pass never visits, costs accuracy: the authors' code does."""
    score, x = tiny_unet(dtype=torch.float64), 2 * images(dtype=torch.float64) - 1
    sampler = ReverseSDE(t_star=0.02)
    exact = value_and_gradient(Exact(), sampler, score, x)[1]
    grid = relative(value_and_gradient(Adjoint(), sampler, score, x)[1], exact)
    end = relative(value_and_gradient(Adjoint(times="end"), sampler, score, x)[1], exact)
    assert end > 3 * grid


def test_surrogate_is_the_gradient_of_the_coarser_path():
    score, x = tiny_unet(dtype=torch.float64), 2 * images(dtype=torch.float64) - 1
    sampler = ProbabilityFlow(t_star=0.05, steps=6)
    gradient = value_and_gradient(Surrogate(3), sampler, score, x)[1]
    coarse = value_and_gradient(Backprop(), ProbabilityFlow(t_star=0.05, steps=3), score, x)[1]
    assert relative(gradient, coarse) < 1e-12
    whole = value_and_gradient(Surrogate(6), sampler, score, x)[1]
    assert relative(whole, value_and_gradient(Exact(), sampler, score, x)[1]) < 1e-12


def test_bpda_is_the_identity_on_the_way_back():
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    _, path = FewStep()(tiny_unet(), x, Noise((1, 2)))
    assert torch.equal(torch.autograd.grad(BPDA()(path, x).sum(), x)[0], torch.ones_like(x))


def test_names_and_errors():
    assert {name: gradient_mode(name).approximate for name in GRADIENT_MODES} == {
        "exact": False,
        "adjoint": True,
        "backprop": False,
        "surrogate": True,
        "bpda": True,
    }
    assert gradient_mode({"kind": "adjoint", "times": "end"}) == Adjoint(times="end")
    with pytest.raises(InputError, match="did you mean 'adjoint'"):
        gradient_mode("ajoint")
    with pytest.raises(InputError, match="at least 0"):
        Exact(memory=-1)
    with pytest.raises(InputError, match="did you mean 'grid'"):
        Adjoint(times="gird")
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(InputError, match="use the exact gradient"):
        Adjoint()(FewStep()(tiny_unet(), x, Noise((1,)))[1], x)

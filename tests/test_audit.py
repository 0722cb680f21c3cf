"""The gradient audit passes exact gradients, kinks or not, and catches approximate, wrong and masked ones."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import diffpure as dp
from diffpure.audit import _generic
from diffpure.noise import Noise
from problems import images, tiny_classifier, tiny_unet

SAMPLER = dp.ReverseSDE(t_star=0.05, steps=5)


def audit(gradient, model=None):
    model = model or dp.Defense(dp.Purifier(tiny_unet(), SAMPLER, gradient), tiny_classifier())
    return dp.audit_gradient(model, images(3), seeds=[1, 2, 3])


def kinked(classes: int = 5) -> nn.Module:
    """A classifier of ReLUs and maxima, with thousands of kinks."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(64, classes)).requires_grad_(False).eval()


class Planted(nn.Module):
    """A model with the right output and a wrong gradient."""

    def __init__(self, model, defect):
        super().__init__()
        self.model, self.defect = model, defect

    def forward(self, x):
        if x.requires_grad:
            x = x.clone()
            x.register_hook(self.defect)
        return self.model(x)


class DetachedStep(nn.Module):
    """A score model whose gradient is lost at the times below one."""

    size, channels = None, 3

    def __init__(self, below):
        super().__init__()
        self.score, self.below = tiny_unet(), below
        self.sde = self.score.sde

    def forward(self, x, t):
        return self.score(x.detach() if float(t.max()) < self.below else x, t)


def random(g):
    return torch.randn(g.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(g.dtype)


def at(g, *pixels):
    """1 at the pixels with the given ranks of |g| per image (0 is the largest), 0 elsewhere."""
    order = g.flatten(1).abs().argsort(1, descending=True)
    return torch.zeros_like(g.flatten(1)).scatter(1, order[:, list(pixels)], 1.0).reshape(g.shape)


DEFECTS = {
    "scaled by 1.01": lambda g: 1.01 * g,
    "scaled by 0.1": lambda g: 0.1 * g,
    "gone": torch.zeros_like,
    "signs only": torch.sign,
    "three typical pixels flipped": lambda g: g * (1 - 2 * at(g, 90, 96, 102)),
    "one pixel lost": lambda g: g * (1 - at(g, 60)),
    "multiplied by noise": lambda g: g * (1 + 0.05 * random(g)),
    "noise added": lambda g: g + 0.01 * g.abs().mean() * random(g),
    "clipped": lambda g: g.clamp(-0.9 * g.abs().max(), 0.9 * g.abs().max()),
    "blurred": lambda g: nn.functional.avg_pool2d(g, 3, 1, 1),
    "channels swapped": lambda g: g.flip(1),
    "another image's": lambda g: g.roll(1, 0),
    "one image's scaled": lambda g: torch.cat([1.01 * g[:1], g[1:]]),
    "not a number": lambda g: g * torch.nan,
}


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("network", [tiny_classifier, kinked], ids=["smooth", "kinked"])
def test_planted_defects_are_caught(network, defect):
    assert not audit("", Planted(network(), DEFECTS[defect])).passed


@pytest.mark.parametrize("seed", range(10))
def test_kinks_raise_no_alarm(seed):
    found = dp.audit_gradient(kinked(), images(3, seed=seed), seeds=range(3))
    assert found.passed
    assert found.precision == "float64"
    defended = dp.Defense(dp.Purifier(tiny_unet(), dp.FewStep(t_star=0.05, steps=1)), kinked())
    assert dp.audit_gradient(defended, images(2, seed=seed), seeds=range(2), directions=2).passed


def test_a_kink_inside_the_first_steps_is_stepped_around():
    """Σ |x| at a distance of 3e-9 from its kinks: the steps 1e-7 and 1e-8 cross them, 1e-9 does not."""
    edge = _generic(images(1).double(), Noise((7,)), 1e-7) + 3e-9

    def near(z):
        return (z - edge).abs().flatten(1).sum(1, keepdim=True).expand(-1, 2) * z.new_tensor([1.0, 0.0])

    def steps(*values):
        return dp.audit_gradient(near, images(1), seeds=[7], steps=values)

    assert steps(1e-7, 1e-8, 1e-9).passed
    assert steps(1e-7, 1e-8, 1e-9).unresolved == 0
    assert not steps(1e-7, 1e-8).resolved
    assert not steps(1e-7, 1e-8).passed


def test_the_exact_gradient_passes():
    found = audit("exact")
    assert found.passed
    assert found.backprop is not None
    assert found.backprop.relative_error < 1e-10
    assert found.backprop.sign_agreement == 1.0
    assert found.differences.relative_error < 1e-5
    assert "passed" in str(found)
    assert "Exact" in str(found)
    assert "float64" in str(found)


@pytest.mark.parametrize("gradient", ["bpda", "surrogate", "adjoint"])
def test_approximate_gradients_fail(gradient):
    sampler = dp.ReverseSDE(t_star=0.15, steps=12)
    model = dp.Defense(dp.Purifier(tiny_unet(), sampler, gradient), tiny_classifier())
    found = audit(gradient, model)
    assert not found.passed
    assert found.backprop is not None
    assert found.backprop.relative_error > 5e-4
    assert found.differences.relative_error > 5e-4  # both references see it
    assert "FAILED" in str(found)


def test_a_detached_step_is_caught_by_differences_alone():
    """Backprop through the same score agrees with itself: only differences see what the score hides."""
    found = audit("", dp.Defense(dp.Purifier(DetachedStep(0.02), SAMPLER), tiny_classifier()))
    assert found.backprop is not None
    assert found.backprop.relative_error < 1e-10
    assert not found.passed
    assert audit("", dp.Defense(dp.Purifier(DetachedStep(0.0), SAMPLER), tiny_classifier())).passed


def test_a_straight_through_gradient_is_caught():
    def rounded(z):
        return tiny_classifier(dtype=z.dtype)(z + ((255 * z).round() / 255 - z).detach())

    assert not audit("", rounded).passed


def test_any_module_can_be_audited():
    assert audit("", tiny_classifier()).passed
    assert audit("", tiny_classifier()).backprop is None
    assert audit("", dp.Purifier(tiny_unet(), SAMPLER)).passed  # an image comes out, not logits


def test_any_purifier_whose_gradient_mode_can_change_is_compared_with_backprop():
    class Other(nn.Module):
        def __init__(self, gradient):
            super().__init__()
            self.gradient, self.network = gradient, tiny_classifier()

        def with_gradient(self, gradient):
            return Other(gradient)

        def forward(self, x):
            return self.network(x if self.gradient == "backprop" else x.detach() + 0.5 * (x - x.detach()))

    found = audit("", Other("half"))
    assert found.backprop is not None
    assert found.backprop.relative_error == pytest.approx(0.5)
    assert not found.passed


def test_a_masked_gradient_is_caught():
    class Masked(nn.Module):
        def forward(self, x):
            return tiny_classifier(dtype=x.dtype)(x.detach() + 0.1 * (x - x.detach()))

    found = audit("", Masked())
    assert not found.passed
    assert found.differences.relative_error == pytest.approx(0.9, abs=0.01)


def test_a_function_with_hidden_float32_weights_is_audited_in_float64():
    w, network = torch.randn(3 * 64, 5, generator=torch.Generator().manual_seed(0)), kinked()
    functions = {
        "closure": lambda z: z.flatten(1) @ w,
        "cast": lambda z: z.float().flatten(1) @ w,
        "module": lambda z: network(z),
    }
    for function in functions.values():
        for model in (function, dp.Defense(dp.Purifier(tiny_unet(), SAMPLER), function)):
            found = audit("", model)
            assert found.passed
            assert found.precision == "float64"
            assert found.note == ""
    assert w.dtype == torch.float32
    assert network[0].weight.dtype == torch.float32
    assert not audit("", lambda z: (z.detach() + 0.99 * (z - z.detach())).flatten(1) @ w).passed


def test_a_model_that_computes_in_float32_only_is_audited_there_and_says_so():
    w = torch.randn(3 * 64, 5, generator=torch.Generator().manual_seed(0))

    def into_float32(z):
        return torch.zeros(len(z), 5).add_(z.flatten(1) @ w)

    found = audit("", into_float32)
    assert found.passed
    assert found.precision == "float32"
    assert "Audited in float32, as in float64: its output has the digits of float32 only." in str(found)
    assert not audit("", lambda z: into_float32(z.detach() + 0.5 * (z - z.detach()))).passed
    script = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5)))
    assert audit("", dp.Defense(dp.Purifier(tiny_unet(), SAMPLER), lambda z: script(z))).passed


def test_a_random_model_without_seeds_fails():
    assert not audit("", lambda z: (z + torch.rand_like(z)).flatten(1)[:, :5]).passed


def test_a_model_in_float64_from_the_start_is_not_asked_for_float32():
    found = audit("", lambda z: (z + torch.rand_like(z)).flatten(1) @ torch.ones(3 * 64, 5, dtype=torch.float64))
    assert not found.passed
    assert found.precision == "float64"


def test_the_result_is_numbers():
    found = audit("exact")
    data = json.loads(json.dumps(found.as_dict()))
    assert data["passed"] is True
    assert data["images"] == 3
    assert data["unresolved"] == 0
    assert data["precision"] == "float64"
    assert data["differences"]["relative_error"] == found.differences.relative_error


def test_the_audit_leaves_the_model_alone():
    model = dp.Defense(dp.Purifier(tiny_unet(), SAMPLER), tiny_classifier())
    dp.audit_gradient(model, images(2), seeds=[1, 2], directions=1)
    assert next(model.parameters()).dtype == torch.float32


def test_bad_input():
    with pytest.raises(dp.InputError, match="at least one direction"):
        dp.audit_gradient(tiny_classifier(), images(2), directions=0)
    with pytest.raises(dp.InputError, match="steps in"):
        dp.audit_gradient(tiny_classifier(), images(2), steps=())
    with pytest.raises(dp.InputError, match="in \\[0, 1\\]"):
        dp.audit_gradient(tiny_classifier(), 255 * images(2))
    with pytest.raises(dp.InputError, match="no gradient with respect to the images"):
        dp.audit_gradient(lambda z: z.detach().flatten(1), images(2))
    with pytest.raises(dp.InputError, match="it fails on these images: mat1 and mat2"):
        dp.audit_gradient(nn.Sequential(nn.Flatten(), nn.Linear(7, 5)), images(2))

"""The gradient audit passes exact gradients, and catches approximate, wrong and masked ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import diffpure as dp
from problems import images, tiny_classifier, tiny_unet

SAMPLER = dp.ReverseSDE(t_star=0.05, steps=5)


def audit(gradient, model=None):
    model = model or dp.Defense(dp.Purifier(tiny_unet(), SAMPLER, gradient), tiny_classifier())
    return dp.audit_gradient(model, images(3), seeds=[1, 2, 3])


def test_the_exact_gradient_passes():
    found = audit("exact")
    assert found.passed
    assert found.backprop is not None
    assert found.backprop.relative_error < 1e-10
    assert found.backprop.sign_agreement == 1.0
    assert found.differences.relative_error < 1e-5
    assert "passed" in str(found)
    assert "Exact" in str(found)


@pytest.mark.parametrize("gradient", ["bpda", "surrogate", "adjoint"])
def test_approximate_gradients_fail(gradient):
    sampler = dp.ReverseSDE(t_star=0.15, steps=12)
    model = dp.Defense(dp.Purifier(tiny_unet(), sampler, gradient), tiny_classifier())
    found = audit(gradient, model)
    assert not found.passed
    assert found.backprop is not None
    assert found.backprop.relative_error > 5e-4
    assert "FAILED" in str(found)


def test_any_module_can_be_audited():
    assert audit("", tiny_classifier()).passed
    assert audit("", tiny_classifier()).backprop is None
    assert audit("", dp.Purifier(tiny_unet(), SAMPLER)).passed  # an image comes out, not logits


def test_a_masked_gradient_is_caught():
    class Masked(nn.Module):
        def forward(self, x):
            return tiny_classifier(dtype=x.dtype)(x.detach() + 0.1 * (x - x.detach()))

    found = audit("", Masked())
    assert not found.passed
    assert found.differences.relative_error == pytest.approx(0.9, abs=0.01)


def test_the_audit_leaves_the_model_alone():
    model = dp.Defense(dp.Purifier(tiny_unet(), SAMPLER), tiny_classifier())
    dp.audit_gradient(model, images(2), seeds=[1, 2], directions=1)
    assert next(model.parameters()).dtype == torch.float32


def test_bad_input():
    with pytest.raises(dp.InputError, match="at least one direction"):
        dp.audit_gradient(tiny_classifier(), images(2), directions=0)
    with pytest.raises(dp.InputError, match="in \\[0, 1\\]"):
        dp.audit_gradient(tiny_classifier(), 255 * images(2))

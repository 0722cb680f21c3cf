"""The purifier and the defence as plain modules: range, size, seeds, gradient, and one sentence for bad input."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import diffpure as dp
from diffpure.diffusion.samplers import SAMPLERS as NAMED
from diffpure.diffusion.samplers import Sampler
from diffpure.diffusion.sde import VPSDE, over
from problems import SAMPLERS, images, tiny_classifier, tiny_unet

FAST = dp.FewStep(t_star=0.1, steps=3)


class Fixed(dp.EpsilonScore):
    """A score model that wants 16 pixels."""

    def __init__(self):
        super().__init__(VPSDE(), size=16, channels=3)

    def epsilon(self, x, t):
        assert x.shape[-2:] == (16, 16)
        return x * over(self.sde.std(t), x)


def defense(gradient="exact", sampler=FAST):
    return dp.Defense(dp.Purifier(tiny_unet(), sampler, gradient), tiny_classifier())


def test_seeds_make_it_a_function_and_batches_do_not_matter():
    model, x = defense(), images(4)
    seeds = [5, 6, 7, 8]
    out = model(x, seeds)
    assert torch.equal(out, model(x, torch.tensor(seeds)))
    assert torch.allclose(model(x[2:3], [7]), out[2:3], atol=1e-6)
    assert torch.allclose(model(x.flip(0), seeds[::-1]), out.flip(0), atol=1e-6)


def test_without_seeds_nobody_can_predict_it():
    model, x = defense(), images(2)
    torch.manual_seed(0)
    first = model(x)
    torch.manual_seed(0)
    assert not torch.equal(first, model(x))
    assert model.stochastic


def test_range_is_changed_on_the_way_in_and_out_only():
    """A score that is exactly 0 with no noise leaves Langevin's image as it was."""

    class Silent:
        sde, size = VPSDE(), None

        def __call__(self, x, t):
            assert x.min() < -0.5  # the score sees [-1, 1]
            return torch.zeros_like(x)

    x = images(2)
    purifier = dp.Purifier(Silent(), dp.Langevin(eta=0.0, steps=3))
    assert torch.allclose(purifier(x), x, atol=1e-6)
    assert not purifier.stochastic


@pytest.mark.parametrize("size", [16, 8, 24])
def test_resolution_is_the_score_models_inside_and_the_images_outside(size):
    x = images(2, size).requires_grad_()
    out = dp.Purifier(Fixed(), FAST)(x)
    assert out.shape == x.shape
    assert torch.autograd.grad(out.sum(), x)[0].abs().sum() > 0
    wide = torch.rand(1, 3, 10, 20)
    assert dp.Purifier(Fixed(), FAST)(wide).shape == wide.shape


def test_rounds_repeat_with_fresh_noise():
    x, seeds = images(2), [1, 2]
    once, twice = (dp.Purifier(tiny_unet(), FAST, rounds=k)(x, seeds) for k in (1, 2))
    assert not torch.allclose(once, twice)
    known = torch.autograd.functional.jacobian(
        lambda v: dp.Purifier(tiny_unet(), FAST, "backprop", rounds=2)(v, seeds).sum(), x
    )
    found = torch.autograd.functional.jacobian(lambda v: dp.Purifier(tiny_unet(), FAST, rounds=2)(v, seeds).sum(), x)
    assert torch.allclose(found, known, rtol=1e-4, atol=1e-5)


def test_trajectory_runs_from_the_diffused_image_to_the_purified_one():
    purifier, x, seeds = dp.Purifier(tiny_unet(), dp.ReverseSDE(t_star=0.05, steps=5)), images(2), [1, 2]
    states = purifier.trajectory(x, [1.0, 0.05, 0.02, 0.0], seeds)
    assert states.shape == (4, *x.shape)
    assert torch.equal(states[0], states[1])
    assert torch.allclose(states[-1], purifier(x, seeds), atol=1e-6)
    assert not states.requires_grad


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_defence_is_differentiable_with_every_sampler(name):
    x = images(2).requires_grad_()
    defense(sampler=SAMPLERS[name])(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0


def test_a_defence_is_only_a_module():
    model = defense()
    assert isinstance(model, nn.Module)
    assert model.train().purifier.score.training is False  # the score never leaves evaluation mode
    assert all(not w.requires_grad for w in model.purifier.parameters())
    double = copy.deepcopy(model).double()
    x, seeds = images(2, dtype=torch.float64), [1, 2]
    assert double(x, seeds).dtype == torch.float64
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer, weights_only=True))
    hooked = []
    model.classifier.register_forward_hook(lambda *_: hooked.append(1))
    model(images(1))
    assert hooked


def test_with_gradient_shares_the_weights():
    model = defense()
    other = model.with_gradient("bpda")
    assert other.purifier.score is model.purifier.score
    assert other.purifier.gradient.approximate
    assert not model.purifier.gradient.approximate
    assert other.purifier._modules is not model.purifier._modules
    x, seeds = images(2), [1, 2]
    assert torch.allclose(model(x, seeds), other(x, seeds), atol=1e-5)


def test_any_callable_classifies():
    model = dp.Defense(dp.Purifier(tiny_unet(), FAST), lambda x: x.mean(dim=(2, 3)))
    assert model(images(2)).shape == (2, 3)


def test_samplers_have_names():
    assert all(isinstance(make(), Sampler) for make in NAMED.values())


NAN, INF = images(2), images(2)
NAN[0, 0, 0, 0] = float("nan")
INF[1, 2, 3, 3] = float("inf")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (images(2) * 255, "in \\[0, 1\\], got values from .* divide 8-bit images by 255"),
        (2 * images(2) - 1, "in \\[0, 1\\], got values from"),
        ((images(2) * 255).to(torch.uint8), "float tensor in \\[0, 1\\], got dtype torch.uint8"),
        (images(2)[0], "add a batch dimension"),
        (images(2)[:, :1], "1 channels, but this purifier wants 3"),
        (NAN, "NaN or infinite"),
        (INF, "NaN or infinite"),
        (images(2)[:0], "empty"),
        ([["a"]], "got list"),
    ],
)
def test_bad_images_get_one_sentence(bad, message):
    with pytest.raises(dp.InputError, match=message) as caught:
        defense()(bad)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_other_bad_input():
    with pytest.raises(dp.InputError, match="one per image: got 1 seeds for 2"):
        defense()(images(2), [1])
    with pytest.raises(dp.InputError, match="did you mean 'exact'"):
        defense("exakt")
    with pytest.raises(dp.InputError, match="score model has a schedule"):
        dp.Purifier(nn.Identity())
    with pytest.raises(dp.InputError, match="rounds"):
        dp.Purifier(tiny_unet(), rounds=0)
    with pytest.raises(dp.InputError, match="classifier is called"):
        dp.Defense(dp.Purifier(tiny_unet()), "resnet")
    with pytest.raises(dp.InputError, match="returns logits \\(2, two or more classes\\), got \\(2, 3, 8, 8\\)"):
        dp.Defense(dp.Purifier(tiny_unet(), FAST), lambda x: x)(images(2))
    with pytest.raises(AttributeError, match="no attribute 'Purifyer'"):
        dp.Purifyer  # noqa: B018
    assert "Purifier" in dir(dp)

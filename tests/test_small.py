"""The small networks: shapes, costs counted by hand, gradients, preconditioning, and their weights as files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diffpure.attacks import PGD
from diffpure.classifiers.load import CLASSIFIERS, load_classifier
from diffpure.classifiers.small import ARCHITECTURES, SmallResNet
from diffpure.data.samples import samples
from diffpure.errors import InputError
from diffpure.models.cards import cards, local_file
from diffpure.models.weights import pack
from diffpure.scores.load import SCORES
from diffpure.scores.small import SmallUNet, widened
from diffpure.threats import Linf
from diffpure.training.cost import multiply_adds, parameters
from problems import shaken

X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_classifiers_give_logits_and_gradients(name):
    torch.manual_seed(0)
    model = ARCHITECTURES[name](classes=7).eval()
    x = X.clone().requires_grad_()
    logits = model(x)
    assert logits.shape == (2, 7)
    logits.logsumexp(1).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().max() > 0


def test_resnet_costs_what_a_hand_counts():
    convolutions = [
        31**2 * 24 * 3 * 4,
        31**2 * 64 * 24 * 9, 15**2 * 64 * 64 * 9,
        15**2 * 256 * 64 * 9, 7**2 * 256 * 256 * 9,
        7**2 * 256 * 256 * 9, 3**2 * 256 * 256 * 9,
    ]  # fmt: skip
    assert multiply_adds(SmallResNet().eval(), X[:1]) == sum(convolutions) + 256 * 10


def test_whitening_whitens():
    torch.manual_seed(0)
    images = torch.rand(64, 3, 16, 16).cumsum(3) / 16
    model = SmallResNet()
    model.fit_whitening(images, floor=0.0)
    with torch.no_grad():
        seen = nn.functional.conv2d(model.normalize(images), model.whiten.weight).transpose(0, 1).flatten(1)
    assert torch.allclose(seen[:12] @ seen[:12].T / seen.shape[1], torch.eye(12), atol=1e-3)
    assert torch.equal(seen[:12], -seen[12:])


def test_unet_costs_what_a_hand_counts():
    a, b, c, d, e = 40, 56, 64, 128, 256
    blocks = 2 * 2 * 9 * (1024 * a**2 + 256 * b**2 + 64 * c**2) + 2 * 9 * 16 * d**2
    door_and_exit = 2 * 9 * 1024 * 3 * a
    down = 9 * (256 * a * b + 64 * b * c + 16 * c * d)
    up = 256 * b * 4 * a + 64 * c * 4 * b + 16 * d * 4 * c
    attention = 64 * 4 * c**2 + 2 * 64**2 * c
    levels = 32 * e + e * e + 2 * e * (2 * (a + b + c) + d)
    total = multiply_adds(SmallUNet(), X[:1], torch.tensor([0.1]))
    assert total == blocks + door_and_exit + down + up + attention + levels
    assert total <= 120_000_000
    assert parameters(SmallUNet()) < 1_250_000


@pytest.mark.parametrize("widths", [(16, 24), (16, 24, 32)])
def test_unet_shapes_and_finite_gradients(widths):
    model = shaken(SmallUNet(widths=widths, embedding=16))
    x = (2 * X - 1).requires_grad_()
    score = model(x, torch.tensor([0.001, 0.3]))
    assert score.shape == x.shape
    (score**2).mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_unet_refuses_what_it_cannot_divide():
    with pytest.raises(InputError, match="multiples of 8"):
        SmallUNet(widths=(10, 20))
    with pytest.raises(InputError, match="Two widths"):
        SmallUNet(widths=(16,))
    with pytest.raises(InputError, match="size"):
        SmallUNet(widths=(16, 16, 16), size=22)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_wider_unet_begins_as_the_narrow_one(times):
    narrow = shaken(SmallUNet(widths=(16, 64, 24), embedding=16))
    wide = widened(narrow, times)
    x, t = 2 * X - 1, torch.tensor([0.05, 0.2], dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(wide(x, t), narrow(x, t), rtol=1e-3, atol=1e-3)
    assert [len(wide.door.weight), *(len(shrink.weight) for shrink in wide.shrink)] == [times * n for n in (16, 64, 24)]


def test_copies_of_a_channel_learn_different_things():
    wide = widened(shaken(SmallUNet(widths=(16, 24), embedding=16)))
    wide.epsilon(2 * X - 1, torch.tensor([0.05, 0.2], dtype=torch.float64)).square().mean().backward()
    for layer in (wide.door, wide.down[0].conv1, wide.grow[0], wide.attention.qkv):
        first, second = layer.weight.grad.chunk(2)
        assert not torch.allclose(first, second, rtol=0.01)


def test_a_unet_is_not_widened_to_nothing():
    with pytest.raises(InputError, match="once as wide"):
        widened(SmallUNet(widths=(16, 24), embedding=16), 0)


def test_the_denoised_image_tends_to_the_image_as_t_tends_to_zero():
    model = shaken(SmallUNet(widths=(16, 24), embedding=16))
    x = 2 * X - 1
    for t in (1e-2, 1e-3, 1e-4, 1e-5):
        times = torch.full((2,), t, dtype=torch.float64)
        with torch.no_grad():
            change = (model.sde.denoised(x, times, model(x, times)) - x).abs().max()
        assert change < 10 * model.sde.std(t)


def test_a_silent_unet_is_the_score_of_gaussian_data():
    """With F = 0 the preconditioning alone is exact for data N(0, σ_d²): its score is -x / (1 - α + σ_d² α)."""
    model = SmallUNet(widths=(16, 24), embedding=16)
    x, t = 2 * X - 1, torch.tensor([0.02, 0.2], dtype=torch.float64)
    alpha = model.sde.alpha(t)
    exact = -x / (1 - 0.75 * alpha)[:, None, None, None]
    with torch.no_grad():
        assert torch.allclose(model(x, t), exact.float(), rtol=1e-4)


def test_an_image_does_not_depend_on_its_batch():
    model = shaken(SmallUNet(widths=(16, 24), embedding=16))
    x, t = 2 * X - 1, torch.tensor([0.05, 0.2], dtype=torch.float64)
    with torch.no_grad():
        together, alone = model(x, t), torch.cat([model(x[i : i + 1], t[i : i + 1]) for i in range(2)])
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-4)


def test_half_precision_refuses_what_it_cannot_hold():
    with pytest.raises(InputError, match="half precision"):
        pack({"w": torch.tensor([1e6])})


EMBEDDED = {name: card for name, card in cards().items() if card.embedded}


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_weights_fit_their_network(name):
    card = EMBEDDED[name]
    model = (SCORES if card.kind == "score" else CLASSIFIERS).read(card, local_file(card))
    assert parameters(model) == card.made["parameters"]
    inputs = (X[:1], torch.tensor([0.1])) if card.kind == "score" else (X[:1],)
    assert multiply_adds(model.eval(), *inputs) == card.made["multiply_adds"]


@pytest.mark.parametrize("name", [name for name, card in EMBEDDED.items() if card.kind == "classifier"])
def test_embedded_classifiers_do_what_their_cards_say(name):
    """On 200 of the embedded images the accuracy is the card's, within three standard deviations."""
    x, y = samples(200)
    right = (load_classifier(name)(x).argmax(1) == y).float().mean().item()
    value = EMBEDDED[name].measured["accuracy"]["value"]
    assert abs(right - value) < 3 * (value * (1 - value) / 200) ** 0.5


def test_the_adversarially_trained_classifier_resists():
    x, y = samples(32)
    threat, attack = Linf(8 / 255), PGD(iterations=5, step_size=3 / 255)
    right = {}
    for name in ("cifar10-resnet", "cifar10-resnet-at"):
        model = load_classifier(name)
        attacked = threat.apply(x, attack(model, x, y, threat, seeds=range(32)))
        right[name] = (model(attacked).argmax(1) == y).sum().item()
    assert right["cifar10-resnet"] <= 2
    assert right["cifar10-resnet-at"] >= 9

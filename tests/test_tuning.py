"""A purifier tuned to a classifier: it comes nearer to what the classifier says, and nothing that was given changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import diffpure as dp
from diffpure.errors import InputError
from diffpure.scores.photos import PhotoUNet
from diffpure.scores.small import SmallUNet
from problems import TinyUNet

X = torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def defense(sampler: object = "one-shot", score: nn.Module | None = None) -> dp.Defense:
    torch.manual_seed(0)
    layers = (nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 4))
    classifier = nn.Sequential(*layers).eval()
    classifier[3].weight.data *= 20
    return dp.Defense(dp.Purifier(score or TinyUNet(8), sampler), classifier)


def disagreement(model: dp.Defense, images: Tensor = X) -> float:
    with torch.no_grad():
        clean = model.classifier(images).softmax(1)
        return F.cross_entropy(model(images, seeds=range(len(images))), clean).item()


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("attack", "sampler"),
    [
        ({}, "one-shot"),
        ({"threat": "linf 4/255"}, "one-shot"),
        ({"threat": "l2 0.2", "transferred": True}, "one-shot"),
        ({"few_steps": 2}, dp.FewStep(0.1, steps=2, end=0.02)),
    ],
)
def test_the_purified_image_comes_nearer_to_what_the_clean_one_says(attack, sampler):
    model = defense(sampler)
    before, trainable = weights(model), [p.requires_grad for p in model.parameters()]
    tuned = dp.tune(model, X, **attack, examples=960, rate=1e-2, precision="float32", threads=1)
    assert disagreement(tuned) < 0.9 * disagreement(model)
    assert same(before, weights(model))
    assert trainable == [p.requires_grad for p in model.parameters()]
    assert same(weights(tuned.classifier), weights(model.classifier))
    assert not any(p.requires_grad for p in tuned.purifier.score.parameters())
    assert tuned.title == model.title


def test_the_sampler_and_the_vote_stay():
    model = defense(dp.DDIM(0.08, steps=2))
    model = dp.Defense(model.purifier, model.classifier, draws=3)
    tuned = dp.tune(model, X, examples=8, precision="float32", threads=1)
    assert tuned.purifier.sampler == model.purifier.sampler
    assert tuned.vote == model.vote


def test_a_folder_of_photographs_of_any_sizes(tmp_path):
    for i, size in enumerate(((20, 14), (9, 31), (1, 1))):
        Image.new("RGB", size, (80 * i, 120, 30)).save(tmp_path / f"{i}.png")
    torch.manual_seed(0)
    model = defense(score=PhotoUNet(widths=(8, 8), blocks=(1, 1), embedding=8))
    tuned = dp.tune(model, tmp_path, examples=9, precision="float32", threads=1)
    assert not same(weights(tuned.purifier.score), weights(model.purifier.score))
    with pytest.raises(InputError, match="made for images of 8×8 pixels"):
        dp.tune(defense(score=SmallUNet(widths=(8, 16), embedding=16, size=8)), tmp_path, examples=9)


def test_a_call_that_was_stopped_goes_on_in_its_folder(tmp_path):
    options = {"examples": 32, "precision": "float32", "threads": 1, "out": tmp_path}
    first = dp.tune(defense(), X, **options)
    assert same(weights(first), weights(dp.tune(defense(), X, **options)))
    with pytest.raises(InputError, match="begun with another rate"):
        dp.tune(defense(), X, **options, rate=1e-5)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: dp.Defense(nn.Identity(), nn.Flatten()), "Only a diffusion purifier"),
        (lambda: dp.Defense(dp.Purifier(dp.GaussianScore(0.0, 0.3)), nn.Flatten()), "Only a diffusion purifier"),
        (lambda: dp.Defense(defense().purifier, lambda x: x.flatten(1)), "an nn.Module"),
        (lambda: defense(dp.Langevin()), "no t"),
    ],
)
def test_what_cannot_be_tuned_is_one_sentence(model, says):
    with pytest.raises(InputError, match=says) as error:
        dp.tune(model(), X, examples=1)
    assert "\n" not in str(error.value)


def test_images_are_checked_at_the_door():
    for wrong in (X * 255, X[0], "nowhere"):
        with pytest.raises(InputError):
            dp.tune(defense(), wrong, examples=1)


def test_a_transferred_attack_needs_a_threat():
    with pytest.raises(InputError, match="needs a threat"):
        dp.tune(defense(), X, transferred=True, examples=1)

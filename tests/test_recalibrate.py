"""Batch normalisations that know purified images: closed forms of their statistics, and what must stay as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import diffpure as dp
from diffpure.errors import InputError


class Darker(nn.Module):
    """A purifier without noise: half of every value."""

    def forward(self, images: Tensor) -> Tensor:
        return images / 2


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(48, 4)).eval()


def images(count: int = 12) -> Tensor:
    return torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_statistics_are_mixed_with_those_of_purified_images(share):
    model, x = dp.Defense(Darker(), classifier()), images()
    norm = dp.recalibrate(model, x, share=share).classifier[0]
    per_channel = (x / 2).transpose(0, 1).flatten(1)
    torch.testing.assert_close(norm.running_mean, share * per_channel.mean(1))
    torch.testing.assert_close(norm.running_var, (1 - share) + share * per_channel.var(1))


def test_batches_weigh_the_same_and_none_has_one_image():
    model, x = dp.Defense(Darker(), classifier()), images(9)
    norm = dp.recalibrate(model, x, share=1.0, batch=4).classifier[0]
    means = [part.mean((0, 2, 3)) / 2 for part in (x[:3], x[3:6], x[6:])]
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0))
    assert torch.isfinite(dp.recalibrate(model, images(3), batch=2).classifier[0].running_var).all()


def test_only_statistics_change_and_only_in_the_copy():
    given = classifier()
    given[0].momentum = 0.3
    before = {name: value.clone() for name, value in given.state_dict().items()}
    made = dp.recalibrate(dp.Defense(Darker(), given), images())
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    changed = {name for name, value in made.classifier.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert made.classifier[0].momentum == 0.3
    assert not any(module.training for module in made.classifier.modules())


def test_a_vote_stays_and_seeds_decide_the_noise():
    score = dp.GaussianScore(0.1, 0.2)
    model = dp.Defense(dp.Purifier(score, dp.OneShot(0.1)), classifier(), draws=3, rule="majority", name="mine")
    first, second, other = (dp.recalibrate(model, images(), seeds=seed) for seed in (1, 1, 2))
    assert (first.draws, first.vote.rule, first.title) == (3, "majority", "mine")
    assert torch.equal(first.classifier[0].running_mean, second.classifier[0].running_mean)
    assert not torch.equal(first.classifier[0].running_mean, other.classifier[0].running_mean)


def test_bad_input_is_one_sentence():
    model = dp.Defense(Darker(), classifier())
    with pytest.raises(InputError, match="no batch normalisation"):
        dp.recalibrate(dp.Defense(Darker(), nn.Sequential(nn.Flatten(), nn.Linear(48, 4))), images())
    with pytest.raises(InputError, match="no batch normalisation"):
        dp.recalibrate(dp.Defense(Darker(), lambda x: x.flatten(1)[:, :4]), images())
    with pytest.raises(InputError, match=r"share in \[0, 1\]"):
        dp.recalibrate(model, images(), share=1.5)
    with pytest.raises(InputError, match="two images or more"):
        dp.recalibrate(model, images(1))

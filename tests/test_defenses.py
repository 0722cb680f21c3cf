"""Whole defences by name: each loads offline, its card says what was measured and nothing else, and a spec names it."""

from __future__ import annotations

import json
import socket

import pytest
import torch
from typer.testing import CliRunner

import diffpure as dp
from diffpure import cli
from diffpure.experiments.load import PLAIN
from diffpure.experiments.spec import EvaluationSpec
from diffpure.models.cards import cards, defense_card, defenses
from diffpure.named import brief
from diffpure.results.rows import Rate

runner = CliRunner()


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a defence inside the package needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", sorted(defenses()))
def test_every_shipped_defence_loads_and_classifies(name):
    model, x = dp.load_defense(name), dp.samples(2)[0]
    assert model(x, seeds=[0, 1]).shape == (2, 1000 if name.startswith("photos") else 10)
    assert model.purifier.stochastic
    assert not any(module.training for module in model.classifier.modules())
    assert name not in cards()
    assert defense_card(name).present
    assert defense_card(name).where.endswith("in the package")


def test_it_is_the_defence_that_its_parts_make():
    model, x = dp.load_defense("cifar10-diffpure"), dp.samples(2)[0]
    purifier = dp.Purifier(dp.load_score("cifar10-small"), dp.DDIM(t_star=0.1, steps=5))
    by_hand = dp.Defense(purifier, dp.load_classifier("cifar10-resnet"))
    assert torch.equal(model(x, seeds=[0, 1]), by_hand(x, seeds=[0, 1]))
    assert model.title == by_hand.title


def test_a_card_holds_the_numbers_that_were_measured():
    """Those of the sampler in the card of its score, on the same images and seeds: a retrained score has others."""
    model, card = dp.load_defense("cifar10-diffpure"), defense_card("cifar10-diffpure")
    measured = cards()["cifar10-small"].measured["purified"]
    sampler = brief(model.purifier.sampler, always=("t_star",))
    for key, name in (("clean", sampler), ("transferred", f"{sampler} on autoattack")):
        assert {k: card.measured[key][k] for k in ("correct", "total")} == {
            k: measured[name][k] for k in ("correct", "total")
        }
    for each in defenses().values():
        for told in each.measured.values():
            assert Rate(told["correct"], told["total"])
            assert told["test_set"]


def test_a_defence_of_another_packages_classifier_says_what_it_needs(monkeypatch):
    card = defense_card("photos-lite0")
    assert card.where == "the package efficientnet_lite_pytorch, in the package"
    monkeypatch.setattr("diffpure.models.cards.find_spec", lambda _: None)
    assert not card.present


def test_a_spec_names_it_and_is_the_spec_that_writes_it_out():
    spec = EvaluationSpec.of({"model": {"defense": "cifar10-diffpure"}})
    assert spec.hash == EvaluationSpec.of({"model": dict(defense_card("cifar10-diffpure").model)}).hash
    assert PLAIN.model(spec.model).title == dp.load_defense("cifar10-diffpure").title
    voting = EvaluationSpec.of({"model": {"defense": "cifar10-diffpure", "draws": 4}})
    assert (voting.model.draws, voting.model.sampler) == (4, spec.model.sampler)
    assert EvaluationSpec.of(voting.plain()) == voting
    with pytest.raises(dp.InputError, match="Unknown key of \\[model\\] 'defence'; did you mean 'defense'"):
        EvaluationSpec.of({"model": {"defence": "cifar10-diffpure", "classifier": "cifar10-resnet"}})


@pytest.mark.parametrize("name", ["cifar10-difpure", "", "cifar10-resnet", 7, None, ["cifar10-diffpure"]])
def test_an_unknown_name_is_one_sentence_with_the_known_ones(name):
    with pytest.raises(dp.InputError, match=r"^Unknown defense .*known: cifar10-diffpure, ") as error:
        dp.load_defense(name)
    assert "\n" not in str(error.value)
    with pytest.raises(dp.InputError, match="Unknown defense"):
        EvaluationSpec.of({"model": {"defense": name}})


def test_the_command_line_lists_and_shows_them():
    listed = json.loads(runner.invoke(cli.app, ["models", "list", "--json"]).output)
    assert listed["cifar10-diffpure"]["kind"] == "defense"
    shown = runner.invoke(cli.app, ["models", "show", "cifar10-diffpure"], env={"COLUMNS": "200"}).output
    assert "79.8 % [77.2, 82.2], 798 of 1,000" in shown
    assert "t_star  0.1" in shown
    unmeasured = runner.invoke(cli.app, ["models", "show", "cifar10-diffpure-at"], env={"COLUMNS": "200"}).output
    assert "%" not in unmeasured
    for command in ("verify", "fetch"):
        with pytest.raises(dp.InputError, match="is a whole defence, cifar10-resnet behind cifar10-small"):
            runner.invoke(cli.app, ["models", command, "cifar10-diffpure"], catch_exceptions=False)
    with pytest.raises(dp.InputError, match="did you mean 'cifar10-diffpure'"):
        runner.invoke(cli.app, ["models", "show", "cifar10-difpure"], catch_exceptions=False)

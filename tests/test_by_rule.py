"""The table of defences by rule: both attacks of a threat together, and differences to a defence with one of them."""

from __future__ import annotations

import pytest

by_rule = pytest.importorskip("by_rule", reason="needs benchmarks/")


def column(*right):
    return {rule: dict(enumerate(right)) for rule in by_rule.RULES}


def test_an_image_is_right_after_both_attacks_only_if_it_is_after_each():
    assert by_rule.joined({0: True, 1: True, 2: False}, {0: True, 1: False, 2: True}) == {0: True, 1: False, 2: False}


def test_counts_have_a_dash_where_nothing_was_measured():
    (*_, line) = by_rule.counts({"a": {"clean": column(True, False, True)}}, ["clean", "ℓ∞"])
    assert line == "| a | 2 / 2 / 2 | – |"


def test_differences_are_those_to_the_one_attack_of_a_defence_that_is_not_random():
    random = {"both, ℓ∞": column(True, True, False, True)}
    base = {"ℓ∞": column(True, False, False, True)}
    (*_, line) = by_rule.differences({"random": random, "base": base}, ["both, ℓ∞", "ℓ2"], "base")
    assert line.startswith("| random | +25.0 [")
    assert line.endswith("| – |")

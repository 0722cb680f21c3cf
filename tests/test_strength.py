"""What the tables of the attack benchmark are made of: pairs by image and seed, and times only where taken in turn."""

from __future__ import annotations

import json

import numpy as np
import pytest

strength = pytest.importorskip("strength", reason="needs benchmarks/")
figure = pytest.importorskip("strength_figure", reason="needs benchmarks/")


def row(attack, right, *, seed=0, start=0, line=0, seconds=1.0, budget=20):
    return {
        "defence": "ancestral", "attack": attack, "budget": budget, "seed": seed, "start": start,
        "stop": start + len(right), "judges": 4, "right": right, "seconds": seconds, "line": line,
        "calls": {"network_gradient": 60, "classifier_gradient": 20},
    }  # fmt: skip


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    whole = json.dumps({k: v for k, v in row("pgd", [0.5]).items() if k != "line"})
    file.write_text(f"{whole}\n{whole[:-5]}")
    assert [found["line"] for found in strength.read(file).values()] == [0]
    assert strength.read(tmp_path / "none.jsonl") == {}


def test_differences_are_paired_by_image_and_seed():
    own = strength.by_image([row("pgd", [1.0, 0.5]), row("pgd", [0.5, 0.5], seed=1), row("pgd", [9.0], start=7)])
    strong = strength.by_image([row("strong", [0.5, 0.5]), row("strong", [0.25, 0.0], seed=1)])
    assert strength.differences(own, strong).tolist() == [(0.5 + 0.25) / 2, (0.0 + 0.5) / 2]
    assert strength.difference(own, {}) == ""


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(3, 2, 4000)
    low, high = strength.interval_of(values)
    error = values.std() / np.sqrt(len(values))
    assert (low, high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.15 * error)


def test_times_compare_only_where_they_were_taken_in_turn():
    strong = [row("strong", [0.5], line=0), row("strong", [0.5], seed=1, line=1)]
    near, far = row("pgd", [0.5], line=3, seconds=2.0), row("pgd", [0.5], seed=1, line=90, seconds=50.0)
    assert strength.ratio([near, far], strong) == "2.00"
    assert strength.ratio([far], strong) == ""


def test_a_point_is_the_strong_attack_plus_the_paired_difference():
    strong = [row("strong", [0.25, 0.5], seed=seed) for seed in (0, 1)]
    point = figure.point(20, [row("pgd", [0.5, 0.75], line=1, seconds=3.0)], strong)
    assert (point.left, point.low, point.high, point.time) == (0.625, 0.625, 0.625, 60.0)


def test_lines_of_other_images_are_in_no_picture():
    half = figure.IMAGES // 2
    rows = [
        row("pgd", [0.5] * half),
        row("pgd", [0.5] * half, start=half),
        row("pgd", [0.5] * 40),
        row("pgd", [0.5], start=99),
    ]
    assert [found["start"] for found in figure.grouped(rows)["ancestral", "pgd"][20]] == [0, half]

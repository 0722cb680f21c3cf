"""Verification: an honest run passes, and every forgery of its rows, rates, images or weights is caught."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffpure.evaluation.evaluate import prepare
from diffpure.evaluation.rows import CLEAN, Row
from diffpure.evaluation.verify import Verification, verify
from evaluations import BATCH, COUNT, RULES, THREAT, attacks, defense, problem, settle


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "r"
    settle(folder)
    return folder


def copied(folder: Path, to: Path) -> Path:
    for file in folder.rglob("*"):
        if file.is_file():
            target = to / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return to


def checked(folder: Path, model: nn.Module | None = None) -> Verification:
    x, y = problem()
    ready = prepare(model or defense(), x, y, THREAT, attacks(), rules=RULES, batch=BATCH, rows=8)
    return verify(folder, ready)


def test_an_honest_run_is_verified(honest):
    found = checked(honest)
    assert found.passed, str(found)
    assert (found.rows, found.images) == (COUNT * 4, COUNT * 3)
    assert "what the run says" in str(found)


def edit_rows(folder: Path, change, seal: bool) -> None:
    """Edit the rows of one attack's image 4, and seal them with a new checksum or not."""
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines[1:], 1):
        data = json.loads(line)
        if (data["image"], data["attack"]) == (4, "pgd-ce"):
            data = {**data, **change}
            lines[i] = Row.of({**data, "sum": _sum_of(data)}).line() if seal else json.dumps(data)
    path.write_text("\n".join(lines) + "\n")


def _sum_of(data: dict) -> str:
    from diffpure.evaluation.results import _checksum

    return _checksum({k: v for k, v in data.items() if k not in ("sum", "seconds")})


@pytest.mark.parametrize("seal", [False, True])
def test_an_edited_row_is_caught(honest, tmp_path, seal):
    folder = copied(honest, tmp_path / "r")
    edit_rows(folder, {"predictions": [9, 9, 9, 9]}, seal)
    found = checked(folder)
    expected = "decisions in the row of image 4, attack pgd-ce" if seal else "image 4, attack pgd-ce, seed 0 was edited"
    assert any(expected in text for text in found.problems)


def test_an_edited_label_size_and_rate_are_caught(honest, tmp_path):
    folder = copied(honest, tmp_path / "r")
    edit_rows(folder, {"label": 7, "size": 0.001}, seal=True)
    problems = "\n".join(checked(folder).problems)
    assert "says label 7, but the data say" in problems
    assert "says size 0.001" in problems
    assert "rates in summary.json are not those of the rows" in problems


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (("rates", "worst case", "one-shot", "value"), "rates in summary.json are not those of the rows"),
        (("rates", CLEAN, "average of 3", "interval"), "rates in summary.json are not those of the rows"),
        (("spent", "gradients"), "costs in summary.json are not those of the rows"),
    ],
)
def test_an_edited_summary_is_caught(honest, tmp_path, what, message):
    folder = copied(honest, tmp_path / "r")
    summary = json.loads((folder / "summary.json").read_text())
    part = functools.reduce(lambda table, key: table[key], what[:-1], summary)
    part[what[-1]] = 0.5
    (folder / "summary.json").write_text(json.dumps(summary))
    (problem,) = checked(folder).problems
    assert message in problem


def test_an_image_outside_the_budget_is_caught(honest, tmp_path):
    folder = copied(honest, tmp_path / "r")
    path = folder / "adversarial" / "pgd-ce-seed0-000004.safetensors"
    x, tensors = problem()[0][4:], load_file(path)
    tensors["z"] = torch.where(x < 0.5, 1.01, -1.01) * THREAT.eps
    tensors["images"] = THREAT.apply(x, tensors["z"])
    save_file(tensors, path)
    assert any("image 4, attack pgd-ce, seed 0 lies outside the budget" in t for t in checked(folder).problems)


def test_an_image_that_is_not_its_perturbation_is_caught(honest, tmp_path):
    folder = copied(honest, tmp_path / "r")
    path = folder / "adversarial" / "square-seed0-000000.safetensors"
    tensors = load_file(path)
    tensors["images"][0] = 0.5
    save_file(tensors, path)
    assert any("is not what its perturbation makes" in text for text in checked(folder).problems)


def test_a_missing_image_a_missing_row_and_a_double_one_are_caught(honest, tmp_path):
    folder = copied(honest, tmp_path / "r")
    (folder / "adversarial" / "apgd-dlr-seed0-000004.safetensors").unlink()
    lines = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join([*lines[:-1], lines[1]]) + "\n")
    problems = "\n".join(checked(folder).problems)
    assert "apgd-dlr-seed0-000004.safetensors is missing" in problems
    assert "1 rows are missing, that of image 4, attack square" in problems
    assert "There are 2 rows of image 0, attack clean" in problems


def test_other_weights_are_caught(honest):
    other = defense()
    with torch.no_grad():
        next(other.classifier.parameters()).view(-1)[0].add_(1e-6)
    found = checked(honest, other)
    assert any("other weights of the classifier" in text for text in found.problems)

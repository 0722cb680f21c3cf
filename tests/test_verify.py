"""Verification: an honest run passes, and every forgery of its rows, rates, images or weights is caught."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffpure.evaluation.setup import Settings, set_up
from diffpure.evaluation.units import attack_seeds, classify, evaluation_seeds
from diffpure.evaluation.warn import of_rows
from diffpure.purify import Defense
from diffpure.results.read import read_rows
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN, Row, _checksum, ordered
from diffpure.threats import Linf
from diffpure.verification.files import verify_files
from diffpure.verification.verify import Verification, verify
from evaluations import BATCH, COUNT, RULES, THREAT, attacks, defense, problem, ready, settle
from problems import tiny_classifier


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


def checked(folder: Path, model: nn.Module | None = None, again: int = 0) -> Verification:
    return verify(folder, ready(model), again=again)


def test_an_honest_run_is_verified(honest):
    found = checked(honest)
    assert found.passed, str(found)
    assert (found.rows, found.images) == (COUNT * 4, COUNT * 3)
    assert "what the run says" in str(found)
    said = str(found).splitlines()
    assert any(line.startswith("  claimed  that the attacks ran as the header says") for line in said)
    assert sum(line.startswith("  proven   ") for line in said) == 5


def test_units_computed_again_prove_the_attack(honest):
    some = checked(honest, again=2)
    assert some.passed, str(some)
    assert "  proven   2 of 9 units, chosen at random and computed again, gave the same rows" in str(some)
    assert "claimed  that the attacks ran" in str(some)  # of seven units nothing is known
    every = checked(honest, again=99)
    assert every.passed, str(every)
    assert "claimed  that the attacks ran" not in str(every)
    assert "claimed  seconds, dates, versions and the machine" in str(every)


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


def test_a_run_without_its_adversarial_images_proves_its_attacks_by_computing_again_alone(honest, tmp_path):
    folder = copied(honest, tmp_path)
    shutil.rmtree(folder / "adversarial")
    (problem,) = checked(folder).problems
    assert "nothing is proven of its attacks: `--again N` computes N of its 9 attacked units anew" in problem
    some = checked(folder, again=1)
    assert some.passed, str(some)
    assert "every prediction of the unperturbed images" in str(some)
    assert "1 of 9 units, chosen at random and computed again, gave the same rows\n" in str(some)
    assert "claimed  that the attacks ran" in str(some)
    files = verify_files(folder)
    assert files.passed, str(files)
    assert "claimed  the adversarial images and their budget: the run does not hold them" in str(files)
    assert sum("proven" in line for line in str(files).splitlines()) == 2


def test_other_weights_are_caught(honest):
    other = defense()
    with torch.no_grad():
        next(other.classifier.parameters()).view(-1)[0].add_(1e-6)
    found = checked(honest, other)
    assert any(text == "The header names another classifier than the one at hand." for text in found.problems)


# ------------------------------------------------------------------------------------- what an attack did not really do


def test_adversarial_images_replaced_by_the_clean_ones_are_caught_by_computing_again(honest, tmp_path):
    """A whole run without any attack, forged with great care: every row, sum and rate fits the clean images."""
    folder, x = copied(honest, tmp_path / "r"), problem()[0]
    for file in (folder / "adversarial").iterdir():
        tensors = load_file(file)
        tensors["z"] = torch.zeros_like(tensors["z"])
        tensors["images"] = x[tensors["indices"]]
        save_file(tensors, file)
    forge_rows(folder)
    assert checked(folder).passed  # decisions, budgets and rates are those of the clean images
    found = checked(folder, again=99)  # every batch: an attack may honestly have left some of them as they are
    assert not found.passed
    assert any("finds other perturbations" in text for text in found.problems)
    assert any("Computed again, the row of" in text for text in found.problems)


def forge_rows(folder: Path) -> None:
    """Rows and rates that fit the images in a folder, whatever an attack would have found."""
    work = ready()
    header, rows = read_rows(folder)
    rows = [replace(row, size=0.0, misclassified=False) for row in rows]
    for unit in work.units:
        kept = folder / "adversarial" / unit.file
        x = load_file(kept)["images"] if unit.attack != CLEAN else work.batch(unit).x
        seeds = evaluation_seeds(work.job, unit, attack_seeds(unit, work.batch(unit).indices))
        said = classify(work.job, x, seeds)
        forged = {key: said.of(i) for i, key in enumerate(work.keys(unit))}
        rows = [replace(row, **forged[row.key]) if row.key in forged else row for row in rows]
    lines = [json.dumps({"header": header}), *(row.line() for row in rows)]
    (folder / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
    result = Result(header, ordered(rows, header))
    (folder / "summary.json").write_text(json.dumps(replace(result, warnings=of_rows(result)).summary()))


def edit_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "rows.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    header = json.loads(first)["header"]
    change(header)
    path.write_text("".join([json.dumps({"header": header}) + "\n", *rest]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["attacks"]["pgd-ce"]["value"].update(iterations=1000), "differs in 'attacks'"),
        (lambda h: h["attacks"]["pgd-ce"].update(title="PGD-1000, EOT 20"), "differs in 'attacks'"),
        (lambda h: h["attacks"]["pgd-ce"].update(gradient="adjoint"), "differs in 'attacks'"),
        (lambda h: h["attacks"]["pgd-ce"]["value"].update(gradient={"class": "Exact"}), "differs in 'attacks'"),
        (lambda h: h["attacks"].update(more=h["attacks"]["pgd-ce"]), "differs in 'attacks'"),
        (lambda h: h.update(threat="Linf(eps=16/255)"), "differs in 'threat'"),
        (lambda h: h["model"].update(gradient="backprop"), "describes the model otherwise"),
        (lambda h: h["model"].update(purifier="another"), "describes the model otherwise"),
        (lambda h: h["model"]["parts"].update(score="0" * 64), "names another score"),
        (lambda h: h.update(data="0" * 64), "differs in 'data'"),
        (lambda h: h.update(seeds=[1]), "differs in 'seeds'"),
        (lambda h: h.update(indices=[9, 8, 7, 6, 5]), "differs in 'indices'"),
        (lambda h: h.update(rules=["one-shot"]), "differs in 'rules'"),
        (lambda h: h.update(batch=5), "differs in 'batch'"),
        (lambda h: h.update(spec={"model": {}}), "differs in 'spec'"),
    ],
)
def test_an_edited_header_is_caught(honest, tmp_path, change, message):
    folder = copied(honest, tmp_path / "r")
    edit_header(folder, change)
    found = checked(folder)
    assert any(message in text for text in found.problems), str(found)


def test_a_header_of_another_attack_or_budget_is_caught_with_the_attack_that_it_names(honest, tmp_path):
    """A forger who edits the header hands over a spec that fits it: then the perturbations betray him."""
    x, y = problem()
    folder = copied(honest, tmp_path / "r")
    longer = (replace(attacks()[0], iterations=4), *attacks()[1:])
    work = ready(tried=longer)
    edit_header(folder, lambda h: h.update(attacks=work.header["attacks"]))
    assert verify(folder, work).passed
    found = verify(folder, work, again=9)
    assert any("Computed again, pgd-ce on images" in text for text in found.problems)
    assert not any("square" in text for text in found.problems)  # as it says
    larger = set_up(defense(), x, y, Linf(16 / 255), attacks(), Settings(rules=RULES, batch=BATCH, per_call=8))
    edit_header(folder, lambda h: h.update(larger.header))
    assert any("finds other perturbations" in text for text in verify(folder, larger, again=9).problems)


def test_a_warning_that_was_left_out_is_caught(honest, tmp_path):
    folder = copied(honest, tmp_path / "r")
    summary = json.loads((folder / "summary.json").read_text())
    summary["warnings"] = []
    (folder / "summary.json").write_text(json.dumps(summary))
    (found,) = checked(folder).problems
    assert found.startswith("The run leaves out a warning that follows from its rows: square: The defence is random")


@pytest.mark.parametrize("text", ["{", "[]", "null", "{}", '{"rates": {}, "spent": {}}'])
def test_a_damaged_summary_is_caught(honest, tmp_path, text):
    folder = copied(honest, tmp_path / "r")
    (folder / "summary.json").write_text(text)
    found = checked(folder)
    assert any("in summary.json" in problem for problem in found.problems)
    (folder / "summary.json").unlink()
    assert any("no summary.json: it was not finished" in problem for problem in checked(folder).problems)


def test_a_model_that_nobody_can_identify_is_not_confirmed(tmp_path):
    """A header without a name for a part proves nothing about that part."""
    lock = threading.Lock()
    model = Defense(defense().purifier, lambda z: tiny_classifier()(z) if lock else z)
    settle(tmp_path / "r")
    assert any("names another classifier" in text for text in checked(tmp_path / "r", model).problems)

"""The gradient is the attacker's choice: one run holds the same attack through four of them, and their worst case."""

from __future__ import annotations

import pytest

from diffpure.attacks import PGD, Square
from diffpure.errors import InputError
from diffpure.evaluation.evaluate import evaluate
from diffpure.experiments.load import run_folder, run_spec, verify_run
from diffpure.report.runs import read_run
from diffpure.results.rows import CLEAN, WORST
from evaluations import TINY, Linear, defense, line_up, problem, spec_of
from problems import tiny_classifier

MODES = ("exact", "surrogate", "adjoint", "bpda")
NAMES = tuple(f"pgd-ce@{mode}" for mode in MODES)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """One spec with four attacks that differ only in their gradient."""
    tables = [*MODES[:1], {"kind": "surrogate", "steps": 2}, {"kind": "adjoint", "times": "end"}, "bpda"]
    spec = spec_of(
        name="Four gradients",
        model={"classifier": "cifar10-resnet", "score": "cifar10-small", "sampler": {"kind": "sde", "steps": 3}},
        data={"images": "0-3"},
        threat="linf 16/255",
        attacks=[{"kind": "pgd", "iterations": 3, "eot": 2, "gradient": table} for table in tables],
        rules=["one-shot", "average of 2"],
        batch=2,
    )
    folder = run_folder(spec, tmp_path_factory.mktemp("runs"))
    return run_spec(spec, folder, TINY), folder


def test_rows_carry_the_gradient_in_their_name(four):
    found, folder = four
    assert found.attacks == NAMES
    assert found.complete
    assert len(found.rows) == 4 * (1 + len(MODES))
    assert {row.attack for row in found.rows} == {CLEAN, *NAMES}
    files = {path.name for path in (folder / "adversarial").iterdir()}
    assert files == {f"pgd-ce_{mode}-seed0-00000{start}.safetensors" for mode in MODES for start in (0, 2)}


def test_each_gradient_finds_its_own_perturbation_at_its_own_cost(four):
    found, _ = four
    spent = {name: [row for row in found.rows if row.attack == name] for name in NAMES}
    graphs = {name: {row.network_gradient for row in rows} for name, rows in spent.items()}
    gradients = 3 * 2  # steps × samples, each through three steps of the path
    assert graphs == {
        "pgd-ce@exact": {3 * gradients},
        "pgd-ce@surrogate": {2 * gradients},
        "pgd-ce@adjoint": {3 * gradients},
        "pgd-ce@bpda": {0},
    }
    assert {row.gradients for row in found.rows if row.attack != CLEAN} == {gradients}


def test_there_is_one_worst_case_over_all_gradients(four):
    found, _ = four
    right = [found.right(name) for name in (CLEAN, *NAMES)]
    worst = {image for image in found.indices if all(each[image] for each in right)}
    assert found.robust().correct == len(worst)
    assert {image for image, ok in found.right(WORST).items() if ok} == worst
    assert found.minimum().correct == min(found.rate(name).correct for name in NAMES)


def test_titles_and_warnings_name_the_gradients(four):
    found, _ = four
    text = str(found)
    assert "PGD-3, EOT 2, exact gradient\n" in text.replace("  ", "\n") or "PGD-3, EOT 2, exact gradient " in text
    for mode in MODES[1:]:
        assert f"PGD-3, EOT 2, {mode} gradient (approximate)" in text
        assert any(t.startswith(f"pgd-ce@{mode}: the gradient mode {mode!r} is approximate") for t in found.warnings)
    assert not any(t.startswith("pgd-ce@exact") for t in found.warnings)


def test_the_run_is_verified_and_reported(four):
    found, folder = four
    checked = verify_run(folder, TINY, again=2)
    assert checked.passed, str(checked)
    reported = read_run(folder)
    assert reported.result.attacks == NAMES
    assert [reported.result.title(name) for name in NAMES] == [found.title(name) for name in NAMES]


def test_without_a_gradient_of_its_own_an_attack_follows_the_defence():
    x, y = problem(2)
    found = evaluate(
        defense().with_gradient("bpda"), x, y, "linf 8/255", [PGD(iterations=1, eot=2), Square(queries=2)],
        rules=["one-shot"],
    )  # fmt: skip
    about = found.header["attacks"]
    assert (about["pgd-ce"]["gradient"], about["pgd-ce"]["approximate"]) == ("bpda", True)
    assert (about["square"]["gradient"], about["square"]["approximate"]) == ("", False)  # it follows none
    assert {row.network_gradient for row in found.rows} == {0}
    exact = evaluate(
        defense().with_gradient("bpda"), x, y, "linf 8/255", [PGD(iterations=1, eot=2, gradient="exact")],
        rules=["one-shot"],
    )  # fmt: skip
    assert exact.header["attacks"]["pgd-ce@exact"]["approximate"] is False
    assert {row.network_gradient for row in exact.rows if row.attack != CLEAN} == {2 * 3}


def test_a_model_without_a_purifier_has_only_its_own_gradient():
    x, y = line_up(Linear(), [0.2, -0.2])
    for mode in ("exact", "backprop"):
        found = evaluate(Linear(), x, y, "linf 0.1", [PGD(iterations=1, gradient=mode)])
        assert found.header["attacks"][f"pgd-ce@{mode}"]["approximate"] is False
    for mode in ("bpda", "adjoint", "surrogate"):
        with pytest.raises(InputError, match=f"names the gradient '{mode}', but the model has no purifier"):
            evaluate(Linear(), x, y, "linf 0.1", [PGD(iterations=1, gradient=mode)])


def test_the_choice_leaves_the_defence_as_it_is():
    model = defense()
    x, y = problem(2)
    evaluate(model, x, y, "linf 8/255", [PGD(iterations=1, gradient="bpda")], rules=["one-shot"])
    assert model.purifier.gradient.name == "exact"
    assert [p.requires_grad for p in tiny_classifier().parameters()] == [
        p.requires_grad for p in model.classifier.parameters()
    ]

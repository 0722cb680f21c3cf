"""Rates against published intervals, rules against counting by hand, rows that know when they were edited."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffpure.errors import InputError
from diffpure.results.read import read_rows
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN, FORMAT, MINIMUM, WORST, Rate, Row, Rule, ordered


def row(image: int, attack: str, predictions: list[int], *, seed: int = 0, label: int = 0, **more: object) -> Row:
    return Row(seed=seed, image=image, attack=attack, label=label, predictions=tuple(predictions), **more)


def result(rows: list[Row], rules: tuple[str, ...] = ("one-shot",), **header: object) -> Result:
    whole = header_of(rows, rules, **header)
    return Result(whole, ordered(rows, whole))


def header_of(rows: list[Row], rules: tuple[str, ...] = ("one-shot",), **changes: object) -> dict[str, Any]:
    """A whole header for these rows."""
    model = {"title": "a model", "gradient": "exact", "approximate": False, "stochastic": False, "parts": {}}
    attacks = {r.attack: {"title": "An attack", "gradient": "exact", "approximate": False} for r in rows}
    return {
        "format": FORMAT, "rules": list(rules), "attacks": {k: attacks[k] for k in sorted(attacks.keys() - {CLEAN})},
        "model": model, "threat": "Linf(eps=8/255)", "data": "0" * 64, "batch": 2, "per_call": 8, "threads": 1,
        "seeds": sorted({r.seed for r in rows}), "indices": sorted({r.image for r in rows}), **changes,
    }  # fmt: skip


# Newcombe (1998), Statistics in Medicine 17, table I: Wilson's score interval without continuity correction.
@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_is_wilsons(correct, total, low, high):
    assert Rate(correct, total).interval == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_holds_its_rate_and_mirrors(counts):
    correct, total = counts
    low, high = Rate(correct, total).interval
    assert 0 <= low <= correct / total <= high <= 1
    mirrored = Rate(total - correct, total).interval
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-12)


def test_a_rate_is_of_something():
    with pytest.raises(InputError, match="of n > 0 images"):
        Rate(0, 0)


@pytest.mark.parametrize(
    ("rule", "predictions", "averages", "right"),
    [
        ("one-shot", [0, 1, 1], {}, True),
        ("one-shot", [1, 0, 0], {}, False),
        ("average of 3", [1, 1, 1], {3: 0}, True),
        ("worst of 2", [0, 0, 1], {}, True),
        ("worst of 3", [0, 0, 1], {}, False),
        ("majority of 3", [0, 0, 1], {}, True),
        ("majority of 4", [0, 0, 1, 1], {}, False),  # a tie is no majority
        ("majority of 5", [0, 0, 1, 2, 3], {}, True),  # of all classes, not of all samples
        ("majority of 3", [1, 2, 3], {}, False),
        ("worst of 10", [0], {}, True),  # a model that is not random has one sample
    ],
)
def test_rules(rule, predictions, averages, right):
    assert Rule.parse(rule).right(row(0, CLEAN, predictions, averages=averages)) is right
    assert str(Rule.parse(rule)) == rule


@pytest.mark.parametrize("text", ["worst", "one-shot of 3", "worst of", "majority of many", "worst of 0", "average-3"])
def test_a_rule_that_is_none(text):
    with pytest.raises(InputError):
        Rule.parse(text)


def test_an_unknown_rule_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'majority of N'"):
        Rule.parse("majorty of 10")


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9))
def test_rules_are_ordered(predictions):
    """Right in the worst case means right in every other way."""
    n = len(predictions)
    r = row(0, CLEAN, predictions)
    if Rule("worst", n).right(r):
        assert Rule("majority", n).right(r)
        assert Rule("one-shot").right(r)


def test_worst_case_and_minimum():
    rows = [
        row(0, CLEAN, [0]), row(1, CLEAN, [0]), row(2, CLEAN, [0]), row(3, CLEAN, [1]),
        row(0, "a", [1]), row(1, "a", [0]), row(2, "a", [0]), row(3, "a", [0]),
        row(0, "b", [0]), row(1, "b", [1]), row(2, "b", [0]), row(3, "b", [0]),
    ]  # fmt: skip
    found = result(rows)
    assert found.clean().value == 0.75
    assert found.rate("a").value == found.rate("b").value == found.minimum().value == 0.75
    assert found.robust() == Rate(1, 4)  # image 3 is lost without any attack
    assert found.rate(WORST) == found.robust()
    assert found.rate(MINIMUM) == found.minimum()
    assert "25.0 % [4.6, 69.9]" in str(found)


def test_seeds_are_averaged_and_do_not_shrink_the_interval():
    rows = [row(i, CLEAN, [int(i < s)], seed=s) for s in (0, 1, 2) for i in range(4)]
    found = result(rows)
    assert found.over_seeds(CLEAN) == (1.0, 0.75, 0.5)
    assert found.clean() == Rate(3, 4)
    assert "75.0 % [30.1, 95.4] ± 25.0" in str(found)
    assert found.summary()["rates"][CLEAN]["one-shot"]["deviation"] == pytest.approx(0.25)


def test_an_unfinished_result_gives_no_rate():
    found = result([row(0, CLEAN, [0]), row(0, "a", [0]), row(1, CLEAN, [0])])
    with pytest.raises(InputError, match="unfinished"):
        found.clean()
    assert "unfinished" in str(found)


def test_an_unknown_attack_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'pgd-ce'"):
        result([row(0, CLEAN, [0]), row(0, "pgd-ce", [0])]).rate("pgd-cw")


def test_an_attack_is_titled_with_its_gradient_and_an_approximate_one_says_so():
    rows = [row(0, name, [0]) for name in (CLEAN, "pgd-ce@adjoint", "square")]
    about = {
        "pgd-ce@adjoint": {"title": "PGD-20, EOT 8", "gradient": "adjoint", "approximate": True},
        "square": {"title": "Square, 10 queries", "gradient": "", "approximate": False},
    }
    found = result(rows, attacks=about)
    assert found.title("pgd-ce@adjoint") == "PGD-20, EOT 8, adjoint gradient (approximate)"
    assert found.title("square") == "Square, 10 queries"  # a black-box attack has no gradient
    assert found.title(CLEAN) == "no attack"
    assert "PGD-20, EOT 8, adjoint gradient (approximate)" in str(found)


def test_without_an_attack_there_is_no_robust_accuracy():
    found = result([row(0, CLEAN, [0]), row(1, CLEAN, [1])])
    for question in (found.robust, found.minimum, lambda: found.rate(WORST)):
        with pytest.raises(InputError, match=r"^The robust accuracy was not measured: the evaluation has no attack\.$"):
            question()
    assert found.lines == (CLEAN,)
    assert WORST not in found.summary()["rates"]
    for text in (str(found), found._repr_html_()):
        assert "robust accuracy: not measured" in text
        assert "worst case" not in text


def test_a_row_survives_its_line():
    r = row(3, "pgd", [1, 2], averages={10: 2, 5: 1}, size=8 / 255, seconds=0.25)
    assert Row.of(json.loads(r.line())) == r


@pytest.mark.parametrize("change", [{"predictions": [0]}, {"label": 9}, {"gradients": 7}, {"averages": {"2": 2}}])
def test_an_edited_row_is_known(change):
    data = json.loads(row(3, "pgd", [1, 2]).line())
    assert Row.of({**data, "seconds": 99.0})  # times are no part of what must be repeated
    with pytest.raises(InputError, match="image 3, attack pgd, seed 0 was edited"):
        Row.of({**data, **change})


def test_a_line_that_is_no_row():
    with pytest.raises(InputError, match="no row"):
        Row.of({"seed": 0})


def test_a_result_is_saved_and_loaded(tmp_path):
    found = Result(
        result([row(0, CLEAN, [0]), row(1, CLEAN, [1])]).header, (row(0, CLEAN, [0]), row(1, CLEAN, [1])), ("!",)
    )
    found.save(tmp_path / "deep" / "mine.jsonl")
    again = Result.load(tmp_path / "deep" / "mine.jsonl")
    assert (again.rows, again.warnings, str(again)) == (found.rows, found.warnings, str(found))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["mine.jsonl"]


def test_a_missing_file_and_a_foreign_one(tmp_path):
    with pytest.raises(InputError, match="no run"):
        read_rows(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="does not begin with the header"):
        read_rows(tmp_path)


def write(path: Path, header: object, rows: list[Row]) -> Path:
    path.mkdir(exist_ok=True)
    lines = [json.dumps({"header": header}), *(r.line() for r in rows)]
    (path / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
    return path


ROWS = [row(0, CLEAN, [0]), row(1, CLEAN, [1]), row(0, "a", [0]), row(1, "a", [1])]


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 0},
        {"batch": True},
        {"per_call": 0},
        {"per_call": None},
        {"threads": -1},
        {"threads": "2"},
        {"seeds": []},
        {"seeds": [0, 0]},
        {"seeds": [0.5]},
        {"indices": "0-1"},
        {"rules": []},
        {"rules": "one-shot"},
        {"rules": ["best of 3"]},
        {"rules": [7]},
        {"attacks": ["a"]},
        {"attacks": {"a": "pgd"}},
        {"attacks": {"a": {"title": "PGD"}}},
        {"model": None},
        {"model": {"title": "a model"}},
        {"model": {"title": "a model", "gradient": "exact", "approximate": False, "parts": [1]}},
        {"machine": "here"},
        {"threat": 8},
        {"data": None},
        {"format": 1},
        {"format": None},
    ],
    ids=str,
)
def test_a_damaged_header_is_one_sentence(tmp_path, change):
    folder = write(tmp_path / "r", {**header_of(ROWS), **change}, ROWS)
    with pytest.raises(InputError) as caught:
        str(Result.load(folder))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("header", [None, 5, "header", [], {}, [1]], ids=str)
def test_a_header_that_is_none_is_one_sentence(tmp_path, header):
    with pytest.raises(InputError, match=r"format|header"):
        Result.load(write(tmp_path / "r", header, ROWS))


@pytest.mark.parametrize("line", ["null", "[]", "7", "{}", '{"seed": 0}', "{", '"row"', "\x00", ""], ids=repr)
def test_a_line_that_is_no_row_is_one_sentence(tmp_path, line):
    folder = write(tmp_path / "r", header_of(ROWS), ROWS)
    with (folder / "rows.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"no row|no JSON") as caught:
        Result.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (row(0, "a", [1]), "a second row: image 0, attack a, seed 0"),
        (row(7, "a", [1]), "a row that is no part of this run: image 7"),
        (row(0, "b", [1]), "a row that is no part of this run: image 0, attack b"),
        (row(0, "a", [1], seed=3), "a row that is no part of this run: image 0, attack a, seed 3"),
    ],
)
def test_a_foreign_or_second_row_is_one_sentence(tmp_path, more, message):
    folder = write(tmp_path / "r", header_of(ROWS), [*ROWS, more])
    with pytest.raises(InputError, match=message):
        Result.load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", '{"warnings": 5}'])
def test_a_damaged_summary_is_one_sentence(tmp_path, text):
    folder = write(tmp_path / "r", header_of(ROWS), ROWS)
    (folder / "summary.json").write_text(text)
    with pytest.raises(InputError, match=r"summary.json is damaged; delete it and evaluate again") as caught:
        Result.load(folder)
    assert "\n" not in str(caught.value)


def test_no_torch_is_needed():
    code = "import sys, diffpure.results.result; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_wilson_is_the_inverted_score_test():
    """The ends p of the interval are where |p̂ - p| = z √(p (1 - p)/n)."""
    rate = Rate(7, 20)
    for p in rate.interval:
        assert abs(rate.value - p) == pytest.approx(1.959963984540054 * math.sqrt(p * (1 - p) / 20))

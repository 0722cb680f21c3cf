"""Two runs compared image by image: counts by hand, McNemar against scipy, and what cannot be paired."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scipy.stats import binomtest

from diffpure.errors import InputError
from diffpure.results.compare import Pairs, compare
from diffpure.results.result import Result
from diffpure.results.rows import Row

MODEL = {"title": "a model", "gradient": "exact", "approximate": False, "stochastic": False, "parts": {}}


def result(clean: str, attacked: str | None, *, indices: tuple[int, ...] | None = None, **header: object) -> Result:
    """A run with one image per letter: r is right, w is wrong."""
    chosen = indices or tuple(range(len(clean)))
    runs = {"clean": clean, **({} if attacked is None else {"pgd-ce": attacked})}
    rows = tuple(
        Row(seed=0, image=i, attack=name, label=1, predictions=(int(letter == "r"),))
        for name, letters in runs.items()
        for i, letter in zip(chosen, letters, strict=True)
    )
    about = {"title": "PGD-20", "gradient": "exact", "approximate": False, "value": {"class": "PGD"}}
    whole = {
        "model": MODEL,
        "data": "the images",
        "threat": "Linf(eps=8/255)",
        "attacks": {} if attacked is None else {"pgd-ce": about},
        "rules": ["one-shot"],
        "seeds": [0],
        "indices": list(chosen),
        **header,
    }
    return Result(whole, rows)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (5, 1), (3, 3), (0, 9), (30, 14), (200, 150)])
def test_mcnemar_is_the_two_sided_binomial_test(b, c):
    found = Pairs(7, b, c, 2).p_value
    assert found == pytest.approx(binomtest(b, b + c).pvalue if b + c else 1.0)
    assert found == Pairs(0, c, b, 11).p_value


def test_the_interval_by_hand():
    """n = 48, b = 9, c = 4: p = 0.2, q = 0.1, half = z √((0.3 - 0.01) / 50)."""
    pairs = Pairs(30, 9, 4, 5)
    assert pairs.difference == 5 / 48
    low, high = pairs.interval
    assert (low + high) / 2 == pytest.approx(0.1)
    assert (high - low) / 2 == pytest.approx(1.959964 * math.sqrt(0.29 / 50), rel=1e-6)
    assert Pairs(0, 3, 0, 0).interval[1] == 1.0
    with pytest.raises(InputError, match="at least one image"):
        Pairs(0, 0, 0, 0)


def test_pairs_of_two_runs():
    a, b = result("rrrrrw", "rrrwww"), result("rrrrwr", "rwwrww")
    found = compare(a, b)
    assert found.pairs["clean"] == Pairs(4, 1, 1, 0)
    assert found.pairs["pgd-ce"] == Pairs(1, 2, 1, 2)
    assert found.pairs["worst case"] == Pairs(1, 2, 1, 2)
    assert found.remarks == ()
    plain = found.as_dict()
    assert plain["images"] == 6
    assert plain["pairs"]["clean"]["title"] == "no attack"
    assert plain["pairs"]["pgd-ce"]["only_a"] == 2


def test_only_common_images_are_paired():
    a = result("rrww", "rwww")
    b = result("wrr", None, indices=(2, 3, 9), data="other images")
    found = compare(a, b)
    assert found.indices == (2, 3)
    assert found.pairs == {"clean": Pairs(0, 0, 1, 1)}
    assert "Only 2 images are in both runs" in found.remarks[0]


def test_what_differs_is_said_and_what_cannot_be_paired_is_refused():
    a = result("rr", "rw")
    about = {**a.header["attacks"]["pgd-ce"], "title": "PGD-40", "value": {"class": "PGD", "iterations": 40}}
    other = result("rr", "ww", threat="Linf(eps=4/255)", attacks={"pgd-ce": about})
    said = " ".join(compare(a, other).remarks)
    assert "Linf(eps=8/255) for A, Linf(eps=4/255) for B" in said
    assert "PGD-20, exact gradient on A, PGD-40, exact gradient on B" in said
    with pytest.raises(InputError, match="other images or labels"):
        compare(a, result("rr", "rw", data="others"))
    with pytest.raises(InputError, match="no dataset index in common"):
        compare(a, result("rr", "rw", indices=(5, 6)))
    relabelled = [replace(row, label=2) for row in a.rows]
    with pytest.raises(InputError, match="give image 0 the labels 1 and 2"):
        compare(a, replace(a, rows=tuple(relabelled)))
    with pytest.raises(InputError, match="unfinished"):
        compare(a, replace(a, rows=a.rows[:3]))
    with pytest.raises(InputError, match="no decision rule in common"):
        compare(a, result("rr", "rw", rules=["worst of 2"]))
    assert compare(a, result("rr", "rw", rules=["worst of 2"]), "one-shot").rule == "one-shot"

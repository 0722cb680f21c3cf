"""Python as kind as TOML: runs made in Python are verified and reported, and what is wrong is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import diffpure as dp
from diffpure.attacks.presets import ATTACKS, by_name, kind_of, revive_attack
from diffpure.errors import InputError
from diffpure.experiments.spec import EvaluationSpec
from diffpure.named import canonical
from diffpure.pictures.gallery import Gallery
from diffpure.verification.revive import evaluation_of
from problems import images, tiny_classifier, tiny_unet

THREAT = "linf 8/255"
PGD = dp.PGD(iterations=2, eot=2)


def defense(**options: str) -> dp.Defense:
    return dp.Defense(
        dp.Purifier(tiny_unet(8), {"kind": "few-step", "steps": 1, "order": 1}), tiny_classifier(), **options
    )


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    x = images(3)
    return x, tiny_classifier()(x).argmax(1)


def kept(folder: Path, **settings: object) -> dp.Result:
    options: dict[str, object] = {"rules": ["one-shot", "worst of 2"], "batch": 2, "out": folder, **settings}
    return dp.evaluate(defense(), *problem(), THREAT, [PGD, dp.Square(queries=2)], **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize("name", ATTACKS)
def test_every_preset_is_made_again_from_its_canonical_value(name):
    for attack in ATTACKS[name]:
        assert revive_attack(json.loads(json.dumps(canonical(attack)))) == attack


@pytest.mark.parametrize("mode", ["exact", "adjoint", "backprop", "bpda", {"kind": "surrogate", "steps": 3}])
def test_gradient_modes_are_made_again(mode):
    attack = dp.PGD(gradient=mode, eot=dp.EOT(3, "logits", fixed=True), step_size=0.01, loss="dlr")
    assert revive_attack(json.loads(json.dumps(canonical(attack)))) == attack


def test_a_function_of_ones_own_cannot_be_made_again():
    with pytest.raises(InputError, match="function or object of your own"):
        revive_attack(canonical(dp.Transfer(attack=PGD, part=lambda model: model.classifier)))
    with pytest.raises(InputError, match="class 'Nothing' cannot be made again"):
        revive_attack({"class": "Nothing"})
    with pytest.raises(InputError, match="a table with its class, got None"):
        revive_attack(None)


def test_a_run_made_in_python_is_verified(tmp_path):
    kept(tmp_path / "r", name="Mine", class_names=list("abcde"), indices=[4, 7, 9], seeds=[3])
    found = dp.verify(tmp_path / "r", defense(), *problem(), again=1)
    assert found.passed, found
    assert found.rows == 9
    assert "computed again" in str(found)
    x, y = problem()
    assert not dp.verify(tmp_path / "r", defense(), x.flip(0), y).passed
    other = dp.Defense(dp.Purifier(tiny_unet(8), "one-shot"), tiny_classifier())
    assert not dp.verify(tmp_path / "r", other, x, y).passed


def test_what_was_edited_in_a_run_made_in_python_is_found(tmp_path):
    kept(tmp_path / "r")
    path = tmp_path / "r" / "rows.jsonl"
    whole = path.read_text()
    first, _, rest = whole.partition("\n")
    for change, to, match in (
        ('"iterations": 2', '"iterations": 3', "attacks"),
        ("Linf(eps=8/255)", "Linf(eps=4/255)", "threat"),
        ("0.03137254901960784", "0.3", "threat"),
    ):
        assert change in first
        path.write_text(first.replace(change, to) + "\n" + rest)
        found = dp.verify(tmp_path / "r", defense(), *problem())
        assert any(match in text for text in found.problems), found
    header = json.loads(first)
    del header["header"]["budget"]
    path.write_text(json.dumps(header) + "\n" + rest)
    with pytest.raises(InputError, match="does not hold the value of its threat"):
        dp.verify(tmp_path / "r", defense(), *problem())


def test_the_evaluation_of_a_header_has_that_header(tmp_path):
    header = kept(tmp_path / "r").header
    again = evaluation_of(header, defense(), *problem()).header
    assert {k: v for k, v in again.items() if k != "date"} == {k: v for k, v in header.items() if k != "date"}


# ------------------------------------------------------------------------------------------------------------- report


def test_a_kept_run_has_pictures_and_a_page(tmp_path):
    result = kept(tmp_path / "r", name="Mine & <b>", class_names=list("abcde"), pictures=2)
    gallery = Gallery.load(tmp_path / "r", result.header)
    assert gallery is not None
    assert gallery.stages == ("clean", "attacked", "diffused", "purified")
    assert gallery.names == tuple("abcde")
    assert len(gallery.labels) == 2
    result.report(tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert "purified" in page
    assert "Mine &amp; &lt;b&gt;" in page
    result.report(tmp_path / "x.md")
    assert "PGD-2, EOT 2" in (tmp_path / "x.md").read_text()
    with pytest.raises(InputError, match="Unknown report format 'doc'"):
        result.report(tmp_path / "x.doc")
    before = (tmp_path / "r" / "pictures.safetensors").stat().st_mtime_ns
    kept(tmp_path / "r", name="Mine & <b>", class_names=list("abcde"), pictures=2)
    assert (tmp_path / "r" / "pictures.safetensors").stat().st_mtime_ns == before  # made once
    dp.write_report([tmp_path / "r", result], tmp_path / "two.html")
    assert (tmp_path / "two.html").stat().st_size > len(page)


def test_a_result_that_was_kept_nowhere_has_a_page_too(tmp_path):
    result = dp.evaluate(defense(name="In memory"), *problem(), THREAT, PGD, rules=["one-shot"])
    result.report(tmp_path / "x.html")
    assert "In memory" in (tmp_path / "x.html").read_text()


def test_images_that_no_picture_shows_are_evaluated(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(2 * 4 * 4, 3)).requires_grad_(False).eval()
    x = torch.rand(2, 2, 4, 4)
    result = dp.evaluate(model, x, model(x).argmax(1), THREAT, PGD, out=tmp_path / "r")
    assert result.complete
    assert not (tmp_path / "r" / "pictures.safetensors").exists()


# -------------------------------------------------------------------------------------------------------------- names


def test_results_are_titled_by_the_users_name():
    x, y = problem()
    assert dp.evaluate(defense(name="Mine"), x, y, THREAT, ()).heading.startswith("Mine under")
    assert dp.evaluate(defense(), x, y, THREAT, (), name="Given").heading.startswith("Given under")


def test_one_name_per_thing_and_the_others_accepted():
    x, y = problem()
    result = dp.evaluate(defense(), x, y, THREAT, [{"kind": "pgd-ce", "iterations": 1}, dp.Square(queries=1)])
    assert result.rate("no attack") == result.rate("clean")
    assert result.rate("pgd") == result.rate("pgd-ce") == result.rate("PGD-1, exact gradient")
    assert result.rate("worst case per image") == result.robust()
    assert result.title("square") == "Square, 1 queries"  # no gradient
    with pytest.raises(InputError, match="did you mean 'square'"):
        result.rate("squar")
    with pytest.raises(InputError, match="no image is right or wrong"):
        result.right("minimum")
    assert [kind_of(name) for name in ("pgd", "PGD", "pgd-ce", "FAB", "apgd", "bpda-eot")] == [
        "pgd",
        "pgd",
        "pgd",
        "fab-t",
        "apgd-ce",
        "bpda-eot",
    ]
    one, other = (
        EvaluationSpec.of({"model": {"classifier": "cifar10-resnet"}, "attacks": [kind]}) for kind in ("pgd", "pgd-ce")
    )
    assert one.hash == other.hash


def test_autoattack_is_evaluated_one_by_one_and_called_as_one():
    assert list(by_name(dp.AUTOATTACK_RAND)) == ["apgd-ce", "apgd-dlr"]
    assert list(by_name([dp.AUTOATTACK_STANDARD, "strong"])) == ["apgd-ce", "apgd-t", "fab-t", "square", "strong"]
    from diffpure.attacks import Several

    model, (x, y) = tiny_classifier(), problem()
    several = Several((dp.PGD(iterations=3), dp.Square(queries=3)))
    z = several(model, x, y, dp.Linf(0.1), seeds=0)
    assert dp.Linf(0.1).within(x, z).all()
    alone = dp.PGD(iterations=3)(model, x, y, dp.Linf(0.1), seeds=0)
    wrong = model(dp.Linf(0.1).apply(x, z)).argmax(1) != y
    assert wrong.sum() >= (model(dp.Linf(0.1).apply(x, alone)).argmax(1) != y).sum()


# ---------------------------------------------------------------------------------------------- one sentence each


def test_everything_that_a_spec_accepts_is_accepted():
    x, y = problem()
    assert dp.PGD(eot=8).eot == dp.EOT(8)
    assert dp.PGD(step_size="2/255").step_size == pytest.approx(2 / 255)  # type: ignore[arg-type]
    assert dp.Linf("8/255") == dp.Linf(8 / 255)  # type: ignore[arg-type]
    assert dp.L2(np.float32(0.5)) == dp.L2(0.5)  # type: ignore[arg-type]
    assert dp.FewStep(steps=np.int64(3)).steps == 3  # type: ignore[arg-type]
    assert repr(dp.Purifier(tiny_unet(8), "few-step")).count("\n") == 0
    want = dp.evaluate(defense(), x, y, dp.Linf(8 / 255), [PGD], seeds=[0], rules=["one-shot"])
    threat = {"kind": "linf", "eps": "8/255"}
    table = {"kind": "pgd", "iterations": 2, "eot": 2}
    for some in (x.numpy(), x.tolist(), x.double()):
        found = dp.evaluate(defense(), some, y.tolist(), threat, table, seeds=np.int64(0), rules="one-shot")
        assert [row.predictions for row in found.rows] == [row.predictions for row in want.rows]
    assert dp.evaluate(defense(), x.half(), y, THREAT, PGD, rules=["one-shot"]).complete
    assert torch.equal(PGD(defense(), x, y, THREAT, seeds=0), PGD(defense(), x, y, dp.Linf(8 / 255), seeds=0))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: dp.PGD(eot="x"), "eot is a number of samples"),
        (lambda: dp.PGD(iterations=2.5), "whole number.*got 2.5"),
        (lambda: dp.Square(queries=2.5), "'queries', argument of Square, is a whole number, got 2.5"),
        (lambda: dp.EOT("x"), "'samples', argument of EOT, is a whole number, got 'x'"),
        (lambda: dp.Transfer(attack="pgd"), "'attack', argument of Transfer, is Attack, got 'pgd'"),
        (lambda: dp.FewStep(steps=2.5), "'steps', argument of FewStep, is a whole number"),
        (lambda: dp.ReverseSDE(t_star="x"), "'t_star', argument of ReverseSDE, is a number, got 'x'"),
        (lambda: dp.Langevin(steps="x"), "'steps', argument of Langevin, is a whole number"),
        (lambda: dp.Purifier(tiny_unet(8), 5), "A sampler is one of .* got 5"),
        (lambda: dp.Purifier(tiny_unet(8), rounds=2.5), "rounds is a whole number"),
        (lambda: dp.Linf(8), "did you mean 8/255"),
        (lambda: dp.Linf("x"), "needs a finite eps > 0, got 'x'"),
        (lambda: dp.Defense(tiny_classifier(), defense().purifier), "given swapped"),
    ],
)
def test_wrong_values_in_constructors_are_one_sentence(make, match):
    with pytest.raises(InputError, match=match) as caught:
        make()
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"seeds": "a"}, "A seed is an integer, got 'a'"),
        ({"batch": 2.5}, "'batch', setting of an evaluation, is a whole number, got 2.5"),
        ({"rules": 5}, "A decision rule is .* got 5"),
        ({"class_names": 5}, "'class_names', setting of an evaluation, is a list, got 5"),
        ({"name": 5}, "'name', setting of an evaluation, is a text, got 5"),
        ({"probe": "x"}, "'probe', setting of an evaluation, is a whole number, got 'x'"),
        ({"engine": "ray"}, "An engine is"),
        ({"seed": 0}, "did you mean 'seeds'"),
    ],
)
def test_wrong_settings_are_one_sentence(settings, match):
    with pytest.raises(InputError, match=match):
        dp.evaluate(defense(), *problem(), THREAT, PGD, **settings)


MODEL = {"classifier": "cifar10-resnet"}


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (
            {"model": MODEL, "attacks": [{"kind": "pgd", "iterations": 2.5}]},
            "'iterations'.* is a whole number, got 2.5",
        ),
        ({"model": MODEL, "seeds": ["a"]}, r"'seeds', key of a spec, is a list of whole numbers, got \['a'\]"),
        ({"model": {**MODEL, "sampler": 5}}, "'sampler', key of .model., is a text or a table, got 5"),
        ({"model": {"classifier": 5}}, "'classifier', key of .model., is a text or a table, got 5"),
        ({"model": MODEL, "threat": {"kind": "linf", "eps": "8"}}, "'eps'.* is a number, got '8'"),
        ({"model": MODEL, "threat": {"kind": "linf", "eps": 8}}, "did you mean 8/255"),
        ({}, "needs a table .model."),
        ({"model": MODEL, "attacks": [5]}, r"a list of texts or tables, got \[5\]"),
        ({"model": {**MODEL, "purifier": "nope"}}, "Unknown purifier 'nope'"),
        ({"model": {**MODEL, "purifier": {"sigma": 1}}}, "A purifier is a table with a kind"),
        ({"model": {**MODEL, "rounds": 0}}, "rounds is a whole number of at least 1, got 0"),
    ],
)
def test_types_are_checked_when_a_spec_is_read(table, match):
    with pytest.raises(InputError, match=match):
        EvaluationSpec.of(table)


def test_what_a_spec_may_say_briefly():
    made = EvaluationSpec.of(
        {
            "model": {**MODEL, "score": "cifar10-small", "sampler": "ReverseSDE"},
            "attacks": "pgd",
            "seeds": 0,
            "rules": "one-shot",
            "threat": THREAT,
            "data": {"images": "all"},
        }
    )
    assert made.seeds == (0,)
    assert made.threat == dp.Linf(8 / 255)
    assert list(made.make_attacks()) == ["pgd-ce"]

"""Specs: the shipped ones run and verify, what people write is understood, and what is wrong is said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from inspect import isabstract

import pytest
import torch
from safetensors.torch import save_file

import diffpure.adapters
import diffpure.attacks
from diffpure.attacks import EOT, PGD, Attack, Suite
from diffpure.errors import InputError
from diffpure.evaluation.results import Result
from diffpure.experiments.load import estimate_run, load_images, run, run_folder, shipped_specs, verify_run
from diffpure.experiments.spec import ATTACKS, EvaluationSpec, attacks_of
from diffpure.threats import Linf
from evaluations import problem, spec_of, tiny_world


@pytest.mark.parametrize("name", sorted(shipped_specs()))
def test_every_shipped_spec_runs_and_verifies(name, tmp_path):
    spec = EvaluationSpec.read(shipped_specs()[name]).tiny()
    said = estimate_run(spec, build=tiny_world)
    found = run(spec, run_folder(spec, tmp_path), build=tiny_world)
    assert found.complete
    assert said.images == len(spec.data.images)
    assert Result.load(tmp_path / spec.hash).rows == found.rows
    checked = verify_run(tmp_path / spec.hash, build=tiny_world)
    assert checked.passed, str(checked)


def test_a_spec_survives_its_plain_form():
    for path in shipped_specs().values():
        spec = EvaluationSpec.read(path)
        assert EvaluationSpec.of(spec.plain()) == spec
        assert EvaluationSpec.of(spec.plain()).hash == spec.hash
        assert replace(spec, name="another").hash == spec.hash
        assert replace(spec, seeds=(7,)).hash != spec.hash


def test_what_people_write():
    spec = spec_of(
        data={"images": "0-3, 9"}, threat={"eps": "8/255"}, attacks=[{"kind": "pgd", "eot": 5, "step_size": "2/255"}]
    )
    assert spec.data.images == (0, 1, 2, 3, 9)
    assert spec.threat.make() == Linf(8 / 255)
    assert spec.make_attacks() == {"pgd-ce": PGD(eot=EOT(5), step_size=2 / 255)}
    two = spec_of(attacks=[{"kind": "pgd"}, {"kind": "pgd", "iterations": 7}])
    assert list(two.make_attacks()) == ["pgd-ce", "pgd-ce-2"]


def test_a_preset_takes_arguments_for_all_its_attacks():
    rand = attacks_of({"kind": "autoattack-rand", "iterations": 9, "eot": 3})
    assert [a.iterations for a in rand] == [9, 9]  # type: ignore[attr-defined]
    assert {a.ranking.samples for a in rand} == {3}
    (suite,) = attacks_of({"kind": "autoattack-standard", "queries": 11})
    assert suite.attacks[-1].queries == 11  # type: ignore[attr-defined]
    for kind in ATTACKS:
        assert attacks_of({"kind": kind}) == ATTACKS[kind]


def parts_of(value: object) -> Iterator[Attack]:
    """The attacks in a value: itself, and those it is made of."""
    if isinstance(value, tuple):
        for item in value:
            yield from parts_of(item)
    elif isinstance(value, Attack):
        yield value
        for field in fields(value):
            yield from parts_of(getattr(value, field.name))


def test_a_spec_can_name_every_attack():
    """Every kind and every preset that `diffpure.attacks` and `diffpure.adapters` export."""
    named = {value for preset in ATTACKS.values() for value in (preset, *preset)}
    kinds = {type(attack) for preset in ATTACKS.values() for attack in parts_of(preset)}
    names = [*(vars(package).values() for package in (diffpure.attacks, diffpure.adapters))]
    exported = [value for values in names for value in values]
    assert {v for v in exported if isinstance(v, type) and issubclass(v, Attack) and not isabstract(v)} == kinds
    for preset in exported:
        if isinstance(preset, Attack) or (isinstance(preset, tuple) and preset and isinstance(preset[0], Attack)):
            assert preset in named or any(preset == a.attacks for a in named if isinstance(a, Suite))
    known = attacks_of({"kind": "pgd", "eot": {"samples": 2, "fixed": True}})  # the attacker who knows the noise
    assert known == (PGD(eot=EOT(2, fixed=True)),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"atacks": []}, "Unknown key of a spec 'atacks'; did you mean 'attacks'"),
        ({"model": {"clasifier": "x"}}, r"Unknown key of \[model\] 'clasifier'; did you mean 'classifier'"),
        ({"model": {}}, "incomplete"),
        ({"model": {"classifier": "x", "gradient": "exakt"}}, "did you mean 'exact'"),
        ({"model": {"classifier": "x", "sampler": {"kind": "sde", "tstar": 1}}}, "did you mean 't_star'"),
        ({"model": {"classifier": "x", "sampler": {"kind": "sdee"}}}, "did you mean 'sde'"),
        ({"model": {"classifier": "x", "sampler": {"t_star": 2.0}}}, "t\\* is a time"),
        ({"attacks": [{"kind": "pdg"}]}, "did you mean 'pgd'"),
        ({"attacks": [{"kind": "pgd", "iteration": 3}]}, "did you mean 'iterations'"),
        ({"attacks": [{"kind": "pgd", "eot": {"sample": 3}}]}, "did you mean 'samples'"),
        ({"attacks": [{"kind": "pgd", "loss": "xe"}]}, "Unknown loss"),
        ({"attacks": {"kind": "pgd"}}, "is a list"),
        ({"threat": {"kind": "linf", "eps": -1}}, "eps > 0"),
        ({"threat": {"kind": "l8"}}, "Unknown threat"),
        ({"data": {"images": "0-"}}, "ranges such as"),
        ({"data": {"images": [1, 1]}}, "twice"),
        ({"attacks": [{"kind": "diffattack"}]}, "needs a score"),
        ({"rules": ["worst"]}, "decision rule"),
        ({"batch": 0}, "batch of at least 1"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        spec_of(**changes)
    assert "\n" not in str(caught.value)


def test_a_spec_that_names_what_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        EvaluationSpec.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = [")
    with pytest.raises(InputError, match="no TOML file"):
        EvaluationSpec.read(tmp_path / "bad.toml")
    for changes, message in (
        ({"model": {"classifier": str(tmp_path / "none.pt")}}, "which is not there"),
        ({"data": {"source": "cifar11"}}, "Unknown source of images"),
        ({"data": {"images": [500]}}, "has 500 images"),
        ({"data": {"source": "file", "path": "none.safetensors"}}, "none.safetensors is none"),
        ({"data": {"source": "cifar10", "path": str(tmp_path)}}, "No CIFAR-10"),
    ):
        with pytest.raises(InputError, match=message):
            run(spec_of(**changes), tmp_path / "r")
        assert not (tmp_path / "r").exists()


def test_images_from_a_file(tmp_path):
    x, y = problem()
    save_file({"images": x, "labels": y}, tmp_path / "mine.safetensors")
    spec = spec_of(data={"source": "file", "path": str(tmp_path / "mine.safetensors"), "images": [2, 0]})
    found, labels = load_images(spec.data)
    assert torch.equal(found, x[[2, 0]])
    assert torch.equal(labels, y[[2, 0]])

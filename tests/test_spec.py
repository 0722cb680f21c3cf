"""Specs: the shipped ones run and verify, what people write is understood, and what is wrong is said."""

from __future__ import annotations

from dataclasses import replace
from inspect import isabstract

import pytest
import torch
from safetensors.torch import save_file

import diffpure.attacks
from diffpure.attacks import ATTACKS, BPDA_EOT, EOT, PGD, PGD_LEE_KIM, Attack, Suite, attacks_of
from diffpure.data.sources import load as load_data
from diffpure.diffusion.gradients import Adjoint, Exact, Surrogate
from diffpure.errors import InputError
from diffpure.experiments.load import run_folder, run_spec, shipped_specs, verify_run
from diffpure.experiments.spec import EvaluationSpec
from diffpure.results.result import Result
from diffpure.threats import Linf
from evaluations import TINY, problem, spec_of, two_photographs


@pytest.mark.parametrize("name", sorted(shipped_specs()))
def test_every_shipped_spec_runs_and_verifies(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two_photographs(tmp_path / "imagenet")  # for the specs that read the user's own
    spec = EvaluationSpec.read(shipped_specs()[name]).tiny()
    said = TINY.evaluation(spec).estimate()
    folder = run_folder(spec, tmp_path)
    found = run_spec(spec, folder, TINY)
    assert found.complete
    assert said.images == len(found.indices) == 2
    assert folder.name.endswith(f"-{spec.hash}")
    assert Result.load(folder).rows == found.rows
    checked = verify_run(folder, TINY)
    assert checked.passed, str(checked)
    assert run_folder(replace(spec, name="Another name"), tmp_path) == folder  # the hash names the run


def test_a_spec_survives_its_plain_form():
    for path in shipped_specs().values():
        spec = EvaluationSpec.read(path)
        assert EvaluationSpec.of(spec.plain()) == replace(spec, name="")
        assert EvaluationSpec.of(spec.plain()).hash == spec.hash
        assert replace(spec, name="another").hash == spec.hash
        assert replace(spec, seeds=(7,)).hash != spec.hash


def test_what_people_write():
    spec = spec_of(
        data={"images": "0-3, 9"}, threat={"eps": "8/255"}, attacks=[{"kind": "pgd", "eot": 5, "step_size": "2/255"}]
    )
    assert spec.data.images == "0-3, 9"
    assert spec.threat == Linf(8 / 255)
    assert spec.make_attacks() == {"pgd-ce": PGD(eot=EOT(5), step_size=2 / 255)}
    two = spec_of(attacks=[{"kind": "pgd"}, {"kind": "pgd", "iterations": 7}])
    assert list(two.make_attacks()) == ["pgd-ce", "pgd-ce-2"]
    short = spec_of(data={"images": [0, 1, 2, 3, 9]}, threat="linf 8/255", attacks="pgd", rules="one-shot", seeds=3)
    assert (short.data, short.threat, short.seeds, short.rules) == (spec.data, spec.threat, (3,), ("one-shot",))
    assert short.attacks == ({"kind": "pgd"},)


def test_an_attack_names_its_gradient():
    tables = ["bpda", {"kind": "adjoint", "times": "end"}, {"kind": "surrogate", "steps": 3}, {"kind": "exact"}]
    found = spec_of(attacks=[{"kind": "pgd", "gradient": gradient} for gradient in tables]).make_attacks()
    assert list(found) == ["pgd-ce@bpda", "pgd-ce@adjoint", "pgd-ce@surrogate", "pgd-ce@exact"]
    assert [a.gradient for a in found.values()][1:] == [Adjoint("end"), Surrogate(3), Exact()]
    presets = spec_of(
        model={"classifier": "x", "score": "y"}, attacks=[{"kind": kind} for kind in ("bpda-eot", "pgd-lee-kim")]
    )
    assert presets.make_attacks() == {"bpda-eot@bpda": BPDA_EOT, "pgd-lee-kim@surrogate": PGD_LEE_KIM}
    other = attacks_of({"kind": "bpda-eot", "gradient": "exact"})[0]
    assert other.name == "bpda-eot@exact"  # what the label promises is what was asked for: the name says what it does


def test_a_preset_takes_arguments_for_all_its_attacks():
    rand = attacks_of({"kind": "autoattack-rand", "iterations": 9, "eot": 3})
    assert [a.iterations for a in rand] == [9, 9]  # type: ignore[attr-defined]
    assert {a.ranking.samples for a in rand} == {3}
    (suite,) = attacks_of({"kind": "autoattack-standard", "queries": 11})
    assert suite.attacks[-1].queries == 11  # type: ignore[attr-defined]
    for kind in ATTACKS:
        assert attacks_of({"kind": kind}) == ATTACKS[kind]


def test_a_spec_can_name_every_attack():
    """Every kind and every preset that `diffpure.attacks` exports."""
    named = {value for preset in ATTACKS.values() for value in (preset, *preset)}
    kinds = {type(part) for preset in ATTACKS.values() for attack in preset for part in attack.walk()}
    exported = list(vars(diffpure.attacks).values())
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
        ({"model": {}}, r"The key 'classifier' is missing in \[model\]"),
        ({"model": {"classifier": "x", "gradient": "exakt"}}, "did you mean 'exact'"),
        ({"model": {"classifier": "x", "sampler": {"kind": "sde", "tstar": 1}}}, "did you mean 't_star'"),
        ({"model": {"classifier": "x", "sampler": {"kind": "sdee"}}}, "did you mean 'sde'"),
        ({"model": {"classifier": "x", "sampler": {"kind": "sde", "t_star": 2.0}}}, "t\\* is a time"),
        ({"model": {"classifier": "x", "sampler": {"t_star": 0.1}}}, "A sampler is a table with a kind"),
        ({"attacks": [{"kind": "pdg"}]}, "did you mean 'pgd'"),
        ({"attacks": [{"kind": "pgd", "iteration": 3}]}, "did you mean 'iterations'"),
        ({"attacks": [{"kind": "pgd", "eot": {"sample": 3}}]}, "did you mean 'samples'"),
        ({"attacks": [{"kind": "pgd", "loss": "xe"}]}, "Unknown loss"),
        ({"attacks": [{"kind": "pgd", "gradient": "bdpa"}]}, "did you mean 'bpda'"),
        ({"attacks": [{"kind": "pgd", "gradient": {"kind": "surrogate", "step": 5}}]}, "did you mean 'steps'"),
        ({"attacks": [{"kind": "pgd", "part": "classifier"}]}, "Unknown argument of the attack 'pgd' 'part'"),
        ({"attacks": 5}, "is a list of texts or tables, got 5"),
        ({"threat": {"kind": "linf", "eps": -1}}, "eps > 0"),
        ({"threat": {"kind": "l8"}}, "Unknown threat"),
        ({"data": {"images": "0-"}}, "ranges such as"),
        ({"attacks": [{"kind": "diffattack"}]}, "needs a score or purifier"),
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
        ({"model": {"classifier": str(tmp_path / "none.pt")}}, "none.pt"),
        ({"data": {"source": "cifar11"}}, "Unknown source of images"),
        ({"data": {"images": [500]}}, "has 500 images"),
        ({"data": {"images": [1, 1]}}, "names image 1 twice"),
        ({"data": {"source": "file", "path": str(tmp_path / "none.safetensors")}}, "none.safetensors"),
        ({"data": {"source": "cifar10", "path": str(tmp_path)}}, "No CIFAR-10"),
    ):
        with pytest.raises(InputError, match=message):
            run_spec(spec_of(**changes), tmp_path / "r")
        assert not (tmp_path / "r").exists()


def test_images_from_a_file(tmp_path):
    x, y = problem()
    save_file({"images": x, "labels": y}, tmp_path / "mine.safetensors")
    spec = spec_of(data={"source": "file", "path": str(tmp_path / "mine.safetensors"), "images": [2, 0]})
    found = load_data(spec.data)
    assert torch.equal(found.images, x[[2, 0]])
    assert torch.equal(found.labels, y[[2, 0]])
    assert found.indices == (2, 0)

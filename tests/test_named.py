"""Values by name: the same words in Python, TOML and on the command line; a canonical form that a new field leaves
alone; and one sentence for every wrong type."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass, replace

import pytest
import torch

import diffpure as dp
from diffpure.attacks import ATTACKS, attacks_of, by_name
from diffpure.diffusion.samplers import SAMPLERS, sampler_of
from diffpure.errors import InputError
from diffpure.experiments.load import shipped_specs
from diffpure.experiments.spec import EvaluationSpec, ModelSpec
from diffpure.named import brief, canonical, changed, construct, make, number
from diffpure.threats import threat_of
from evaluations import Linear, line_up, spec_of
from problems import tiny_classifier, tiny_unet

# ----------------------------------------------------------------------------------------------------- names and tables


def test_a_name_a_table_and_a_value_are_the_same():
    for given in ("few-step", "FewStep", {"kind": "few-step"}, dp.FewStep()):
        assert sampler_of(given) == dp.FewStep()
    assert sampler_of({"kind": "few-step", "steps": 5}) == dp.FewStep(steps=5)
    for name, member in SAMPLERS.items():
        assert isinstance(sampler_of(name), member)
    for given in ("linf 8/255", "Linf 8/255", {"kind": "linf", "eps": "8/255"}, dp.Linf(8 / 255)):
        assert threat_of(given) == dp.Linf(8 / 255)
    assert dp.Purifier(tiny_unet(8), "few-step").sampler == dp.FewStep()
    assert dp.Purifier(tiny_unet(8), gradient={"kind": "surrogate", "steps": 3}).gradient == dp.Surrogate(3)
    assert dp.PGD(eot=8) == dp.PGD(eot=dp.EOT(8)) == attacks_of({"kind": "pgd", "eot": 8})[0]
    assert dp.PGD(eot={"samples": 8, "average": "logits"}).eot == dp.EOT(8, "logits")
    assert dp.PGD(gradient="bpda").gradient == dp.BPDA()
    assert list(by_name(["pgd", {"kind": "square", "queries": 5}, dp.APGD()])) == ["pgd-ce", "square", "apgd-ce"]
    assert by_name("autoattack-rand") == by_name(dp.AUTOATTACK_RAND) == by_name(["autoattack-rand"])
    assert by_name({"kind": "pgd"}) == {"pgd-ce": dp.PGD()}
    assert by_name({"mine": "pgd"}) == {"mine": dp.PGD()}


def test_an_evaluation_in_words():
    """Threats and attacks by name, arrays and lists for tensors, one seed as a number: the rows of the values."""
    model = Linear()
    x, y = line_up(model, [0.3, 0.05, -0.2, -0.01])
    rules = ["one-shot"]
    values = dp.evaluate(model, x, y, dp.Linf(0.1), [dp.PGD(iterations=3)], seeds=[0], rules=rules)
    for images, labels in ((x.numpy(), y.numpy()), (x.tolist(), y.tolist()), (x.double(), y.int()), (x, y.byte())):
        named = dp.evaluate(
            model, images, labels, "linf 0.1", {"kind": "pgd", "iterations": 3}, seeds=0, rules="one-shot"
        )
        assert [replace(row, seconds=0) for row in named.rows] == [replace(row, seconds=0) for row in values.rows]
        assert named.header["data"] == values.header["data"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_images_of_other_floats_are_images(dtype):
    """Half precision and double become what the model computes in; nobody has to know what torch would refuse."""
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    model = dp.Defense(dp.Purifier(tiny_unet(8), dp.FewStep(steps=2)), tiny_classifier())
    torch.testing.assert_close(model(x, seeds=[0, 1]), model(x.float(), seeds=[0, 1]))
    attack = dp.PGD(iterations=1)
    found = dp.evaluate(model, x, [0, 1], "linf 8/255", attack, rules=["one-shot"], per_call=2)
    assert found.complete
    z = attack(model, x, [0, 1], dp.Linf(8 / 255), seeds=[0, 1])
    assert z.shape == x.shape


@pytest.mark.parametrize("labels", [[0.0, 1.0], [True, False], [0], [0, -1], "ab", None, [0, 99]], ids=repr)
def test_labels_that_are_none_are_one_sentence(labels):
    x, _ = line_up(Linear(), [0.3, -0.2])
    with pytest.raises(InputError, match=r"^Labels are [^\n]*\.$"):
        dp.evaluate(Linear(), x, labels, "linf 0.1")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: dp.PGD(eot="8"), "eot is a number of samples or a table"),
        (lambda: dp.PGD(eot=True), "eot is a number of samples or a table"),
        (lambda: dp.PGD(eot=0), "at least 1"),
        (lambda: dp.PGD(iterations=2.5), "'iterations', argument of PGD, is a whole number, got 2.5"),
        (lambda: dp.PGD(iterations=0), "iterations as a whole number of at least 1, got 0"),
        (lambda: dp.PGD(step_size=-2 / 255), "step_size above 0, got -0.0078"),
        (lambda: dp.PGD(step_size=0.0), "step_size above 0, got 0.0"),
        (lambda: dp.PGD(step_size=float("nan")), "step_size above 0, got nan"),
        (lambda: dp.PGD(gradient="exakt"), "did you mean 'exact'"),
        (lambda: dp.PGD(gradient=5), "A gradient mode is one of"),
        (lambda: dp.PGD(loss="xe"), "Unknown loss 'xe'"),
        (lambda: dp.Square(p=2.0), "p in"),
        (lambda: dp.Linf(8), "at most 1, got 8; did you mean 8/255"),
        (lambda: dp.Linf(float("nan")), "finite eps > 0"),
        (lambda: dp.Linf("8/0"), "finite eps > 0, got '8/0'"),
        (lambda: dp.L2(-1), "finite eps > 0, got -1"),
        (lambda: threat_of("linf eight"), "such as 'linf 8/255', got 'linf eight'"),
        (lambda: threat_of("l8 0.5"), "Unknown threat 'l8'"),
        (lambda: threat_of(5), "A threat is one of"),
        (lambda: threat_of("linf 8"), "did you mean 8/255"),
        (lambda: dp.Purifier(tiny_unet(8), "few-steps"), "did you mean 'few-step'"),
        (lambda: dp.Purifier(tiny_unet(8), dp.FewStep), "A sampler is one of"),
        (lambda: dp.Purifier(tiny_unet(8), rounds=0), "rounds is a whole number of at least 1, got 0"),
        (lambda: dp.Purifier(5), "A score model has a schedule"),
        (lambda: dp.Defense(tiny_classifier(), dp.Purifier(tiny_unet(8))), "they were given swapped"),
        (lambda: dp.Defense(5, tiny_classifier()), "A purifier is called with images"),
        (lambda: dp.Defense(dp.Purifier(tiny_unet(8)), 5), "A classifier is called with images"),
        (lambda: by_name({"mine": "autoattack-rand"}), "is 2 attacks, which the one name 'mine' cannot stand for"),
        (lambda: by_name(5), "An attack is a name or a table"),
        (lambda: by_name({"kind": "pgd", "steps": 5}), "Unknown argument of the attack 'pgd' 'steps'"),
        (lambda: dp.Exact(memory=-1), "at least 0"),
        (lambda: dp.Adjoint("middle"), "Unknown times of the adjoint 'middle'"),
    ],
)  # fmt: skip
def test_what_a_spec_refuses_is_refused_in_python(wrong, message):
    with pytest.raises(InputError, match=message) as caught:
        wrong()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seeds", [[1.5], torch.tensor([0.25, 0.5]), ["a", "b"], [0], [None, None]], ids=repr)
def test_seeds_that_are_none_are_refused(seeds):
    """A float would be cut to the same few seeds for all images."""
    with pytest.raises(InputError, match=r"[Ss]eed"):
        dp.Purifier(tiny_unet(8), dp.FewStep(steps=2))(torch.rand(2, 3, 8, 8), seeds)


def test_fractions_are_numbers():
    assert [number(text) for text in ("8/255", " 1 / 4 ", "0.5/2")] == [8 / 255, 0.25, 0.25]
    for other in ("8", "1/0", "a/b", "1/2/3", "./.", 8, None, "-1/2"):
        assert number(other) == other


# ------------------------------------------------------------------------------------------------------- canonical form


@dataclass(frozen=True)
class Old:
    steps: int = 3
    names: tuple[str, ...] = ()
    inner: dict = field(default_factory=dict)


New = make_dataclass("Old", [("more", float, field(default=0.5))], bases=(Old,), frozen=True)


def test_a_new_field_changes_nothing_until_it_is_used():
    assert canonical(Old()) == canonical(New()) == {"class": "Old"}
    assert canonical(Old(names=("a",))) == canonical(New(names=("a",))) == {"class": "Old", "names": ["a"]}
    assert canonical(New(more=1.0)) == {"class": "Old", "more": 1.0}
    assert changed(Old(steps=4)) == {"steps": 4}
    assert brief(Old(steps=4)) == "Old(steps=4)"
    assert brief(Old(), always=("steps",)) == "Old(steps=3)"
    assert canonical({"f": lambda: 0})["f"] == canonical({"f": lambda: 0})["f"].replace(" at 0x0", "")


def grown(cls: type) -> type:
    """A dataclass of specs as a later version may have it: with one more field that has a default."""
    return make_dataclass(cls.__name__, [("later", str, field(default="off"))], bases=(cls,), frozen=True, kw_only=True)


SPEC = {
    "name": "not part of the hash",
    "model": {"classifier": "cifar10-resnet", "score": "cifar10-small", "sampler": {"kind": "few-step", "steps": 5}},
    "data": {"images": "0-7"},
    "threat": {"kind": "l2", "eps": 0.5},
    "attacks": [{"kind": "pgd", "iterations": 20, "eot": 8, "gradient": "bpda"}],
    "rules": ["one-shot"],
    "seeds": [1, 2],
}  # fmt: skip
PLAIN = {
    "model": {"classifier": "cifar10-resnet", "score": "cifar10-small", "sampler": {"kind": "few-step", "steps": 5}},
    "data": {"images": "0-7"},
    "threat": {"kind": "l2", "eps": 0.5},
    "attacks": [{"kind": "pgd", "iterations": 20, "eot": 8, "gradient": "bpda"}],
    "rules": ["one-shot"],
    "seeds": [1, 2],
}  # fmt: skip


def test_the_hash_of_a_spec_is_pinned():
    """What a committed run is called: these literals may change only with the format number."""
    spec = EvaluationSpec.of(SPEC)
    assert spec.plain() == PLAIN
    assert spec.hash == "eb8010c4df1c53d1"
    assert spec.folder_name == "not-part-of-the-hash-eb8010c4df1c53d1"
    assert spec_of().hash == "e47d1a71ae4b9f1e"


def test_a_spec_keeps_its_hash_when_a_field_with_a_default_is_added(monkeypatch):
    spec = EvaluationSpec.of(SPEC)
    larger = grown(EvaluationSpec).of(SPEC)
    assert {f.name for f in fields(larger)} - {f.name for f in fields(spec)} == {"later"}
    assert larger.plain() == spec.plain()
    assert larger.hash == spec.hash
    assert replace(larger, later="on").hash != spec.hash
    monkeypatch.setattr("diffpure.experiments.spec.ModelSpec", grown(ModelSpec))
    inner = EvaluationSpec.of(SPEC)
    assert inner.model.later == "off"  # type: ignore[attr-defined]
    assert inner.hash == spec.hash
    used = EvaluationSpec.of({**SPEC, "model": {**SPEC["model"], "later": "on"}})
    assert used.plain()["model"]["later"] == "on"
    assert used.hash != spec.hash


@pytest.mark.parametrize(
    "same",
    [
        {"name": "another"},
        {"batch": 16},
        {"probe": 0},
        {"data": {"source": "cifar10-samples", "images": [*range(8)]}},
        {"threat": "l2 0.5"},
        {"threat": {"kind": "l2", "eps": "1/2"}},
        {"attacks": [{**SPEC["attacks"][0], "restarts": 1, "loss": "ce", "random_start": True}]},
        {"attacks": {"kind": "pgd", "iterations": 20, "eot": 8, "gradient": "bpda", "label": ""}},
        {"rules": "one-shot"},
        {"model": {**SPEC["model"], "rounds": 1, "gradient": "exact"}},
        {"model": {**SPEC["model"], "classifier": {"name": "cifar10-resnet"}}},
    ],
    ids=str,
)
def test_what_says_the_same_has_the_same_hash(same):
    assert EvaluationSpec.of({**SPEC, **same}).hash == EvaluationSpec.of(SPEC).hash


@pytest.mark.parametrize(
    "other",
    [
        {"batch": 8},
        {"probe": 2},
        {"data": {"images": "0-8"}},
        {"data": {"images": "1-7, 0"}},  # the order decides which images are attacked together
        {"threat": {"kind": "l2", "eps": 0.25}},
        {"threat": {"kind": "linf", "eps": 0.5}},
        {"attacks": [{**SPEC["attacks"][0], "gradient": "exact"}]},
        {"attacks": [*SPEC["attacks"], *SPEC["attacks"]]},
        {"seeds": [2, 1]},
        {"model": {**SPEC["model"], "gradient": "backprop"}},
        {"model": {**SPEC["model"], "rounds": 2}},
        {"model": {**SPEC["model"], "classifier": {"name": "x.pt", "like": "cifar10-resnet"}}},
    ],
    ids=str,
)
def test_what_says_something_else_has_another_hash(other):
    assert EvaluationSpec.of({**SPEC, **other}).hash != EvaluationSpec.of(SPEC).hash


def test_the_plain_form_of_every_shipped_spec_says_only_what_was_written():
    for path in shipped_specs().values():
        spec = EvaluationSpec.read(path)
        assert EvaluationSpec.of(spec.plain()).plain() == spec.plain()
        assert "name" not in spec.plain()


# --------------------------------------------------------------------------------------------- wrong types in a spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attacks": [{"kind": "pgd", "iterations": 2.5}]}, "argument of the attack 'pgd-ce', is a whole number"),
        ({"attacks": [{"kind": "pgd", "iterations": "20"}]}, "is a whole number, got '20'"),
        ({"attacks": [{"kind": "pgd", "iterations": True}]}, "is a whole number, got True"),
        ({"attacks": [{"kind": "pgd", "step_size": "big"}]}, "is a number, got 'big'"),
        ({"attacks": [{"kind": "pgd", "step_size": -0.01}]}, "step_size above 0"),
        ({"attacks": [{"kind": "pgd", "random_start": 1}]}, "is true or false, got 1"),
        ({"attacks": [{"kind": "pgd", "eot": "8"}]}, "eot is a number of samples or a table"),
        ({"attacks": [{"kind": "pgd", "eot": {"samples": 2.5}}]}, "'samples', key of eot, is a whole number, got 2.5"),
        ({"attacks": [{"kind": "pgd", "loss": 5}]}, "loss"),
        ({"attacks": [{"kind": 5}]}, "Unknown attack 5"),
        ({"attacks": [{"iterations": 5}]}, "table with a kind"),
        ({"attacks": [5]}, "'attacks', key of a spec, is a list"),
        ({"seeds": ["a"]}, "'seeds', key of a spec, is a list"),
        ({"seeds": [1.5]}, "'seeds', key of a spec, is a list"),
        ({"seeds": [0, 0]}, r"Each of the seeds of a spec is given once, got \[0, 0\]"),
        ({"seeds": []}, "one seed"),
        ({"seeds": "0"}, "is a list"),
        ({"batch": "16"}, "is a whole number, got '16'"),
        ({"batch": 1.5}, "is a whole number, got 1.5"),
        ({"batch": True}, "is a whole number, got True"),
        ({"probe": -1}, "probe of 0 or more"),
        ({"rules": [5]}, "'rules', key of a spec, is a list"),
        ({"rules": []}, "one rule"),
        ({"name": 5}, "is a text, got 5"),
        ({"model": {"classifier": "x", "sampler": "few-steps"}}, "did you mean 'few-step'"),
        ({"model": {"classifier": "x", "sampler": 5}}, r"'sampler', key of \[model\], is a text or a table, got 5"),
        ({"model": {"classifier": "x", "sampler": {"kind": "sde", "t_star": "much"}}}, "is a number, got 'much'"),
        ({"model": {"classifier": 5}}, r"'classifier', key of \[model\], is .*, got 5"),
        ({"model": {"classifier": {"like": "x"}}}, "'name' is missing"),
        ({"model": {"classifier": {"name": 5}}}, "is a text, got 5"),
        ({"model": {"classifier": {"name": "x", "arguments": 5}}}, "is a table, got 5"),
        ({"model": {"classifier": "x", "rounds": "2"}}, "is a whole number, got '2'"),
        ({"model": {"classifier": "x", "score": "y", "purifier": "blur"}}, "not both"),
        ({"model": {"classifier": "x", "gradient": ["exact"]}}, "is a text or a table"),
        ({"model": 5}, r"A spec needs a table \[model\]"),
        ({"model": "cifar10-resnet"}, r"A spec needs a table \[model\]"),
        ({"threat": {"kind": "linf", "eps": "8"}}, "is a number, got '8'"),
        ({"threat": {"kind": "linf", "eps": 8}}, "did you mean 8/255"),
        ({"threat": {"kind": "linf"}}, "'eps' is missing"),
        ({"threat": 8}, "A threat is one of"),
        ({"data": {"images": "some"}}, "Images are"),
        ({"data": {"images": 5}}, "5"),
        ({"data": {"images": [0.5]}}, "Images are"),
        ({"data": {"source": 5}}, "is a text, got 5"),
        ({"data": 5}, "A table of keys is expected"),
        ({"data": {"source": "folder"}}, "needs `path`"),
        ({"data": {"split": "train"}}, "does not take `split`"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_type_in_a_spec_is_one_sentence(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        spec_of(**changes)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


@pytest.mark.parametrize("table", [{}, {"data": {}}, 5, None, "spec", []], ids=repr)
def test_a_spec_without_a_model_is_one_sentence(table):
    with pytest.raises(InputError, match=r"\[model\]"):
        EvaluationSpec.of(table)


def test_all_images_of_a_source():
    assert spec_of(data={"images": "all"}).data.images == "all"
    assert spec_of(data={"images": " ALL "}).plain()["data"] == {"images": "all"}
    assert spec_of(data={"images": "0-63"}).hash == spec_of().hash


def test_construct_and_make_say_what_is_wrong():
    assert construct(Old, {"names": ["a"]}, "key of [old]") == Old(names=("a",))
    with pytest.raises(InputError, match=r"^Unknown key of \[old\] 'step'; did you mean 'steps'"):
        construct(Old, {"step": 5}, "key of [old]")
    with pytest.raises(InputError, match="A thing is one of a, b or a table with a kind, got 5"):
        make(5, Old, {"a": Old, "b": Old}, "thing")
    for kind in ATTACKS:
        assert attacks_of(kind) == attacks_of({"kind": kind}) == ATTACKS[kind]

"""Models by name: every scheme, a user's own model from a function, and no code that the caller did not allow."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffpure.classifiers.load import CLASSIFIERS, load_classifier
from diffpure.errors import InputError
from diffpure.models.cards import Card, cards
from diffpure.models.code import SOURCE, load_object
from diffpure.models.identity import identify
from diffpure.scores.load import SCORES, load_score

MINE = """
import torch
from torch import nn
import diffpure as dp
from helper import SCALE

open("ran", "w").close()

class Net(nn.Module):
    def __init__(self, classes, sign):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.sign = nn.Linear(12, classes), sign

    def forward(self, x):
        return self.sign * SCALE * self.layer(x.flatten(1))

def classifier(classes=3, sign=1.0):
    return Net(classes, sign)

def function():
    return lambda x: x.flatten(1)

def score(strength=0.5):
    return dp.DenoiserScore(lambda y, sigma: strength * y)

def number():
    return 7

THREE = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's Python file that leaves a trace when it is run, and a working folder elsewhere."""
    (tmp_path / "spec").mkdir()
    (tmp_path / "spec" / "mine.py").write_text(MINE)
    (tmp_path / "spec" / "helper.py").write_text("SCALE = 2.0\n")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    return tmp_path / "spec"


X = torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def one_sentence(error: pytest.ExceptionInfo[InputError]) -> None:
    assert str(error.value).endswith(".")
    assert ". " not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_classifier_of_a_users_own_file(mine: Path) -> None:
    model = load_classifier("python:mine.py:classifier", allow_code=True, arguments={"classes": 5}, base=mine)
    assert model(X).shape == (2, 5)
    assert not any(p.requires_grad for p in model.parameters())
    assert str(mine) not in sys.path
    flat = load_classifier(f"python:{mine / 'mine.py'}:function", allow_code=True)
    assert torch.equal(flat(X), X.flatten(1))


def test_a_score_of_a_users_own_file(mine: Path) -> None:
    score = load_score("python:mine.py:score", allow_code=True, arguments={"strength": 0.25}, base=mine)
    t = torch.tensor([0.1, 0.1], dtype=torch.float64)
    exact = -(1 - 0.25) * X / score.sde.std(t[:1]) ** 2  # of D(y) = y / 4: ε̂ = (y - D) / σ = ¾ x / std
    assert torch.allclose(score(X, t), exact.float(), rtol=1e-5)
    with pytest.raises(InputError, match=r"returned int, but a score model is wanted; dp\.DenoiserScore makes one"):
        load_score("python:mine.py:number", allow_code=True, base=mine)


def test_a_module_that_can_be_imported(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(mine))
    assert load_classifier("python:mine:classifier", allow_code=True)(X).shape == (2, 3)
    sys.modules.pop("mine")


@pytest.mark.parametrize("load", [load_classifier, load_score, lambda name, **k: load_object(name, k.get("arguments"))])
def test_nothing_of_a_users_file_runs_unless_it_is_allowed(load: Any, mine: Path) -> None:
    with pytest.raises(InputError, match=r"runs code when it is loaded, .* --allow-code .*allow_code=True") as error:
        load(f"python:{mine / 'mine.py'}:classifier")
    one_sentence(error)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("python:gone.py:classifier", {}, r"There is no Python file .*gone\.py"),
        ("python:gone.package:classifier", {}, "The module 'gone.package' could not be imported"),
        ("python:mine.py:gone", {}, r"mine\.py has no function 'gone'"),
        ("python:mine.py:THREE", {}, r"mine\.py has no function 'THREE'"),
        ("python:mine.py:classifier", {"clases": 3}, "does not take these arguments .*clases"),
        ("python:mine.py", {}, "is not python:PACKAGE.MODULE:FUNCTION or python:FILE.py:FUNCTION"),
        ("python::", {}, "is not python:PACKAGE.MODULE:FUNCTION"),
        ("python:mine.py:number", {}, "returned int, but a classifier from images to logits is wanted"),
        ("python:wrong.py:f", {}, r"wrong\.py is not valid Python \(line 1"),
        ("python:lonely.py:f", {}, r"lonely\.py could not be imported \(No module named 'nowhere'\)"),
        ("python:builtins:print", {}, "has no file, so its code cannot be identified"),
    ],
)
def test_a_name_that_leads_nowhere_says_so(name: str, arguments: dict[str, Any], message: str, mine: Path) -> None:
    (mine / "wrong.py").write_text("def f(:\n")
    (mine / "lonely.py").write_text("import nowhere\n")
    with pytest.raises(InputError, match=message) as error:
        load_classifier(name, allow_code=True, arguments=arguments, base=mine)
    one_sentence(error)


def test_the_code_and_the_arguments_of_a_users_model_name_it(mine: Path) -> None:
    def name(**arguments: Any) -> str:
        return identify(load_classifier("python:mine.py:classifier", allow_code=True, arguments=arguments, base=mine))

    first = name()
    assert name() == first
    assert name(sign=-1.0) != first
    (mine / "mine.py").write_text(MINE.replace("self.sign * SCALE", "-self.sign * SCALE"))
    assert name() != first  # equal weights, other code
    made = load_object("python:mine.py:classifier", {}, True, mine)
    assert len(getattr(made, SOURCE)) == 64


def torchscript(path: Path, sign: float) -> Path:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return sign * self.layer(x.flatten(1))

    torch.jit.trace(Net(), X).save(path)
    return path


@pytest.mark.filterwarnings("ignore")
def test_torchscript_runs_only_where_it_is_allowed_and_is_named_by_its_code(tmp_path: Path) -> None:
    one, other = torchscript(tmp_path / "one.pt", 1.0), torchscript(tmp_path / "other.pt", -1.0)
    with pytest.raises(InputError, match=r"one\.pt, a file of TorchScript, runs code .*--allow-code") as error:
        load_classifier(one)
    one_sentence(error)
    names = [identify(load_classifier(path, allow_code=True)) for path in (one, one, other)]
    assert names[0] == names[1] != names[2]


def test_a_name_that_only_ends_like_onnx_is_not_opened_without_leave(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(InputError, match=r"model\.onnx, a file of ONNX, runs code"):
        load_classifier("model.onnx", base=tmp_path)


def test_an_onnx_file_is_named_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the runtime, whose sessions nobody can look into."""
    runtime = ModuleType("onnxruntime")
    runtime.InferenceSession = lambda *_, **__: type("Session", (), {"get_inputs": lambda self: [runtime]})()  # type: ignore[attr-defined]
    runtime.name = "x"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    names = []
    for content in (b"one", b"one", b"other"):
        (tmp_path / "model.onnx").write_bytes(content)
        names.append(identify(load_classifier(tmp_path / "model.onnx", allow_code=True)))
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "\ud800", "", ".", "/", "~", "python:" + "a" * 5000 + ".py:f"])
@pytest.mark.parametrize("load", [load_classifier, load_score])
def test_odd_names_are_no_models(load: Any, name: str) -> None:
    with pytest.raises(InputError):
        load(name, allow_code=True)


@pytest.mark.parametrize("name", ["timm:hf-hub:owner/model", "timm:hf_hub:owner/model", "timm:local-dir:/tmp/x"])
def test_weights_that_a_zoo_would_fetch_from_anybody_need_leave(name: str) -> None:
    with pytest.raises(InputError, match="runs code when it is loaded"):
        load_classifier(name)


def test_a_zoo_takes_arguments_that_its_loader_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []
    zoo, parent = ModuleType("robustbench.utils"), ModuleType("robustbench")
    zoo.load_model = lambda **given: asked.append(given) or nn.Flatten()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "robustbench", parent)
    monkeypatch.setitem(sys.modules, "robustbench.utils", zoo)
    load_classifier("robustbench:Standard", arguments={"dataset": "imagenet", "threat": "L2"})
    assert asked == [{"model_name": "Standard", "dataset": "imagenet", "threat_model": "L2"}]
    with pytest.raises(InputError, match="does not take these arguments"):
        load_classifier("robustbench:Standard", arguments={"norm": "L2"})
    with pytest.raises(InputError, match="cifar10-resnet takes no arguments; models of the scheme python: do"):
        load_classifier("cifar10-resnet", arguments={"classes": 3})


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (load_classifier, "weights.safetensors", r"There is no file weights\.safetensors"),
        (load_classifier, "./model", "There is no file"),
        (load_score, "folder/score.pt", r"There is no file folder/score\.pt"),
        (load_classifier, "cifar10-resnt", "did you mean 'cifar10-resnet'"),
        (load_score, "cifar10-smal", "did you mean 'cifar10-small'.*owner/name"),
        (load_score, "cifar10-resnet", "Unknown score 'cifar10-resnet'"),
        (load_classifier, "nosuch:model", "Unknown classifier 'nosuch:model'.*timm:NAME"),
    ],
)
def test_unknown_names_say_what_is_accepted(
    load: Any, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        load(name)
    assert "\n" not in str(error.value)


def test_a_file_is_relative_to_the_folder_of_the_spec(tmp_path: Path) -> None:
    (tmp_path / "own.safetensors").write_bytes(cards()["cifar10-vit-tiny"].path.read_bytes())
    own = load_classifier("own.safetensors", like="cifar10-vit-tiny", base=tmp_path)
    x = torch.rand(1, 3, 32, 32)
    assert torch.equal(own(x), load_classifier("cifar10-vit-tiny")(x))


def test_every_card_has_its_architecture_and_one_form() -> None:
    for card in cards().values():
        assert isinstance(card, Card)
        assert card.architecture in (SCORES if card.kind == "score" else CLASSIFIERS).architectures
        assert card.licence
        assert card.embedded == (card.where == "in the package")
        assert not (card.arguments and card.config)
        assert card.plain()["kind"] == card.kind
    assert cards()["cifar10-resnet"].measured["accuracy"]["correct"] == 9328
    assert cards()["cifar10-small"].made["seed"] == 0


def test_the_page_names_every_scheme() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models-and-data.md").read_text()
    schemes = [
        *(f"`{zoo}:NAME`" for zoo in CLASSIFIERS.zoos),
        *CLASSIFIERS.programs,
        "`python:package.module:function`",
    ]
    assert [scheme for scheme in schemes if scheme not in page] == []

"""What names a model part: weights, code and everything a function closes over, equal in every process."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diffpure.classifiers.foreign import from_callable
from diffpure.classifiers.load import load_classifier
from diffpure.diffusion.score import GaussianScore
from diffpure.diffusion.sde import VPSDE
from diffpure.errors import InputError
from diffpure.models.identity import Unidentifiable, identify
from diffpure.scores import DenoiserScore, load_score

W = torch.arange(12.0).reshape(6, 2)


def linear(w: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda z: z.flatten(1) @ w


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


class Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, z: Tensor) -> Tensor:
        return self.by * z

    def method(self, z: Tensor) -> Tensor:
        return self.by + z


class Temperature(nn.Module):
    def __init__(self, value: float, then: Any = None) -> None:
        super().__init__()
        self.value = value
        self.then = then

    def forward(self, z: Tensor) -> Tensor:
        return z / self.value


def outer(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def nested(z: Tensor, *, by: int = 2) -> Tensor:
        return by * inner(z)

    return nested


def scaled(by: float, z: Tensor) -> Tensor:
    return by * z


class WithExtraState(nn.Module):
    def __init__(self, secret: Any) -> None:
        super().__init__()
        self._secret = secret

    def get_extra_state(self) -> Any:
        return self._secret


def with_hook(network: nn.Module, by: float) -> nn.Module:
    network.register_forward_hook(lambda module, args, out: by * out)
    return network


# Pairs that must differ; each is made twice, and equal makings must agree.
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a closure over w and over -w": (lambda: linear(W), lambda: linear(-W)),
    "a closure over another type": (lambda: linear(W), lambda: linear(W.double())),
    "another shape": (lambda: linear(W), lambda: linear(W.reshape(2, 6))),
    "a global name": (lambda: lambda z: z @ W, lambda: lambda z: z @ -W),
    "a constant": (lambda: lambda z: 2 * z, lambda: lambda z: 3 * z),
    "an array": (lambda: functools.partial(scaled, np.ones(2)), lambda: functools.partial(scaled, np.zeros(2))),
    "a keyword": (lambda: functools.partial(scaled, by=1.0), lambda: functools.partial(scaled, by=2.0)),
    "nested functions": (lambda: outer(linear(W)), lambda: outer(linear(-W))),
    "a bound method": (lambda: Scaled(1.0).method, lambda: Scaled(2.0).method),
    "another method": (lambda: Scaled(1.0).method, lambda: Scaled(1.0).__call__),
    "an object that is called": (lambda: Scaled(1.0), lambda: Scaled(2.0)),
    "weights": (lambda: network(0), lambda: network(1)),
    "a closure over a network": (lambda: outer(network(0)), lambda: outer(network(1))),
    "layers without weights": (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.SiLU())),
    "settings of a layer": (lambda: nn.AvgPool2d(2), lambda: nn.AvgPool2d(3)),
    "a number of a module": (lambda: Temperature(1.0), lambda: Temperature(2.0)),
    "a function of a module": (lambda: Temperature(1.0, linear(W)), lambda: Temperature(1.0, linear(-W))),
    "networks in a list": (lambda: Temperature(1.0, [network(0)]), lambda: Temperature(1.0, [network(1)])),
    "an extra state": (lambda: WithExtraState({"w": W}), lambda: WithExtraState({"w": -W})),
    "a package's wrapper": (lambda: torch.vmap(lambda z: z + 1), lambda: torch.vmap(lambda z: z + 2)),
    "a hook": (lambda: with_hook(network(), 1.0), lambda: with_hook(network(), 2.0)),
    "a denoiser": (lambda: DenoiserScore(outer(linear(W))), lambda: DenoiserScore(outer(linear(-W)))),
    "the range of a denoiser": (lambda: DenoiserScore(scaled), lambda: DenoiserScore(scaled, unit_range=True)),
    "a schedule": (lambda: DenoiserScore(scaled), lambda: DenoiserScore(scaled, sde=VPSDE(0.1, 10.0))),
    "a dataclass": (lambda: GaussianScore(0.0), lambda: GaussianScore(0.5)),
    "a classifier from a function": (lambda: from_callable(linear(W)), lambda: from_callable(linear(-W))),
    "functions of a package": (lambda: torch.relu, lambda: torch.tanh),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_different_parts_have_different_names_and_equal_parts_equal_ones(name: str) -> None:
    one, other = PAIRS[name]
    assert identify(one()) == identify(one())
    assert identify(other()) == identify(other())
    assert identify(one()) != identify(other())


def test_a_buffer_that_no_state_dict_holds_counts() -> None:
    def shifted(by: float) -> nn.Module:
        module = nn.Identity()
        module.register_buffer("by", torch.tensor(by), persistent=False)
        return module

    assert identify(shifted(1.0)) != identify(shifted(2.0))


def test_how_a_network_is_laid_out_or_used_does_not_count() -> None:
    def convolution() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(3, 4, 3)

    name = identify(convolution())
    assert identify(convolution().to(memory_format=torch.channels_last)) == name
    assert identify(convolution().eval().requires_grad_(False)) == name


def test_a_model_of_the_package_keeps_its_name_when_its_class_gains_an_option() -> None:
    def score(option: bool | None) -> DenoiserScore:
        made = DenoiserScore(scaled)
        if option is not None:
            made.sharpen = option
        return made

    assert identify(score(None)) == identify(score(False)) != identify(score(True))


def test_the_embedded_models_keep_the_names_that_committed_runs_have() -> None:
    assert identify(load_classifier("cifar10-resnet")).startswith("e6153fcc9660bc83")
    assert identify(load_score("cifar10-small")).startswith("7f070caa58e4f298")


@pytest.mark.filterwarnings("ignore")
def test_torchscript_with_equal_weights_and_other_code_differs(tmp_path: Path) -> None:
    class Negated(nn.Module):
        def __init__(self, inner: nn.Module, sign: float) -> None:
            super().__init__()
            self.inner, self.sign = inner, sign

        def forward(self, z: Tensor) -> Tensor:
            return self.sign * self.inner(z)

    names = []
    for sign in (1.0, -1.0):
        file = tmp_path / f"{sign}.pt"
        torch.jit.trace(Negated(network(), sign), torch.zeros(1, 4)).save(file)
        names += [identify(torch.jit.load(file)), identify(torch.jit.load(file))]
    assert names[0] == names[1] != names[2] == names[3]
    constant = [torch.jit.trace(linear(w), torch.zeros(1, 6)) for w in (W, -W)]
    assert identify(constant[0]) != identify(constant[1])


def test_it_ends_where_things_hold_each_other() -> None:
    module = Temperature(1.0)
    module.then = module.forward  # a bound method of itself
    values: list[Any] = [1]
    values.append(values)
    assert len(identify(module)) == len(identify(outer(functools.partial(scaled, values)))) == 64  # type: ignore[arg-type]


@pytest.mark.parametrize("hidden", [torch.Generator(), random.Random(0), (i for i in "ab"), object(), open])
def test_what_cannot_be_named_is_refused_in_one_sentence(hidden: Any) -> None:
    def function(z: Tensor) -> Tensor:
        return hidden and z

    if hidden is open:
        assert identify(function)
        return
    with pytest.raises(Unidentifiable, match=r"'hidden' in function is an? \w+, which cannot be identified") as error:
        identify(function)
    assert isinstance(error.value, InputError)
    assert str(error.value).count(". ") == 0
    with pytest.raises(Unidentifiable, match=r"'hidden' in Temperature\.then"):
        identify(Temperature(1.0, function))


PROGRAM = """
import functools, math, sys
import numpy as np, torch
from torch import nn
from diffpure.models.identity import identify

scale = np.array([1.0, 2.0])

class Net(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.layer, self.then, self.kinds = nn.Linear(3, 2), then, {"a", "b", "c"}
        nn.init.constant_(self.layer.weight, 0.5), nn.init.constant_(self.layer.bias, 0.0)

    def forward(self, z):
        return self.then(self.layer(z))

def make(w):
    def inner(z, names=("a", "b"), *, some={"x": 1}):
        return z @ w * math.pi if z in {"p", "q", "r"} else scale
    return functools.partial(inner, some={"y": w})

print(identify(make(torch.ones(2))), identify(Net(make(torch.ones(2)))), identify(lambda z: make(z)))
"""


def test_the_name_is_the_same_in_another_process_and_after_an_import(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    runs = []
    for seed, command in enumerate(
        [["program.py"], ["program.py"], ["-c", "import program"], ["-c", "import program"]]
    ):
        paths = ":".join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        runs.append(done.stdout.split())
    assert len(runs[0]) == 3
    assert runs[0] == runs[1] == runs[2] == runs[3]

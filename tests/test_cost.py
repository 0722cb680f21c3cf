"""What a run will cost: calibrations against the real calls and bytes, estimates against what is then spent."""

from __future__ import annotations

import pytest
import torch
from diffpure.evaluation.calibrate import Calibration, Line, _Peak, calibrate, rows_that_fit
from torch import Tensor, nn

from diffpure.attacks import EOT, PGD
from diffpure.diffusion.gradients import GRADIENT_MODES, Exact, Surrogate
from diffpure.diffusion.samplers import Ancestral, FewStep, Langevin, OneShot, ProbabilityFlow, ReverseSDE
from diffpure.diffusion.score import EpsilonScore
from diffpure.evaluation.cost import Estimate, estimate
from diffpure.evaluation.evaluate import evaluate, prepare
from diffpure.experiments.spec import ATTACKS
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from evaluations import THREAT, defense, problem, spec_of, tiny_world
from problems import images, tiny_classifier, tiny_unet


def test_calibration_counts_calls_and_bytes():
    wide = nn.Sequential(nn.Flatten(), nn.Linear(192, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 5, bias=False))
    wide.requires_grad_(False)
    found = calibrate(wide, images(2))
    assert found.classes == 5
    assert found.calls == (0, 0)
    assert 4 * 4096 * 2 <= found.memory.each <= 4 * 4096 * 4  # the hidden layer, its rectification, their gradients
    assert found.memory.base >= 4 * (192 + 5) * 4096
    need = Line(1000, 100)
    assert [rows_that_fit(need, memory) for memory in (0, 1000, 1750, 10**9)] == [1, 1, 7, 256]


class Counted(EpsilonScore):
    """A score that counts its calls."""

    def __init__(self) -> None:
        inner = tiny_unet(8)
        super().__init__(inner.sde, inner.size)
        self.inner, self.calls = inner, 0

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        return self.inner.epsilon(x, t)


SMALL = {"sde": ReverseSDE(0.05, steps=3), "few-step": FewStep(0.05, steps=2), "one-shot": OneShot(0.05)}
SMALL |= {"ode": ProbabilityFlow(0.05, steps=7), "ld": Langevin(steps=3), "ancestral": Ancestral(0.05, steps=4)}
MODES = {**GRADIENT_MODES, "surrogate": lambda: Surrogate(2), "memory": lambda: Exact(memory=200_000)}


NO_EULER_STEPS = ("few-step", "ancestral")  # the adjoint has no meaning there
PAIRS = [(kind, mode) for kind in SMALL for mode in MODES if mode != "adjoint" or kind not in NO_EULER_STEPS]


@pytest.mark.parametrize(("kind", "mode"), PAIRS)
def test_calibration_knows_every_sampler_and_gradient_mode(kind, mode):
    """What a hollow score counts and takes is what the whole model spends on one image."""
    model = Defense(Purifier(score := Counted(), SMALL[kind], MODES[mode](), rounds=2), tiny_classifier())
    found = calibrate(model, images(1), largest=4)
    assert found.gradient is not None
    assert 0 < found.forward(1) <= found.forward(4)
    assert 0 < found.gradient(1) <= found.gradient(4)
    score.calls = 0
    model(images(1), seeds=[0])
    forward = score.calls
    x = images(1).requires_grad_()
    with (peak := _Peak([*model.parameters(), *model.buffers(), x])):
        torch.autograd.grad(model(x, seeds=[0]).sum(), x)
    assert found.calls == (forward, score.calls - forward)
    assert found.memory.each == pytest.approx(peak.peak, rel=0.25)


def test_calibration_does_not_walk_the_path():
    model = Defense(Purifier(score := Counted(), ReverseSDE(t_star=0.1)), tiny_classifier())
    assert calibrate(model, images(1), largest=4).calls == (100, 200)
    assert score.calls < 12


def test_a_line_through_two_measurements():
    line = Line.through((1, 5.0), (9, 21.0))
    assert (line(1), line(9), line(4)) == (5.0, 21.0, 11.0)
    assert (line + line).times(0.5) == line
    assert Line.through((1, 5.0), (4, 3.0))(4) == 3.0  # a machine that was busy for a while
    assert Line.through((1, 1.0), (4, 40.0)).base == 0.0
    assert Line.through((2, 6.0), (2, 6.0)) == Line(0.0, 3.0)


def test_seconds_are_those_of_the_calls_that_are_made():
    """One call costs 10 s and 1 s an image, a gradient ten times that: 4 images, 3 samples, at most 6 images a call."""
    x, y = problem(4)
    ready = prepare(defense(), x, y, THREAT, [PGD(iterations=2, eot=EOT(3))], rules=["worst of 2"], batch=4, rows=6)
    price = Calibration(5, (3, 6), Line(0, 1), forward=Line(10, 1), gradient=Line(100, 10), rows=6)
    said = estimate(ready.job, price, ready.units)
    judged = 2 * 4 * 2 * 16 / 6  # clean and attacked, 4 images, 2 samples, at the price of one of six in a call
    looks = 4 * 3 * (2 * 160 / 6 + 2 * 16 / 6)  # two with a gradient, the first and the last without
    assert said.seconds == pytest.approx(judged + looks)
    assert (said.images, said.gradients, said.queries, said.memory) == (4, 4 * 6, 4 * (6 + 2 * 2), 6)


@pytest.mark.parametrize("kind", sorted(ATTACKS))
def test_an_estimate_is_what_is_then_spent(kind):
    """But for attacks that stop early (less) or ask about doubtful images again (a little more)."""
    spec = spec_of(
        model={"classifier": "cifar10-resnet", "score": "cifar10-small"},
        data={"images": "0-1"},
        threat={"kind": "flow", "eps": 0.05} if kind == "stadv" else {},
        attacks=[{"kind": kind}],
    ).tiny()
    said: list[Estimate] = []
    world = tiny_world(spec)
    given = (world.model, world.images, world.labels, spec.threat.make(), spec.make_attacks())
    spent = evaluate(*given, rules=spec.rules, on_estimate=said.append).spent()
    assert "score calls" in str(said[0])
    if kind in ("autoattack-standard", "bpda-eot"):
        assert spent["gradients"] <= said[0].gradients
    elif kind != "transfer":  # whose own gradients are those of the bare classifier
        assert said[0].gradients == spent["gradients"]
    if kind not in ("autoattack-standard", "bpda-eot"):
        assert said[0].score_calls == spent["score_calls"]

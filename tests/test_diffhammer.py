"""DiffHammer: its gradient against formulas written out, its ablations against what they reduce to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from diffpure.attacks import DIFFHAMMER, EOT, LOSSES, DiffHammer, attacks_of, expect, margin, sample_seeds
from diffpure.attacks.state import Problem
from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.threats import L2, Flow, Linf, Norm
from victims import Linear, Noisy, problem

THREATS = (Linf(0.05), L2(0.3))
SEEDS = (1, 2, 3)


class Shifted(nn.Module):
    """A purifier that blurs and adds noise: its Jacobian is the same for every sample."""

    stochastic = True

    def forward(self, x: Tensor, seeds=None) -> Tensor:
        return nn.functional.avg_pool2d(x, 3, 1, 1) + 0.3 * Noise.of(seeds, len(x))(0, x)


class Parts(nn.Module):
    """A defence of two parts."""

    stochastic = True

    def __init__(self, purifier: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.purifier, self.classifier = purifier, classifier

    def forward(self, x: Tensor, seeds=None) -> Tensor:
        return self.classifier(self.purifier(x, seeds))


class Bent(nn.Module):
    """A classifier whose gradient differs from image to image."""

    def forward(self, x: Tensor) -> Tensor:
        return Linear(5, 64)(x.sin() + x.square())


def asked(attack: DiffHammer, model: nn.Module, threat: Norm) -> tuple[Problem, Tensor, Tensor]:
    """The problem of three images, a perturbation, and the gradient that the attack takes there at step 4."""
    x, y = problem(3)
    at = Problem(model, x.double(), y, threat, SEEDS)
    z = threat.random(at.x, Noise(SEEDS))
    seen = attack.ask(at, z, attack.eot, 4, y, True)
    assert seen.gradient is not None
    return at, z, seen.gradient


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("loss", ["margin", "dlr"])
def test_without_its_ideas_it_is_the_plain_expectation_over_samples(threat, loss):
    plain = DiffHammer(eot=4, graft=False, weights=False, loss=loss)
    at, z, gradient = asked(plain, Parts(Noisy().purifier, Bent()), threat)
    mean = expect(at.model, at.x + z, at.y, LOSSES[loss], EOT(4), SEEDS, 4, gradient=True)
    torch.testing.assert_close(gradient, mean.gradient)


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("graft", [True, False])
def test_the_gradient_is_the_formula(threat, graft):
    model, n, lam = Parts(Noisy().purifier, Bent()), 5, 3.0
    at, z, gradient = asked(DiffHammer(eot=n, graft=graft, sharpness=lam), model, threat)
    for b, y in enumerate(at.y.tolist()):
        seeds = sample_seeds(SEEDS, 4, n)[b * n : (b + 1) * n]
        image = (at.x + z)[b : b + 1].requires_grad_()
        purified = [model.purifier(image, [seed]) for seed in seeds]
        losses, grads = [], []
        for p in purified:
            leaf = p.detach().requires_grad_()
            value = margin(model.classifier(leaf), torch.tensor([y]))
            losses.append(value.item())
            grads.append(torch.autograd.grad(value.sum(), leaf)[0])
        unit = [g.sign() if isinstance(threat, Linf) else g / g.norm() for g in grads]
        after = torch.tensor(
            [[losses[i] + threat.eps * (unit[j] * grads[i]).sum() for i in range(n)] for j in range(n)]
        )
        j = int(torch.where(after > 0, after, after.exp() - 1).sum(1).argmax())
        w = 1 / (1 + (-lam * after[j]).exp())
        w = w / w.sum()
        if graft:
            r = sum(w[i] * grads[i] for i in range(n))
            (wanted,) = torch.autograd.grad(purified[j], image, r)
        else:
            pulled = [torch.autograd.grad(purified[i], image, w[i] * grads[i], retain_graph=True)[0] for i in range(n)]
            wanted = sum(pulled)
        torch.testing.assert_close(gradient[b : b + 1], wanted, rtol=1e-5, atol=1e-7)


def test_grafting_is_exact_where_all_samples_have_the_same_jacobian():
    grafted, own = (DiffHammer(eot=4, graft=graft) for graft in (True, False))
    model = Parts(Shifted(), Bent())
    torch.testing.assert_close(asked(grafted, model, Linf(0.05))[2], asked(own, model, Linf(0.05))[2])


def test_it_finds_the_known_optimum_on_a_linear_defence():
    """A linear classifier behind a linear purifier: the best perturbation is ε times the sign of the weights' pull."""
    x, y = problem()
    model, threat = Parts(Shifted(), Linear(2, 64)), Linf(0.02)
    y = Linear(2, 64)(x).argmax(1)
    z = DiffHammer(iterations=20, eot=4).run(model, x, y, threat, seeds=range(6)).state["last"]
    leaf = x.clone().requires_grad_()
    (pull,) = torch.autograd.grad(margin(model(leaf, seeds=range(6)), y).sum(), leaf)
    torch.testing.assert_close(z, threat.eps * pull.sign())


def test_far_from_the_boundary_the_weights_still_sum_to_one():
    steep = Parts(Noisy().purifier, Linear(5, 64, scale=1e3))
    gradient = asked(DiffHammer(eot=3, sharpness=50.0), steep, Linf(1e-6))[2]
    assert torch.isfinite(gradient).all()
    assert (gradient.flatten(1).abs().amax(1) > 0).all()


def test_the_named_attack_has_three_losses_and_takes_the_switches():
    (found,) = attacks_of({"kind": "diffhammer", "graft": False, "eot": 4, "iterations": 3})
    assert [member.loss for member in DIFFHAMMER.attacks] == ["margin", "ce", "dlr"]
    assert [(m.graft, m.weights, m.eot.samples, m.iterations) for m in found.attacks] == [(False, True, 4, 3)] * 3
    assert found.attacks[0].title == "DiffHammer-3 on margin, no graft, EOT 4"


def test_it_says_what_it_needs():
    x, y = problem()
    with pytest.raises(InputError, match="needs a defence"):
        DiffHammer()(Linear(5, 64), x, y, Linf(0.05))
    with pytest.raises(InputError, match="not in Flow"):
        replace(DiffHammer(), iterations=2)(Noisy(), x, y, Flow(0.1))

"""Attacks: closed-form optima and published settings, losses, saturated and bad gradients, and bad input."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from diffpure.attacks import (
    APGD,
    AUTOATTACK_RAND,
    AUTOATTACK_STANDARD,
    BPDA_EOT,
    DIFFUSION_ONLY,
    EOT,
    FAB,
    LOSSES,
    PGD,
    PGD_LEE_KIM,
    TRANSFER,
    Attack,
    LogitLoss,
    MomentumPGD,
    Square,
    StAdv,
    Suite,
    Transfer,
    margin,
    strong,
)
from diffpure.attacks.apgd import checkpoints
from diffpure.attacks.losses import DIFFERENCE
from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.threats import L2, Flow, Linf, ThreatModel
from victims import Linear, problem

# ------------------------------------------------------------------------------------------------------ known answers


def dual(threat: ThreatModel, w: Tensor) -> Tensor:
    return w.abs().sum(-1) if isinstance(threat, Linf) else w.norm(dim=-1)


@pytest.mark.parametrize("threat", [Linf(0.01), L2(0.05)], ids=str)
@pytest.mark.parametrize(
    "attack",
    [
        PGD(iterations=20, step_size=0.05),
        APGD(iterations=20),
        APGD(iterations=20, loss="margin"),
        PGD(iterations=20, random_start=False),
        MomentumPGD(iterations=30),
        MomentumPGD(iterations=30, loss="margin"),
    ],
    ids=lambda a: a.name,
)
def test_two_classes_of_a_linear_model_lose_the_optimal_margin(attack: Attack, threat: ThreatModel):
    x, y = problem(classes=2)
    model = Linear(2, 64)
    gain = margin(model(threat.apply(x, attack(model, x, y, threat, seeds=range(6)))), y) - margin(model(x), y)
    optimum = threat.eps * dual(threat, model.w[0] - model.w[1])
    assert (gain >= 0.99 * optimum).all()
    assert (gain <= 1.0001 * optimum).all()


@pytest.mark.parametrize("threat", [Linf(0.01), L2(0.05)], ids=str)
def test_targeted_apgd_reaches_the_best_class_of_a_linear_model(threat: ThreatModel):
    x, y = problem()
    model = Linear(5, 64)
    z = APGD(iterations=20, loss="dlr-targeted")(model, x, y, threat, seeds=range(6))
    towards = model.w[None] - model.w[y][:, None]
    reach = (model(x) - model(x).gather(1, y[:, None])) + threat.eps * dual(threat, towards)
    best = reach.scatter(1, y[:, None], -torch.inf).amax(1)
    clean = margin(model(x), y)
    assert (margin(model(threat.apply(x, z)), y) - clean >= 0.99 * (best - clean)).all()


@pytest.mark.parametrize("threat", [Linf(1.0), L2(8.0)], ids=str)
def test_fab_finds_the_minimal_distance_of_a_linear_model(threat: ThreatModel):
    x, y = problem()
    model = Linear(5, 64)
    run = FAB(iterations=10).run(model, x, y, threat, seeds=range(6))
    towards = dual(threat, model.w[None] - model.w[y][:, None])
    gap = (model(x).gather(1, y[:, None]) - model(x)) / towards
    nearest = gap.scatter(1, y[:, None], torch.inf).amin(1)
    torch.testing.assert_close(run.state["distance"], nearest.double(), rtol=0.01, atol=0)
    assert (run.state["distance"] >= 0.9999 * nearest).all()
    assert torch.equal(threat.size(run.state["nearest"]), run.state["distance"])
    assert run.misclassified.all()


@pytest.mark.parametrize("threat", [Linf(0.01), L2(0.05)], ids=str)
def test_square_lowers_the_margin_monotonically(threat: ThreatModel):
    x, y = problem()
    seen: list[Tensor] = []
    run = Square(queries=60, horizon=60).run(
        Linear(5, 64), x, y, threat, seeds=range(6), on_step=lambda run: seen.append(run.state["value"])
    )
    assert all((b >= a).all() for a, b in pairwise(seen))
    assert (seen[-1] > seen[0] + 0.01).all()
    assert threat.within(x, run.z).all()


def test_stadv_moves_a_bright_bar_to_where_the_model_reads_another_class():
    x = torch.exp(-((torch.arange(8) - 3.4) ** 2)).expand(1, 1, 8, 8)  # the model reads the class from columns 3 and 4
    model = lambda images: 10 * images[:, 0].mean(1)[:, 3:5]  # noqa: E731
    threat = Flow(0.3)  # a little more than a pixel
    attack = StAdv(iterations=60)
    z = attack(model, x, torch.tensor([0]), threat)
    assert model(threat.apply(x, z)).argmax(1).item() == 1
    assert threat.within(x, z).all()
    rough = replace(attack, smoothness=0.0)(model, x, torch.tensor([0]), threat)
    assert threat.roughness(z) < threat.roughness(rough)


class Coin(nn.Module):
    """A random model whose answer has nothing to do with the image: a margin that is normal with mean -1."""

    stochastic = True

    def forward(self, x: Tensor, seeds=None) -> Tensor:
        noise = Noise.of(seeds, len(x))(0, x.new_zeros(len(x), 1)) - 1 + 0 * x.sum((1, 2, 3))[:, None]
        return torch.cat([torch.zeros_like(noise), noise], 1)


@pytest.mark.parametrize("attack", [PGD(iterations=20), APGD(iterations=20), MomentumPGD(iterations=20, confirm=1)])
def test_a_random_model_is_not_attacked_by_luck(attack: Attack):
    """Where no perturbation matters, an attack must not claim more than the two candidates it compares would show by
    chance: P(a sample fails) = 0.159, of the last iterate or the unperturbed image 0.292, of the best of 21 0.97."""
    x = torch.full((400, 1, 2, 2), 0.5)
    run = attack.run(Coin(), x, torch.zeros(400, dtype=torch.int64), Linf(0.1), seeds=range(400))
    share = run.misclassified.double().mean().item()
    assert share == pytest.approx(1 - 0.8413**2, abs=0.09)  # four standard deviations


def test_momentum_averages_the_noise_of_gradients():
    """On a linear model whose weights are drowned in noise that changes with every sample, momentum over steps finds
    the direction that one sample per step without it does not."""
    w = torch.linspace(-1, 1, 64).double()

    class Drowned(nn.Module):
        stochastic = True

        def forward(self, x: Tensor, seeds=None) -> Tensor:
            noise = Noise.of(seeds, len(x))(0, x.flatten(1))
            z = ((w + 4 * noise) * x.flatten(1)).sum(1)
            return torch.stack([-z, z], 1)

    x, y, threat = torch.full((16, 1, 8, 8), 0.5).double(), torch.zeros(16, dtype=torch.int64), Linf(0.1)
    gains = {}
    for momentum in (0.0, 0.9):
        attack = MomentumPGD(iterations=60, momentum=momentum, confirm=1, loss="margin")
        state = attack.run(Drowned(), x, y, threat, seeds=range(16)).state
        gains[momentum] = (state["z"].flatten(1) @ w).mean().item() / (threat.eps * w.abs().sum().item())
    assert gains[0.9] > gains[0.0] + 0.1


def test_the_strong_attack_tries_several_classes_of_a_model_that_is_not_random():
    """The nearest class need not be the one that the budget reaches: here it is flat, and climbing towards it leads
    away from the other one, whose optimum is its logit plus eps times the ℓ1 norm of its weights."""

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            change = (x - 0.5).flatten(1).sum(1)
            return torch.stack([torch.zeros_like(change), -0.1 - 0.01 * change, change - 1], 1)

    x, y, threat = torch.full((4, 1, 8, 8), 0.5).double(), torch.zeros(4, dtype=torch.int64), Linf(0.05)
    nearest = replace(strong(80), per_target=None).unsampled().run(Flat(), x, y, threat, seeds=range(4))
    assert not nearest.misclassified.any()
    found = strong(80).unsampled().run(Flat(), x, y, threat, seeds=range(4))
    assert found.state["rank"].tolist() == pytest.approx([64 * 0.05 - 1] * 4)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_strong_attack_spends_its_gradients_whatever_the_number_of_classes(classes: int):
    for gradients in (20, 40, 80):
        alone = strong(gradients).unsampled()
        assert sum(each.gradients for each in alone.account(classes)) == gradients
    assert strong(20).unsampled().loss == "margin"
    assert (alone.loss, alone.targets, alone.iterations) == ("difference", 4, 20)
    run = alone.run(Linear(classes, 64), *problem(), Linf(0.05), seeds=range(6))
    assert (run.state["gradients"] == 80).all()
    with pytest.raises(InputError, match="per_target of at least 1"):
        MomentumPGD(per_target=0)


def test_checkpoints_are_those_of_the_paper():
    assert list(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert checkpoints(100)[41] == 19
    assert list(checkpoints(1)) == [1]


def test_the_suites_are_the_published_ones():
    assert [a.name for a in AUTOATTACK_STANDARD] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert [a.name for a in AUTOATTACK_RAND] == ["apgd-ce", "apgd-dlr"]
    assert all(a.eot.samples == 20 and a.iterations == 100 for a in AUTOATTACK_RAND)
    assert AUTOATTACK_STANDARD[1].steps(10) == 9 * 101
    assert sum(s.queries for s in AUTOATTACK_STANDARD[3].account(10)) == 5001
    assert (BPDA_EOT.attack.eot, BPDA_EOT.defence_samples) == (EOT(15, "logits"), 150)
    assert (PGD_LEE_KIM.iterations, PGD_LEE_KIM.step_size, PGD_LEE_KIM.eot.samples) == (200, 0.007, 20)
    assert (StAdv().iterations, StAdv().lr, StAdv().smoothness) == (100, 0.01, 0.0025)
    assert (FAB().iterations, FAB().alpha_max, FAB().eta, FAB().beta, FAB().restarts) == (100, 0.1, 1.05, 0.9, 1)
    assert TRANSFER.part == "classifier"
    assert DIFFUSION_ONLY.part == "purifier"


# ------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    ("loss", "label", "target", "value"),
    [
        ("margin", 0, 0, 1 - 3),
        ("margin", 1, 1, 3 - 1),  # misclassified
        ("difference", 0, 2, 0 - 3),
        ("dlr", 0, 0, (1 - 3) / (3 - 0)),
        ("dlr", 1, 1, (3 - 1) / (3 - 0)),
        ("dlr-targeted", 0, 2, (0 - 3) / (3 - (0 - 2) / 2)),
        ("dlr-targeted", 1, 0, (3 - 1) / (3 - (0 - 2) / 2)),
    ],
)
def test_losses_are_those_of_their_papers(loss: str, label: int, target: int, value: float):
    logits = torch.tensor([[[3.0, 1.0, 0.0, -2.0]], [[4.0, 2.0, 1.0, -1.0]]]).double()  # a shift changes nothing
    of = {**LOSSES, "difference": DIFFERENCE}[loss]
    found = of.loss(logits, torch.tensor([label] * 2), torch.tensor([target] * 2))
    torch.testing.assert_close(found, torch.full((2,), value, dtype=torch.float64))


def test_the_log_of_the_mean_cross_entropy_points_where_the_mean_does():
    logits = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(3)).double().requires_grad_()
    y = torch.arange(4)
    flat = nn.functional.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(6), reduction="none").reshape(4, 6)
    value = LOSSES["ce"].loss(logits, y, y)
    torch.testing.assert_close(value.exp(), flat.sum(1))
    (a,), (b,) = torch.autograd.grad(value.sum(), logits), torch.autograd.grad(flat.sum(), logits)
    torch.testing.assert_close(a.flatten(1), b.flatten(1) / flat.detach().sum(1, keepdim=True))


def test_the_deviated_loss_adds_what_the_path_says():
    x, y = problem()
    inner = Linear(5, 64)

    def model(images):  # deviation: the mean square of the image
        return inner(images), images.square().flatten(1).mean(1)

    huge = APGD(iterations=5, loss=replace(LOSSES["deviated"], weight=1e6))
    z = huge.run(model, x, y, Linf(0.1), seeds=range(6)).state["top"]
    assert (z > 0.09).all()  # a huge weight only brightens
    z = APGD(iterations=10, loss="deviated")(model, x, y, Linf(0.1), seeds=range(6))
    assert (inner(x + z).argmax(1) != y).all()


def test_any_loss_of_the_logits_can_be_given():
    x, y = problem()
    loss = LogitLoss("energy", lambda logits, y, target: logits.square().sum((1, 2)))
    z = PGD(iterations=5, loss=loss)(Linear(5, 64), x, y, Linf(0.05), seeds=range(6))
    assert Linf(0.05).within(x, z).all()


# ---------------------------------------------------------------------------------------------- saturation, bad input


@pytest.mark.parametrize("attack", [PGD(iterations=10), APGD(iterations=10), APGD(iterations=10, loss="dlr")], ids=str)
def test_a_saturated_cross_entropy_leaves_no_false_survivors(attack: Attack):
    x, y = problem(40, classes=5)
    plain, steep, threat = Linear(5, 64), Linear(5, 64, scale=1e5), Linf(0.02)
    assert (nn.functional.cross_entropy(steep(x), y, reduction="none") == 0).sum() > 30
    z = attack(steep, x, y, threat, seeds=range(40))
    reference = attack(plain, x, y, threat, seeds=range(40))
    misclassified = steep(threat.apply(x, z)).argmax(1) != y
    assert misclassified.sum() >= (plain(threat.apply(x, reference)).argmax(1) != y).sum() - 1
    assert misclassified.float().mean() > 0.5


def nan(images: Tensor) -> Tensor:
    return Linear(5, 64)(images) * torch.nan


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"y": torch.tensor([0, 1, 2, 3, 4, 5])}, r"Labels are in \[0, 5\)"),
        ({"y": torch.tensor([0, 1, 2, 3, 4, -1])}, r"Labels are in \[0, …\), got -1 to 4"),
        ({"y": torch.tensor([0, 1])}, "Labels are an integer tensor"),
        ({"y": torch.zeros(6)}, "Labels are an integer tensor"),
        ({"x": 2 * torch.ones(6, 1, 8, 8)}, r"Images are in \[0, 1\]"),
        ({"x": torch.ones(6, 64)}, "Images are a batch"),
        ({"x": torch.full((6, 1, 8, 8), torch.nan)}, "Images hold NaN"),
        ({"model": nan}, "NaN or infinite"),
        ({"model": lambda x: x}, "returns logits"),
        ({"model": lambda x: x.flatten(1)[:, :1]}, "returns logits"),
        ({"model": lambda x: Linear(5, 64)(x).detach()}, "gives no gradient"),
        ({"attack": APGD(loss="dlr"), "model": Linear(2, 64), "y": torch.zeros(6).long()}, "needs 3 classes or more"),
        ({"attack": FAB(), "threat": Flow(0.1)}, "works on the threats Linf and L2"),
        ({"attack": Square(), "threat": Flow(0.1)}, "works on the threats Linf and L2"),
        ({"attack": StAdv()}, "works on the threat Flow"),
        ({"attack": Transfer(attack=PGD())}, "has no part 'classifier'"),
        ({"attack": PGD(loss="reconstruction")}, "needs a model that returns images"),
        ({"seeds": [1, 2]}, "one per image"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_input_is_one_sentence(change, sentence):
    x, y = problem()
    given = {"attack": PGD(), "model": Linear(5, 64), "x": x, "y": y, "threat": Linf(0.1), "seeds": None, **change}
    with pytest.raises(InputError, match=sentence) as caught:
        given.pop("attack")(given["model"], given["x"], given["y"], given["threat"], seeds=given["seeds"])
    assert str(caught.value).count(". ") == 0


def test_a_run_is_continued_by_its_own_attack_on_its_own_images_only():
    x, y = problem()
    run = PGD(iterations=3).run(Linear(5, 64), x, y, Linf(0.1), on_step=lambda run: True)
    with pytest.raises(InputError, match="6 images and 4 steps, this attack 6 and 6"):
        PGD(iterations=5).run(Linear(5, 64), x, y, Linf(0.1), resume=run)
    with pytest.raises(InputError, match="6 images and 4 steps, this attack 3 and 4"):
        PGD(iterations=3).run(Linear(5, 64), x[:3], y[:3], Linf(0.1), resume=run)


@pytest.mark.parametrize(
    "build",
    [
        lambda: EOT(0),
        lambda: EOT(1, "mean"),
        lambda: PGD(loss="entropy"),
        lambda: APGD(iterations=0),
        lambda: Square(queries=0),
        lambda: Suite(attacks=()),
    ],
)
def test_a_bad_attack_cannot_be_built(build):
    with pytest.raises(InputError):
        build()


def test_a_gradient_that_is_not_finite_is_counted_and_does_not_spoil_the_attack():
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Linear(5, 64)(x) + 0 * (x[:, :, 0, 0] - x[:, :, 0, 0].detach()).abs().sqrt()

    x, y = problem()
    run = PGD(iterations=4).run(Root(), x, y, Linf(0.05), seeds=range(6))
    assert (run.state["nonfinite"] == 4).all()
    assert torch.isfinite(run.z).all()
    assert run.misclassified.any()

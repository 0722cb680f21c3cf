"""Attacks: closed-form optima, one contract for every attack, and what a random defence does to them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    Cost,
    LogitLoss,
    Run,
    Square,
    StAdv,
    Suite,
    Transfer,
    TwoStage,
    draw_seeds,
    look,
    margin,
)
from diffpure.attacks.apgd import checkpoints
from diffpure.attacks.draws import uniforms
from diffpure.attacks.losses import DIFFERENCE
from diffpure.errors import InputError
from diffpure.evaluation.checks import attacked, fewer
from diffpure.sde import Noise
from diffpure.threats import L2, Flow, Linf, ThreatModel

FEW = EOT(4)
MODES = ("exact", "surrogate", "bpda")  # gradient modes, the best first


class Linear(nn.Module):
    """Logits Wx + b, whose optimal attack is known."""

    def __init__(self, classes: int, pixels: int, scale: float = 1.0) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        self.w = scale * torch.randn(classes, pixels, generator=gen)
        self.b = scale * torch.randn(classes, generator=gen)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.w.to(x.dtype).T + self.b.to(x.dtype)


class Noisy(nn.Module):
    """A random defence: seeded noise, a small denoiser, a classifier; with the parts that a `Defense` has."""

    stochastic = True

    def __init__(self, sigma: float = 0.1, channels: int = 1, size: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.sigma = sigma
        self.kernel = torch.full((channels, 1, 3, 3), 1 / 9)
        self.classifier = Linear(classes, channels * size * size)

    @property
    def purifier(self) -> nn.Module:
        return Blur(self.sigma, self.kernel)

    def forward(self, x: Tensor, seeds=None) -> Tensor:
        return self.classifier(self.purifier(x, seeds))


class Blur(nn.Module):
    stochastic = True

    def __init__(self, sigma: float, kernel: Tensor) -> None:
        super().__init__()
        self.sigma, self.kernel = sigma, kernel

    def forward(self, x: Tensor, seeds=None) -> Tensor:
        x = x + self.sigma * Noise.of(seeds, len(x))(0, x)
        return nn.functional.conv2d(x, self.kernel.to(x.dtype), padding=1, groups=x.shape[1]).tanh()


def problem(n: int = 6, classes: int = 5, channels: int = 1, size: int = 8) -> tuple[Tensor, Tensor]:
    """Grey images far from the walls of the box, with the labels that the linear model gives them."""
    gen = torch.Generator().manual_seed(2)
    x = 0.5 + 0.05 * torch.randn(n, channels, size, size, generator=gen)
    return x, Linear(classes, channels * size * size)(x).argmax(1)


# ------------------------------------------------------------------------------------------------- known answers


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
    assert run.broken.all()


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


def test_checkpoints_are_those_of_the_paper():
    assert list(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert checkpoints(100)[41] == 19
    assert list(checkpoints(1)) == [1]


def test_the_suites_are_the_published_ones():
    assert [a.name for a in AUTOATTACK_STANDARD] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert [a.name for a in AUTOATTACK_RAND] == ["apgd-ce", "apgd-dlr"]
    assert all(a.eot.draws == 20 and a.iterations == 100 for a in AUTOATTACK_RAND)
    assert AUTOATTACK_STANDARD[1].steps(10) == 9 * 101
    assert AUTOATTACK_STANDARD[3].cost(10) == Cost(0, 5001)
    assert (BPDA_EOT.attack.eot, BPDA_EOT.defence_draws) == (EOT(15, "logits"), 150)
    assert (PGD_LEE_KIM.iterations, PGD_LEE_KIM.step_size, PGD_LEE_KIM.eot.draws) == (200, 0.007, 20)
    assert (StAdv().iterations, StAdv().lr, StAdv().smoothness) == (100, 0.01, 0.0025)
    assert (FAB().iterations, FAB().alpha_max, FAB().eta, FAB().beta, FAB().restarts) == (100, 0.1, 1.05, 0.9, 1)
    assert TRANSFER.part == "classifier"
    assert DIFFUSION_ONLY.part == "purifier"


# ---------------------------------------------------------------------------------------------- budgets, contract


@settings(max_examples=15, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(4, 7), st.integers(4, 7)),
    eps=st.floats(1e-3, 1.5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    kind=st.sampled_from([Linf, L2, Flow]),
    attack=st.sampled_from([PGD(iterations=3), APGD(iterations=3), PGD(iterations=2, step_size=5.0, restarts=2)]),
    seed=st.integers(0, 2**64 - 1),
)
def test_gradient_attacks_never_leave_the_budget(shape, eps, dtype, kind, attack, seed):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed >> 1)).to(dtype).round(decimals=1)
    model, threat = Linear(4, x[0].numel()), kind(eps)
    seen = []
    attack.run(
        model, x, x.new_zeros(len(x), dtype=torch.int64), threat,
        seeds=[seed] * len(x), on_step=lambda run: seen.append(run.state["z"]),
    )  # fmt: skip
    for z in seen:
        assert threat.within(x, z).all()
        assert ((threat.apply(x, z) >= 0) & (threat.apply(x, z) <= 1)).all()


QUICK = EOT(3, rows=7)
ATTACKS: dict[str, tuple[Attack, ThreatModel]] = {
    "pgd": (PGD(iterations=3, eot=QUICK), Linf(0.05)),
    "pgd-logits": (PGD(iterations=3, eot=replace(QUICK, average="logits"), restarts=2), L2(0.3)),
    "pgd-fixed": (PGD(iterations=3, eot=replace(QUICK, fixed=True)), Linf(0.05)),
    "pgd-flow": (PGD(iterations=3, eot=QUICK), Flow(0.2)),
    "apgd-ce": (APGD(iterations=5, eot=QUICK), Linf(0.05)),
    "apgd-dlr": (APGD(iterations=5, eot=QUICK, loss="dlr", restarts=2), L2(0.3)),
    "apgd-t": (APGD(iterations=3, eot=QUICK, loss="dlr-targeted", targets=2), Linf(0.05)),
    "fab": (FAB(iterations=2, eot=QUICK), L2(0.3)),
    "square-linf": (Square(queries=6, eot=QUICK), Linf(0.05)),
    "square-l2": (Square(queries=6, eot=QUICK), L2(0.3)),
    "stadv": (StAdv(iterations=3, eot=QUICK), Flow(0.2)),
    "bpda": (TwoStage(attack=PGD(iterations=3, eot=QUICK), defence_draws=9), Linf(0.05)),
    "suite": (Suite(attacks=(APGD(iterations=2, eot=QUICK), Square(queries=4, eot=QUICK))), Linf(0.05)),
    "cascade": (Suite(attacks=(PGD(iterations=2), FAB(iterations=2)), skip_broken=True), Linf(0.05)),
    "transfer": (Transfer(attack=APGD(iterations=3), eot=QUICK), Linf(0.05)),
    "diffusion": (
        Transfer(attack=PGD(iterations=3, loss="reconstruction", eot=QUICK), part="purifier", eot=QUICK),
        Linf(0.05),
    ),
}


@pytest.fixture(params=ATTACKS, name="case")
def _case(request) -> tuple[Attack, ThreatModel, nn.Module, Tensor, Tensor]:
    attack, threat = ATTACKS[request.param]
    x, y = problem()
    return attack, threat, Noisy().double(), x.double(), y


def test_an_attack_depends_on_its_image_and_seed_only(case):
    attack, threat, model, x, y = case
    run = attack.run(model, x, y, threat, seeds=range(6))
    assert run.done
    assert threat.within(x, run.z).all()
    assert run.z.dtype == x.dtype
    assert run.seeds == tuple(range(6))
    again = attack(model, x, y, threat, seeds=torch.arange(6))
    torch.testing.assert_close(again, run.z, rtol=0, atol=0)
    some = attack(model, x[[4, 1]], y[[4, 1]], threat, seeds=[4, 1])
    torch.testing.assert_close(some, run.z[[4, 1]], rtol=1e-9, atol=1e-12)
    assert attack.run(model, x, y, threat, on_step=lambda run: True).seeds != run.seeds  # without seeds: fresh ones


def test_an_interrupted_attack_goes_on_to_the_same_result(case, tmp_path):
    attack, threat, model, x, y = case
    whole = attack.run(model, x, y, threat, seeds=range(6))
    for stop in (1, whole.steps // 2):
        part = attack.run(model, x, y, threat, seeds=range(6), on_step=lambda run, stop=stop: run.step == stop)
        assert part.step == stop
        torch.save(part.tensors(), tmp_path / "run.pt")
        run = attack.run(model, x, y, threat, resume=Run.of(torch.load(tmp_path / "run.pt", weights_only=True)))
        assert run.state.keys() == whole.state.keys()
        for key, value in whole.state.items():
            torch.testing.assert_close(run.state[key], value, rtol=0, atol=0, equal_nan=True)


def test_an_attack_keeps_its_budget_and_what_it_promised(case):
    attack, threat, model, x, y = case
    cost = attack.cost(5)
    calls = 0

    def counted(images, seeds=None):
        nonlocal calls
        calls += len(images)
        return model(images, seeds=seeds)

    counted.stochastic = True
    counted.classifier, counted.purifier = model.classifier, model.purifier
    run = attack.run(counted, x, y, threat, seeds=range(6))
    gradients, queries = run.spent
    assert gradients <= 6 * cost.gradients
    assert queries <= 6 * cost.queries
    # A gradient of averaged logits that does not fit into `rows` asks twice; parts are not counted here.
    assert calls <= 2 * gradients + queries
    half = Cost(cost.gradients // 2, cost.queries // 2)
    stopped = attack.run(model, x, y, threat, seeds=range(6), limit=half)
    assert (stopped.state["gradients"] <= half.gradients).all()
    assert (stopped.state["queries"] <= max(half.queries, attack.ranking.draws)).all()


def test_an_attack_is_never_worse_than_doing_nothing(case):
    attack, threat, model, x, y = case
    run = attack.run(model, x, (y + 1) % 5, threat, seeds=range(6))  # misclassified from the start
    assert (run.state["rank"] >= margin(run.state["clean"], (y + 1) % 5) - 1e-9).all() or "twostage" in attack.name
    if not attack.skip_broken and not isinstance(attack, Transfer):
        assert (run.state["gradients"] + run.state["queries"] > attack.ranking.draws).all()  # and still optimised
    skipped = replace(attack, skip_broken=True)(model, x, (y + 1) % 5, threat, seeds=range(6))
    assert (skipped == 0).flatten(1).all(1)[run.state["rank"] > 0].any()


# ----------------------------------------------------------------------------------------------- random defences


def test_draw_seeds_are_recorded_fresh_and_of_the_image_alone():
    first = draw_seeds([7, 8], 3, 4)
    assert len(set(first)) == 8
    assert draw_seeds([8], 3, 4) == first[4:]
    assert not set(draw_seeds([7, 8], 4, 4)) & set(first)
    assert draw_seeds([7, 8], 3, 2, fixed=True) == draw_seeds([7, 8], 9, 2, fixed=True)
    assert draw_seeds([7, 8], 3, 1, fixed=True) == (7, 8)
    u = uniforms(range(200), 0, 50)
    assert 0 <= u.min() <= u.max() < 1
    assert abs(u.mean().item() - 0.5) < 0.01
    assert torch.equal(uniforms([5], 0, 50)[0], u[5])


@pytest.mark.parametrize("average", ["gradients", "logits"])
@pytest.mark.parametrize("loss", ["ce", "dlr", "margin"])
def test_a_look_is_the_mean_over_all_draws_in_any_batching(average, loss):
    x, y = problem(3)
    model, x = Noisy(sigma=0.3), x.double()
    seen = {
        rows: look(model, x, y, LOSSES[loss], EOT(5, average, rows), (1, 2, 3), 0, gradient=True)
        for rows in (1, 4, 10, 99)
    }
    leaf = x.clone().requires_grad_()
    seeds = draw_seeds((1, 2, 3), 0, 5)
    logits = model(leaf.repeat_interleave(5, 0), seeds=seeds).reshape(3, 5, -1)
    value = LOSSES[loss].loss(logits.mean(1, keepdim=True) if average == "logits" else logits, y, y)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    for found in seen.values():
        torch.testing.assert_close(found.loss, value.detach())
        torch.testing.assert_close(found.logits, logits.detach().mean(1))
        torch.testing.assert_close(found.gradient, gradient)


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


def test_a_known_noise_is_attacked_to_the_letter():
    x, y = problem(40)
    model, threat, seeds = Noisy(sigma=0.5), Linf(0.02), list(range(100, 140))
    attack = APGD(iterations=15, eot=EOT(1, fixed=True))
    run = attack.run(model, x, y, threat, seeds=seeds)
    wrong = model(threat.apply(x, run.z), seeds=seeds).argmax(1) != y
    assert torch.equal(wrong, run.broken)
    fresh = APGD(iterations=15)(model, x, y, threat, seeds=seeds)
    assert wrong.sum() >= (model(threat.apply(x, fresh), seeds=seeds).argmax(1) != y).sum()


def test_iterates_are_ranked_on_all_their_draws_and_not_on_the_last():
    x, y = problem(20)
    model, threat, judges = Noisy(sigma=1.0), Linf(0.02), tuple(range(20))
    means = []
    for draws in (1, 20):
        z = APGD(iterations=15, eot=EOT(draws))(model, x, y, threat, seeds=range(20))
        seen = look(model, threat.apply(x, z), y, LOSSES["margin"], EOT(200), judges, 1 << 30)
        means.append(seen.loss.mean())
    assert means[1] > means[0]


def test_the_two_stage_rule_needs_both_means_to_fail():
    x, y = problem(30)
    model, threat = Noisy(sigma=1.0), Linf(0.01)
    attack = TwoStage(attack=PGD(iterations=8, step_size=0.004, eot=EOT(2, "logits")), defence_draws=60)
    run = attack.run(model, x, y, threat, seeds=range(30))
    one_stage = run.state["inner/rank"] > 0
    assert one_stage[run.broken].all()
    assert run.broken.sum() < one_stage.sum()  # means of 2 draws fail more often than means of 60
    judged = look(model, threat.apply(x, run.z), y, LOSSES["margin"], EOT(400, "logits"), run.seeds, 1 << 30)
    assert (judged.loss[run.broken] > -0.3).all()


def test_the_diffusion_alone_is_driven_away_from_its_input():
    x, y = problem()
    model, threat = Noisy(sigma=0.05), Linf(0.1)
    attack = replace(DIFFUSION_ONLY, attack=APGD(iterations=10, loss="reconstruction", eot=FEW))
    z = attack.run(model, x, y, threat, seeds=range(6)).state["inner/best"]
    seeds = tuple(range(6))
    error = lambda images: (model.purifier(images, seeds) - images).square().mean()  # noqa: E731
    assert error(threat.apply(x, z)) > error(threat.apply(x, threat.random(x, Noise(seeds))))
    assert error(threat.apply(x, z)) > error(x)


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


# ------------------------------------------------------------------------------------------- saturation, bad input


@pytest.mark.parametrize("attack", [PGD(iterations=10), APGD(iterations=10), APGD(iterations=10, loss="dlr")], ids=str)
def test_a_saturated_cross_entropy_leaves_no_false_survivors(attack: Attack):
    x, y = problem(40, classes=5)
    plain, steep, threat = Linear(5, 64), Linear(5, 64, scale=1e5), Linf(0.02)
    assert (nn.functional.cross_entropy(steep(x), y, reduction="none") == 0).sum() > 30
    z = attack(steep, x, y, threat, seeds=range(40))
    reference = attack(plain, x, y, threat, seeds=range(40))
    broken = steep(threat.apply(x, z)).argmax(1) != y
    assert broken.sum() >= (plain(threat.apply(x, reference)).argmax(1) != y).sum() - 1
    assert broken.float().mean() > 0.5


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
        ({"seeds": [1, 2]}, "one an image"),
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
    assert run.broken.any()


def test_any_loss_of_the_logits_can_be_given():
    x, y = problem()
    loss = LogitLoss("energy", lambda logits, y, target: logits.square().sum((1, 2)))
    z = PGD(iterations=5, loss=loss)(Linear(5, 64), x, y, Linf(0.05), seeds=range(6))
    assert Linf(0.05).within(x, z).all()


# ------------------------------------------------------------------------------------------------ a real defence


@pytest.fixture(scope="module", name="orders")
def _orders() -> dict[str, list[bool]]:
    """The survivors of attacks on digits behind their diffusion, by the gradient that the attacker has."""
    digits = pytest.importorskip("digits", reason="needs scikit-learn")
    x, y = digits.held_out(40)
    threat, eot = L2(1.5), EOT(4)
    white = APGD(iterations=10, eot=eot)
    out = {mode: attacked(white, digits.defence(mode), x, y, threat, range(40), 16) for mode in MODES}
    out["transfer"] = attacked(
        Transfer(attack=APGD(iterations=10), eot=eot), digits.defence(), x, y, threat, range(40), 16
    )
    return out


def test_better_gradients_leave_fewer_survivors(orders):
    """exact ≤ surrogate ≤ BPDA ≤ transfer, unless by chance; and the ends are far apart."""
    for stronger, weaker in pairwise([*MODES, "transfer"]):
        assert not fewer(orders[stronger], orders[weaker], random=True), (stronger, weaker)
    assert fewer(orders["transfer"], orders["exact"], random=True)

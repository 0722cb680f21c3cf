"""One contract for every attack: it keeps its budgets, depends on image and seed only, and can be interrupted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from diffpure.attacks import (
    APGD,
    EOT,
    FAB,
    PGD,
    STRONG,
    Attack,
    AttackRun,
    Cost,
    DiffHammer,
    LowFrequency,
    MomentumPGD,
    Square,
    StAdv,
    Suite,
    Transfer,
    TwoStage,
    attacks_of,
    margin,
    strong,
)
from diffpure.attacks.presets import ATTACKS as PRESETS
from diffpure.errors import InputError
from diffpure.threats import L2, Flow, Linf, Perceptual, ThreatModel
from victims import Linear, Noisy, TinyFeatures, problem


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
    model, threat = Linear(4, x[0].numel()), kind(min(eps, 1.0) if kind is Linf else eps)
    seen = []
    attack.run(
        model, x, x.new_zeros(len(x), dtype=torch.int64), threat,
        seeds=[seed] * len(x), on_step=lambda run: seen.append(run.state["z"]),
    )  # fmt: skip
    for z in seen:
        assert threat.within(x, z).all()
        assert ((threat.apply(x, z) >= 0) & (threat.apply(x, z) <= 1)).all()


QUICK = EOT(3, per_call=7)
ATTACKS: dict[str, tuple[Attack, ThreatModel]] = {
    "pgd": (PGD(iterations=3, eot=QUICK), Linf(0.05)),
    "pgd-logits": (PGD(iterations=3, eot=replace(QUICK, average="logits"), restarts=2), L2(0.3)),
    "pgd-fixed": (PGD(iterations=3, eot=replace(QUICK, fixed=True)), Linf(0.05)),
    "pgd-flow": (PGD(iterations=3, eot=QUICK), Flow(0.2)),
    "momentum": (MomentumPGD(iterations=4, confirm=3, restarts=2), Linf(0.05)),
    "momentum-targeted": (MomentumPGD(iterations=3, confirm=3, loss="difference", targets=3), Linf(0.05)),
    "momentum-l2": (MomentumPGD(iterations=4, confirm=9, loss="margin", eot=replace(QUICK, samples=2)), L2(0.3)),
    "momentum-flow": (MomentumPGD(iterations=3, eot=QUICK), Flow(0.2)),
    "apgd-ce": (APGD(iterations=5, eot=QUICK), Linf(0.05)),
    "apgd-dlr": (APGD(iterations=5, eot=QUICK, loss="dlr", restarts=2), L2(0.3)),
    "apgd-t": (APGD(iterations=3, eot=QUICK, loss="dlr-targeted", targets=2), Linf(0.05)),
    "fab": (FAB(iterations=2, eot=QUICK), L2(0.3)),
    "square-linf": (Square(queries=6, eot=QUICK), Linf(0.05)),
    "square-l2": (Square(queries=6, eot=QUICK), L2(0.3)),
    "stadv": (StAdv(iterations=3, eot=QUICK), Flow(0.2)),
    "low-frequency": (LowFrequency(iterations=3, eot=QUICK, restarts=2, sizes=(5, 3)), Perceptual(0.1)),
    "momentum-perceptual": (MomentumPGD(iterations=3, eot=QUICK), Perceptual(0.1)),
    "bpda": (TwoStage(attack=PGD(iterations=3, eot=QUICK), defence_samples=9), Linf(0.05)),
    "suite": (Suite(attacks=(APGD(iterations=2, eot=QUICK), Square(queries=4, eot=QUICK))), Linf(0.05)),
    "cascade": (Suite(attacks=(PGD(iterations=2), FAB(iterations=2)), skip_misclassified=True), Linf(0.05)),
    "stopping": (Suite(attacks=(PGD(iterations=2), MomentumPGD(iterations=2, confirm=3)), stop=0.3), Linf(0.05)),
    "diffhammer": (DiffHammer(iterations=4, eot=QUICK, restarts=2), Linf(0.05)),
    "diffhammer-l2": (DiffHammer(iterations=3, eot=QUICK, loss="ce", graft=False), L2(0.3)),
    "diffhammer-plain": (DiffHammer(iterations=3, eot=EOT(3, per_call=2), weights=False, loss="dlr"), Linf(0.05)),
    "transfer": (Transfer(attack=APGD(iterations=3), eot=QUICK), Linf(0.05)),
    "diffusion": (
        Transfer(attack=PGD(iterations=3, loss="reconstruction", eot=QUICK), part="purifier", eot=QUICK),
        Linf(0.05),
    ),
}


@pytest.fixture(autouse=True)
def _tiny_features(monkeypatch):
    """Perceptual distances by a tiny network."""
    tiny = TinyFeatures().requires_grad_(False)
    monkeypatch.setattr("diffpure.classifiers.features.network", lambda name, dtype, device: tiny.to(dtype))


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
        run = attack.run(model, x, y, threat, resume=AttackRun.of(torch.load(tmp_path / "run.pt", weights_only=True)))
        assert run.state.keys() == whole.state.keys()
        for key, value in whole.state.items():
            torch.testing.assert_close(run.state[key], value, rtol=0, atol=0, equal_nan=True)


def test_an_attack_keeps_its_budget_and_what_it_promised(case):
    attack, threat, model, x, y = case
    account = attack.account(5)
    cost = Cost(sum(s.gradients for s in account), sum(s.queries for s in account))
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
    assert (stopped.state["queries"] <= max(half.queries, attack.ranking.samples)).all()


def test_an_attack_is_never_worse_than_doing_nothing(case):
    attack, threat, model, x, y = case
    run = attack.run(model, x, (y + 1) % 5, threat, seeds=range(6))  # misclassified from the start
    assert (run.state["rank"] >= margin(run.state["clean"], (y + 1) % 5) - 1e-9).all() or "twostage" in attack.name
    if not attack.skip_misclassified and not isinstance(attack, Transfer):
        assert (run.state["gradients"] + run.state["queries"] > attack.ranking.samples).all()  # and still optimised
    skipped = replace(attack, skip_misclassified=True)(model, x, (y + 1) % 5, threat, seeds=range(6))
    assert (skipped == threat.zeros(x)).flatten(1).all(1)[run.state["rank"] > 0].any()


@pytest.mark.parametrize("kind", PRESETS)
def test_the_title_of_an_attack_is_made_of_words_alone(kind):
    """It stands in the header that a run is continued by, so an address of this process would end the run here."""
    for attack in PRESETS[kind]:
        assert "<" not in attack.title
        assert "0x" not in attack.title


def test_a_transferred_attack_says_what_it_was_crafted_on():
    (transfer,), (diffusion,) = PRESETS["transfer"], PRESETS["diffusion-only"]
    assert transfer.title.endswith("crafted on the classifier alone")
    assert diffusion.title.endswith("crafted on the purifier alone")


def test_the_strong_attack_is_made_for_a_number_of_gradients():
    spent = {n: sum(each.gradients for each in strong(n).account(10)) for n in (20, 40, 80)}
    assert spent == {n: n for n in spent}
    assert strong(40).name == STRONG.name == "strong"
    assert attacks_of("strong") == (STRONG,) == (strong(80),)
    assert attacks_of({"kind": "strong", "iterations": 40}) == (strong(40),)
    assert attacks_of({"kind": "strong", "iterations": 40, "momentum": 0.5}) == (replace(strong(40), momentum=0.5),)
    with pytest.raises(InputError, match="'iterations', argument of the attack 'momentum-margin', is a whole number"):
        attacks_of({"kind": "strong", "iterations": "many"})

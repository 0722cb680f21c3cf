"""What is spent is counted where it is spent, and equals what an attack says beforehand; one traversal for it all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diffpure.attacks import (
    APGD,
    ATTACKS,
    EOT,
    FAB,
    PGD,
    Attack,
    LowFrequency,
    SampledAttack,
    Square,
    StAdv,
    Suite,
    Transfer,
    TwoStage,
    attacks_of,
)
from diffpure.attacks.presets import own_keys
from diffpure.diffusion.gradients import BPDA, GRADIENT_MODES, Exact, Surrogate
from diffpure.diffusion.samplers import ReverseSDE
from diffpure.diffusion.score import EpsilonScore
from diffpure.errors import InputError
from diffpure.evaluation.cost import account
from diffpure.evaluation.evaluate import run
from diffpure.evaluation.setup import Evaluation, Settings, set_up
from diffpure.meter import CALLS
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from diffpure.results.rows import CLEAN
from diffpure.threats import Flow, Linf, Perceptual
from problems import images, tiny_classifier, tiny_unet
from victims import TinyFeatures

SPENT = ("gradients", "queries", *CALLS)
SIZES = {"iterations": 1, "restarts": 1, "targets": 1, "queries": 2, "eot": 3, "defence_samples": 4}
STOPS_EARLY = ("autoattack-standard", "transfer", "bpda-eot")  # or asks again about what it doubts


@pytest.fixture(autouse=True)
def _tiny_features(monkeypatch):
    """Perceptual distances by a tiny network."""
    tiny = TinyFeatures().requires_grad_(False)
    monkeypatch.setattr("diffpure.classifiers.features.network", lambda name, dtype, device: tiny.to(dtype))


def tiny(kind: str, **more: object) -> tuple[Attack, ...]:
    """A preset with few steps, three EOT samples, and further arguments."""
    known = {key for attack in ATTACKS[kind] for part in attack.walk() for key in own_keys(part)}
    return attacks_of({"kind": kind, **{key: value for key, value in SIZES.items() if key in known}, **more})


def work(attacks: tuple[Attack, ...], per_call: int, model: Defense | None = None, **settings: object) -> Evaluation:
    x = images(2)
    model = model or Defense(Purifier(tiny_unet(8), ReverseSDE(t_star=0.05, steps=2)), tiny_classifier())
    kinds = {type(part) for attack in attacks for part in attack.walk()}
    threat = Flow(0.05) if StAdv in kinds else Perceptual(0.1) if LowFrequency in kinds else Linf(8 / 255)
    chosen = Settings(rules=("one-shot", "worst of 2"), per_call=per_call, **settings)  # type: ignore[arg-type]
    y = model(x, seeds=range(2)).argmax(1)
    return set_up(model, x, y, threat, attacks, chosen)


def said_and_spent(evaluation: Evaluation) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """What each attack of an evaluation is said to spend, and what its rows then count."""
    said: dict[str, Counter[str]] = {}
    for unit in evaluation.units:
        said.setdefault(unit.attack, Counter()).update(
            account(evaluation.job, unit, evaluation.classes, evaluation.images[:1])
        )
    rows = run(evaluation).rows
    return {
        name: (
            {key: said[name][key] for key in SPENT},
            {key: sum(getattr(row, key) for row in rows if row.attack == name) for key in SPENT},
        )
        for name in said
    }


def refused(kind: str, mode: str) -> str | None:
    """Why a preset cannot follow a gradient mode."""
    if kind == "transfer" and mode in ("bpda", "adjoint", "surrogate"):
        return "the model has no purifier"  # it attacks the classifier alone
    if kind == "diffattack" and mode in ("adjoint", "surrogate"):
        return "gradient"  # pieces of a path are no equation and have no coarser form
    return None


@pytest.mark.parametrize("mode", GRADIENT_MODES)
@pytest.mark.parametrize("kind", ATTACKS)
def test_the_account_equals_what_is_counted(kind, mode):
    """With calls that hold all three EOT samples of an image, and with smaller ones that ask for them in pieces."""
    for per_call in (2, 8):
        evaluation = work(tiny(kind, gradient=mode), per_call)
        if message := refused(kind, mode):
            with pytest.raises(InputError, match=message):
                run(evaluation)
            continue
        for name, (said, spent) in said_and_spent(evaluation).items():
            if kind in STOPS_EARLY and name != CLEAN:
                assert all(spent[key] <= said[key] for key in SPENT), (per_call, name)
                assert spent["classifier"] > 0
            else:
                assert spent == said, (per_call, name)


def test_ten_samples_in_calls_of_four():
    """First the outputs of all ten samples, in calls of 4, 4 and 2, then their gradients; nothing is inferred."""
    ten = PGD(iterations=2, eot=10)
    found = said_and_spent(work((ten,), per_call=4))
    said, spent = found["pgd-ce"]
    assert spent == said
    steps, images_, samples = 2, 2, 10
    evaluated = images_ * 2  # the evaluation samples
    gradients = images_ * 2 * samples
    queries = images_ * (samples + samples + 2 * samples)  # clean, last, and once more beside each gradient
    assert (spent["gradients"], spent["queries"]) == (gradients, queries)
    assert spent["network_gradient"] == steps * gradients
    assert spent["network"] == steps * (gradients + queries + evaluated)
    assert (spent["classifier"], spent["classifier_gradient"]) == (queries + evaluated, gradients)
    whole = said_and_spent(work((ten,), per_call=10))["pgd-ce"][1]
    assert whole["queries"] == images_ * 2 * samples


class Counted(EpsilonScore):
    """A score that counts its images itself, and knows nothing of the meter."""

    def __init__(self) -> None:
        inner = tiny_unet(8)
        super().__init__(inner.sde, inner.size, channels=3)
        self.inner, self._asked = inner, [0]

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        self._asked[0] += len(x)
        return self.inner.epsilon(x, t)


def test_what_the_rows_say_is_what_the_network_was_asked():
    score = Counted()
    model = Defense(Purifier(score, ReverseSDE(t_star=0.05, steps=2), rounds=2), tiny_classifier())
    modes = (*GRADIENT_MODES, {"kind": "exact", "memory": 100_000})
    evaluation = work(tuple(PGD(iterations=2, eot=3, gradient=mode) for mode in modes), 4, model)
    score._asked[0] = 0
    found = run(evaluation)
    spent = sum(row.network + row.network_gradient for row in found.rows)
    checked = 2 * 2 * 2  # a finished run asks about the cross-entropy of both images, through two rounds of two steps
    assert spent == score._asked[0] - checked


def test_a_budget_of_memory_is_accounted_for_one_image_per_call():
    """How many graphs fit, and need not be computed again, depends on how many images a call holds."""
    attack = PGD(iterations=2, eot=3, gradient=Exact(memory=100_000))
    said, spent = said_and_spent(work((attack,), per_call=1))["pgd-ce@exact"]
    assert spent == said
    said, spent = said_and_spent(work((attack,), per_call=3))["pgd-ce@exact"]
    assert spent["network"] > said["network"]


def test_an_attack_that_stops_early_spends_less_and_one_that_cannot_stop_all_of_it():
    """The suite skips what is misclassified already; where nothing can be misclassified it spends its whole account."""

    class Sure(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x.flatten(1).mean(1) + 9, *(x.flatten(1)[:, i] for i in range(4))], 1)

    model = Defense(Purifier(tiny_unet(8), ReverseSDE(t_star=0.05, steps=2)), Sure())
    for kind in STOPS_EARLY:
        for per_call in (2, 8):
            said, spent = said_and_spent(work(tiny(kind), per_call, model))[tiny(kind)[0].name]
            confirmed = 4 * 2 * 2 if kind == "bpda-eot" else 0  # samples × steps × images that nobody doubts here
            assert said["queries"] - spent["queries"] == confirmed
            assert spent["gradients"] == said["gradients"]
    misclassified = work(tiny("autoattack-standard"), 8, model)
    wrong = replace(misclassified, labels=misclassified.labels + 1)
    assert said_and_spent(wrong)["autoattack-standard"][1]["gradients"] == 0


# ----------------------------------------------------------------------------------------------------------- traversal


def nested() -> Suite:
    """Every kind of composite, inside each other."""
    two = TwoStage(attack=PGD(eot=2), defence_samples=5)
    return Suite(attacks=(APGD(eot=3), two, Transfer(attack=Suite(attacks=(FAB(), Square())), eot=4)))


def samples(attack: Attack) -> list[int]:
    return [part.eot.samples for part in attack.walk() if isinstance(part, SampledAttack)]


def test_an_attack_walks_over_all_that_it_is_made_of():
    kinds = [type(part).__name__ for part in nested().walk()]
    assert kinds == ["Suite", "APGD", "TwoStage", "PGD", "Transfer", "Suite", "FAB", "Square"]
    assert [type(part).__name__ for part in nested().parts()] == ["APGD", "TwoStage", "Transfer"]
    assert PGD().parts() == ()
    assert samples(nested()) == [3, 2, 4, 1, 1]


def test_eot_samples_reach_every_part():
    assert samples(nested().with_eot(7)) == [7] * 5
    averaged = nested().with_eot({"average": "logits"})
    assert samples(averaged) == [3, 2, 4, 1, 1]
    assert {part.eot.average for part in averaged.walk() if isinstance(part, SampledAttack)} == {"logits"}
    for kind in ATTACKS:
        for attack in ATTACKS[kind]:
            assert set(samples(attack.with_eot(6))) == {6}
    assert nested().with_eot(EOT(2)).attacks[1].defence_samples == 5  # type: ignore[attr-defined]


def test_images_per_call_reach_every_part_and_only_shrink():
    limited = nested().with_per_call(3).with_per_call(100)
    assert {part.eot.per_call for part in limited.walk() if isinstance(part, SampledAttack)} == {3}
    assert limited.attacks[1].ranking.per_call == 3


def test_a_change_reaches_every_part_the_innermost_first():
    seen: list[str] = []

    def change(part: Attack) -> Attack:
        seen.append(type(part).__name__)
        return replace(part, skip_misclassified=True)

    changed = nested().mapped(change)
    assert all(part.skip_misclassified for part in changed.walk())
    assert seen == ["APGD", "PGD", "TwoStage", "FAB", "Square", "Suite", "Transfer", "Suite"]
    assert not any(part.skip_misclassified for part in nested().walk())


def test_the_setting_eot_of_an_evaluation_reaches_a_suite_and_the_two_stages():
    evaluation = work((nested(), *tiny("bpda-eot")), 8, eot=5)
    for attack in evaluation.job.attacks.values():
        assert set(samples(attack)) == {5}
    header = evaluation.header["attacks"]
    assert header["bpda-eot@bpda"]["title"].startswith("PGD-1, EOT 5, step 2/255")


def test_the_name_carries_every_gradient_that_is_named():
    mixed = Suite(attacks=(PGD(gradient="bpda"), APGD(gradient="exact"), Square()))
    assert mixed.name == "pgd-ce+apgd-ce+square@bpda/exact"
    assert replace(mixed, label="mine").name == "mine@bpda/exact"
    assert TwoStage(attack=PGD(gradient=Surrogate())).name == "pgd-ce-twostage@surrogate"
    assert PGD(label="mine").name == "mine"
    account = mixed.account(5)
    assert [spending.mode for spending in account] == [None, BPDA(), Exact(), None]
    outer = Suite(attacks=(PGD(), APGD(gradient="exact")), gradient="bpda")
    assert [spending.mode for spending in outer.account(5)] == [BPDA(), BPDA(), Exact()]

"""A vote of several draws: its value and gradient by hand, its cost, and what evaluations and specs make of it."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import diffpure as dp
from diffpure import purify
from diffpure.adapters import Averaged
from diffpure.attacks import DIFFATTACK, EOT, PGD, Square, Transfer
from diffpure.attacks.diffattack import Deviating
from diffpure.attacks.diffhammer import DiffHammer
from diffpure.diffusion.memory import saved_bytes
from diffpure.evaluation.cost import MOST, images_per_call
from diffpure.evaluation.setup import about_model
from diffpure.experiments.load import PLAIN
from diffpure.experiments.spec import EvaluationSpec
from diffpure.noise import Noise, mix
from diffpure.vote import Vote
from evaluations import RULES, problem, spec_of, timeless
from problems import images, tiny_classifier, tiny_unet
from test_account import said_and_spent, work

SEEDS = [5, 6, 7]
SAMPLER = dp.ReverseSDE(t_star=0.05, steps=3)


def defense(draws: int = 1, rule: str = "average", gradient: str = "exact", **more: object) -> dp.Defense:
    return dp.Defense(dp.Purifier(tiny_unet(8), SAMPLER, gradient), tiny_classifier(), draws=draws, rule=rule, **more)


def by_hand(model: dp.Defense, x: torch.Tensor, draws: int) -> torch.Tensor:
    """log of the mean probabilities of so many calls of a defence of one draw, each with seeds of its own."""
    seeds = [[mix(seed, d) for seed in SEEDS] for d in range(draws)]
    return torch.stack([model(x, each).softmax(1) for each in seeds]).mean(0).log()


# ----------------------------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("rule", ["average", "majority"])
def test_one_draw_is_the_defence_as_it_was(rule):
    plain = dp.Defense(dp.Purifier(tiny_unet(8), SAMPLER), tiny_classifier())
    model, x = defense(1, rule), images(3)
    assert torch.equal(model(x, SEEDS), plain(x, SEEDS))
    assert torch.equal(model(x, 7), model.classifier(model.purifier(x, 7)))  # the classifier's own logits
    assert about_model(model) == about_model(plain)
    assert about_model(nn.Sequential(model)) == about_model(nn.Sequential(plain))
    assert (model.draws, model.vote) == (1, None)


def test_the_average_is_that_of_defences_of_one_draw_with_child_seeds():
    x = images(3)
    found = defense(4)(x, SEEDS)
    torch.testing.assert_close(found, by_hand(defense(), x, 4), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(3))
    assert Noise((5, 6)).draws(2).seeds == (mix(5, 0), mix(5, 1), mix(6, 0), mix(6, 1))


def test_its_gradient_is_that_of_the_average_by_hand():
    x = images(3, dtype=torch.float64).requires_grad_()
    weights = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5)
    (known,) = torch.autograd.grad((weights * by_hand(defense(1, gradient="backprop").double(), x, 4)).sum(), x)
    for gradient in ("exact", "backprop"):
        for rule in ("average", "majority"):  # the majority is followed straight through
            (found,) = torch.autograd.grad((weights * defense(4, rule, gradient).double()(x, SEEDS)).sum(), x)
            torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-12)


def test_the_gradient_audit_confirms_the_average_and_tells_the_majority():
    x = images(2)
    assert dp.audit_gradient(defense(3), x, seeds=[1, 2], directions=2).passed
    assert not dp.audit_gradient(defense(3, "majority"), x, seeds=[1, 2], directions=2).passed


def test_the_exact_gradient_keeps_states_and_no_graph():
    x = images(2).requires_grad_()
    exact, every = (saved_bytes(lambda m=m: m(x, [1, 2])) for m in (defense(4), defense(4, gradient="backprop")))
    assert exact < every / 2
    assert defense(4).with_gradient("bpda").vote == Vote(4)


def test_the_majority_counts_classes():
    """Three draws of three classes, by hand: two for class 2, one for class 0, and one vote split as p̄ is."""
    p = torch.tensor([[0.2, 0.1, 0.7], [0.9, 0.05, 0.05], [0.1, 0.2, 0.7]], dtype=torch.float64)
    shares = (torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64) + p.mean(0)) / 4
    torch.testing.assert_close(Vote(3, "majority")(p.log()), shares.log()[None])
    torch.testing.assert_close(Vote(3)(p.log() + 17), p.mean(0).log()[None])  # logits are up to a constant
    assert Vote(3, "majority")(p.log()).argmax() == 2


def test_a_tie_goes_to_the_larger_mean_probability():
    p = torch.tensor([[0.5, 0.4, 0.1], [0.02, 0.97, 0.01]], dtype=torch.float64)
    assert Vote(2, "majority")(p.log()).argmax() == 1
    assert Vote(2, "majority")(p.log().flip(1)).argmax() == 1  # whatever their order
    assert Vote(2, "majority")(p[:, [1, 0, 2]].log()).argmax() == 0


def test_no_probability_outvotes_a_draw():
    """Of all outcomes of five draws the winner never has fewer draws than another class, however sure the draws are."""
    for classes in itertools.product(range(3), repeat=5):
        logits = torch.nn.functional.one_hot(torch.tensor(classes), 3).float()
        counts = logits.sum(0)
        for sure in (1e-3, 1.0, 50.0):
            scale = torch.where(torch.tensor(classes) == 0, sure, 1e-3)[:, None]  # only class 0 is sure of itself
            assert counts[Vote(5, "majority")(scale * logits).argmax()] == counts.max()


def test_extreme_logits_stay_finite_and_keep_their_gradient():
    logits = torch.tensor([[1e4, 0.0, -1e4], [1e4, 50.0, 0.0]], requires_grad=True)
    for rule in ("average", "majority"):
        out = Vote(2, rule)(logits)
        assert out.isfinite().all()
        (grad,) = torch.autograd.grad(out[0, 1] - out[0, 0], logits)
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0
    assert Vote(2)(logits.half().detach()).dtype == torch.float32
    far = torch.tensor([[3e38, -3e38]])  # finite, but not their difference
    beyond = dp.Defense(dp.Purifier(tiny_unet(8), SAMPLER), lambda x: far.expand(len(x), 2), draws=2)
    with pytest.raises(dp.InputError, match="NaN or infinite"):  # it fails closed
        beyond(images(1))


def test_seeds_draws_and_batches():
    model, x = defense(3), images(3)
    out = model(x, SEEDS)
    assert torch.equal(out, model(x, torch.tensor(SEEDS)))
    torch.testing.assert_close(model(x[1:2], [6]), out[1:2])
    assert not torch.equal(model(x), model(x))  # entropy
    rows, drawn = model.drawn(x, SEEDS)
    assert rows.shape[0] == len(set(drawn)) == 9
    purified = model.purifier(rows, drawn)
    assert not torch.allclose(purified[0], purified[1])
    assert torch.equal(model.stages(x, SEEDS)["purified"], model.purifier.stages(x, drawn[::3])["purified"])
    assert set(defense().stages(x, SEEDS)) == set(model.stages(x, SEEDS))
    torch.testing.assert_close(Averaged(model, 2)(x[:1], [5])[0], model(x[[0, 0]], [mix(5, 0), mix(5, 1)]).mean(0))
    assert model(x.numpy().tolist(), SEEDS).shape == (3, 5)


def test_draws_are_purified_together_in_calls_of_bounded_size(monkeypatch):
    sizes = []
    whole = defense(4)(images(3), SEEDS)
    monkeypatch.setattr(purify, "PER_CALL", 5)
    model = defense(4)
    model.classifier.register_forward_hook(lambda _, x, __: sizes.append(len(x[0])))
    x = images(3).requires_grad_()
    torch.testing.assert_close(model(x, SEEDS), whole)
    assert sizes == [5, 5, 2]
    (found,) = torch.autograd.grad(model(x, SEEDS)[:, 0].sum(), x)
    monkeypatch.setattr(purify, "PER_CALL", 100)
    (known,) = torch.autograd.grad(model(x, SEEDS)[:, 0].sum(), x)
    assert sizes[6:] == [12]
    torch.testing.assert_close(found, known)


def test_it_says_what_it_is():
    assert defense(10).title.endswith("ReverseSDE(t_star=0.05, steps=3), average of 10 draws")
    assert defense(10, "majority").title.endswith(", majority of 10 draws")
    assert defense(10, name="mine").title == "mine"
    votes = ((1, "average"), (2, "average"), (3, "average"), (3, "majority"))
    names = [about_model(defense(draws, rule, name="mine"))["parts"] for draws, rule in votes]
    assert len({str(found) for found in names}) == 4
    assert {"score", "classifier"} == names[0].keys() == names[1].keys() - {"vote"}
    other = copy.deepcopy(defense(3, "majority")).with_purifier(dp.Purifier(tiny_unet(8), dp.OneShot()))
    assert (str(other.vote), other.purifier.sampler) == ("majority of 3 draws", dp.OneShot())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draws": 0}, "draws is a whole number of at least 1, got 0"),
        ({"draws": 2.5}, "'draws', argument of Vote, is a whole number, got 2.5"),
        ({"draws": True}, "is a whole number, got True"),
        ({"draws": 3, "rule": "mean"}, "one of 'average', 'majority', got 'mean'"),
        ({"draws": 3, "rule": "majorty"}, "did you mean 'majority'"),
    ],
)
def test_bad_values_get_one_sentence(arguments, message):
    with pytest.raises(dp.InputError, match=message) as caught:
        defense(**arguments)
    assert "\n" not in str(caught.value)


def test_a_purifier_without_noise_has_no_draws():
    for purifier in (nn.AvgPool2d(3, 1, 1), dp.Purifier(tiny_unet(8), dp.Langevin(eta=0.0, steps=2))):
        with pytest.raises(dp.InputError, match=r"Draws differ by the purifier's noise, and .* has none"):
            dp.Defense(purifier, tiny_classifier(), draws=2)


# ------------------------------------------------------------------------------------------- attacks and evaluations


@pytest.mark.parametrize("mode", ["exact", "bpda"])
@pytest.mark.parametrize("rule", ["average", "majority"])
def test_the_account_of_a_vote_equals_what_is_counted(rule, mode):
    """Attacks on the whole vote, on its parts (which know no vote), and with the deviation of its path."""
    tried = (
        PGD(iterations=2, eot=3, gradient=mode),
        Square(queries=2, eot=2),
        Transfer(attack=PGD(iterations=1), part="classifier", eot=EOT(2)),
        DiffHammer(iterations=1, eot=2, gradient=mode),
        replace(DIFFATTACK, attack=replace(DIFFATTACK.attack, iterations=1, eot=EOT(2)), eot=EOT(2), gradient=mode),
    )
    for per_call in (2, 8):
        for name, (said, spent) in said_and_spent(work(tried, per_call, defense(3, rule))).items():
            assert spent == said, (per_call, name)
    clean = said_and_spent(work((), 8, defense(3, rule)))["clean"][1]
    images_, samples, steps = 2, 2, 3
    assert (clean["classifier"], clean["network"]) == (3 * images_ * samples, 3 * images_ * samples * steps)


def test_every_draw_takes_the_memory_of_an_image():
    one, tried = images(1), (PGD(),)
    assert images_per_call(defense(10), tried, one, 10**12) == MOST // 10
    plain = images_per_call(defense(), tried, one, 20_000_000)
    assert images_per_call(defense(3), tried, one, 20_000_000) == plain // 3 > 1
    assert images_per_call(defense(1000), tried, one, 0) == 1


def test_the_deviation_of_a_vote_is_the_mean_over_its_draws():
    model, x = defense(3), images(2)
    logits, deviation = Deviating(model)(x, [1, 2])
    torch.testing.assert_close(logits, model(x, [1, 2]))
    each = [Deviating(defense())(x, [mix(1, d), mix(2, d)])[1] for d in range(3)]
    torch.testing.assert_close(deviation, torch.stack(each).mean(0))


@pytest.mark.parametrize("rule", ["average", "majority"])
def test_an_evaluation_attacks_through_the_vote_and_is_verified(rule, tmp_path):
    x, y = problem()
    model, attack = defense(3, rule, name="mine"), PGD(iterations=2, eot=EOT(2))
    options = {"rules": RULES, "batch": 2, "per_call": 4, "name": "mine"}
    result = dp.evaluate(model, x, y, "linf 8/255", attack, out=tmp_path, **options)
    again = dp.evaluate(model, x, y, "linf 8/255", attack, **options)
    assert timeless(result.rows) == timeless(again.rows)
    row = next(row for row in result.rows if row.attack == "pgd-ce")
    assert (row.gradients, row.queries) == (4, 4)
    assert row.classifier_gradient == 3 * 4
    straight = rule == "majority"
    assert ("exact straight-through gradient (approximate)" in str(result)) == straight
    assert any("'exact straight-through' is approximate" in text for text in result.warnings) == straight
    assert dp.verify(tmp_path, model, x, y, again=1).passed
    for other in (defense(1, name="mine"), defense(4, rule, name="mine")):
        assert "The header names another vote than the one at hand." in dp.verify(tmp_path, other, x, y).problems
        with pytest.raises(dp.InputError):
            dp.evaluate(other, x, y, "linf 8/255", attack, out=tmp_path, **options)


def test_an_attack_moves_the_vote():
    """Through the straight-through gradient the majority falls as the average does."""
    x, y = problem()
    for rule in ("average", "majority"):
        model = defense(5, rule)
        z = dp.MomentumPGD(iterations=5)(model, x, y, "linf 16/255", seeds=range(len(x)))
        before, after = (-model(v, seeds=range(len(x))).gather(1, y[:, None]).mean() for v in (x, x + z))
        assert after > before + 0.05


def test_a_certificate_counts_single_draws():
    model = dp.Defense(dp.Purifier(tiny_unet(8), dp.OneShot(0.1)), tiny_classifier(), draws=3)
    with pytest.raises(dp.InputError, match="its own vote; use draws=1, got 3"):
        dp.certify(model, images(1), [0], n0=2, n=2)


# --------------------------------------------------------------------------------------------------------------- specs

MODEL = {"classifier": "cifar10-resnet", "score": "cifar10-small", "sampler": {"kind": "one-shot", "t_star": 0.05}}


def test_a_spec_keeps_its_hash_where_nothing_votes():
    spec = spec_of(model=MODEL)
    assert spec_of(model={**MODEL, "draws": 1, "rule": "average"}).hash == spec.hash == "2b2c9fd434dff46d"  # as ever
    voting = spec_of(model={**MODEL, "draws": 10, "rule": "majority"})
    assert len({spec.hash, voting.hash, spec_of(model={**MODEL, "draws": 10}).hash}) == 3
    assert EvaluationSpec.of(voting.plain()) == voting
    assert voting.plain()["model"]["draws"] == 10
    assert voting.tiny().model.draws == 2
    made = PLAIN.model(voting.model)
    assert str(made.vote) == "majority of 10 draws"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({**MODEL, "draws": 0}, "draws is a whole number of at least 1, got 0"),
        ({**MODEL, "draws": "10"}, "'draws', key of \\[model\\], is a whole number, got '10'"),
        ({**MODEL, "rule": "vote"}, "'rule', key of \\[model\\], is one of 'average', 'majority'"),
        ({"classifier": "cifar10-resnet", "draws": 2}, "2 draws need a purifier to draw from, so \\[model\\] needs"),
    ],
)
def test_a_spec_says_what_is_wrong_with_its_vote(model, message):
    with pytest.raises(dp.InputError, match=message):
        spec_of(model=model)

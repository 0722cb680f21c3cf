"""Anyone's attacks work on our defences, and find what they should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

digits = pytest.importorskip("digits", reason="needs scikit-learn")

from diffpure.adapters import Averaged, art_preprocessor, foolbox_model  # noqa: E402
from diffpure.attacks import APGD, DIFFATTACK, EOT, Deviated, expect  # noqa: E402
from diffpure.attacks.diffattack import Deviating  # noqa: E402
from diffpure.diffusion.samplers import Langevin, ReverseSDE  # noqa: E402
from diffpure.errors import InputError  # noqa: E402
from diffpure.threats import Linf  # noqa: E402

EPS = 0.3


@pytest.fixture(scope="module")
def world():
    return digits.defence(sampler=ReverseSDE(t_star=0.05, steps=3)), *digits.held_out(8)


def right(model, x, y) -> int:
    """How many are right on the mean of 16 samples."""
    return int((Averaged(model, 16)(x, seeds=range(len(x))).argmax(1) == y).sum())


def check(model, x, y, adversarial) -> None:
    """Inside the budget and the box, and stronger than the images as they are."""
    assert (adversarial - x).abs().max() <= EPS + 1e-6
    assert 0 <= adversarial.min() <= adversarial.max() <= 1
    assert right(model, adversarial, y) < right(model, x, y) - 2


def test_averaged_is_the_mean_of_its_samples_and_batch_invariant(world):
    model, x, _ = world
    torch.testing.assert_close(Averaged(model, 3)(x, seeds=range(8))[5:6], Averaged(model, 3)(x[5:6], seeds=[5]))
    with pytest.raises(InputError, match="one draw or more"):
        Averaged(model, 0)


def test_foolbox(world):
    foolbox = pytest.importorskip("foolbox")
    model, x, y = world
    _, (adversarial,), _ = foolbox.attacks.LinfPGD(steps=8, rel_stepsize=0.25)(
        foolbox_model(model, samples=4), x, y, epsilons=[EPS]
    )
    check(model, x, y, adversarial)


def test_art_with_the_purifier_as_preprocessor(world):
    pytest.importorskip("art")
    from art.attacks.evasion import ProjectedGradientDescent
    from art.estimators.classification import PyTorchClassifier

    model, x, y = world
    classifier = PyTorchClassifier(
        model.classifier, torch.nn.CrossEntropyLoss(), x.shape[1:], 10, clip_values=(0, 1),
        preprocessing_defences=[art_preprocessor(model.purifier)], device_type="cpu",
    )  # fmt: skip
    attack = ProjectedGradientDescent(classifier, eps=EPS, eps_step=EPS / 4, max_iter=8, verbose=False)
    check(model, x, y, torch.from_numpy(attack.generate(x.numpy(), y.numpy())))


def test_torchattacks(world):
    torchattacks = pytest.importorskip("torchattacks")
    model, x, y = world
    check(model, x, y, torchattacks.EOTPGD(model, eps=EPS, alpha=EPS / 4, steps=8, eot_iter=4)(x, y))


def test_the_public_autoattack(world):
    public = pytest.importorskip("pyautoattack")
    model, x, y = world
    suite = public.AutoAttack(model, norm="Linf", eps=EPS, version="rand", device="cpu", seed=0)
    suite.verbose, suite.apgd.n_iter, suite.apgd.eot_iter = False, 5, 4
    adversarial, _ = suite.run_standard_evaluation(x, y, batch_size=8)
    check(model, x, y, adversarial)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "foolbox", None)
    with pytest.raises(InputError, match="needs the package 'foolbox'"):
        foolbox_model(torch.nn.Identity())


@pytest.mark.parametrize("sampler", [ReverseSDE(t_star=0.05, steps=5), Langevin(variance=0.02, steps=4)], ids=str)
def test_the_path_says_how_far_it_deviates_with_an_exact_gradient(sampler):
    model, (x, y) = digits.defence(sampler=sampler), digits.held_out(3)
    path = Deviating(model, states=2)
    logits, deviation = path(x, seeds=range(3))
    torch.testing.assert_close(logits, model(x, seeds=range(3)))
    assert (deviation > 0).all()
    objective = Deviated(weight=5.0)
    ours = expect(path, x, y, objective, EOT(), (1, 2, 3), 0, gradient=True).gradient
    plain = Deviating(model.with_gradient("backprop"), states=2)
    oracle = expect(plain, x, y, objective, EOT(), (1, 2, 3), 0, gradient=True).gradient
    torch.testing.assert_close(ours, oracle, rtol=1e-4, atol=1e-6)


def test_the_deviated_attack_breaks_the_defence(world):
    model, x, y = world
    attack = replace(DIFFATTACK, attack=APGD(loss="deviated", iterations=6, eot=EOT(4)))
    assert attack.name == "diffattack"
    assert replace(attack, label="").name == "deviating:apgd-deviated"
    z = attack(model, x, y, Linf(EPS), seeds=range(8))
    check(model, x, y, Linf(EPS).apply(x, z))


def test_the_deviation_needs_the_path_of_one_round(world):
    model, x, _ = world
    with pytest.raises(InputError, match="a defence with a diffusion purifier"):
        Deviating(model.classifier)
    twice = digits.defence(sampler=ReverseSDE(t_star=0.05, steps=3))
    twice.purifier.rounds = 2
    with pytest.raises(InputError, match="one round, got 2 rounds"):
        Deviating(twice)(x, seeds=range(8))

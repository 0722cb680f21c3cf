"""Training a purifier: its objectives against closed forms, what learns and what stays, and the command."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

import diffpure as dp
from diffpure import cli
from diffpure.data import cifar10
from diffpure.data.cifar10 import Images
from diffpure.data.photos import Photos
from diffpure.diffusion.samplers import START, FewStep, OneShot
from diffpure.diffusion.score import EpsilonScore, GaussianScore
from diffpure.diffusion.sde import VPSDE, over
from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.purifiers.diffusion import Purifier
from diffpure.threats import L2, Linf
from diffpure.training import purifier as training
from diffpure.training import recipes
from diffpure.training.adversarial import FAST_LINF, Adversary
from diffpure.training.loop import generator
from diffpure.training.objectives import OBJECTIVES, WALK, Guarded, Rows, bridge, deployed, ranked
from diffpure.training.purifier import PurifierConfig, train_purifier
from problems import TinyUNet

SDE = VPSDE()
SCORE_ONLY = {"bridge": {"learn": "score"}, "rank": {"learn": "score"}, "classifier": {}}


class Gaussian(EpsilonScore):
    """ε̂ of data N(0, v), in closed form, with v to learn."""

    def __init__(self, variance: float) -> None:
        super().__init__(SDE, size=None)
        self.variance = nn.Parameter(torch.tensor(variance))

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        return x * over(SDE.std(t), x) / (over(SDE.std(t) ** 2, x) + self.variance * over(SDE.alpha(t), x))


def linear(weight: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(weight.shape[1], len(weight), bias=False))
    model[1].weight.data.copy_(weight)
    return model


def rows(batch: int = 6, size: int = 4, seed: int = 0, t: tuple[float, float] = (0.03, 0.1), steps: int = 0) -> Rows:
    random = generator(seed, 0)
    x = torch.rand(batch, 3, size, size, generator=random)
    eps = torch.randn(x.shape, generator=random)
    times = torch.linspace(*t, batch, dtype=torch.float64)
    return Rows(x, torch.arange(batch) % 2, times, eps, torch.arange(batch) + 7, torch.full((batch,), steps))


# --------------------------------------------------------------------------------------------------------- objectives


def test_one_step_of_training_is_the_purification_that_is_deployed():
    """The purified state is what OneShot gives with the same noise."""
    x = rows().x
    model = Guarded(Gaussian(0.3), nn.Identity())
    noise, t = Noise.of(5, len(x)), torch.full((len(x),), 0.07, dtype=torch.float64)
    state = model.diffuse(x, t, noise.child(0)(0, x))
    deployed = Purifier(GaussianScore(0.0, 0.3), OneShot(0.07))(x, noise.seeds)
    assert torch.allclose(model(state, t), deployed, atol=1e-6)


def test_the_steps_of_training_are_those_that_are_deployed():
    """With the same noise, `FewStep` gives the images that training sees."""
    x, noise = rows().x, Noise.of(5, 6)
    sampler = FewStep(t_star=0.07, steps=3, end=0.02)
    assert deployed(0.07, few_steps=3) == sampler
    start, path = sampler(GaussianScore(0.0, 0.3), 2 * x - 1, noise)
    model, t = Guarded(Gaussian(0.3), nn.Identity()), torch.full((len(x),), 0.07, dtype=torch.float64)
    assert torch.allclose(model.diffuse(x, t, noise(START, x)), start, atol=1e-6)
    state = start
    for step in range(len(path)):
        state = path.step(state, step)
    assert torch.allclose(model(start, t, 3, noise), (state + 1) / 2, atol=1e-6)


@pytest.mark.parametrize("knows", training.KNOWS)
def test_the_loss_of_a_purification_in_several_steps(knows):
    """Behind a linear defence the attack is its sign; the noise is missed in the first call, attacked or not."""
    r = rows(steps=2)
    weight = torch.randn(2, r.x[0].numel(), generator=generator(1, 0))
    model = Guarded(Gaussian(0.3), linear(weight))
    config = PurifierConfig(denoising=0.5, clean=0.25, weighting="epsilon", knows=knows, few_steps=2, t_min=0.03)

    direction = (weight[1] - weight[0]) * (1 - 2 * r.y[:, None])
    threat = FAST_LINF.threat
    start = threat.random(r.x, Noise(tuple(r.seeds.tolist())).child(0x57A27))
    z = threat.project(r.x, start + 10 / 255 * direction.sign().view_as(r.x))

    expected = 0.0
    for share, shown in ((1.0, (r.x + z).clamp(0, 1)), (0.25, r.x)):
        state = SDE.diffuse(2 * shown - 1, r.t, r.eps)
        purified, _ = model.purify(state, r.t, 2, Noise.of(r.seeds, len(r.x)).child(WALK))
        loss = F.cross_entropy(purified.flatten(1) @ weight.T, r.y)
        alpha = over(SDE.alpha(r.t), state)
        target = (state - alpha.sqrt() * (2 * r.x - 1)) / (1 - alpha).sqrt()
        expected += share * (loss + 0.5 * (model.score.epsilon(state, r.t) - target).square().mean())
    assert OBJECTIVES["classifier"](model, config, r).item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("variance", [0.3, -0.001])
@pytest.mark.parametrize("knows", training.KNOWS)
def test_the_loss_of_a_linear_classifier_behind_a_gaussian_purifier(knows, variance):
    """Both are linear, so the attack's step, the logits and the denoised image are known in closed form.

    With a negative "variance" the purifier turns the image's sign, which only an attack through it knows.
    """
    r = rows()
    weight = torch.randn(2, r.x[0].numel(), generator=generator(1, 0))
    model = Guarded(Gaussian(variance), linear(weight))
    config = PurifierConfig(denoising=0.5, clean=0.25, weighting="epsilon", knows=knows)

    direction = (weight[1] - weight[0]) * (1 - 2 * r.y[:, None])  # the loss rises away from the label's row
    if variance < 0 and knows != "classifier":
        direction = -direction
    threat = FAST_LINF.threat
    start = threat.random(r.x, Noise(tuple(r.seeds.tolist())).child(0x57A27))
    z = threat.project(r.x, start + 10 / 255 * direction.sign().view_as(r.x))

    alpha = SDE.alpha(r.t).float()[:, None, None, None]
    expected = 0.0
    for share, shown in ((1.0, (r.x + z).clamp(0, 1)), (0.25, r.x)):
        state = alpha.sqrt() * (2 * shown - 1) + (1 - alpha).sqrt() * r.eps
        denoised = alpha.sqrt() * variance * state / (alpha * variance + 1 - alpha)
        loss = F.cross_entropy((denoised + 1).flatten(1) / 2 @ weight.T, r.y)
        miss = (denoised - (2 * r.x - 1)) * (alpha / (1 - alpha)).sqrt()  # an error of ε̂ is one of D times √α/std
        expected += share * (loss + 0.5 * miss.square().mean())
    assert OBJECTIVES["classifier"](model, config, r).item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_bridge_leads_from_the_diffused_attack_to_the_clean_image():
    r, attacked = rows(), rows(seed=3).x
    x, attacked = 2 * r.x - 1, 2 * attacked - 1
    assert torch.allclose(bridge(SDE, x, attacked, r.t, r.t, r.eps), SDE.diffuse(attacked, r.t, r.eps), atol=1e-6)
    zero = torch.full_like(r.t, 1e-12)
    assert torch.allclose(bridge(SDE, x, attacked, zero, r.t, r.eps), x, atol=1e-5)
    t = r.t / 3
    a, A = (SDE.alpha(time)[:, None, None, None].float() for time in (t, r.t))  # as the paper writes it
    published = a.sqrt() * x + (1 - a).sqrt() * r.eps + (attacked - x) * A * (1 - a) / ((1 - A) * a.sqrt())
    assert torch.allclose(bridge(SDE, x, attacked, t, r.t, r.eps), published, atol=1e-5)


def test_the_target_of_the_bridge_is_the_published_one():
    r = rows()
    moved, t = (r.x + 0.03).clamp(0, 1), r.t / 2
    model = Guarded(Gaussian(0.3), nn.Identity())
    state = bridge(SDE, 2 * r.x - 1, 2 * moved - 1, t, r.t, r.eps)
    a, A = (SDE.alpha(time)[:, None, None, None].float() for time in (t, r.t))
    published = r.eps + 2 * (moved - r.x) * (1 / a - 1).sqrt() * A / (1 - A)
    assert model.missed(r.x, state, t, published, "edm").item() == pytest.approx(0, abs=1e-8)


def test_ranks_become_gaussian_numbers_in_the_same_order():
    random = generator(0, 0)
    values, gaussian = torch.randn(2, 2, 3, 4, 5, generator=random).exp()
    mapped = ranked(values, gaussian)
    assert mapped.shape == values.shape
    assert torch.equal(mapped.flatten(2).sort(2).values, gaussian.flatten(2).sort(2).values)
    assert torch.equal(mapped.flatten(2).argsort(2), values.flatten(2).argsort(2))


def test_an_attack_of_ranks_raises_the_loss_of_the_classifier():
    """Behind a linear defence the hostile noise has the order of the gradient, and the loss is higher with it."""
    r = rows(batch=8, t=(0.05, 0.05))
    weight = torch.randn(2, r.x[0].numel(), generator=generator(1, 0))
    seen = []

    class Watched(Gaussian):
        def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
            seen.append((x, t))
            return super().epsilon(x, t)

    model = Guarded(Watched(0.3), linear(weight))
    OBJECTIVES["rank"](model, PurifierConfig(objective="rank", learn="score"), r)
    (_, t), (met, again) = seen
    assert torch.equal(t, again)
    assert (t <= r.t).all()
    gamma = (0.03 / SDE.sigma(t)).clamp(max=0.3)[:, None, None, None].float()
    eps = (met - SDE.diffuse(2 * r.x - 1, t, torch.zeros_like(r.x))) / SDE.std(t)[:, None, None, None].float()
    hostile = (eps - (1 - gamma**2).sqrt() * r.eps) / gamma
    direction = (weight[1] - weight[0]) * (1 - 2 * r.y[:, None])
    channels = direction.view_as(r.x).flatten(2).argsort(2)
    assert torch.equal(hostile.flatten(2).argsort(2), channels)
    assert hostile.std().item() == pytest.approx(1, abs=0.15)


# ------------------------------------------------------------------------------------------------------------ training

STRIPES = Images(
    torch.stack([torch.linspace(0, 255, 8).repeat(3, 8, 1) if i % 2 else torch.full((3, 8, 8), 90) for i in range(40)])
    .add(torch.randint(-20, 20, (40, 3, 8, 8), generator=generator(0, 0)))
    .clamp(0, 255)
    .to(torch.uint8),
    torch.arange(40) % 2,
)


def networks() -> tuple[TinyUNet, nn.Module]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(72, 2))
    return TinyUNet(8), nn.Sequential(*layers)


def trained(folder: Path | None = None, **changes: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    options = {"examples": 120, "batch": 8, "rate": 3e-3, "classifier_rate": 3e-3, "decay": 0.5, "threads": 1}
    config = PurifierConfig(**{**options, **changes})
    return train_purifier(*networks(), STRIPES[:32], config, STRIPES[32:], folder)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(("objective", "steps"), [*((name, 0) for name in OBJECTIVES), ("classifier", 2)])
def test_every_objective_lowers_its_loss(objective, steps):
    r = replace(rows(40, 8, steps=steps), x=STRIPES.float(), y=STRIPES.labels)
    options = {"objective": objective, "few_steps": steps, "t_min": 0.03, **SCORE_ONLY[objective]}
    losses = []
    for states in (None, trained(examples=800, rate=2e-2, **options)):
        model = Guarded(*networks())
        if states:
            model.score.load_state_dict(states[0])
            model.classifier.load_state_dict(states[1])
        losses.append(OBJECTIVES[objective](model, PurifierConfig(**options), r).item())
    assert losses[1] < 0.8 * losses[0]


@pytest.mark.parametrize(("learn", "frozen"), [("both", []), ("score", [1]), ("classifier", [0])])
def test_what_does_not_learn_stays_bit_for_bit(learn, frozen):
    before = [{key: value.clone() for key, value in network.state_dict().items()} for network in networks()]
    after = trained(learn=learn, examples=24, clean=0.5, threads=3)
    assert [part for part in (0, 1) if same(before[part], after[part])] == frozen
    statistics = [key for key in before[1] if "running" in key]
    assert all(torch.equal(before[1][key], after[1][key]) for key in statistics)


def test_a_classifier_can_learn_purified_images_that_nobody_attacks(monkeypatch):
    monkeypatch.setattr(Adversary, "attacked", lambda *_: pytest.fail("attacked"))
    score, classifier = networks()
    before = classifier[4].weight.clone()
    config = PurifierConfig(learn="classifier", attacked=0, clean=1, examples=16, batch=8, threads=1)
    _, state = train_purifier(score, classifier, STRIPES, config)
    assert not torch.equal(state["4.weight"], before)


@pytest.mark.parametrize(("objective", "steps"), [*((name, 0) for name in OBJECTIVES), ("classifier", 2)])
def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path, monkeypatch, objective, steps):
    options = {
        "objective": objective,
        "few_steps": steps,
        "t_min": 0.03,
        "examples": 56,
        "threads": 2,
        **SCORE_ONLY[objective],
    }
    whole, batches = trained(**options), training._batches

    def interrupted(step: int, batch: Any) -> tuple[Tensor, ...]:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return batch(step)

    monkeypatch.setattr(training, "_batches", lambda *given: partial(interrupted, batch=batches(*given)))
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, **options)
    monkeypatch.setattr(training, "_batches", batches)
    again = trained(tmp_path, **options)
    assert same(whole[0], again[0])
    assert same(whole[1], again[1])
    assert "accuracy clean" in (log := (tmp_path / "log.txt").read_text())
    assert "(8 images, PGD-5, t* = 0.065)" in log
    with pytest.raises(InputError, match="begun with another rate"):
        trained(tmp_path, **options, rate=1e-5)


def test_half_of_the_steps_of_training_purify_in_few_steps():
    """Drawn anew for each, the same for all its rows and at every time that it is asked for."""
    config = PurifierConfig(few_steps=3, t_min=0.03, batch=4)
    batch = training._batches(Images(torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.zeros(8).long()), config)
    drawn = [batch(step)[-1] for step in range(300)]
    assert all(len(steps) == 4 and steps.unique().numel() == 1 for steps in drawn)
    assert torch.equal(drawn[7], batch(7)[-1])
    assert torch.stack(drawn)[:, 0].bincount().tolist() == pytest.approx([150, 0, 0, 150], abs=32)  # 3.7 deviations


def test_the_labels_of_the_classifier_are_its_probabilities_for_the_clean_image(monkeypatch):
    """With clean images alone the loss is the cross-entropy of the purified image to what the clean one gets."""
    score, classifier = networks()
    seen: list[Rows] = []
    monkeypatch.setitem(
        OBJECTIVES, "classifier", lambda _, __, r: seen.append(r) or sum(p.sum() for p in score.parameters())
    )
    config = PurifierConfig(learn="score", labels="classifier", examples=8, batch=8, threads=1)
    train_purifier(score, classifier, STRIPES, config)
    with torch.no_grad():
        assert torch.allclose(seen[0].y, classifier(seen[0].x).softmax(1), atol=1e-6)
    assert seen[0].y.shape == (8, 2)


PHOTOS = Photos(tuple(torch.randint(0, 256, (3, 9 + i, 12), dtype=torch.uint8) for i in range(12)))


def test_a_purifier_of_photographs_is_tuned_to_a_classifier_without_labels(tmp_path):
    """Squares of photographs of any sizes; the score learns, the classifier stays, and a run goes on."""
    score, classifier = networks()
    before = {key: value.clone() for key, value in classifier.state_dict().items()}
    options = {"learn": "score", "labels": "classifier", "batch": 4, "crop": 8, "threads": 1, "clean": 0.5}
    config = PurifierConfig(**options, examples=16)
    watched = Images(PHOTOS.squares(8), torch.zeros(12, dtype=torch.int64))
    whole, same_classifier = train_purifier(score, classifier, PHOTOS, config, watched, tmp_path)
    assert same(before, same_classifier)
    assert not same(networks()[0].state_dict(), whole)
    assert "accuracy clean" in (tmp_path / "log.txt").read_text()
    assert same(whole, train_purifier(*networks(), PHOTOS, config, watched, tmp_path)[0])


def test_photographs_have_no_labels_of_their_own():
    with pytest.raises(InputError, match="Photographs have no labels"):
        train_purifier(*networks(), PHOTOS, PurifierConfig(examples=4, batch=4))


def test_a_network_without_weights_cannot_learn():
    config = PurifierConfig(learn="classifier", examples=8, batch=8)
    with pytest.raises(InputError, match="Flatten has no weights"):
        train_purifier(networks()[0], nn.Flatten(), STRIPES, config)


def test_a_run_goes_on_with_its_own_networks_only(tmp_path):
    trained(tmp_path, examples=8)
    score, classifier = networks()
    classifier[4].bias.data += 1
    config = PurifierConfig(examples=8, batch=8, rate=3e-3, classifier_rate=3e-3, decay=0.5, threads=1)
    with pytest.raises(InputError, match="begun with another classifier; give the same"):
        train_purifier(score, classifier, STRIPES[:32], config, None, tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"objective": "clasifier"}, "did you mean 'classifier'"),
        ({"learn": "all"}, "part to learn"),
        ({"labels": "mine"}, "kind of labels"),
        ({"knows": "all"}, "knowledge of an attack"),
        ({"labels": "classifier"}, "learn is 'score'"),
        ({"crop": 0}, "are 1 or more"),
        ({"objective": "bridge"}, "trains the score alone"),
        ({"objective": "rank", "learn": "score", "clean": 1.0}, "clean belongs to the objective 'classifier'"),
        ({"objective": "bridge", "learn": "score", "knows": "purifier"}, "knows belongs"),
        ({"objective": "rank", "learn": "score", "few_steps": 2, "t_min": 0.03}, "few_steps belongs"),
        ({"few_steps": -1}, "a whole number"),
        ({"few_steps": 2.5, "t_min": 0.03}, "a whole number"),
        ({"few_steps": 2, "t_min": 0.02}, "a larger t_min"),
        ({"weighting": "edn"}, "weighting"),
        ({"t_min": 0}, "0 < t_min"),
        ({"t_min": 0.2}, "t_min <= t_max"),
        ({"attacked": 0}, "have a weight above zero"),
        ({"clean": -1}, "not negative"),
        ({"adversary": replace(FAST_LINF, trades=6.0)}, "TRADES"),
    ],
)
def test_a_configuration_refuses_what_cannot_be_trained(options, says):
    with pytest.raises(InputError, match=says):
        PurifierConfig(**options)


# ------------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`diffpure train purifier` on a few images of noise."""
    pixels = torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8, generator=generator(0, 0))
    monkeypatch.setattr(cifar10, "load", lambda *_: Images(pixels, torch.arange(10)))
    monkeypatch.setattr(recipes, "HELD_OUT", 2)

    def run(*options: str) -> str:
        arguments = ["train", "purifier", "--examples", "4", "--batch", "2", "--threads", "1", *options]
        found = CliRunner().invoke(cli.app, [*arguments, "--out", str(tmp_path)], catch_exceptions=False)
        assert found.exit_code == 0
        return found.output

    return run


@pytest.fixture
def configured(command, monkeypatch):
    """The configuration that the command makes of its options; nothing is trained."""
    configs: list[PurifierConfig] = []
    monkeypatch.setattr(recipes, "harden", lambda *given: configs.append(given[3]) or {})

    def run(*options: str) -> PurifierConfig:
        command(*options)
        return configs.pop()

    return run


def test_the_command_trains_and_writes_files_that_load(command, tmp_path):
    assert command().count("sha256") == 2
    assert "step 2/2 accuracy clean" in (tmp_path / "log.txt").read_text()
    dp.load_score(tmp_path / "score.safetensors", like="cifar10-small")
    dp.load_classifier(tmp_path / "classifier.safetensors", like="cifar10-resnet-at")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "learn": "classifier",
            "attacked": 0.5,
            "clean": 0.25,
            "denoising": 2.0,
            "classifier_rate": 1e-5,
            "few_steps": 4,
            "t_min": 0.03,
        },
        {"objective": "rank", "learn": "score", "rate": 1e-3, "decay": 0.9, "t_min": 0.01, "t_max": 0.2, "seed": 3},
        {"learn": "score", "labels": "classifier", "crop": 96},
    ],
    ids=["defaults", "classifier", "rank", "labels"],
)
def test_the_options_of_the_command_reach_the_training(configured, options):
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    config = configured(*words, "--precision", "float32")
    assert config == PurifierConfig(**options, examples=4, batch=2, threads=1)


def test_the_attack_of_the_command_is_that_of_its_options(configured):
    words = ["--norm", "l2", "--eps", "0.5", "--iterations", "2", "--knows", "purifier"]
    config = configured(*words)
    assert config.adversary == Adversary(threat=L2(0.5), iterations=2)
    assert config.knows == "purifier"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--score cifar10-smal", "did you mean 'cifar10-small'"),
        ("--score nowhere/score.safetensors", "There is no file"),
        ("--classifier cifar10-resnet-av", "did you mean"),
        ("--eps eight", "8/255 is wanted"),
        ("--objective bridge", "trains the score alone"),
        ("--batch 9", "A batch of 9 images"),
    ],
)
def test_the_command_refuses_what_it_cannot_train(command, options, says):
    with pytest.raises(InputError, match=says):
        command(*options.split())


def test_the_command_tunes_a_score_of_any_size_on_photographs(tmp_path, monkeypatch):
    """Only what learned is written; the classifier is somebody else's."""
    monkeypatch.setattr(recipes, "HELD_OUT_PHOTOS", 2)
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(5):
        Image.new("RGB", (40, 36), (40 * i, 90, 200)).save(folder / f"{i}.png")
    words = f"train purifier --score photos-small --data {folder} --crop 32"
    words += f" --attacked 0 --clean 1 --examples 3 --batch 3 --threads 1 --out {tmp_path / 'tuned'}"
    found = CliRunner().invoke(cli.app, words.split(), catch_exceptions=False)
    assert found.exit_code == 0
    dp.load_score(tmp_path / "tuned/score.safetensors", like="photos-small")
    assert not (tmp_path / "tuned/classifier.safetensors").exists()


def test_one_move_of_the_command_is_a_quarter_longer_than_the_budget(configured):
    adversary = configured("--eps", "4/255").adversary
    assert adversary == Adversary(threat=Linf(4 / 255), iterations=1, step_size=5 / 255)

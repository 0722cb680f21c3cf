"""An evaluation: known answers, warnings, memory, adversarial images as pictures, and bad arguments."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from diffpure.attacks import EOT, PGD
from diffpure.attacks.pgd import RestartedAttack
from diffpure.diffusion.samplers import OneShot
from diffpure.errors import InputError
from diffpure.evaluation.engine import Local
from diffpure.evaluation.evaluate import evaluate
from diffpure.evaluation.setup import Settings, set_up
from diffpure.pictures.pngs import save_pngs
from diffpure.purifiers.blur import Blur
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN
from diffpure.threats import L2, Linf
from evaluations import THREAT, Linear, attacks, defense, line_up, problem, settle, timeless
from problems import images, tiny_unet

# ------------------------------------------------------------------------------------------------------ known answers


def test_a_linear_model_has_its_exact_robust_accuracy(tmp_path):
    eps = 0.1
    model, distances = Linear(), [0.3, 0.11, 0.09, -0.05, -0.25, -0.101, 0.02]
    x, y = line_up(model, distances)
    y[0] = 0  # one image is wrong from the start
    found = evaluate(model, x, y, Linf(eps), [PGD(iterations=5, random_start=False)], out=tmp_path / "r")
    assert found.clean().correct == 6
    survivors = {i for i, d in enumerate(distances) if abs(d) > eps} - {0}
    rows = {row.image: row for row in found.rows if row.attack == "pgd-ce"}
    assert {i for i, row in rows.items() if row.predictions == (int(y[i]),)} == survivors
    assert found.robust().correct == len(survivors)
    assert all(row.size == pytest.approx(eps) and row.within for row in rows.values())
    assert found.header["model"]["stochastic"] is False


def test_what_an_attack_spends_is_counted(reference):
    """Three steps of the network per evaluation, each of them again, with a graph, in the backward pass."""
    rows = [row for row in reference.rows if row.attack == "pgd-ce"]
    assert {(row.gradients, row.queries) for row in rows} == {(4, 4)}  # 2 steps × 2 samples; first and last × 2
    samples = 4  # of the evaluation, for "worst of 4"
    assert {row.network for row in rows} == {3 * (4 + 4 + samples)}
    assert {row.network_gradient for row in rows} == {3 * 4}
    assert {(row.classifier, row.classifier_gradient) for row in rows} == {(4 + samples, 4)}
    clean = [row for row in reference.rows if row.attack == CLEAN]
    assert {(row.network, row.network_gradient, row.classifier) for row in clean} == {(3 * samples, 0, samples)}
    total = sum(row.network + row.network_gradient for row in reference.rows)
    assert reference.spent()["network"] + reference.spent()["network_gradient"] == total
    assert f"{total:,} network calls" in str(reference)


def test_an_attack_that_cheats_is_moved_back():
    class Cheat(RestartedAttack):
        kind = "cheat"

        def start(self, problem, state):
            return state

        def begin(self, problem, state, i, run):
            too_far = torch.ones_like(state["best"])
            too_far[0, 0, 0, 0] = torch.nan
            return {**state, "best": too_far}

        def iterate(self, problem, state, i, k):
            return state

    model = Linear()
    x, y = line_up(model, [0.2, -0.2])
    found = evaluate(model, x, y, Linf(0.1), [Cheat(iterations=1)])
    rows = [row for row in found.rows if row.attack == "cheat"]
    assert not any(row.within for row in rows)
    assert found.robust().value == 1.0  # no image within the budget is lost
    assert any("2 of 2 perturbations exceeded their budget" in text for text in found.warnings)


def test_evaluation_samples_are_not_those_of_the_attack(reference):
    again = settle(seeds=[1])
    assert [r.predictions for r in again.rows] != [r.predictions for r in reference.rows]
    assert timeless(settle().rows) == timeless(reference.rows)


def test_fixed_noise_is_evaluated_with_the_noise_that_the_attack_knew():
    """With its noise known, a random defence is a deterministic model: what the attack believes is what is found."""
    x, y = problem()
    known = PGD(iterations=6, step_size=2 / 255, eot=EOT(1, fixed=True))
    found = evaluate(defense(), x, y, Linf(16 / 255), {"known": known}, rules=["one-shot"])
    rows = [row for row in found.rows if row.attack == "known"]
    assert any(row.misclassified for row in rows)
    assert all(row.misclassified == (row.predictions[0] != row.label) for row in rows)


def test_a_random_model_without_seeds_is_seeded_image_by_image():
    class Shaky(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.2 * torch.randn_like(x))

    x, y = line_up(Linear(), [0.02, -0.02, 0.3, 0.01])
    one = evaluate(Shaky(), x, y, Linf(0.01), [PGD(iterations=2, eot=EOT(2))], rules=["worst of 5"], batch=4)
    other = evaluate(Shaky(), x, y, Linf(0.01), [PGD(iterations=2, eot=EOT(2))], rules=["worst of 5"], batch=1)
    assert one.header["model"]["stochastic"]
    assert timeless(one.rows) == timeless(other.rows)
    assert len({row.predictions for row in one.rows}) > 1


def test_warnings_of_the_checks(reference):
    assert any(text.startswith("square: The defence is random") for text in reference.warnings)
    x, y = problem(2)
    for model, attack in (
        (defense().with_gradient("bpda"), PGD(iterations=1, eot=EOT(2))),  # the defence's own gradient
        (defense(), PGD(iterations=1, eot=EOT(2), gradient="bpda")),  # the attack's
    ):
        soft = evaluate(model, x, y, THREAT, [attack], rules=["one-shot"])
        assert any(f"{attack.name}: the gradient mode 'bpda' is approximate" in text for text in soft.warnings)
    model = Linear()
    x, y = line_up(model, [0.2, -0.2])
    weak = PGD(iterations=1, step_size=1e-4, random_start=False)
    found = evaluate(model, x, y, Linf(0.15), [weak], probe=2)
    assert any("survived an attack without a budget" in text for text in found.warnings)


def test_without_an_attack_robustness_is_not_measured(tmp_path):
    x, y = line_up(Linear(), [0.2, -0.2])
    found = evaluate(Linear(), x, y, Linf(0.15), (), out=tmp_path / "r")
    assert found.clean().value == 1.0
    for result in (found, Result.load(tmp_path / "r")):
        assert result.warnings == ("The evaluation has no attack: robust accuracy was not measured.",)
        assert "robust accuracy: not measured" in str(result)
        with pytest.raises(InputError, match="not measured"):
            result.robust()


@pytest.mark.parametrize(
    ("threat", "said"),
    [
        (Linf(0.6), "An ℓ∞ budget of 0.6 lets every image become grey"),
        (L2(7.0), "An ℓ2 budget of 7 is longer than the diagonal of the images"),  # √48 = 6.9
        (Linf(0.5), ""),
        (L2(6.9), ""),
    ],
)
def test_budgets_under_which_nothing_is_robust(threat, said):
    x, y = line_up(Linear(), [0.2, -0.2])
    found = evaluate(Linear(), x, y, threat, [PGD(iterations=1)])
    told = [text for text in found.warnings if "budget" in text and "nothing is robust" in text]
    assert len(told) == bool(said)
    assert all(text.startswith(said) for text in told)


def test_images_of_which_the_purifier_sees_a_small_part_are_told():
    score = tiny_unet(8)
    score.size = 8
    model = Defense(Purifier(score, OneShot(t_star=0.05)), nn.Sequential(nn.Flatten(), nn.LazyLinear(3)).eval())
    for size, lost in ((17, True), (16, False), (4, False), (3, True)):
        model.classifier = nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 3)).eval()
        found = evaluate(model, images(1, size), [0], "linf 8/255", (), rules=["one-shot"])
        said = f"The images are {size}×{size}, but the purifier works at 8×8"
        assert any(text.startswith(said) for text in found.warnings) == lost


@pytest.mark.parametrize("defended", [False, True])
def test_a_function_is_probed_and_audited(defended):
    """A classifier that is a function of float32 numbers: the checks at the end ask it, too, and lose no run."""
    x, y = problem(2)
    w = torch.linspace(-1, 1, 5 * x[0].numel()).reshape(-1, 5)
    function = lambda z: z.flatten(1) @ w  # noqa: E731
    model = Defense(Blur(), function) if defended else function
    found = evaluate(model, x, y, "linf 8/255", [PGD(iterations=1)], rules=["one-shot"], probe=1)
    assert found.complete
    assert not any("audit disagrees" in text for text in found.warnings)


def test_gradients_that_the_caller_switched_off_are_switched_on_where_they_are_needed(reference):
    with torch.no_grad():
        assert timeless(settle().rows) == timeless(reference.rows)


def test_what_was_not_tried_is_said():
    model = Linear()
    x, y = line_up(model, [0.2, -0.2])
    attack = PGD(iterations=1)
    for tried, probe, said in (([attack], 0, True), ([attack], 2, False), ([], 0, False)):
        found = evaluate(model, x, y, Linf(0.15), tried, probe=probe)
        assert any(text.startswith("Not tried: whether more EOT samples") for text in found.warnings) == said


def test_every_result_says_where_the_cross_entropy_saturates():
    steep = Linear()
    x, y = line_up(steep, [0.2, 0.3])
    steep.w.mul_(1e3)
    found = evaluate(steep, x, y, Linf(0.01), [PGD(iterations=1)])
    assert any("2 of 2 images is zero in float32" in text for text in found.warnings)


def test_a_probe_audits_the_gradient():
    x, y = problem(1)
    attack = PGD(iterations=1, eot=EOT(2))
    for mode, doubted in (("exact", False), ("bpda", True)):
        found = evaluate(defense().with_gradient(mode), x, y, THREAT, [attack], rules=["one-shot"], probe=1)
        assert any("audit disagrees" in text for text in found.warnings) == doubted


def test_memory_does_not_grow_with_the_images():
    """Bytes of tensors alive after every unit, with five times the images (counted, so that no allocator matters)."""

    def peak(count: int) -> int:
        x, y = line_up(Linear(), [0.1] * count)
        settings = Settings(rules=["one-shot"], batch=50, per_call=50)
        work = set_up(Linear(), x, y, Linf(0.05), [PGD(iterations=2)], settings)
        alive = []
        for done in Local().run(work, work.units, lambda *_: None, None):
            attacked = done.unit.attack != CLEAN
            del done
            if not attacked:
                continue
            gc.collect()
            alive.append(sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is Tensor))
        return max(alive) - x.nbytes - y.nbytes

    assert peak(500) <= peak(100) + 4096


# ----------------------------------------------------------------------------------------------------------- pictures


def test_pngs_keep_the_budget(tmp_path):
    model = Linear()
    x, y = line_up(model, [0.2, -0.1, 0.0])
    x = (x * 255).round() / 255
    evaluate(model, x, y, Linf(7.6 / 255), [PGD(iterations=3)], batch=2, out=tmp_path / "r")
    files = save_pngs(tmp_path / "r", tmp_path / "png")
    assert [str(file.relative_to(tmp_path / "png")) for file in files] == [
        f"pgd-ce-seed0/{index:06d}.png" for index in range(3)
    ]
    levels = torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files]).double()
    assert (levels - x.double() * 255).abs().max() == pytest.approx(7, abs=1e-3)
    with pytest.raises(InputError, match="no adversarial images"):
        save_pngs(tmp_path, tmp_path / "png")


# ------------------------------------------------------------------------------------------------------ bad arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": []}, "needs at least one rule"),
        ({"seeds": []}, "Every seed is an integer that is given once, at least one; got \\[\\]"),
        ({"seeds": [0, 0]}, "Every seed is an integer that is given once"),
        ({"seeds": [1.5]}, "A seed is an integer, got 1.5"),
        ({"batch": 0}, "batch and per_call of at least 1"),
        ({"per_call": 0}, "batch and per_call of at least 1"),
        ({"indices": [0, 0, 1, 2, 3]}, "Every dataset index is an integer that is given once, one per image"),
        ({"indices": [0, 1]}, "one per image, 5 in all"),
        ({"rules": ["best of 3"]}, "Unknown decision rule"),
        ({"rows": 8}, "Unknown setting of an evaluation 'rows'"),
    ],
)
def test_bad_arguments(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        settle(tmp_path / "r", **changes)
    assert not (tmp_path / "r").exists()


def test_labels_beyond_the_classes_and_a_model_in_training(tmp_path):
    x, y = problem()
    with pytest.raises(InputError, match=r"Labels are in \[0, 5\)"):
        evaluate(defense(), x, y + 5, THREAT, attacks(), out=tmp_path / "r")
    with pytest.raises(InputError, match="training mode"):
        evaluate(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(192, 5)), x, y, THREAT, out=tmp_path / "r")
    with pytest.raises(InputError, match="An attack is a name or a table with a kind"):
        evaluate(defense(), x, y, THREAT, {"mine": lambda *_: x}, out=tmp_path / "r")  # type: ignore[dict-item]
    assert not (tmp_path / "r").exists()

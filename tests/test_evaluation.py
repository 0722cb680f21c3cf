"""An evaluation: known answers, warnings, memory, adversarial images as pictures, and bad arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffpure.evaluation.calibrate import _Peak
from PIL import Image
from torch import Tensor, nn

from diffpure.attacks import APGD, EOT, PGD, Suite
from diffpure.errors import InputError
from diffpure.evaluation.cost import spending
from diffpure.evaluation.engine import Local, Work
from diffpure.evaluation.evaluate import evaluate, prepare
from diffpure.evaluation.rows import CLEAN
from diffpure.pictures.pngs import save_pngs
from diffpure.threats import Linf
from evaluations import THREAT, Linear, attacks, defense, line_up, problem, settle, timeless

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


def test_what_an_attack_spends_is_known(reference):
    rows = [row for row in reference.rows if row.attack == "pgd-ce"]
    assert {(row.gradients, row.queries) for row in rows} == {(4, 4)}  # 2 steps × 2 samples; first and last look × 2
    forward, gradient = 3, 6  # three steps, each of them again in the backward pass
    assert reference.header["calls"] == [forward, gradient]
    assert {row.score_calls for row in rows} == {4 * gradient + (4 + 4) * forward}
    assert {row.score_calls for row in reference.rows if row.attack == CLEAN} == {4 * forward}
    assert spending(PGD(iterations=2, eot=EOT(2)), 5) == (4, 4)
    assert spending(Suite(attacks=(PGD(iterations=2), APGD(iterations=3, loss="dlr-targeted"))), 5) == (
        2 + 12,
        1 + 1 + 4,
    )


def test_an_attack_that_cheats_is_moved_back():
    class Cheat(PGD.__mro__[1]):  # type: ignore[misc]  # any attack frame
        name = "cheat"

        def start(self, problem, state):
            return state

        def begin(self, problem, state, i, run):
            too_far = torch.ones_like(state["best"])
            too_far[0, 0, 0, 0] = torch.nan
            return {**state, "best": too_far}

        def move(self, problem, state, i, k):
            return state

    model = Linear()
    x, y = line_up(model, [0.2, -0.2])
    found = evaluate(model, x, y, Linf(0.1), [Cheat(iterations=1)])
    rows = [row for row in found.rows if row.attack == "cheat"]
    assert not any(row.within for row in rows)
    assert found.robust().value == 1.0  # no image within the budget is lost
    assert any("2 of 2 perturbations exceeded their budget" in text for text in found.warnings)


def test_draws_of_the_judge_are_not_those_of_the_attack(reference):
    again = settle(seeds=[1])
    assert [r.predictions for r in again.rows] != [r.predictions for r in reference.rows]
    assert timeless(settle().rows) == timeless(reference.rows)


def test_fixed_noise_is_judged_with_the_noise_that_the_attack_knew():
    """With its noise known, a random defence is a deterministic model: what the attack believes is what is judged."""
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
    soft = evaluate(defense().with_gradient("bpda"), x, y, THREAT, [PGD(iterations=1, eot=EOT(2))], rules=["one-shot"])
    assert any("'bpda' is approximate" in text for text in soft.warnings)
    model = Linear()
    x, y = line_up(model, [0.2, -0.2])
    weak = PGD(iterations=1, step_size=1e-4, random_start=False)
    found = evaluate(model, x, y, Linf(0.15), [weak], probe=2)
    assert any("survived an attack without a budget" in text for text in found.warnings)


def test_what_was_not_tried_is_said():
    model = Linear()
    x, y = line_up(model, [0.2, -0.2])
    attack = PGD(iterations=1)
    for tried, probe, said in (([attack], 0, True), ([attack], 2, False), ([], 0, False)):
        found = evaluate(model, x, y, Linf(0.15), tried, probe=probe)
        assert any(text.startswith("Not tried: whether more samples") for text in found.warnings) == said


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
    """Live tensor bytes at their peak, with ten times the images (counted, so that no timing or allocator matters)."""

    def peak(count: int) -> int:
        x, y = line_up(Linear(), [0.1] * count)
        ready = prepare(Linear(), x, y, Linf(0.05), [PGD(iterations=2)], rules=["one-shot"], batch=50, rows=50)
        counter = _Peak()
        with counter:
            for done in Local().run(Work(ready.job, x, y, ready.indices, ready.units), lambda *_: None):
                assert done.rows
        return counter.peak - x.nbytes - y.nbytes

    assert peak(2000) <= 1.1 * peak(200)


# ----------------------------------------------------------------------------------------------------------- pictures


def test_pngs_keep_the_budget(tmp_path):
    model = Linear()
    x, y = line_up(model, [0.2, -0.1, 0.0])
    x = (x * 255).round() / 255
    evaluate(model, x, y, Linf(7.6 / 255), [PGD(iterations=3)], batch=2, out=tmp_path / "r")
    files = save_pngs(tmp_path / "r", tmp_path / "png")
    assert [str(file.relative_to(tmp_path / "png")) for file in files] == [
        f"pgd-ce-seed0/{place:06d}.png" for place in range(3)
    ]
    levels = torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files]).double()
    assert (levels - x.double() * 255).abs().max() == pytest.approx(7, abs=1e-3)
    with pytest.raises(InputError, match="no adversarial images"):
        save_pngs(tmp_path, tmp_path / "png")


# ------------------------------------------------------------------------------------------------------ bad arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": []}, "needs one place an image"),
        ({"seeds": []}, "needs one place an image"),
        ({"batch": 0}, "batch and rows of at least 1"),
        ({"indices": [0, 0, 1, 2, 3]}, "one place an image"),
        ({"rules": ["best of 3"]}, "Unknown decision rule"),
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
    with pytest.raises(InputError, match="Attacks are"):
        evaluate(defense(), x, y, THREAT, {"mine": lambda *_: x}, out=tmp_path / "r")  # type: ignore[dict-item]
    assert not (tmp_path / "r").exists()

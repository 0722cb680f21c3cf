"""Certificates: radii with known answers, draws that are never used twice, runs that are killed, forged and resumed."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
from torch import Tensor, nn

import diffpure as dp
from diffpure.certificates.certify import COUNT, SELECT, CertificateLog, Smoothing, draw_seeds, set_up
from diffpure.certificates.smoothed import decisions, majority, sigma_of, smoothed, t_star_of
from diffpure.diffusion.sde import VPSDE, DiscreteVP
from diffpure.errors import InputError
from diffpure.noise import Noise, mix
from diffpure.results.certificates import CertificateRow, Certification, read_certificates
from diffpure.results.read import read_rows
from diffpure.verification.certificates import verify_certificates
from problems import images, tiny_classifier, tiny_unet

PHI = NormalDist()
NEARLY = dp.GaussianScore(mean=0.0, variance=1e6)  # its posterior mean is x(t*)/√α: the noisy image itself


class Constant(nn.Module):
    """Three classes of which it always answers one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor([0.0, 0.0, 1.0]).expand(len(x), 3)


class Half(nn.Module):
    """Two classes, divided by the plane ⟨w, x⟩ = c with ‖w‖ = 1: the distance of an image from it is its margin."""

    def __init__(self, c: float = 0.0) -> None:
        super().__init__()
        w = torch.linspace(-1, 1, 3 * 4 * 4).reshape(3, 4, 4)
        self.w, self.c = nn.Parameter(w / w.norm(), requires_grad=False), c

    def margin(self, x: Tensor) -> Tensor:
        return ((x - 0.5) * self.w).flatten(1).sum(1) - self.c

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([-self.margin(x), self.margin(x)], 1)


def on_margins(model: Half, margins: list[float]) -> Tensor:
    return 0.5 + torch.tensor(margins)[:, None, None, None] * model.w


def defense(sigma: float = 0.25, sampler: object = "one-shot") -> dp.Defense:
    return smoothed(tiny_unet(8), tiny_classifier(), sigma, sampler)


def timeless(rows) -> list[CertificateRow]:
    return [replace(row, seconds=0.0) for row in rows]


# ------------------------------------------------------------------------------------------------------ known answers


@pytest.mark.parametrize(("sigma", "n", "alpha"), [(0.25, 50, 0.001), (0.5, 20, 0.05)])
def test_a_constant_classifier_has_the_largest_radius(sigma, n, alpha):
    x = images(2, 4)
    result = dp.certify(smoothed(NEARLY, Constant(), sigma), x, [2, 0], sigma, n0=5, n=n, alpha=alpha)
    wanted = sigma * PHI.inv_cdf(alpha ** (1 / n))
    assert [row.radius for row in result.rows] == pytest.approx([wanted, wanted], rel=1e-9)
    assert all(row.radius <= wanted for row in result.rows)
    assert result.largest_radius == result.rows[0].radius
    assert [row.prediction for row in result.rows] == [2, 2]
    assert [row.right for row in result.rows] == [True, False]
    assert result.certified(0).correct == 1
    assert result.mean_radius == pytest.approx(wanted / 2)


def test_a_linear_classifier_tends_to_its_margin_from_below():
    """The class is P(⟨w, δ⟩ < margin) = Φ(margin/σ), so the radius of infinitely many draws is the margin itself."""
    model, sigma = Half(), 0.5
    margins = [0.25, -0.5, 0.1, 0.05]
    x, y = on_margins(model, margins), [1, 0, 1, 1]
    result = dp.certify(smoothed(NEARLY, model, sigma), x, y, n0=100, n=4000, per_call=4000)
    assert [row.prediction for row in result.rows[:3]] == [1, 0, 1]
    for row, margin in zip(result.rows[:3], margins, strict=False):
        share = PHI.cdf(abs(margin) / sigma)
        assert row.count / row.n == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / row.n))
        assert 0.6 * abs(margin) - 0.05 < row.radius < abs(margin)


def test_the_gaussian_score_moves_the_plane_by_its_gain():
    """E[x(0) | x(t*)] = μ + g (x + δ - μ) with g = v/(v + 4σ²) in [0, 1] units, so a plane at c is one at c/g."""
    sigma, variance, c = 0.5, 1.0, 0.1
    gain = variance / (variance + 4 * sigma**2)
    model = Half(c)
    x = on_margins(Half(), [c / gain + 0.3])
    result = dp.certify(smoothed(dp.GaussianScore(0.0, variance), model, sigma), x, [1], n0=50, n=3000, per_call=3000)
    share = PHI.cdf(0.3 / sigma)
    assert result.rows[0].count / 3000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 3000))
    assert 0.2 < result.rows[0].radius < 0.3


def test_an_image_on_the_boundary_is_abstained_from():
    model = Half()
    result = dp.certify(smoothed(NEARLY, model, 0.5), on_margins(model, [0.0]), [1], n0=10, n=100)
    (row,) = result.rows
    assert (row.prediction, row.radius) == (None, 0.0)
    assert 30 < row.count < 70
    assert row.p < 0.5
    assert str(result.abstained).startswith("100.0 %")
    assert result.certified(0).correct == 0


@pytest.mark.parametrize("sde", [VPSDE(), VPSDE(0.5, 8.0), DiscreteVP(VPSDE().discrete().betas)])
@pytest.mark.parametrize("sigma", [0.01, 0.12, 0.25, 0.5, 1.0])
def test_sigma_and_t_star_mean_the_same_noise(sde, sigma):
    t = t_star_of(sde, sigma)
    assert sde.alpha(t).item() == pytest.approx(1 / (1 + 4 * sigma**2), rel=1e-12)
    assert sigma_of(sde, t) == pytest.approx(sigma, rel=1e-9)


def test_the_paper_schedule_has_the_published_times():
    assert [round(t_star_of(VPSDE(), sigma), 3) for sigma in (0.25, 0.5, 1.0)] == [0.145, 0.259, 0.397]
    with pytest.raises(InputError, match=r"ends at t = 1, where sigma is .*; got sigma 1000"):
        t_star_of(VPSDE(), 1000.0)


def test_the_forward_diffusion_is_gaussian_noise_on_the_image():
    """x(t*)/√α in [0, 1] units is x + σ ε with the very ε of the seed."""
    sigma, x = 0.3, images(2, 4)
    model = smoothed(NEARLY, Constant(), sigma)
    noise = Noise.of([5, 6], 2).child(0)
    state, _ = model.purifier.begin(x, noise)
    alpha = 1 / (1 + 4 * sigma**2)
    torch.testing.assert_close((state / math.sqrt(alpha) + 1) / 2, x + sigma * noise(0, x), atol=1e-6, rtol=1e-5)


# -------------------------------------------------------------------------------------------------------------- draws


def test_one_vote_is_the_defence_itself_with_fresh_seeds():
    model, x = defense(), images(1)
    seeds = list(range(40))
    with torch.no_grad():
        classes = model(x.expand(40, -1, -1, -1), seeds=seeds).argmax(1).tolist()
    found = decisions(model, x[0], seeds, 1, 7)
    assert found == {k: classes.count(k) for k in dict.fromkeys(classes)}
    assert list(found) == list(dict.fromkeys(classes))


def test_selecting_and_counting_never_share_a_draw():
    chosen, counted = zip(*(draw_seeds(0, index, 100, 1000) for index in range(20)), strict=True)
    every = [seed for part in (*chosen, *counted) for seed in part]
    assert len(set(every)) == len(every) == 20 * 1100
    assert draw_seeds(0, 3, 100, 10)[1] == draw_seeds(0, 3, 5, 1000)[1][:10]
    assert draw_seeds(7, 3, 2, 2)[0] == [mix(mix(mix(7, 3), SELECT), i) for i in range(2)]
    assert SELECT != COUNT


def test_a_certificate_asks_for_no_draw_twice(monkeypatch):
    asked: list[int] = []
    forward = Noise.__call__
    monkeypatch.setattr(
        Noise, "__call__", lambda self, step, like: asked.extend(self.seeds * (step == 0)) or forward(self, step, like)
    )
    dp.certify(defense(), images(2), [0, 0], n0=10, n=30, per_call=8)
    assert len(set(asked)) == len(asked) == 2 * 40


def test_rows_depend_on_neither_batch_nor_company():
    model, x, y = defense(), images(3), [0, 1, 2]
    whole = dp.certify(model, x, y, n0=20, n=60)
    for per_call in (1, 7):
        assert timeless(dp.certify(model, x, y, n0=20, n=60, per_call=per_call).rows) == timeless(whole.rows)
    alone = dp.certify(model, x[[2, 0]], [2, 0], n0=20, n=60, indices=[2, 0])
    assert timeless(alone.rows) == timeless([whole.rows[2], whole.rows[0]])
    assert timeless(dp.certify(model, x, y, n0=20, n=60, seed=1).rows) != timeless(whole.rows)


# -------------------------------------------------------------------------------------------------------------- votes


def test_a_majority_needs_more_than_any_other():
    assert majority([3, 1, 3]) == 3
    assert majority([4]) == 4
    assert majority([1, 0, 0, 1]) == majority([0, 1]) == majority([0, 1, 2]) == -1
    assert majority([2, 2, 0, 1]) == 2


def test_votes_start_from_one_diffused_image_and_come_back_by_different_noise():
    """Data N(0, v): x̂(0) given x(t*) is Gaussian, so many votes give the sign of its mean, which one vote may miss."""
    model, sigma = Half(), 0.5
    score = dp.GaussianScore(0.0, 1.0)
    back = dp.FewStep(steps=4, order=1)
    x = on_margins(model, [0.1])
    random, steady = smoothed(score, model, sigma, back), smoothed(score, model, sigma)
    seeds = list(range(400))
    one, many = (decisions(random, x[0], seeds, votes, 4000) for votes in (1, 25))
    mean = decisions(steady, x[0], seeds, 1, 4000)
    assert sum(one.values()) == sum(many.values()) == 400  # an odd number of votes for two classes has no ties
    # A posterior of the width of the noise blurs one vote; the vote of many is nearly that of the posterior mean.
    assert abs(many[1] - mean[1]) < 20
    assert many[1] - one[1] > 5
    pairs = decisions(random, x[0], seeds, 2, 4000)
    assert sum(pairs.values()) < 400
    assert sum(pairs.values()) == 400 - _disagreements(random, x, seeds)


def _disagreements(model: dp.Defense, x: Tensor, seeds: list[int]) -> int:
    """Of how many draws two chains from one x(t*) disagree, computed by hand."""
    purifier, many = model.purifier, x.expand(len(seeds), -1, -1, -1)
    state, path = purifier.begin(many, Noise(tuple(mix(seed, 0) for seed in seeds)))
    found = []
    for vote in (0, 1):
        own, y = replace(path, noise=Noise(tuple(mix(seed, vote) for seed in seeds))), state
        for i in range(len(own)):
            y = own.step(y, i)
        found.append(model.classify(purifier.finish(y, many)).argmax(1))
    return int((found[0] != found[1]).sum())


def test_votes_are_certified_and_counted():
    model = defense(sampler={"kind": "few-step", "steps": 2, "order": 1})
    result = dp.certify(model, images(2), [0, 1], n0=6, n=12, votes=3)
    assert [row.classifier for row in result.rows] == [3 * 18] * 2
    assert [row.network for row in result.rows] == [3 * 18 * 3] * 2
    assert "majority of 3 reverse chains" in str(result)


# --------------------------------------------------------------------------------------------------------------- runs


def settle(out=None, **changes):
    return dp.certify(
        defense(), images(5), [0, 1, 2, 3, 4], **{"n0": 20, "n": 200, "out": out, "per_call": 20, **changes}
    )


def test_kill_and_resume_to_the_same_rows(tmp_path):
    began = time.perf_counter()
    whole = settle(tmp_path / "whole")
    took = time.perf_counter() - began
    kills = 0
    for share in (0.3, 0.5):
        child = os.fork()
        if child == 0:
            try:
                settle(tmp_path / "r")
            finally:
                os._exit(0)
        time.sleep(took * share)
        done, _ = os.waitpid(child, os.WNOHANG)
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
    assert kills
    found = settle(tmp_path / "r")
    assert timeless(found.rows) == timeless(whole.rows) == timeless(settle().rows)
    path = tmp_path / "r" / "rows.jsonl"
    assert len(path.read_text().splitlines()) == 6
    path.write_bytes(path.read_bytes()[:-40])  # a torn line is computed again
    assert timeless(settle(tmp_path / "r").rows) == timeless(whole.rows)
    assert timeless(Certification.load(tmp_path / "r").rows) == timeless(whole.rows)


def test_a_finished_run_is_only_read(tmp_path):
    calls = []
    settle(tmp_path / "r", progress=lambda done, total: calls.append((done, total)))
    assert calls[0] == (0, 1100)
    assert calls[-1] == (1100, 1100)
    before = (tmp_path / "r" / "rows.jsonl").read_bytes()
    settle(tmp_path / "r", progress=lambda done, total: calls.append("again"))
    assert "again" not in calls
    assert (tmp_path / "r" / "rows.jsonl").read_bytes() == before


def test_another_certification_and_a_second_writer_are_refused(tmp_path):
    settle(tmp_path / "r")
    for change, key in (({"n": 100}, "n"), ({"seed": 1}, "seed"), ({"alpha": 0.01}, "alpha"), ({"n0": 7}, "n0")):
        with pytest.raises(InputError, match=rf"holds another certification \(with other {key}\)"):
            settle(tmp_path / "r", **change)
    header, _ = read_certificates(tmp_path / "r")
    with CertificateLog.open(tmp_path / "r", header), pytest.raises(InputError, match="Another process is writing"):
        settle(tmp_path / "r")
    with pytest.raises(InputError, match=r"holds certificates .*, not an evaluation under attacks"):
        read_rows(tmp_path / "r")


# ------------------------------------------------------------------------------------------------------------- verify


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "r"
    settle(folder)
    return folder


def forged(folder, to, change):
    """A copy of the run with one row changed and sealed again, and a summary that fits."""
    header, rows = read_certificates(folder)
    rows[1] = replace(rows[1], **change(rows[1]))
    to.mkdir()
    lines = [json.dumps({"header": header}), *(row.line() for row in rows)]
    (to / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
    (to / "summary.json").write_text(json.dumps(Certification.of(header, rows).summary()))
    return to


def test_verify_proves_a_run(finished):
    found = dp.verify(finished, defense(), images(5), [0, 1, 2, 3, 4], again=2)
    assert found.passed, found
    assert "2 of 5 images, chosen at random and certified again, gave the same counts" in str(found)
    assert "5 rows are what the run says they are" in str(found)
    alone = verify_certificates(finished)
    assert alone.passed
    assert any("not compared" in text for text in alone.claimed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: {"radius": row.radius + 0.1}, "The radius in the row of image 1"),
        (lambda row: {"p": 0.99, "radius": 0.58, "prediction": row.selected}, "The p in the row of image 1"),
        (lambda row: {"prediction": 4 if row.prediction is None else None}, "The prediction in the row of image 1"),
        (lambda row: {"selected": (row.selected + 1) % 5}, "The selected in the row of image 1"),
        (lambda row: {"counts": {row.selected: 201}}, "The counts in the row of image 1 are 201 draws"),
        (lambda row: {"n": 100}, "says n 100 and sigma 0.25"),
        (lambda row: {"sigma": 0.5}, "says n 200 and sigma 0.5"),
        (lambda row: {"image": 9}, "There is a row of image 9, which is no part of this run"),
    ],
)
def test_a_forged_row_is_found_in_the_files_alone(finished, tmp_path, change, said):
    header, rows = read_certificates(finished)
    rows[1] = replace(rows[1], **change(rows[1]))
    (tmp_path / "rows.jsonl").write_text(
        "".join(line + "\n" for line in [json.dumps({"header": header}), *(row.line() for row in rows)])
    )
    (tmp_path / "summary.json").write_bytes((finished / "summary.json").read_bytes())
    found = verify_certificates(tmp_path)
    assert not found.passed
    assert said in str(found)


def test_forged_counts_are_found_by_drawing_again(finished, tmp_path):
    def all_agree(row):
        made = CertificateRow.of_draws(1, 1, {1: 20}, {1: 200}, {"sigma": 0.25, "n": 200, "alpha": 0.001})
        return {k: getattr(made, k) for k in ("selection", "counts", "selected", "count", "p", "radius", "prediction")}

    folder = forged(finished, tmp_path / "f", all_agree)
    assert verify_certificates(folder).passed  # the files alone cannot tell
    found = dp.verify(folder, defense(), images(5), [0, 1, 2, 3, 4], again=5)
    assert "Certified again, the row of image 1 is another one" in str(found)
    edited = (folder / "rows.jsonl").read_text().replace('"count": 200', '"count": 199')
    (folder / "rows.jsonl").write_text(edited)
    assert "The row of image 1 was edited" in str(verify_certificates(folder))


def test_another_model_other_images_and_other_labels_are_found(finished):
    y = [0, 1, 2, 3, 4]
    other = smoothed(tiny_unet(12), tiny_classifier(), 0.25)
    assert "names another score" in str(dp.verify(finished, other, images(5), y))
    assert "differs in 'data'" in str(dp.verify(finished, defense(), images(5, seed=1), y))
    assert "differs in 'data'" in str(dp.verify(finished, defense(), images(5), y[::-1]))


def test_a_summary_that_says_more_than_the_rows_is_found(finished, tmp_path):
    folder = forged(finished, tmp_path / "f", lambda row: {})
    said = json.loads((folder / "summary.json").read_text())
    said["mean radius"] += 0.1
    (folder / "summary.json").write_text(json.dumps(said))
    assert "'mean radius' does not follow from the rows" in str(verify_certificates(folder))
    (folder / "summary.json").unlink()
    assert "was not finished" in str(verify_certificates(folder))


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: tiny_classifier(), "needs a Defense with a diffusion purifier"),
        (lambda: dp.Defense(nn.AvgPool2d(3, 1, 1), tiny_classifier()), "needs a Defense with a diffusion purifier"),
        (lambda: made(dp.Langevin()), "OneShot, ReverseSDE, ProbabilityFlow, FewStep; got Langevin"),
        (lambda: made(dp.DDIM(t_star=0.1)), "got DDIM"),
        (lambda: made(dp.ReverseSDE(t_star=0.1, jitter=0.01, steps=3)), "no jitter"),
        (lambda: made(dp.ReverseSDE(t_star=0.1, steps=3, forward="discrete")), "continuous forward diffusion"),
        (lambda: made(dp.OneShot(0.1), rounds=2), "one round of purification, got 2"),
    ],
)
def test_models_whose_noise_is_not_that_of_smoothing_are_refused(model, said):
    with pytest.raises(InputError, match=said):
        dp.certify(model(), images(1), [0], n0=1, n=1)


def made(sampler, **options) -> dp.Defense:
    return dp.Defense(dp.Purifier(tiny_unet(8), sampler, **options), tiny_classifier())


def test_images_of_another_size_are_refused():
    score = tiny_unet(8)
    score.size = 16
    for fit in ("resize", "tiles"):
        model = dp.Defense(dp.Purifier(score, dp.OneShot(0.1), fit=fit), tiny_classifier())
        with pytest.raises(InputError, match="own size, 16×16, got 8×8: resizing or tiles would change the noise"):
            dp.certify(model, images(1), [0], n0=1, n=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sigma": 0.5}, "adds noise of sigma 0.25, not 0.5"),
        ({"n": 0}, "n0 and n are draws, from 1"),
        ({"n0": -1}, "n0 and n are draws, from 1"),
        ({"n": 10**9}, "n0 and n are draws, from 1 to 10,000,000"),
        ({"n": 1.5}, "'n'"),
        ({"alpha": 0.0}, r"alpha, .*, is in \(0, 1/2\), got 0.0"),
        ({"alpha": 0.7}, r"alpha, .*, is in \(0, 1/2\), got 0.7"),
        ({"votes": 0}, "votes and per_call are at least 1"),
        ({"votes": 2}, "Votes differ by the noise of the way back, and OneShot has none"),
        ({"indices": [0, 0]}, "Every dataset index is an integer that is given once"),
    ],
)
def test_bad_settings_are_one_sentence(change, said):
    with pytest.raises(InputError, match=said):
        dp.certify(defense(), images(2), [0, 1], **{"n0": 1, "n": 1, **change})


def test_bad_images_labels_and_sigmas_are_one_sentence():
    with pytest.raises(InputError, match=r"Labels are in \[0, 5\)"):
        dp.certify(defense(), images(2), [0, 9])
    with pytest.raises(InputError, match=r"Images are in \[0, 1\]"):
        dp.certify(defense(), 255 * images(2), [0, 1])
    for sigma in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="sigma, the noise on images"):
            defense(sigma)
    with pytest.raises(InputError, match="got Langevin"):
        defense(0.25, "ld")
    with pytest.raises(InputError, match="A radius is 0 or more"):
        settle().certified(-0.1)


def test_an_unfinished_run_gives_no_number(finished, tmp_path):
    lines = (finished / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:3]))
    part = Certification.load(tmp_path)
    assert str(part) == "Unfinished certificates: 2 of 5 images."
    with pytest.raises(InputError, match="2 of 5 images have one; resume the run"):
        part.certified(0)
    assert "3 rows are missing, that of image 2 first" in str(verify_certificates(tmp_path))


@pytest.mark.parametrize(
    "wrong",
    [{"n": 10**15}, {"n0": 10**15}, {"sigma": 1e300}, {"sigma": "0.25"}, {"alpha": 0.5}, {"votes": 0}, {"seed": "1"},
     {"classes": None}, {"model": {}}, {"indices": [1, 1]}, {"format": 2}, {"threads": 10**6}],
)  # fmt: skip
def test_a_damaged_header_is_one_sentence(finished, tmp_path, wrong):
    header, rows = read_certificates(finished)
    lines = [json.dumps({"header": {**header, **wrong}}), *(row.line() for row in rows)]
    (tmp_path / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
    with pytest.raises(InputError, match=r"is damaged|holds no certificates of format 1"):
        verify_certificates(tmp_path)


def test_the_table_of_a_large_sigma_has_wider_steps():
    x = images(1, 4)
    radii = dp.certify(smoothed(NEARLY, Constant(), 20.0), x, [2], n0=1, n=1000, per_call=1000).radii
    assert radii[:3] == (0.0, 4.0, 8.0)
    assert len(radii) <= 17


def test_the_header_says_what_fixes_the_rows():
    header = set_up(defense(), images(1), [0], Smoothing(n0=3, n=4, alpha=0.01, seed=5)).header
    assert (header["sigma"], header["n0"], header["n"], header["alpha"], header["seed"]) == (0.25, 3, 4, 0.01, 5)
    assert header["t_star"] == t_star_of(VPSDE(), 0.25)
    assert set(header["model"]["parts"]) == {"score", "classifier"}

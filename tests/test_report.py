"""Reports of a real (tiny) evaluation in every format."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tomllib

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import diffpure as dp
from diffpure import cli
from diffpure.data.samples import samples
from diffpure.errors import InputError
from diffpure.evaluation.evaluate import evaluate
from diffpure.experiments import load as experiments
from diffpure.experiments.load import gallery_of
from diffpure.experiments.spec import EvaluationSpec
from diffpure.pictures.gallery import FILE, Gallery
from diffpure.report.axes import sweeps
from diffpure.report.page import FORMATS, html
from diffpure.report.runs import read_run
from problems import images, tiny_classifier, tiny_unet

SPEC = """
rules = ["one-shot", "worst of 3"]
[model]
classifier = "cifar10-resnet"
score = "cifar10-small"
sampler = { kind = "few-step", t_star = 0.05, steps = 2 }
[data]
images = "3-8"
[[attacks]]
kind = "pgd"
iterations = 3
eot = 2
"""


@pytest.fixture
def spec_run(tmp_path, monkeypatch):
    """A run of a spec, with tiny untrained models in place of the embedded ones."""
    torch.manual_seed(0)
    classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)).eval()
    monkeypatch.setattr(experiments, "load_classifier", lambda name, like=None, **_: classifier)
    monkeypatch.setattr(experiments, "load_score", lambda name, like=None, **_: tiny_unet())
    spec = EvaluationSpec.of(tomllib.loads(SPEC))
    experiments.run_spec(spec, tmp_path / "run")
    return tmp_path / "run"


def test_the_pictures_are_what_the_run_classified(spec_run):
    gallery = gallery_of(spec_run, 4)
    assert gallery.stages == ("clean", "attacked", "diffused", "purified")
    assert gallery.pictures.shape == (4, 4, 3, 32, 32)
    rows = {(row.attack, row.image): row for row in read_run(spec_run).result.rows}
    # What the classifier says of the purified picture is the first sample of the row, with its recorded seed.
    assert gallery.classes[3].tolist() == [rows["pgd-ce", index].predictions[0] for index in range(3, 7)]
    assert gallery.labels.tolist() == [rows["clean", index].label for index in range(3, 7)]
    clean, attacked, diffused, purified = gallery.pictures.astype(int)
    assert np.array_equal(clean, (samples(7)[0][3:] * 255).round().int().numpy())
    assert 0 < np.abs(clean - attacked).max() <= 9
    assert np.abs(diffused - attacked).mean() > 9  # noise of deviation 0.17/2 was added
    assert not np.array_equal(diffused, purified)
    assert ((gallery.confidence > 0) & (gallery.confidence <= 1)).all()


def test_pictures_are_kept_and_made_again_for_another_run(spec_run, monkeypatch):
    made = gallery_of(spec_run, 4)
    monkeypatch.setattr(experiments, "load_score", lambda name, like=None, **_: pytest.fail("loaded again"))
    assert np.array_equal(gallery_of(spec_run, 4).pictures, made.pictures)
    assert (spec_run / FILE).stat().st_size < 60_000
    other = {**read_run(spec_run).result.header, "batch": 1}
    assert Gallery.load(spec_run, other) is None
    (spec_run / FILE).write_bytes(b"damaged")
    assert Gallery.load(spec_run, other) is None


def test_without_the_weights_the_page_says_why(spec_run, tmp_path, monkeypatch):
    def missing(name, like=None, **_):
        raise InputError("The weights are not on this machine.")

    monkeypatch.setattr(experiments, "load_score", missing)
    out = tmp_path / "report.html"
    assert CliRunner().invoke(cli.app, ["report", str(spec_run), "-o", str(out)]).exit_code == 0
    page = out.read_text()
    assert "no pictures of the diffused and purified images: The weights are not on this machine." in page
    assert page.count("<figcaption>attacked <span") == 6
    assert "<figcaption>diffused" not in page
    monkeypatch.setattr(experiments, "load_score", lambda name, like=None, **_: tiny_unet(8))
    with pytest.raises(InputError, match="not that of the run"):
        gallery_of(spec_run, 4)


def test_the_command_shows_every_stage_with_class_and_confidence(spec_run, tmp_path):
    out = tmp_path / "new" / "report.html"
    assert CliRunner().invoke(cli.app, ["report", str(spec_run), "-o", str(out)], catch_exceptions=False).exit_code == 0
    page = out.read_text()
    for stage in ("no attack", "attacked", "purified"):
        assert page.count(f"<figcaption>{stage} <span") == 6
    assert page.count("<figcaption>diffused</figcaption>") == 6  # nobody classifies noise
    assert page.count("<figcaption>perturbation ×") == 6
    words, right = gallery_of(spec_run, 6).caption(3, 0)
    assert f">{'✓' if right else '✗'}<br>{words}</span>" in page
    assert words.endswith("\N{NO-BREAK SPACE}%")


@pytest.mark.parametrize("count", [0, 2, 5])
def test_as_many_pictures_are_shown_as_were_asked_for(spec_run, tmp_path, count):
    gallery_of(spec_run, 6)  # more are kept
    out = tmp_path / "report.html"
    arguments = ["report", str(spec_run), "-o", str(out), "--pictures", str(count)]
    assert CliRunner().invoke(cli.app, arguments, catch_exceptions=False).exit_code == 0
    assert out.read_text().count("<figcaption>purified <span") == count


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: an undefended classifier and a defence, each under PGD."""
    home = tmp_path_factory.mktemp("runs")
    x, classifier = images(6), tiny_classifier()
    y = classifier(x).argmax(1)
    purifier = dp.Purifier(tiny_unet(), dp.FewStep(t_star=0.05, steps=2))
    for name, model in {"bare": classifier, "defence": dp.Defense(purifier, classifier)}.items():
        attack = dp.PGD(iterations=3, eot=dp.EOT(2))
        evaluate(model, x, y, dp.Linf(8 / 255), attack, rules=["one-shot", "worst of 3"], out=home / name)
    return [home / "bare", home / "defence"]


def test_the_page_holds_every_rate_and_needs_no_network(runs):
    found = [read_run(folder) for folder in runs]
    page = html(found).replace("\N{NO-BREAK SPACE}", " ")
    for run in found:
        assert str(run.result.clean()) in page
        assert str(run.result.robust("worst of 3")) in page
    assert page.count("data:image/png;base64,") >= 3
    assert "http" not in page.replace("http-equiv", "")


def test_other_formats_hold_the_same_numbers(runs):
    found = [read_run(folder) for folder in runs]
    rate = found[1].result.clean()
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](found))))
    assert any(row["attack"] == "no attack" and float(row["accuracy"]) == rate.value for row in rows)
    called = found[1].result.title("pgd-ce")
    assert called.startswith("PGD-3, EOT 2")
    assert called.endswith("exact gradient")
    assert any(row["attack"] == called and row["name"] == "pgd-ce" for row in rows)
    assert json.loads(FORMATS["json"](found))[1]["rates"]["clean"]["one-shot"]["value"] == rate.value
    assert str(rate) in FORMATS["md"](found)
    assert f"| {called} | pgd-ce | " in FORMATS["md"](found)
    assert "- Threat: ℓ∞ 8/255\n- Seed: 0\n" in FORMATS["md"](found)


def test_a_result_saved_as_a_file_is_reported(runs, tmp_path):
    saved, out = tmp_path / "mine.jsonl", tmp_path / "report.html"
    result = read_run(runs[0]).result
    result.save(saved)
    assert CliRunner().invoke(cli.app, ["report", str(saved), "-o", str(out)], catch_exceptions=False).exit_code == 0
    assert str(result.clean()) in out.read_text().replace("\N{NO-BREAK SPACE}", " ")


def test_a_run_without_attacks_names_no_threat_and_several_seeds_their_deviation(tmp_path):
    x, classifier = images(4), tiny_classifier()
    evaluate(classifier, x, classifier(x).argmax(1), dp.Linf(8 / 255), (), seeds=(0, 1), out=tmp_path / "run")
    run = read_run(tmp_path / "run")
    page = html([run]).partition("<body>")[2].split("<h2>Provenance</h2>")[0]
    assert "Linf" not in page
    assert "gradient" not in page
    assert "<dt>Seeds</dt><dd>0–1</dd>" in page
    assert "robust accuracy: not measured" in page
    assert "± 0.0" in page
    assert "± 0.0" in FORMATS["md"]([run])


def test_figures_follow_the_declared_axes_or_else_the_usual_ones(runs):
    found = [read_run(folder) for folder in runs]
    assert sweeps(found) == []
    for run, t_star in zip(found, (0.1, 0.05), strict=True):
        attacks = [{"kind": "pgd", "rho": 1 - t_star}]
        run.result.header["spec"] = {"model": {"sampler": {"t_star": t_star}}, "attacks": attacks}
    assert sweeps(found) == []  # they differ in more than t*
    for run in found:
        run.result.header["spec"]["attacks"][0]["rho"] = 0.5
    ((axis, points),) = sweeps(found)
    assert (axis, [value for value, _ in points]) == ("t*", [0.05, 0.1])
    assert "Accuracy against t*" in html(found)
    assert "Accuracy against" not in html(found, axes=())
    page = html(found, axes=[("diffusion time", "model.sampler.t_star"), ("ρ", "attacks.0.rho"), ("none", "a.3.b")])
    assert "Accuracy against diffusion time" in page
    assert page.count("Accuracy against") == 2  # the caption, and the alternative text


@pytest.mark.parametrize("kind", ["html", "md", "csv", "json", "png", "pdf"])
def test_the_command_writes_every_format(runs, tmp_path, kind):
    out = tmp_path / f"report.{kind}"
    arguments = ["report", *map(str, runs), "-o", str(out)]
    assert CliRunner().invoke(cli.app, arguments, catch_exceptions=False).exit_code == 0
    assert out.stat().st_size > 100


def test_bad_runs_are_one_sentence(runs, tmp_path):
    with pytest.raises(InputError, match="no run of an evaluation"):
        read_run(tmp_path)
    torn = tmp_path / "torn"
    shutil.copytree(runs[0], torn)
    lines = (torn / "rows.jsonl").read_text().splitlines(keepends=True)
    (torn / "rows.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(InputError, match="unfinished"):
        read_run(torn)

"""Reports of a real (tiny) evaluation in every format, and the page in a real browser where there is one."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tomllib

import numpy as np
import pytest
import torch
from diffpure.experiments.pictures import NAMES, gallery_of
from typer.testing import CliRunner

import diffpure as dp
from diffpure import cli
from diffpure.data.samples import samples
from diffpure.errors import InputError
from diffpure.evaluation.evaluate import evaluate
from diffpure.evaluation.gallery import FILE, Gallery
from diffpure.experiments import run as experiments
from diffpure.experiments.spec import EvaluationSpec
from diffpure.models import weights
from diffpure.report.page import FORMATS, html
from diffpure.report.runs import read_run, sweeps
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
    monkeypatch.setattr(experiments, "load_classifier", lambda name, like=None: classifier)
    monkeypatch.setattr(experiments, "load_score", lambda name, like=None: tiny_unet())
    spec = EvaluationSpec.of(tomllib.loads(SPEC))
    experiments.run(spec, tmp_path / "run")
    return tmp_path / "run"


def test_the_pictures_are_what_the_run_judged(spec_run):
    gallery = gallery_of(spec_run, 4)
    assert gallery.stages == ("clean", "attacked", "diffused", "purified")
    assert gallery.pictures.shape == (4, 4, 3, 32, 32)
    rows = {(row.attack, row.image): row for row in read_run(spec_run).result.rows}
    # What the classifier says of the purified picture is the first draw of the row, with its recorded seed.
    assert gallery.classes[3].tolist() == [rows["pgd-ce", place].predictions[0] for place in range(3, 7)]
    assert gallery.labels.tolist() == [rows["clean", place].label for place in range(3, 7)]
    clean, attacked, diffused, purified = gallery.pictures.astype(int)
    assert np.array_equal(clean, (samples(7)[0][3:] * 255).round().int().numpy())
    assert 0 < np.abs(clean - attacked).max() <= 9
    assert np.abs(diffused - attacked).mean() > 9  # noise of deviation 0.17/2 was added
    assert not np.array_equal(diffused, purified)
    assert ((gallery.confidence > 0) & (gallery.confidence <= 1)).all()


def test_pictures_are_kept_and_made_again_for_another_run(spec_run, monkeypatch):
    made = gallery_of(spec_run, 4)
    monkeypatch.setattr(experiments, "load_score", lambda name, like=None: pytest.fail("loaded again"))
    assert np.array_equal(gallery_of(spec_run, 4).pictures, made.pictures)
    assert (spec_run / FILE).stat().st_size < 60_000
    other = {**read_run(spec_run).result.header, "batch": 1}
    assert Gallery.load(spec_run, other) is None
    (spec_run / FILE).write_bytes(b"damaged")
    assert Gallery.load(spec_run, other) is None


def test_without_the_weights_the_page_says_why(spec_run, tmp_path, monkeypatch):
    def missing(name, like=None):
        raise InputError("The weights are not on this machine.")

    monkeypatch.setattr(experiments, "load_score", missing)
    out = tmp_path / "report.html"
    assert CliRunner().invoke(cli.app, ["report", str(spec_run), "-o", str(out)]).exit_code == 0
    page = out.read_text()
    assert "no pictures of the diffused and purified images: The weights are not on this machine." in page
    assert page.count("<figure><img") == 2 * 6
    assert "<figcaption>diffused" not in page
    monkeypatch.setattr(experiments, "load_score", lambda name, like=None: tiny_unet(8))
    with pytest.raises(InputError, match="not those of the run"):
        gallery_of(spec_run, 4)


def test_the_command_shows_every_stage_with_class_and_confidence(spec_run, tmp_path):
    out = tmp_path / "new" / "report.html"
    assert CliRunner().invoke(cli.app, ["report", str(spec_run), "-o", str(out)], catch_exceptions=False).exit_code == 0
    page = out.read_text().replace("&nbsp;", " ")
    for stage in ("clean", "attacked", "diffused", "purified"):
        assert page.count(f"<figcaption>{stage} <span") == 6
    words, right = gallery_of(spec_run, 6).caption(3, 0)
    assert f">{'✓' if right else '✗'}<br>{words}</span>" in page
    assert words.endswith("\N{NO-BREAK SPACE}%")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: a bare classifier and a defence, each under PGD."""
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
    page = html(found).replace("&nbsp;", " ")
    for run in found:
        assert str(run.result.clean()) in page
        assert str(run.result.robust("worst of 3")) in page
    assert page.count("data:image/png;base64,") >= 3
    assert "http" not in page.replace("http-equiv", "")


def test_other_formats_hold_the_same_numbers(runs):
    found = [read_run(folder) for folder in runs]
    rate = found[1].result.clean()
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](found))))
    assert any(row["attack"] == "clean" and float(row["accuracy"]) == rate.value for row in rows)
    assert json.loads(FORMATS["json"](found))[1]["rates"]["clean"]["one-shot"]["value"] == rate.value
    assert str(rate) in FORMATS["md"](found)
    assert "Linf(eps=8/255); exact gradient; seed 0" in FORMATS["md"](found)


def test_a_result_saved_as_a_file_is_reported(runs, tmp_path):
    saved, out = tmp_path / "mine.jsonl", tmp_path / "report.html"
    result = read_run(runs[0]).result
    result.save(saved)
    assert CliRunner().invoke(cli.app, ["report", str(saved), "-o", str(out)], catch_exceptions=False).exit_code == 0
    assert str(result.clean()) in out.read_text().replace("&nbsp;", " ")


def test_a_run_without_attacks_names_no_threat_and_several_seeds_their_deviation(tmp_path):
    x, classifier = images(4), tiny_classifier()
    evaluate(classifier, x, classifier(x).argmax(1), dp.Linf(8 / 255), (), seeds=(0, 1), out=tmp_path / "run")
    run = read_run(tmp_path / "run")
    page = html([run]).split("<h2>Provenance</h2>")[0]
    assert "Linf" not in page
    assert "gradient" not in page
    assert "seeds 0, 1" in page
    assert "± 0.0" in page
    assert "± 0.0" in FORMATS["md"]([run])


def test_every_embedded_classifier_has_names_for_its_classes():
    classifiers = {name for name, card in weights.cards().items() if card["kind"] == "classifier"}
    assert classifiers <= NAMES.keys()


def test_sweeps_are_found(runs):
    found = [read_run(folder) for folder in runs]
    assert sweeps(found) == []
    for run, t_star in zip(found, (0.1, 0.05), strict=True):
        run.result.header["spec"] = {"model": {"sampler": {"t_star": t_star}}, "attacks": []}
    ((axis, points),) = sweeps(found)
    assert (axis, [value for value, _ in points]) == ("t*", [0.05, 0.1])
    assert "Accuracy against t*" in html(found)
    found[0].result.header["spec"]["attacks"] = [{"kind": "pgd"}]
    assert sweeps(found) == []  # they differ in more than t*


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


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(runs, tmp_path, width, scheme):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser_path is None:
        pytest.skip("no Chromium on this machine")
    page_file = tmp_path / "report.html"
    page_file.write_text(html([read_run(folder) for folder in runs]))
    problems: list[str] = []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(page_file.as_uri())
        assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        ink, paper = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
        browser.close()
    assert problems == []
    assert abs(_brightness(ink) - _brightness(paper)) > 120
    assert (_brightness(paper) < 80) == (scheme == "dark")


def _brightness(colour: str) -> float:
    numbers = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3

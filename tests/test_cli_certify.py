"""`diffpure certify` and what the other commands do with its runs, with cheap models in place of the embedded ones."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import diffpure as dp
from diffpure import cli
from diffpure.certificates.smoothed import sigma_of
from diffpure.errors import InputError
from diffpure.experiments import load as experiments
from diffpure.results.certificates import Certification, read_certificates
from reports import PAYLOAD

SPEC = """
name = "Mine"
[model]
classifier = "cifar10-resnet"
score = "cifar10-small"
sampler = {kind = "few-step", t_star = 0.1, steps = 2, order = 1}
[data]
images = "3-9, 20-29"
[[attacks]]
kind = "pgd"
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder to work in, where names of models stand for cheap ones."""
    torch.manual_seed(0)
    classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)).eval()
    monkeypatch.setattr(experiments, "load_classifier", lambda name, **_: classifier)
    monkeypatch.setattr(experiments, "load_score", lambda name, **_: dp.GaussianScore(variance=0.25))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(SPEC)
    return tmp_path


def invoke(*words, fails=False):
    found = CliRunner().invoke(cli.app, list(map(str, words)), catch_exceptions=fails)
    assert fails or found.exit_code == 0, found.output
    return found


def certified(*words):
    said = json.loads(invoke("certify", "--n", 40, "--n0", 10, "--json", "--quiet", *words).stdout)
    return said, Certification.load(said["folder"])


def test_certify_prints_keeps_and_goes_on(world):
    shown = invoke("certify", "--sigma", 0.5, "--images", 3, "--n", 40, "--n0", 10)
    assert "smoothed with σ = 0.5: certified on 3 images, 10 + 40 draws per image, α = 0.001, seed 0" in shown.stdout
    assert "largest radius that 40 draws can certify" in shown.stdout
    (folder,) = (world / "runs").iterdir()
    assert folder.name.startswith("certified-sigma-0.5-cifar-10-small-models-")
    path = folder / "rows.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    said, result = certified("--sigma", 0.5, "--images", 3)
    assert said["folder"] == f"runs/{folder.name}"
    assert said["certified"]["0"]["value"] == result.certified(0).value
    without = [{**json.loads(line), "seconds": 0} for line in path.read_text().splitlines()[1:]]
    assert without == [{**json.loads(line), "seconds": 0} for line in whole.decode().splitlines()[1:]]


def test_a_spec_is_certified_as_it_stands_or_at_a_sigma(world):
    _, as_it_stands = certified("mine.toml")
    assert as_it_stands.sigma == pytest.approx(sigma_of(dp.VPSDE(), 0.1))
    assert as_it_stands.header["indices"] == [*range(3, 10), *range(20, 30)]
    assert as_it_stands.rows[0].network == 50 * 3  # two steps and a denoising call
    _, first = certified("mine.toml", "--sigma", 0.25, "--images", 8, "--votes", 2)
    assert first.sigma == 0.25
    assert first.header["indices"] == [*range(3, 10), 20]
    assert first.header["spec"]["model"]["sampler"]["kind"] == "few-step"
    _, one = certified("mine.toml", "--sigma", 0.25, "--images", 2, "--sampler", "one-shot")
    assert one.rows[0].network == 50
    assert len(list((world / "runs").iterdir())) == 3
    assert invoke("verify", "runs", "--again", 1).stdout.count("rows are what the run says they are") == 3


def test_other_commands_know_runs_of_certificates(world):
    said, result = certified("--images", 2)
    folder = said["folder"]
    assert "certificates, σ = 0.25, 40 draws, 2 images" in invoke("runs", "list").stdout
    assert "certified on 2 images" in invoke("runs", "show", folder).stdout
    assert json.loads(invoke("runs", "show", folder, "--json").stdout)["certified"]["0"]["value"] >= 0
    assert "2 rows are what the run says" in invoke("verify", folder, "--rows-only").stdout
    again = invoke("verify", folder, "--again", 2).stdout
    assert "2 of 2 images, chosen at random and certified again, gave the same counts" in again
    for kind in ("html", "md", "csv", "json", "png", "pdf"):
        invoke("report", folder, folder, "-o", f"page.{kind}")
    assert "data:image/png;base64" in (world / "page.html").read_text()
    assert str(result.certified(0)) in (world / "page.md").read_text()
    assert float((world / "page.csv").read_text().splitlines()[1].split(",")[-3]) == result.certified(0).value
    assert json.loads((world / "page.json").read_text())[0]["certified"] == result.summary()["certified"]
    compared = invoke("compare", folder, folder, fails=True)
    assert "holds certificates (`diffpure certify`), not an evaluation under attacks" in str(compared.exception)
    invoke("runs", "rm", folder, "--yes")
    assert not (world / folder).exists()


def test_a_report_is_of_one_kind(world):
    said, _ = certified("--images", 1)
    spec = (world / "mine.toml").read_text().partition("[[attacks]]")[0].replace("3-9, 20-29", "3")
    (world / "plain.toml").write_text(spec)
    other = json.loads(invoke("evaluate", "plain.toml", "--out", "others", "--json", "--quiet").stdout)["folder"]
    mixed = invoke("report", said["folder"], other, fails=True)
    assert "about evaluations or about certificates, not both" in str(mixed.exception)


def test_a_forged_run_fails_verify(world):
    folder = certified("--images", 2)[0]["folder"]
    path = world / folder / "rows.jsonl"
    header, first, second = path.read_text().splitlines()
    path.write_text("\n".join([header, first, second.replace('"count": ', '"count": 1')]) + "\n")
    found = invoke("verify", folder, fails=True)
    assert found.exit_code == 1
    assert "was edited" in found.stdout


def test_every_text_of_a_header_is_escaped_in_the_page(world):
    folder = certified("--images", 1)[0]["folder"]
    header, rows = read_certificates(folder)
    text = PAYLOAD.format("x")
    header |= {"name": text, "date": text, "classes": [text] * 10, "t_star": text, "spec": {"data": {"source": text}}}
    header["model"] |= {"title": text}
    Certification.of(header, rows).report("page.html")
    Certification.of(header, rows).report("page.md")
    assert "<script" not in (world / "page.html").read_text()
    assert "onerror=" not in (world / "page.html").read_text().replace("onerror=&#39;", "")
    assert "<script" not in (world / "page.md").read_text().replace(r"\<script", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--alpha", "0.9"], "alpha, the probability that a certificate is wrong"),
        (["--sigma", "0"], "sigma, the noise on images in [0, 1], is above 0"),
        (["--sampler", "ld"], "diffuses with α(t*) in continuous time"),
        (["--sampler", "nonsense"], "Unknown sampler 'nonsense'"),
        (["--votes", "3"], "Votes differ by the noise of the way back"),
        (["--images", "100000"], "images, so there is no image 99999"),
        (["mine.toml", "--images", "18"], "'3-9, 20-29' has 17 images, fewer than 18"),
        (["cifar10-bare-linf"], "needs a [model] with a score"),
        (["cifar10-smal-linf"], "did you mean 'cifar10-small-linf'"),
    ],
)
def test_bad_input_is_one_sentence(world, words, said):
    found = invoke("certify", "--n", 2, "--n0", 2, *words, fails=True)
    assert isinstance(found.exception, InputError)
    assert said in str(found.exception)
    assert not (world / "runs").exists()


def test_the_commands_of_the_published_runs_name_them(world):
    """What fixes a run is in the name of its folder, so a change of it would begin the run anew."""
    said, result = certified("--sigma", 0.25, "--images", 1)
    assert result.header["spec"] == {
        "model": {
            "classifier": "cifar10-resnet",
            "score": "cifar10-small",
            "sampler": {"kind": "one-shot", "t_star": pytest.approx(0.14481391953981912, rel=1e-14)},
        },
        "data": {"images": "0"},
    }
    assert said["folder"].startswith("runs/certified-sigma-0.25-cifar-10-small-models-")

"""Runs published without their images: what is copied, what `verify` then proves, and every forgery that it finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import diffpure as dp
from diffpure.cli.base import app
from diffpure.errors import InputError
from diffpure.evaluation.evaluate import evaluate
from diffpure.experiments import load
from diffpure.models.checkpoints import digest
from diffpure.report.page import write_report
from diffpure.results.catalogue import describe, remove_run
from diffpure.results.read import read_rows
from diffpure.results.rows import Row, _checksum
from diffpure.verification import publish as publishing
from diffpure.verification.files import verify_files
from diffpure.verification.publish import publish
from diffpure.verification.verify import Verification, verify
from diffpure.verification.withheld import LONGEST
from evaluations import COUNT, THREAT, attacks, defense, problem, ready, settle
from problems import tiny_unet

WHY = "ImageNet's images may not be passed on"
NOTE = f"  note     published without its adversarial images ({WHY})"
FILE = "pgd-ce-seed0-000004.safetensors"
SPEC = """
rules = ["one-shot"]
batch = 2

[model]
classifier = "cifar10-resnet"
score = "cifar10-small"
sampler = {kind = "few-step", t_star = 0.05, steps = 1, order = 1}

[data]
images = "0-1"

[[attacks]]
kind = "pgd"
iterations = 2
"""


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "r"
    settle(folder, pictures=2)
    return folder


@pytest.fixture
def published(honest, tmp_path) -> Path:
    return publish(honest, tmp_path / "out", f" {WHY}. ")


def checked(folder: Path, again: int = 0) -> Verification:
    return verify(folder, ready(), again=again)


def edit(folder: Path, **changes: object) -> None:
    path = folder / "withheld.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


# ------------------------------------------------------------------------------------------------------------ publish


def test_a_run_is_copied_without_its_images(honest, tmp_path):
    run = Path(shutil.copytree(honest, tmp_path / "mine"))
    (run / "a.png").touch()
    assert (run / "pictures.safetensors").is_file()
    found = publish(run, tmp_path / "out", WHY)
    assert found == tmp_path / "out" / "mine"
    assert names(found) == {"rows.jsonl", "summary.json", "withheld.json"}
    assert all((found / name).read_bytes() == (run / name).read_bytes() for name in ("rows.jsonl", "summary.json"))
    said = json.loads((found / "withheld.json").read_text())
    assert said["why"] == WHY
    files = {file.name: digest(load_file(file)["z"]) for file in (run / "adversarial").iterdir()}
    assert said["perturbations"] == files
    assert len(files) == 9


@pytest.mark.parametrize("why", ["", "  ", "two\nlines", "a\x1b[31m", "a\u202eb", "a" * (LONGEST + 1)])
def test_a_reason_is_one_line(honest, tmp_path, why):
    with pytest.raises(InputError, match=r"one line of 1 to 200 printable characters, got"):
        publish(honest, tmp_path / "out", why)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_published(honest, published, tmp_path):
    out = tmp_path / "other"
    part, damaged, idle = (Path(shutil.copytree(honest, tmp_path / name)) for name in ("part", "damaged", "idle"))
    lines = (part / "rows.jsonl").read_text().splitlines(keepends=True)
    (part / "rows.jsonl").write_text("".join(lines[:-1]))
    (idle / "summary.json").unlink()
    tensors = load_file(damaged / "adversarial" / FILE)
    save_file({**tensors, "z": torch.ones_like(tensors["z"])}, damaged / "adversarial" / FILE)
    x, y = problem()
    evaluate(defense(), x, y, THREAT, (), rules=["one-shot"], out=tmp_path / "clean")
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "measured.json").write_text("{}")
    header = json.loads(lines[0])
    header["header"]["kind"] = "certificates"
    (tmp_path / "certified").mkdir()
    (tmp_path / "certified" / "rows.jsonl").write_text(json.dumps(header) + "\n")
    for run, match in (
        (part, r"part is not finished \(19 of 20 rows\)"),
        (idle, "idle is not finished"),
        (damaged, "does not verify, so that it is not published: The adversarial image of image 4"),
        (tmp_path / "clean", "holds no adversarial images"),
        (published, "holds no adversarial images"),
        (tmp_path / "measured", "There is no run of an evaluation"),
        (tmp_path / "certified", "holds certificates"),
        (tmp_path / "nowhere", "A run is a folder"),
    ):
        with pytest.raises(InputError, match=match) as caught:
            publish(run, out, WHY)
        assert "\n" not in str(caught.value)
    assert not out.exists()


def test_nothing_that_is_there_is_replaced(honest, published, tmp_path):
    before = (published / "withheld.json").read_bytes()
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "r").touch()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "r").symlink_to(tmp_path / "gone")
    for out in (published.parent, honest.parent, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(InputError, match="is there already"):
            publish(honest, out, "another reason")
    assert (published / "withheld.json").read_bytes() == before
    assert (honest / "adversarial").is_dir()


@pytest.mark.parametrize("file", ["withheld.json", "summary.json", "rows.jsonl"])
def test_what_a_kill_leaves_is_no_run_and_the_same_call_goes_on(honest, tmp_path, monkeypatch, file):
    write = publishing.write_whole

    def killed(path: Path, data: bytes) -> None:
        if path.name == file:
            path.with_name(f"{file}.part").write_bytes(data[:5])
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(publishing, "write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        publish(honest, tmp_path, WHY)
    with pytest.raises(InputError, match="There is no run"):
        verify_files(tmp_path / "r")
    monkeypatch.undo()
    assert verify_files(publish(honest, tmp_path, WHY)).passed


# ------------------------------------------------------------------------------------------------------------- verify


def test_the_files_of_a_published_run_hold(published):
    found = verify_files(published)
    assert found.passed, str(found)
    assert (found.rows, found.images) == (COUNT * 4, 0)
    assert f"{NOTE}; --again N computes units anew from your own copy of the data" in str(found)
    assert "  claimed  the adversarial images and their budget: the run does not hold them" in str(found)


def test_with_the_model_at_hand_the_unperturbed_images_are_proven_too(published):
    found = checked(published)
    assert found.passed, str(found)
    assert f"{NOTE}; --again N" in str(found)
    assert "gives every prediction of the unperturbed images" in str(found)
    assert "  claimed  the adversarial images, their budget and predictions: the run does not hold" in str(found)
    assert "  claimed  that the attacks ran as the header says" in str(found)


def test_units_computed_again_have_the_published_hashes(published):
    told = "units, chosen at random and computed again, gave the same rows and perturbations with the published hashes"
    some, every = checked(published, again=1), checked(published, again=99)
    assert some.passed, str(some)
    assert f"  proven   1 of 9 {told}" in str(some)
    assert "claimed  the adversarial images" in str(some)
    assert NOTE in str(some).splitlines()
    assert every.passed, str(every)
    assert f"  proven   9 of 9 {told}" in str(every)
    assert every.claimed == ("seconds, dates, versions and the machine",)


def test_python_checks_a_published_run_alike(tmp_path):
    x, y = problem()
    dp.evaluate(defense(), x, y, THREAT, attacks()[:1], rules=["one-shot"], batch=2, out=tmp_path / "r")
    folder = publish(tmp_path / "r", tmp_path / "out", WHY)
    for again in (0, 3):
        found = dp.verify(folder, defense(), x, y, again=again)
        assert found.passed, str(found)
        assert NOTE in str(found)
    assert not dp.verify(folder, defense(), x.flip(0), y).passed


def test_a_forged_row_and_a_forged_hash_are_found_by_computing_again(honest, published, tmp_path):
    (tmp_path / "rows").mkdir()
    forged = Path(shutil.copytree(published, tmp_path / "rows" / "r"))
    lines = (forged / "rows.jsonl").read_text().splitlines()
    for i, line in enumerate(lines[1:], 1):
        data = json.loads(line)
        if (data["image"], data["attack"]) == (4, "pgd-ce"):
            data["size"] = 0.001  # which no rate shows
            sealed = _checksum({k: v for k, v in data.items() if k not in ("sum", "seconds")})
            lines[i] = Row.of({**data, "sum": sealed}).line()
    (forged / "rows.jsonl").write_text("\n".join(lines) + "\n")
    assert verify_files(forged).passed
    (problem,) = checked(forged, again=99).problems
    assert problem == "Computed again, the row of image 4, attack pgd-ce, seed 0 is another one."

    hashes = json.loads((published / "withheld.json").read_text())["perturbations"]
    edit(published, perturbations={**hashes, FILE: "0" * 64})
    assert checked(published).passed
    (problem,) = checked(published, again=99).problems
    assert (
        problem == "Computed again, pgd-ce on images 4 to 4 finds perturbations of another hash than the published one."
    )


def test_the_hashes_are_those_of_the_attacked_units(published):
    hashes = json.loads((published / "withheld.json").read_text())["perturbations"]
    few = {name: value for name, value in hashes.items() if name != FILE}
    missing = f"withheld.json lacks the hashes of 1 attacked units, that of {FILE} first."
    extra = "withheld.json names 'x.safetensors', which is the file of no attacked unit of this run."
    for named, sentences in ((few, [missing]), ({**hashes, "x.safetensors": "0" * 64}, [extra])):
        edit(published, perturbations=named)
        for found in (verify_files(published), checked(published), checked(published, again=99)):
            assert list(found.problems) == sentences


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("\udcff", "it is no JSON"),
        ("[]", "it is no table of 'why' and 'perturbations'"),
        ('{"why": "x"}', "it is no table of 'why' and 'perturbations'"),
        ('{"why": 1, "perturbations": {"a": "HASH"}}', "its 'why' is 1"),
        ('{"why": "a\\u001b[31m", "perturbations": {"a": "HASH"}}', "one line of 1 to 200 printable characters"),
        ('{"why": "x", "perturbations": {}}', "are no SHA-256 of 64 digits"),
        ('{"why": "x", "perturbations": ["HASH"]}', "are no SHA-256 of 64 digits"),
        ('{"why": "x", "perturbations": {"a": "HASH0"}}', "are no SHA-256 of 64 digits"),
        ('{"why": "x", "perturbations": {"a": 1}}', "are no SHA-256 of 64 digits"),
        (" " * (1 << 24) + "{}", "it is larger than 16 MiB"),
    ],
    ids=range(12),
)
def test_a_malformed_file_is_one_sentence(published, text, message):
    data = text.replace("HASH", "0" * 64).encode(errors="surrogateescape")
    (published / "withheld.json").write_bytes(data)
    for found in (verify_files(published), checked(published)):
        (problem,) = found.problems
        assert problem.startswith(f"The file {published / 'withheld.json'} is damaged: ")
        assert message in problem
        assert "\n" not in problem


def test_a_missing_file_lets_nothing_pass_and_a_whole_run_needs_none(honest, published):
    shutil.copytree(honest / "adversarial", published / "adversarial")
    edit(published, why="")
    found = checked(published)
    assert found.passed, str(found)
    assert found.images == COUNT * 3
    assert "published without" not in str(found)
    shutil.rmtree(published / "adversarial")
    (published / "withheld.json").unlink()
    (problem,) = checked(published).problems
    assert "The run holds no adversarial images, so that nothing is proven of its attacks" in problem


def test_a_published_run_is_described_reported_and_deleted(published, tmp_path):
    header, _ = read_rows(published)
    assert describe(published).state == "finished"
    write_report([published], tmp_path / "r.html")
    assert header["model"]["title"].split()[0] in (tmp_path / "r.html").read_text()
    remove_run(published)
    assert not published.exists()


# ------------------------------------------------------------------------------------------------------- command line


def test_the_commands(tmp_path, monkeypatch):
    def invoke(*arguments: object):
        return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)

    torch.manual_seed(0)
    classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)).eval()
    monkeypatch.setattr(load, "load_classifier", lambda **_: classifier)
    monkeypatch.setattr(load, "load_score", lambda **_: tiny_unet())
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(SPEC)
    assert invoke("evaluate", "tiny.toml", "--out", "runs").exit_code == 0
    (run,) = Path("runs").iterdir()
    made = Path("out") / run.name
    assert str(made) in invoke("runs", "publish", run, "--out", "out", "--why", WHY).output
    with pytest.raises(InputError, match="is there already"):
        invoke("runs", "publish", run, "--out", "out", "--why", WHY)
    again = invoke("verify", made, "--again", 1)
    assert again.exit_code == 0, again.output
    assert "1 of 1 units, chosen at random and computed again, gave the same rows and perturb" in again.output
    assert invoke("report", made, "-o", "r.html").exit_code == 0
    assert "The run was published without its adversarial images" in Path("r.html").read_text()
    assert names(made) == {"rows.jsonl", "summary.json", "withheld.json"}  # no picture was made
    assert "finished" in invoke("runs", "show", made).output

    monkeypatch.setattr(load, "load_classifier", lambda **_: pytest.fail("neither model nor data are loaded"))
    for options in ((), ("--rows-only",)):
        plain = invoke("verify", made, *options)
        assert plain.exit_code == 0, plain.output
        assert f"{NOTE}; --again N" in plain.output
    (entry,) = json.loads(invoke("verify", made, "--json").stdout).values()
    assert WHY in entry["remarks"][0]
    (made / "withheld.json").write_text("{}")
    assert invoke("verify", made).exit_code == 1
    assert invoke("runs", "rm", made, "--yes").exit_code == 0

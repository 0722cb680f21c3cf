"""The commands over a spec: evaluate, verify, attack, audit, suggest-t, with tiny models in place of the embedded."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from diffpure import cli
from diffpure.errors import InputError
from diffpure.experiments import load as loading
from problems import tiny_unet

SPEC = """
name = "tiny"
rules = ["one-shot", "worst of 2"]
batch = 2

[model]
classifier = "cifar10-resnet"
score = "cifar10-small"
sampler = { kind = "few-step", t_star = 0.05, steps = 1, order = 1 }

[data]
images = "0-3"

[[attacks]]
kind = "pgd"
iterations = 2
eot = 2
"""
runner = CliRunner()


@pytest.fixture
def spec(tmp_path, monkeypatch):
    torch.manual_seed(0)
    classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)).eval()
    monkeypatch.setattr(loading, "load_classifier", lambda name, **options: classifier)
    monkeypatch.setattr(loading, "load_score", lambda name, **options: tiny_unet())
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "tiny.toml"
    path.write_text(SPEC)
    return path


def invoke(*arguments):
    return runner.invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)


def test_evaluate_then_verify_then_report(spec, tmp_path):
    home = tmp_path / "runs"
    assert "network calls" in invoke("evaluate", spec, "--estimate").output
    assert not home.exists()
    found = invoke("evaluate", spec, "--out", home)
    assert found.exit_code == 0
    assert "worst case per image" in found.output
    (folder,) = home.iterdir()
    rows = (folder / "rows.jsonl").read_text()
    assert invoke("evaluate", spec, "--out", home).exit_code == 0  # nothing to do, nothing added
    assert (folder / "rows.jsonl").read_text() == rows
    again = invoke("verify", folder, "--again", 1)
    assert again.exit_code == 0
    assert "proven   1 of 2 units, chosen at random and computed again" in again.output
    told = json.loads(invoke("verify", home, "--json").output)  # a folder of runs
    assert [entry["passed"] for entry in told.values()] == [True]
    honest = shutil.copytree(folder, tmp_path / "honest")
    assert invoke("report", folder, "-o", tmp_path / "report.html").exit_code == 0
    lines = rows.splitlines()
    edited = json.loads(lines[-1])
    edited["predictions"] = [int(edited["label"])] * 2
    (folder / "rows.jsonl").write_text("\n".join([*lines[:-1], json.dumps(edited)]) + "\n")
    caught = invoke("verify", folder, honest)
    assert caught.exit_code == 1
    assert "edited" in caught.output
    assert f"{honest}: 8 rows" in caught.output  # one bad run does not hide the next
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    mixed = invoke("verify", nothing, honest)
    assert mixed.exit_code == 1
    assert f"{nothing}: " in mixed.output
    assert f"{honest}: 8 rows" in mixed.output


def test_numbers_as_json(spec, tmp_path):
    said = json.loads(invoke("evaluate", spec, "--estimate", "--json").output)
    found = json.loads(invoke("evaluate", spec, "--out", tmp_path / "runs", "--json").output)
    spent = found["spent"]
    assert {key: spent[key] for key in said["calls"]} == said["calls"]
    assert (said["gradients"], said["queries"]) == (spent["gradients"], spent["queries"])
    assert found["rates"]["clean"]["one-shot"]["value"] in (0, 0.25, 0.5, 0.75, 1)


def test_a_spec_without_attacks_measures_no_robustness(spec, tmp_path):
    spec.write_text(SPEC.partition("[[attacks]]")[0])
    found = invoke("evaluate", spec, "--out", tmp_path / "runs").output
    assert "robust accuracy: not measured: the evaluation has no attack" in found
    assert "worst case" not in found
    assert "warning: The evaluation has no attack: robust accuracy was not measured." in found


def rows_without_times(folder):
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()[1:]]
    return sorted((line["attack"], line["image"], line["sum"]) for line in lines)  # the sum leaves the time out


def test_attack_makes_the_images_of_the_evaluation_which_goes_on_from_them(spec, tmp_path):
    found = invoke("attack", spec, "--out", tmp_path / "a", "--images", 1, "--png", tmp_path / "png")
    assert "2 images under pgd-ce" in found.output  # a whole batch
    (part,) = (tmp_path / "a").iterdir()
    assert [file.name for file in (part / "adversarial").iterdir()] == ["pgd-ce-seed0-000000.safetensors"]
    assert len(rows_without_times(part)) == len(list((tmp_path / "png").rglob("*.png"))) == 2
    assert not (part / "summary.json").exists()
    before = (part / "rows.jsonl").read_text()
    assert invoke("evaluate", spec, "--out", tmp_path / "b").exit_code == 0
    whole = tmp_path / "b" / part.name
    for file in (part / "adversarial").iterdir():
        assert file.read_bytes() == (whole / "adversarial" / file.name).read_bytes()
    assert set(rows_without_times(part)) < set(rows_without_times(whole))
    assert invoke("evaluate", spec, "--out", tmp_path / "a").exit_code == 0
    assert (part / "rows.jsonl").read_text().startswith(before)
    assert rows_without_times(part) == rows_without_times(whole)
    assert invoke("verify", part).exit_code == 0
    with pytest.raises(InputError, match="did you mean 'pgd-ce'"):
        invoke("attack", spec, "--attack", "pgd-cw", "--out", tmp_path / "a")
    spec.write_text(SPEC.partition("[[attacks]]")[0])
    with pytest.raises(InputError, match="names no attack"):
        invoke("attack", spec, "--out", tmp_path / "a")


def test_devices_and_resources(spec, tmp_path, monkeypatch):
    out = ("--out", tmp_path / "r")
    assert invoke("evaluate", spec, "--device", "gpu", *out).exit_code == 2  # not one of auto, cpu, cuda, mps
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in ("evaluate", "attack"):
        with pytest.raises(InputError, match="finds no device 'cuda' on this machine; it finds cpu"):
            invoke(command, spec, "--device", "cuda", *out)
    with pytest.raises(InputError, match="--gpus is for --engine ray"):
        invoke("evaluate", spec, "--gpus", 1, *out)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(InputError, match="leave --device out"):
        invoke("evaluate", spec, "--engine", "ray", "--device", "cuda", *out)
    assert not (tmp_path / "r").exists()
    given = []

    class Recording:
        device = "cuda"

        def __init__(self, **options):
            given.append(options)

        def run(self, work, units, on_step, keeper):
            return iter(())

    monkeypatch.setattr("diffpure.evaluation.engine.Ray", Recording)
    options = ("--engine", "ray", "--cpus", 0.5, "--gpus", 1, "--address", "here:1")
    assert "unfinished" in invoke("evaluate", spec, *options, *out).output
    assert given == [{"address": "here:1", "cpus": 0.5, "gpus": 1.0}]
    (folder,) = (tmp_path / "r").iterdir()
    assert json.loads((folder / "rows.jsonl").read_text())["header"]["machine"]["device"] == "cuda"
    with pytest.raises(InputError, match="was begun on the device cuda and goes on only there, not on cpu"):
        invoke("evaluate", spec, "--device", "cpu", *out)


def test_audit_and_advice(spec):
    assert "passed" in invoke("audit", spec, "--images", 1).output
    assert "suggested t*" in invoke("suggest-t", spec, "--images", 2).output


def test_bad_specs_are_one_sentence(spec, tmp_path):
    with pytest.raises(InputError, match="did you mean 'cifar10-bare-linf'"):
        invoke("evaluate", "cifar10-bare-lin")
    with pytest.raises(InputError, match="cannot be read"):
        invoke("evaluate", tmp_path / "missing.toml")
    spec.write_text(SPEC.replace("iterations", "iteration"))
    with pytest.raises(InputError, match="did you mean 'iterations'"):
        invoke("evaluate", spec)
    spec.write_text(SPEC)
    with pytest.raises(InputError, match="Unknown engine"):
        invoke("evaluate", spec, "--engine", "spark", "--out", tmp_path / "r")

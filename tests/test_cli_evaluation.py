"""The commands over a spec: evaluate, verify, attack, audit, suggest-t, with tiny models in place of the embedded."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from diffpure import cli
from diffpure.errors import InputError
from diffpure.experiments import run as runs
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
    monkeypatch.setattr(runs, "load_classifier", lambda name, like=None: classifier)
    monkeypatch.setattr(runs, "load_score", lambda name, like=None: tiny_unet())
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "tiny.toml"
    path.write_text(SPEC)
    return path


def invoke(*arguments):
    return runner.invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)


def test_evaluate_then_verify_then_report(spec, tmp_path):
    home = tmp_path / "runs"
    assert "score calls" in invoke("evaluate", spec, "--estimate").output
    assert not home.exists()
    found = invoke("evaluate", spec, "--out", home)
    assert found.exit_code == 0
    assert "worst case per image" in found.output
    (folder,) = home.iterdir()
    rows = (folder / "rows.jsonl").read_text()
    assert invoke("evaluate", spec, "--out", home).exit_code == 0  # nothing to do, nothing added
    assert (folder / "rows.jsonl").read_text() == rows
    assert invoke("verify", folder).exit_code == 0
    assert invoke("report", folder, "-o", tmp_path / "report.html").exit_code == 0
    lines = rows.splitlines()
    edited = json.loads(lines[-1])
    edited["predictions"] = [int(edited["label"])] * 2
    (folder / "rows.jsonl").write_text("\n".join([*lines[:-1], json.dumps(edited)]) + "\n")
    caught = invoke("verify", folder)
    assert caught.exit_code == 1
    assert "edited" in caught.output


def test_attack_saves_images_inside_the_budget(spec, tmp_path):
    found = invoke("attack", spec, "-o", tmp_path / "a.npz", "--images", 3)
    assert "3 images under pgd-ce" in found.output
    saved = np.load(tmp_path / "a.npz")
    assert saved["attacked"].shape == (3, 3, 32, 32)
    assert np.abs(saved["attacked"] - saved["clean"]).max() <= 8 / 255 + 1e-6


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

"""A user's own classifier from a Python file, on a folder of images, from the command line, outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import diffpure
from diffpure.errors import InputError
from diffpure.experiments.load import Loader, run_spec, verify_run
from diffpure.experiments.spec import EvaluationSpec

NET = '''
"""A network of somebody who has never heard of this package."""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        bright = self.scale * (x.mean((1, 2, 3)) - 0.5)
        return torch.stack([-bright, bright], 1)


def make(scale=10.0):
    return Net(scale)


def soften(amount=0.1):
    return lambda x: (1 - amount) * x + amount / 2


def nothing():
    return 5
'''
SPEC = """
name = "My own"
rules = ["one-shot"]
batch = 2

[model]
classifier = "python:net.py:make"
purifier = { kind = "blur", sigma = 0.5 }

[data]
source = "folder"
path = "photos"
images = "all"

[[attacks]]
kind = "pgd"
iterations = 2

[[attacks]]
kind = "pgd"
iterations = 1
gradient = "bpda"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a spec, a Python file, and two classes of images, dark and light."""
    home = tmp_path / "thesis"
    (home / "photos").mkdir(parents=True)
    (home / "net.py").write_text(NET)
    (home / "mine.toml").write_text(SPEC)
    for name, levels in (("dark", (40, 100)), ("light", (150, 210))):
        (home / "photos" / name).mkdir()
        for level in levels:
            Image.new("RGB", (8, 8), (level, level, level)).save(home / "photos" / name / f"{level}.png")
    return home


def command(where: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """`diffpure WORDS`, in a folder that knows nothing of the repository."""
    environment = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG")}
    environment |= {"PYTHONPATH": str(Path(diffpure.__file__).parents[1]), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    line = [sys.executable, "-c", "from diffpure.cli import main; main()", *map(str, words), "--threads", "1"]
    return subprocess.run(line, cwd=where, env=environment, capture_output=True, text=True, check=False)


def test_evaluate_resume_and_verify_from_the_command_line(home, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    refused = command(elsewhere, "evaluate", home / "mine.toml")
    assert refused.returncode != 0
    (said,) = (refused.stdout + refused.stderr).strip().splitlines()
    assert "python:net.py:make runs code when it is loaded, which is done only with --allow-code" in said
    assert not list(elsewhere.iterdir())

    part = command(elsewhere, "attack", home / "mine.toml", "--allow-code", "--images", 1, "--out", "runs")
    assert part.returncode == 0, part.stderr
    (folder,) = (elsewhere / "runs").iterdir()
    begun = (folder / "rows.jsonl").read_text()
    assert len(begun.splitlines()) == 1 + 2  # one batch of one attack
    found = command(elsewhere, "evaluate", home / "mine.toml", "--allow-code", "--out", "runs", "--json")
    assert found.returncode == 0, found.stderr
    rows = (folder / "rows.jsonl").read_text()
    assert rows.startswith(begun)
    assert len(rows.splitlines()) == 1 + 4 * 3
    assert json.loads(found.stdout)["rates"]["clean"]["one-shot"]["value"] == 1.0
    header = json.loads(begun.splitlines()[0])["header"]
    assert header["classes"] == ["dark", "light"]
    assert header["spec"]["model"]["classifier"] == "python:net.py:make"

    unsafe = command(elsewhere, "verify", folder, "--base", home)
    assert unsafe.returncode != 0
    assert "only with --allow-code" in unsafe.stdout + unsafe.stderr
    verified = command(elsewhere, "verify", folder, "--allow-code", "--base", home, "--again", 9)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "12 rows and 8 adversarial images are what the run says they are" in verified.stdout
    assert "4 of 4 units, chosen at random and computed again" in verified.stdout


def loaded(home: Path, **changes: object) -> tuple[EvaluationSpec, Loader]:
    spec = EvaluationSpec.read(home / "mine.toml")
    plain = spec.plain()
    return EvaluationSpec.of({**plain, **changes}), Loader(home, allow_code=True)


def test_a_changed_file_is_another_model(home, tmp_path):
    spec, loader = loaded(home)
    found = run_spec(spec, tmp_path / "r", loader)
    assert found.complete
    assert run_spec(spec, tmp_path / "r", loader).rows == found.rows
    (home / "net.py").write_text(NET.replace("- 0.5)", "- 0.6)"))  # not one weight differs
    with pytest.raises(InputError, match=r"holds another evaluation \(with other model\)"):
        run_spec(spec, tmp_path / "r", loader)
    checked = verify_run(tmp_path / "r", loader)
    assert any("names another classifier" in text for text in checked.problems)


def test_a_folder_that_moved_as_a_whole_is_verified_where_it_is(home, tmp_path):
    """Paths of a spec are relative to it, so the run is the same one anywhere."""
    spec, loader = loaded(home)
    run_spec(spec, tmp_path / "r", loader)
    moved = shutil.move(home, tmp_path / "another place")
    checked = verify_run(tmp_path / "r", Loader(Path(moved), allow_code=True))
    assert checked.passed, str(checked)
    with pytest.raises(InputError, match=r"photos|net\.py"):
        verify_run(tmp_path / "r", Loader(tmp_path, allow_code=True))


def test_a_purifier_of_ones_own_with_arguments(home, tmp_path):
    model = {
        "classifier": {"name": "python:net.py:make", "arguments": {"scale": 5.0}},
        "purifier": {"kind": "python:net.py:soften", "amount": 0.2},
    }
    spec, loader = loaded(home, model=model)
    evaluation = loader.evaluation(spec)
    x = torch.rand(1, 3, 8, 8)
    torch.testing.assert_close(evaluation.job.model.purifier(x), 0.8 * x + 0.1)  # type: ignore[attr-defined]
    assert run_spec(spec, tmp_path / "r", loader).complete
    assert verify_run(tmp_path / "r", loader).passed
    softer, _ = loaded(home, model={**model, "purifier": {**model["purifier"], "amount": 0.3}})
    assert softer.hash != spec.hash
    twice, _ = loaded(home, model={**model, "rounds": 2, "gradient": "bpda"})
    purifier = loader.evaluation(twice).job.model.purifier  # type: ignore[attr-defined]
    torch.testing.assert_close(purifier(x), 0.8 * (0.8 * x + 0.1) + 0.1)
    assert (purifier.rounds, purifier.gradient.name) == (2, "bpda")
    for changes, allowed in ((model, False), ({"classifier": model["classifier"]}, False)):
        refused, _ = loaded(home, model=changes)
        with pytest.raises(InputError, match="only with --allow-code"):
            Loader(home, allow_code=allowed).evaluation(refused)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"classifier": "python:net.py:mkae"}, "has no function 'mkae'"),
        ({"classifier": "python:nets.py:make"}, "There is no Python file"),
        ({"classifier": "python:net.py"}, "is not python:PACKAGE.MODULE:FUNCTION"),
        ({"classifier": "python:net.py:nothing"}, "returned int, but a classifier"),
        ({"classifier": {"name": "python:net.py:make", "arguments": {"size": 5}}}, "does not take these arguments"),
        ({"classifier": {"name": "cifar10-resnet", "arguments": {"scale": 5}}}, "takes no arguments"),
        ({"classifier": "python:net.py:make", "purifier": "python:net.py:nothing"}, "A purifier is called with images"),
        ({"classifier": "python:net.py:make", "purifier": {"kind": "blurr"}}, "did you mean 'blur'"),
        ({"classifier": "python:net.py:make", "purifier": {"sigma": 2}}, "purifier"),
        ({"classifier": "python:net.py:make", "purifier": {"kind": "blur", "width": 2}}, "does not take these"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_users_model_is_one_sentence(home, model, message):
    def evaluation() -> object:
        spec, loader = loaded(home, model=model, attacks=[])
        return loader.evaluation(spec)

    with pytest.raises(InputError, match=message) as caught:
        evaluation()
    assert "\n" not in str(caught.value)

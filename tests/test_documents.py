"""The documents are run: every Python block of the README, in order, and every example."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from diffpure.experiments.spec import ATTACKS, EvaluationSpec

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PRELUDE = """
import torch
torch.set_num_threads(1)
my_classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
images = torch.rand(2, 3, 32, 32)
"""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_code_blocks_run(document):
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    scope: dict[str, object] = {}
    exec(PRELUDE, scope)
    for block in blocks:
        exec(compile(block, f"{document.name}: {block[:40]!r}", "exec"), scope)


def test_the_page_on_evaluations_names_every_attack_and_key_of_a_spec():
    text = (ROOT / "docs" / "evaluate.md").read_text()
    assert [kind for kind in ATTACKS if f"`{kind}`" not in text] == []
    assert [f.name for f in fields(EvaluationSpec) if not re.search(rf"\b{f.name}\b", text)] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_examples_run_and_are_short(example, tmp_path):
    assert len(example.read_text().splitlines()) <= 40
    run = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]

"""The documents are run as a reader pastes them: the Python blocks of each, every example and every notebook."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from diffpure.cli.evaluation import make_loader
from diffpure.errors import InputError
from diffpure.experiments.load import run_folder, run_spec
from diffpure.experiments.spec import ATTACKS, EvaluationSpec
from diffpure.experiments.table import Table

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blocks(document: Path, language: str) -> list[str]:
    """The code blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_code_blocks_run_by_themselves(document, one_thread, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(document, "python"):
        exec(compile(block, f"{document.name}: {block[:40]!r}", "exec", dont_inherit=True), scope)


def test_the_page_on_evaluations_names_every_attack_and_key_of_a_spec():
    text = (ROOT / "docs" / "evaluate.md").read_text()
    assert [kind for kind in ATTACKS if f"`{kind}`" not in text] == []
    assert [f.name for f in fields(EvaluationSpec) if not re.search(rf"\b{f.name}\b", text)] == []


def test_a_function_of_the_user_is_evaluated_from_the_spec_of_the_page(tmp_path, one_thread):
    page, path = ROOT / "docs" / "evaluate.md", tmp_path / "mine.toml"
    (tmp_path / "mine.py").write_text(next(block for block in blocks(page, "python") if "def make" in block))
    path.write_text(next(block for block in blocks(page, "toml") if "python:mine.py:make" in block))
    spec = EvaluationSpec.read(path).tiny()
    with pytest.raises(InputError, match="--allow-code"):
        make_loader(base=tmp_path).evaluation(spec)
    result = run_spec(spec, run_folder(spec, tmp_path / "runs"), make_loader(allow_code=True, base=tmp_path))
    assert result.complete
    assert len(result.indices) == 2


def test_specs_and_tables_in_the_documents_are_read():
    for document in DOCUMENTS:
        for block in blocks(document, "toml"):
            table = tomllib.loads(block)
            if "rows" in table:
                assert len(list(Table.of(table).entries())) > len(table["rows"])
            elif {"model", "attacks"} <= table.keys():
                EvaluationSpec.of(table)


def test_every_page_is_in_the_navigation_and_every_link_has_its_file():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nplugins:")[0]
    named = set(re.findall(r"[\w-]+\.md", nav))
    assert named == {page.name for page in PAGES}
    for document in DOCUMENTS:
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
        assert [link for link in links if not (document.parent / link).exists()] == [], document.name


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_small_stored_with_their_outputs_and_run(notebook, one_thread):
    location = importlib.util.spec_from_file_location("execute", ROOT / "docs" / "notebooks" / "execute.py")
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    import matplotlib

    matplotlib.use("Agg")
    assert notebook.stat().st_size < 300_000
    scope: dict[str, object] = {}
    for cell in module.code_cells(notebook):
        outputs = module.execute("".join(cell["source"]), scope)
        kinds = [output["output_type"] for output in outputs]
        assert kinds == [output["output_type"] for output in cell["outputs"]]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_examples_run_and_are_short(example, tmp_path):
    assert len(example.read_text().splitlines()) <= 40
    run = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]

"""An import points only up the list: a file may use what stands above it, never below."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "diffpure"

LAYERS = (
    "errors",
    "disk",
    "validate",
    "named",
    "noise",
    "meter",
    "diffusion",
    "models",
    "scores",
    "classifiers",
    "vote",
    "purify",
    "views",
    "purifiers",
    "recalibrate",
    "exporting",
    "theory",
    "smoothing",
    "audit",
    "threats",
    "attacks",
    "adapters",
    "results",
    "evaluation",
    "certificates",
    "verification",
    "pictures",
    "advice",
    "data",
    "files",
    "training",
    "tuning",
    "experiments",
    "report",
    "play",
    "serve",
    "cli",
)
FORBIDDEN = {"attacks": {"purify", "purifiers", "scores"}, "report": {"torch"}}


def layer_of(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path) -> set[str]:
    """The modules that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "diffpure":
                found |= {f"diffpure.{alias.name}" for alias in node.names}
    return found


FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_up(path):
    layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert layer in LAYERS, f"{layer} has no place in the list of layers"
    for module in imports(path):
        if module.startswith("diffpure."):
            target = layer_of(module)
            if target not in LAYERS:
                continue  # a name of the package itself, such as __version__
            assert LAYERS.index(target) <= LAYERS.index(layer), f"{path.name} in {layer} imports {module}"
            assert target not in FORBIDDEN.get(layer, ()), f"{layer} must not know {target}"
        else:
            assert module.split(".")[0] not in FORBIDDEN.get(layer, ()), f"{layer} must not import {module}"


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_stay_small():
    assert {str(path.relative_to(SOURCE)): lines(path) for path in FILES if lines(path) > 350} == {}
    assert sum(lines(path) for path in (SOURCE / "evaluation").glob("*.py")) < 2000  # to be explained in one breath


def test_importing_the_package_does_not_import_torch():
    code = "import sys, diffpure; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_type_checkers_see_the_names_that_are_imported_lazily():
    import diffpure

    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == diffpure._HOME
    for name in typed:
        assert getattr(diffpure, name) is not None

"""Execute the notebooks beside this file and store their outputs, without Jupyter: python docs/notebooks/execute.py

A notebook is JSON. Its code cells are executed in order in one scope; what a cell prints, the value of its last
expression and its figures become its outputs, as Jupyter would store them.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook."""
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def execute(source: str, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell; returns its outputs."""
    tree, printed, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec", dont_inherit=True), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    outputs += [_data(png) for png in _figures()]
    if value is not None:
        outputs.append({**_data({"text/plain": repr(value)}), "output_type": "execute_result", "execution_count": None})
    return outputs


def _data(data: dict[str, str]) -> dict[str, Any]:
    return {"output_type": "display_data", "data": data, "metadata": {}}


def _figures() -> list[dict[str, str]]:
    """The open figures as PNG, and close them."""
    from matplotlib import pyplot

    found = []
    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, format="png", dpi=56, bbox_inches="tight")
        found.append({"image/png": base64.b64encode(buffer.getvalue()).decode()})
    pyplot.close("all")
    return found


def main() -> None:
    """Execute every notebook that is named, or all, and store what came out."""
    import matplotlib
    import torch

    matplotlib.use("Agg")
    torch.set_num_threads(1)
    for path in [Path(name) for name in sys.argv[1:]] or sorted(Path(__file__).parent.glob("*.ipynb")):
        notebook, scope = json.loads(path.read_text("utf-8")), dict[str, Any]()
        for count, cell in enumerate([c for c in notebook["cells"] if c["cell_type"] == "code"], 1):
            cell["outputs"] = execute("".join(cell["source"]), scope)
            cell["execution_count"] = count
            for output in cell["outputs"]:
                if "execution_count" in output:
                    output["execution_count"] = count
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

"""What the site is built with beyond Markdown: pages from the code, and equations as MathML, which needs no script.

A line `<!-- generated: spec -->` is replaced by the reference of specs, `commands` by every command, `api` by the
public names. `<!-- notebook: NAME -->` is replaced by the cells of a notebook and their outputs. A TeX equation between
lines `$$` becomes MathML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import latex2mathml.converter
import typer

import diffpure
from diffpure.cli import app
from diffpure.experiments.reference import reference


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated."""
    for name, write in GENERATED.items():
        marker = f"<!-- generated: {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, write())
    markdown = re.sub(r"<!-- notebook: (\w+) -->", lambda found: notebook(found[1]), markdown)
    return re.sub(r"^\$\$\n(.*?)\n\$\$$", _typeset, markdown, flags=re.MULTILINE | re.DOTALL)


def _typeset(found: re.Match[str]) -> str:
    return f"<p>{latex2mathml.converter.convert(found[1], display='block')}</p>"


def commands() -> str:
    """Every command, with a heading, its help and its options."""
    return "\n\n".join(_commands(typer.main.get_command(app), "diffpure"))


def _commands(command: Any, name: str) -> Iterator[str]:
    if getattr(command, "commands", None):
        for key, inner in sorted(command.commands.items()):
            yield from _commands(inner, f"{name} {key}")
        return
    yield f"## `{name}`"
    yield str(command.help or "")
    lines = [_option(parameter) for parameter in command.params if parameter.name != "help"]
    if lines:
        yield "\n".join(["| argument or option | default | what it does |", "|---|---|---|", *lines])
    if command.epilog:
        yield re.sub(r"^Example: (.*)$", r"Example: `\1`", command.epilog)


def _option(parameter: Any) -> str:
    option = getattr(parameter, "param_type_name", "") == "option"
    name = ", ".join([*parameter.opts, *parameter.secondary_opts]) if option else str(parameter.name).upper()
    value = parameter.default
    shown = "" if value is None or value is False or callable(value) or "Sentinel" in type(value).__name__ else value
    shown = f"`{shown}`" if shown != "" else ("required" if parameter.required else "")
    text = str(getattr(parameter, "help", None) or "").replace("|", "\\|")
    return f"| `{name}` | {shown} | {text} |"


def api() -> str:
    """The public classes and functions, by the module that they come from."""
    found: dict[str, list[str]] = {}
    for name in sorted(set(diffpure.__all__) - {"__version__"}):
        value = getattr(diffpure, name)
        if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
            found.setdefault(value.__module__, []).append(value.__name__)
    return "\n\n".join(
        f"## `{module}`\n\n" + "\n\n".join(f"::: {module}.{name}" for name in names)
        for module, names in sorted(found.items())
    )


def notebook(name: str) -> str:
    """The cells of a notebook as Markdown, its headings one level lower."""
    path = Path(__file__).parent / "notebooks" / f"{name}.ipynb"
    return "\n\n".join(part for cell in json.loads(path.read_text("utf-8"))["cells"] for part in _cell(cell))


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield re.sub(r"^#", "##", source, flags=re.MULTILINE)
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            yield f'<img alt="output of the cell" src="data:image/png;base64,{data["image/png"]}">'
        else:
            yield f"```text\n{output.get('text', data.get('text/plain', '')).rstrip()}\n```"


GENERATED: dict[str, Callable[[], str]] = {"spec": reference, "commands": commands, "api": api}

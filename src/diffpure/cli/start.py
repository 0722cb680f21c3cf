"""`diffpure init`: a spec to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffpure.cli.base import app, say
from diffpure.errors import InputError, unknown


@app.command(epilog="Example: diffpure init mine.toml")
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("evaluation.toml"),
    like: Annotated[str | None, typer.Option(help="Begin with a copy of this spec inside the package.")] = None,
) -> None:
    """Write a commented spec of an evaluation, ready to run and to change."""
    from diffpure.disk import one_sentence

    text = _template(like)
    with one_sentence(file):
        try:
            with file.open("x", encoding="utf-8") as out:
                out.write(text)
        except FileExistsError as error:
            raise InputError(f"{file} is there already; name another file.") from error
    say(f"{file}: change it, then run `diffpure evaluate {file}` (with --estimate to see what it costs).")


def _template(like: str | None) -> str:
    """The commented spec, or that of a name inside the package."""
    from importlib import resources

    root = resources.files("diffpure.experiments")
    if like is None:
        return root.joinpath("new.toml").read_text("utf-8")
    shipped = {path.name.removesuffix(".toml"): path for path in root.joinpath("specs").iterdir()}
    if like not in shipped:
        raise unknown("spec", like, shipped)
    return shipped[like].read_text("utf-8")

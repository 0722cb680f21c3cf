"""`diffpure spec`: every key that a spec or a table may have, from the code itself."""

from __future__ import annotations

from typing import Annotated

import typer

from diffpure.cli.base import app, console


@app.command(epilog="Example: diffpure spec attacks")
def spec(
    section: Annotated[
        str | None, typer.Argument(help="spec, model, data, threat, attacks, eot, sampler, …; without one all.")
    ] = None,
) -> None:
    """Print the reference of specs and tables: keys, defaults and meanings."""
    from diffpure.experiments.reference import reference

    console.print(reference(section), soft_wrap=True, markup=False)

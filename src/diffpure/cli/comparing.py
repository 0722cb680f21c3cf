"""`diffpure compare`: two runs, image by image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from diffpure.cli.base import AsJson, app, console, say, visible
from diffpure.cli.output import print_json


@app.command(epilog="Example: diffpure compare runs/a runs/b")
def compare(
    a: Annotated[Path, typer.Argument(help="A finished run.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another one on the same images.", show_default=False)],
    rule: Annotated[
        str | None, typer.Option(help='When an image counts as right, such as "worst of 10"; the first both have.')
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs, paired per image, with McNemar's exact test."""
    from diffpure.results.catalogue import describe_evaluation
    from diffpure.results.compare import compare as paired

    first, second = describe_evaluation(a), describe_evaluation(b)
    found = paired(first.result, second.result, rule)
    if as_json:
        print_json({"a": str(a), "b": str(b), **found.as_dict()})
        return
    say(f"A: {first.name} ({a})\nB: {second.name} ({b})")
    say(f"{len(found.indices)} images, paired; right by the rule {found.rule}")
    table = Table("", "both", "only A", "only B", "neither", "A - B [95 % interval]", "McNemar p")
    for name, pairs in found.pairs.items():
        counts = (pairs.both, pairs.only_a, pairs.only_b, pairs.neither)
        table.add_row(Text(visible(found.titles[name])), *map(str, counts), str(pairs), f"{pairs.p_value:.3g}")
    console.print(table)
    for remark in found.remarks:
        say(f"note: {remark}")

"""`diffpure demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from diffpure.cli.base import Bars, Threads, app, console, keep_memory, say, use_threads
from diffpure.cli.evaluation import stoppable

if TYPE_CHECKING:
    from diffpure.experiments.demo import Demo
    from diffpure.pictures.gallery import Gallery

SMALL = "The embedded models are small: these are not the paper's numbers."


@app.command(epilog="Example: diffpure demo --out out")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, the picture and the runs.")] = Path("out"),
    images: Annotated[int, typer.Option(min=8, max=500, help="Embedded images to classify and purify.")] = 100,
    adaptive: Annotated[int, typer.Option(min=1, help="Images for the attack on the defence.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of all noise.")] = 0,
    threads: Threads = None,
) -> None:
    """Attack a classifier, purify, and attack the defence: offline, in about a minute."""
    use_threads(threads)
    keep_memory()
    from diffpure.disk import one_sentence
    from diffpure.experiments.demo import DemoConfig, run_demo
    from diffpure.report.page import write
    from diffpure.report.runs import read_run
    from diffpure.report.strips import save_strip

    config = DemoConfig(images=images, adaptive_images=min(adaptive, images), seed=seed)
    with stoppable(out / "runs"), Bars() as bars:
        result = run_demo(config, out / "runs", bars)
    _show(result)
    page, picture = out / "report.html", out / "demo.png"
    write([read_run(folder) for folder in result.folders], page, "html", f"{result.notes}. {SMALL}")
    with one_sentence(picture):
        save_strip(picture, *_stages(result))
    say(f"Picture: {picture}")
    say(f"Runs:    {out / 'runs'} (a second demo reads them; check one with `diffpure verify`)")
    say(f"Report:  {page} (open it in a browser: {page.resolve().as_uri()})")


def _stages(result: Demo) -> tuple[dict[str, Any], dict[str, list[tuple[str, bool]]]]:
    """The picture: the images before and after the attack on the classifier, then on their way through the defence."""
    bare, brought = _by_stage(result.galleries[0]), _by_stage(result.galleries[2])
    chosen = {**bare, "diffused": brought["diffused"], "purified": brought["purified"]}
    captions = {
        name: [gallery.caption(place, i) for i in range(len(gallery.labels))]
        for name, (gallery, place) in chosen.items()
    }
    return {name: gallery.pictures[place] / 255 for name, (gallery, place) in chosen.items()}, captions


def _by_stage(gallery: Gallery) -> dict[str, tuple[Gallery, int]]:
    return {name: (gallery, place) for place, name in enumerate(gallery.stages)}


def _show(result: Demo) -> None:
    table = Table("model", "attack", "correct", "accuracy [95 % interval]")
    for row in result.rows:
        table.add_row(row.model, row.attack, f"{row.rate.correct:g} of {row.rate.total}", str(row.rate))
    console.print(table)
    console.print(f"{result.notes}. {SMALL}")

"""`diffpure demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from diffpure.cli.base import Bars, Threads, app, console, use_threads

if TYPE_CHECKING:
    from diffpure.experiments.demo import Demo


@app.command(epilog="Example: diffpure demo --out out")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("out"),
    images: Annotated[int, typer.Option(min=8, max=500, help="Embedded images to classify and purify.")] = 100,
    adaptive: Annotated[int, typer.Option(min=1, help="Images for the attack on the defence.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of all noise.")] = 0,
    threads: Threads = None,
) -> None:
    """Attack a classifier, purify, and attack the defence: offline, in about a minute."""
    use_threads(threads)
    from diffpure.experiments.demo import DemoConfig, run_demo
    from diffpure.report.strips import save_strip

    config = DemoConfig(images=images, adaptive_images=min(adaptive, images), seed=seed)
    with Bars() as bars:
        result = run_demo(config, bars)
    _show(result)
    out.mkdir(parents=True, exist_ok=True)
    stages = {name: view.numpy() for name, view in result.strips.items()}
    save_strip(out / "demo.png", stages, result.captions())
    console.print(f"Picture: {out / 'demo.png'}")


def _show(result: Demo) -> None:
    table = Table("model", "attack", "correct", "accuracy", "95 % interval")
    for row in result.rows:
        low, high = row.rate.interval
        share = f"{row.rate.correct}/{row.rate.total}"
        table.add_row(
            row.model, row.attack, share, f"{100 * row.rate.value:.1f} %", f"{100 * low:.1f} – {100 * high:.1f} %"
        )
    console.print(table)
    console.print(f"{result.notes}. The embedded models are small: these are not the paper's numbers.")

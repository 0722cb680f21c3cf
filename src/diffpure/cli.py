"""The command line: parse, call, show. Everything heavy is imported inside a command, so that --help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from diffpure import __version__
from diffpure.errors import InputError

if TYPE_CHECKING:
    from diffpure.experiments.demo import Demo

app = typer.Typer(
    help="Defend an image classifier with a diffusion model, and find out honestly how robust it then is.",
    epilog="Start with: diffpure demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Get the data sets that the paper uses.", no_args_is_help=True)
train_app = typer.Typer(help="Train the models inside the package again, or your own.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(train_app, name="train")

console = Console(highlight=False)
Threads = Annotated[int | None, typer.Option(help="CPU threads; by default as many as torch chooses.", min=1)]


def main() -> None:
    """Run the command line; what a user can mend is one sentence on standard error and exit code 2."""
    try:
        app()
    except InputError as error:
        Console(stderr=True, highlight=False).print(f"[red]Error:[/red] {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted.")
        sys.exit(130)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"diffpure {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@app.command(epilog="Example: diffpure demo --out out")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the table.")] = Path("out"),
    images: Annotated[int, typer.Option(min=8, max=500, help="Embedded images to classify and purify.")] = 100,
    adaptive: Annotated[int, typer.Option(min=1, help="Images for the attack on the defence.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of all noise.")] = 0,
    threads: Threads = None,
) -> None:
    """Attack a classifier, purify, and attack the defence: offline, in about a minute."""
    _use_threads(threads)
    from diffpure.experiments.demo import DemoConfig, run_demo

    config = DemoConfig(images=images, adaptive_images=min(adaptive, images), seed=seed)
    with _Bars() as report:
        result = run_demo(config, report)
    _show_demo(result)
    out.mkdir(parents=True, exist_ok=True)
    from diffpure.report.strips import save_strip

    stages = {name: view.numpy() for name, view in result.strips.items()}
    save_strip(out / "demo.png", stages, result.captions())
    console.print(f"Picture: {out / 'demo.png'}")


def _show_demo(result: Demo) -> None:
    from rich.table import Table

    table = Table()
    for name in ("model", "attack", "correct", "accuracy", "95 % interval"):
        table.add_column(name)
    for row in result.rows:
        rate = row.rate
        low, high = rate.interval
        table.add_row(
            row.model,
            row.attack,
            f"{rate.correct}/{rate.total}",
            f"{100 * rate.value:.1f} %",
            f"{100 * low:.1f} – {100 * high:.1f} %",
        )
    console.print(table)
    console.print(f"{result.notes}. The embedded models are small: these are not the paper's numbers.")


@data_app.command(epilog="Example: diffpure data fetch cifar10")
def fetch(name: Annotated[str, typer.Argument(help="cifar10")] = "cifar10") -> None:
    """Download a data set into the cache, verify every file by its hash, and continue where it broke off."""
    from diffpure.data import cifar10
    from diffpure.errors import unknown

    if name != "cifar10":
        raise unknown("data set", name, ["cifar10"])
    cifar10.fetch(console.print)


@train_app.command(epilog="Example: diffpure train score --recipe cifar10-small --out runs/score")
def score(
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints, log and weights; an interrupted run goes on there.")
    ],
    recipe: Annotated[str, typer.Option(help="Which embedded score model to make again.")] = "cifar10-small",
    examples: Annotated[int | None, typer.Option(min=1, help="Images to see in all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, order and noise.")] = None,
    data: Annotated[Path | None, typer.Option(help="CIFAR-10 in any official form; the cache by default.")] = None,
    threads: Threads = None,
) -> None:
    """Train a score model by denoising score matching; kill it at any time, the same command continues it."""
    _follow(recipe, out, data, threads, examples=examples, seed=seed)


@train_app.command(epilog="Example: diffpure train classifier --recipe cifar10-resnet --out runs/resnet")
def classifier(
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints, log and weights; an interrupted run goes on there.")
    ],
    recipe: Annotated[str, typer.Option(help="Which embedded classifier to make again.")] = "cifar10-resnet",
    epochs: Annotated[float | None, typer.Option(min=0.01, help="Passes over the training set.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, order and augmentation.")] = None,
    data: Annotated[Path | None, typer.Option(help="CIFAR-10 in any official form; the cache by default.")] = None,
    threads: Threads = None,
) -> None:
    """Train a classifier, plainly or adversarially as its recipe says; the same command continues it."""
    _follow(recipe, out, data, threads, epochs=epochs, seed=seed)


def _follow(recipe: str, out: Path, data: Path | None, threads: int | None, **changes: float | None) -> None:
    _use_threads(threads)
    from diffpure.data import cifar10
    from diffpure.training.recipes import export, follow

    images = cifar10.load("train", data)
    given = {name: value for name, value in changes.items() if value is not None}
    model = follow(recipe, images, out, console, threads=threads, **given)
    card = export(recipe, model, out)
    console.print(f"Weights: {out / card['file']} (sha256 {card['sha256']})")


class _Bars:
    """One rich bar for each kind of work, with an estimate of the time that is left."""

    def __enter__(self) -> _Bars:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, int] = {}
        self._bars.start()
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

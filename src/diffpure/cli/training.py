"""`diffpure data` and `diffpure train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffpure.cli.base import Threads, app, console, use_threads
from diffpure.errors import unknown

data_app = typer.Typer(help="Get the data sets.", no_args_is_help=True)
train_app = typer.Typer(help="Train the models inside the package again.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(train_app, name="train")

Out = Annotated[Path, typer.Option(help="Folder for checkpoints, log and weights; an interrupted run goes on there.")]
Data = Annotated[Path | None, typer.Option(help="CIFAR-10 in any official form; the cache by default.")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, order and noise.")]


@data_app.command(epilog="Example: diffpure data fetch cifar10")
def fetch(name: Annotated[str, typer.Argument(help="cifar10")] = "cifar10") -> None:
    """Download a data set into the cache, verify every file by its hash, and continue where it broke off."""
    from diffpure.data import cifar10

    if name != "cifar10":
        raise unknown("data set", name, ["cifar10"])
    cifar10.fetch(console.print)


@data_app.command(epilog="Example: diffpure data where")
def where() -> None:
    """Show the cache folder, where data sets and checkpoints are kept."""
    from diffpure.disk import home

    console.print(str(home()), soft_wrap=True)


@train_app.command(epilog="Example: diffpure train score --recipe cifar10-small --out runs/score")
def score(
    out: Out,
    recipe: Annotated[str, typer.Option(help="Which embedded score model to make again.")] = "cifar10-small",
    examples: Annotated[int | None, typer.Option(min=1, help="Images to see in all.")] = None,
    seed: Seed = None,
    data: Data = None,
    threads: Threads = None,
) -> None:
    """Train a score model by denoising score matching; kill it at any time, the same command continues it."""
    _follow(recipe, out, data, threads, examples=examples, seed=seed)


@train_app.command(epilog="Example: diffpure train classifier --recipe cifar10-resnet --out runs/resnet")
def classifier(
    out: Out,
    recipe: Annotated[str, typer.Option(help="Which embedded classifier to make again.")] = "cifar10-resnet",
    epochs: Annotated[float | None, typer.Option(min=0.01, help="Passes over the training set.")] = None,
    seed: Seed = None,
    data: Data = None,
    threads: Threads = None,
) -> None:
    """Train a classifier, plainly or adversarially as its recipe says; the same command continues it."""
    _follow(recipe, out, data, threads, epochs=epochs, seed=seed)


def _follow(recipe: str, out: Path, data: Path | None, threads: int | None, **changes: float | None) -> None:
    use_threads(threads)
    from diffpure.data import cifar10
    from diffpure.training.recipes import export, follow

    images = cifar10.load("train", data)
    given = {name: value for name, value in changes.items() if value is not None}
    model = follow(recipe, images, out, console, threads=threads, **given)
    card = export(recipe, model, out)
    console.print(f"Weights: {out / card['file']} (sha256 {card['sha256']})", soft_wrap=True)

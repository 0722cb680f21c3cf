"""`diffpure data` and `diffpure train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffpure.cli.base import Threads, app, console, use_threads
from diffpure.errors import InputError, unknown

if TYPE_CHECKING:
    from torch import Tensor, nn

    from diffpure.training.adversarial import Adversary

data_app = typer.Typer(help="Get the data sets.", no_args_is_help=True)
train_app = typer.Typer(
    help="Train the models inside the package again, or a defence against attacks.", no_args_is_help=True
)
app.add_typer(data_app, name="data")
app.add_typer(train_app, name="train")

Out = Annotated[Path, typer.Option(help="Folder for checkpoints, log and weights; an interrupted run goes on there.")]
Data = Annotated[Path | None, typer.Option(help="CIFAR-10 in any official form; the cache by default.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Images a step.")]
Rate = Annotated[float | None, typer.Option(help="Learning rate at its peak.")]
Decay = Annotated[float | None, typer.Option(help="Of the moving average of the weights, in [0, 1).")]
Precision = Annotated[str | None, typer.Option(help="float32, bfloat16, or auto: the faster here.")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, order and noise.")]


@data_app.command(epilog="Example: diffpure data fetch cifar10")
def fetch(name: Annotated[str, typer.Argument(help="cifar10")] = "cifar10") -> None:
    """Download a data set into the cache, verify every file by its hash, and continue where it broke off."""
    from diffpure.data import cifar10

    if name != "cifar10":
        raise unknown("data set", name, ["cifar10"])
    cifar10.fetch(lambda text: console.print(text, markup=False, soft_wrap=True))


@data_app.command(epilog="Example: diffpure data where")
def where() -> None:
    """Show the cache folder, where data sets and checkpoints are kept."""
    from diffpure.disk import home

    console.print(str(home()), markup=False, soft_wrap=True)


@train_app.command(epilog="Example: diffpure train score --recipe cifar10-small --out runs/score")
def score(
    out: Out,
    recipe: Annotated[str, typer.Option(help="Which embedded score model to make again.")] = "cifar10-small",
    examples: Annotated[int | None, typer.Option(min=1, help="Images to see in all.")] = None,
    batch: Batch = None,
    rate: Rate = None,
    decay: Decay = None,
    optimiser: Annotated[str | None, typer.Option(help="adam, or muon with a rate of 0.01.")] = None,
    weighting: Annotated[str | None, typer.Option(help="Of the times: epsilon, edm, relative or likelihood.")] = None,
    t_max: Annotated[float | None, typer.Option(help="Largest time, in (0, 1]; purify no further.")] = None,
    power: Annotated[float | None, typer.Option(help="t = t_max u^power; above 1, small times more often.")] = None,
    crop: Annotated[int | None, typer.Option(min=1, help="Side of the squares of photographs, in pixels.")] = None,
    start: Annotated[
        str | None, typer.Option(help="Begin with the weights of another run (its folder) or of an embedded model.")
    ] = None,
    precision: Precision = None,
    seed: Seed = None,
    data: Annotated[
        Path | None,
        typer.Option(help="CIFAR-10 in any official form (the cache by default), or photographs: a folder or a tar."),
    ] = None,
    threads: Threads = None,
) -> None:
    """Train a score model by denoising score matching; kill it at any time, the same command continues it."""
    changes = {"weighting": weighting, "t_max": t_max, "power": power, "crop": crop, "precision": precision}
    changes |= {"start": start, "optimiser": optimiser}
    _follow(recipe, out, data, threads, examples=examples, batch=batch, rate=rate, decay=decay, seed=seed, **changes)


@train_app.command(epilog="Example: diffpure train classifier --recipe cifar10-resnet --out runs/resnet")
def classifier(
    out: Out,
    recipe: Annotated[str, typer.Option(help="Which embedded classifier to make again.")] = "cifar10-resnet",
    epochs: Annotated[float | None, typer.Option(min=0.01, help="Passes over the training set.")] = None,
    batch: Batch = None,
    rate: Rate = None,
    decay: Decay = None,
    adversary: Annotated[str | None, typer.Option(help="Train against attacks: pgd or trades.")] = None,
    norm: Annotated[str | None, typer.Option(help="Of the adversary: linf (default) or l2.")] = None,
    eps: Annotated[str | None, typer.Option(help="Its budget for images in [0, 1]; 8/255 by default.")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Its moves; 10 by default.")] = None,
    step_size: Annotated[str | None, typer.Option(help="Of a move; 2.5 eps / iterations by default.")] = None,
    beta: Annotated[float | None, typer.Option(help="Weight of robustness in TRADES; 6 by default.")] = None,
    purify: Annotated[
        float | None,
        typer.Option(help="Train on images purified from this t* by cifar10-small in one shot; attacks come after it."),
    ] = None,
    precision: Precision = None,
    seed: Seed = None,
    data: Data = None,
    threads: Threads = None,
) -> None:
    """Train a classifier, plainly or adversarially as its recipe or you say; the same command continues it."""
    changes = {
        "adversary": _adversary(adversary, norm, eps, iterations, step_size, beta),
        "purify": None if purify is None else _purify(purify),
        "precision": precision,
    }
    _follow(recipe, out, data, threads, epochs=epochs, batch=batch, rate=rate, decay=decay, seed=seed, **changes)


@train_app.command(epilog="Example: diffpure train purifier --out runs/purifier --precision auto")
def purifier(
    out: Annotated[Path, typer.Option(help="Folder; a broken run goes on there.")],
    score: Annotated[str, typer.Option(help="A name or a file.")] = "cifar10-small",
    score_like: Annotated[str | None, typer.Option(help="The model that its file is read as.")] = None,
    classifier: Annotated[str, typer.Option(help="A name or a file.")] = "cifar10-resnet-at",
    classifier_like: Annotated[str | None, typer.Option(help="The model that its file is read as.")] = None,
    objective: Annotated[str | None, typer.Option(help="classifier, bridge (ADBM) or rank (ADDT).")] = None,
    learn: Annotated[str | None, typer.Option(help="both, score (photographs) or classifier.")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="In all; 64,000 images or 1,600 photographs.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images a step; 64, or 8 photographs.")] = None,
    rate: Annotated[float | None, typer.Option(help="Learning rate of the score; 3e-4.")] = None,
    classifier_rate: Annotated[float | None, typer.Option(help="That of the classifier; 1e-4.")] = None,
    decay: Annotated[float | None, typer.Option(help="Of the moving average of the weights.")] = None,
    t_min: Annotated[float | None, typer.Option(help="t* of an image is drawn from here, 0.02,")] = None,
    t_max: Annotated[float | None, typer.Option(help="to here, 0.1.")] = None,
    few_steps: Annotated[int | None, typer.Option(min=0, help="Steps of half of the purifications; 0.")] = None,
    attacked: Annotated[float | None, typer.Option(help="Weight of attacked images: 1; 0 attacks none.")] = None,
    clean: Annotated[float | None, typer.Option(help="Weight of clean ones: 0.")] = None,
    denoising: Annotated[float | None, typer.Option(help="Weight of errors of the denoised image: 1.")] = None,
    norm: Annotated[str, typer.Option(help="Of the attack: linf or l2.")] = "linf",
    eps: Annotated[str, typer.Option(help="Its budget in [0, 1].")] = "8/255",
    iterations: Annotated[int, typer.Option(min=1, help="Its moves, a gradient each.")] = 1,
    step_size: Annotated[str | None, typer.Option(help="1.25 eps for one, else 2.5 eps / iterations.")] = None,
    knows: Annotated[str | None, typer.Option(help="noise, purifier or classifier (alone).")] = None,
    precision: Precision = None,
    labels: Annotated[str | None, typer.Option(help="given, or classifier: its own (photographs).")] = None,
    crop: Annotated[int | None, typer.Option(min=1, hidden=True, help="Side of the squares of photographs.")] = None,
    seed: Seed = None,
    data: Annotated[Path | None, typer.Option(help="CIFAR-10 or photographs, cut (--crop).")] = None,
    threads: Threads = None,
) -> None:
    """Train a score against attacks that go through it, and the classifier behind it, or one alone."""
    use_threads(threads)
    from diffpure.classifiers.load import load_classifier
    from diffpure.data import cifar10
    from diffpure.scores.load import load_score
    from diffpure.training.purifier import PHOTOGRAPHS, PurifierConfig
    from diffpure.training.recipes import harden, photographs

    if iterations == 1 and step_size is None:
        step_size = str(1.25 * _number(eps))
    changes: dict[str, Any] = {
        "objective": objective, "learn": learn, "examples": examples, "batch": batch, "rate": rate, "decay": decay,
        "classifier_rate": classifier_rate, "t_min": t_min, "t_max": t_max, "few_steps": few_steps,
        "attacked": attacked, "clean": clean, "denoising": denoising, "knows": knows, "labels": labels, "crop": crop,
        "precision": precision, "seed": seed, "threads": threads,
        "adversary": _adversary("pgd", norm, eps, iterations, step_size, None),
    }  # fmt: skip
    networks = load_score(score, like=score_like), load_classifier(classifier, like=classifier_like)
    of_photographs = networks[0].size is None
    config = PurifierConfig(**{**(PHOTOGRAPHS if of_photographs else {}), **_given(changes)})
    images = photographs(data) if of_photographs else cifar10.load("train", data)
    for name, model in harden(*networks, images, config, out, console).items():
        _export(name, model, out)


def _adversary(
    kind: str | None, norm: str | None, eps: str | None, iterations: int | None, step: str | None, beta: float | None
) -> Adversary | None:
    """The adversary that the options name, None if they name none."""
    from diffpure.threats import threat_of
    from diffpure.training.adversarial import Adversary

    if kind is None:
        if any(option is not None for option in (norm, eps, iterations, step, beta)):
            raise InputError("--norm, --eps, --iterations, --step-size and --beta describe an --adversary; name one.")
        return None
    if kind not in ("pgd", "trades"):
        raise unknown("adversary", kind, ("pgd", "trades"))
    if kind == "pgd" and beta is not None:
        raise InputError("--beta belongs to --adversary trades.")
    return Adversary(
        threat=threat_of({"kind": norm or "linf", "eps": _number(eps or "8/255")}),
        iterations=iterations or 10,
        step_size=None if step is None else _number(step),
        trades=None if kind == "pgd" else 6.0 if beta is None else beta,
    )


def _number(text: str) -> float:
    """A number such as 0.5 or 8/255."""
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError) as error:
        raise InputError(f"A number such as 0.03 or 8/255 is wanted, got {text!r}.") from error


def _purify(t_star: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The purifier to train behind: images (B, C, H, W) in [0, 1] and seeds (B,) to purified images."""
    from diffpure.diffusion.samplers import OneShot
    from diffpure.purifiers.diffusion import Purifier
    from diffpure.scores.load import load_score

    return Purifier(load_score("cifar10-small"), OneShot(t_star))


def _follow(recipe: str, out: Path, data: Path | None, threads: int | None, **changes: object) -> None:
    use_threads(threads)
    from diffpure.training.recipes import find, follow

    images = find(recipe).read(data)
    _export(recipe, follow(recipe, images, out, console, threads=threads, **_given(changes)), out)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were typed."""
    return {name: value for name, value in options.items() if value is not None}


def _export(name: str, model: nn.Module, out: Path) -> None:
    from diffpure.training.recipes import export

    card = export(name, model, out)
    console.print(f"Weights: {out / card['file']} (sha256 {card['sha256']})", soft_wrap=True)

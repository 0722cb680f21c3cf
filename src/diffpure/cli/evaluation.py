"""`diffpure evaluate`, `verify`, `attack`, `audit` and `suggest-t`: each over the same spec."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from diffpure.cli.base import Bars, Threads, app, console, use_threads
from diffpure.disk import one_sentence
from diffpure.errors import InputError, unknown

if TYPE_CHECKING:
    from diffpure.evaluation.engine import Engine
    from diffpure.evaluation.evaluate import Tick
    from diffpure.evaluation.spec import EvaluationSpec

Spec = Annotated[str, typer.Argument(help="A TOML file, or the name of a spec inside the package.")]
Images = Annotated[int, typer.Option(min=1, help="How many of the spec's images to use.")]


def read_spec(name: str) -> EvaluationSpec:
    """The spec in a file, or the one inside the package of that name."""
    from diffpure.evaluation.spec import EvaluationSpec
    from diffpure.experiments.run import shipped_specs

    shipped = shipped_specs()
    if name in shipped:
        return EvaluationSpec.read(shipped[name])
    if not Path(name).exists() and not name.endswith(".toml"):
        raise unknown("spec", name, [*shipped, "a TOML file"])
    return EvaluationSpec.read(name)


@app.command(epilog="Example: diffpure evaluate cifar10-bare-linf --out runs")
def evaluate(
    spec: Spec,
    out: Annotated[Path, typer.Option(help="Parent of the run's folder, which is named by the spec's hash.")] = Path(
        "runs"
    ),
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what it would cost on this machine.")] = False,
    engine: Annotated[str, typer.Option(help="local, or ray (pip install ray).")] = "local",
    address: Annotated[str | None, typer.Option(help="A Ray cluster; without one, Ray starts here.")] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="GiB that a batch may take; by default what is free.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Evaluate a defence or a classifier as a spec says; killed at any moment, the same command goes on."""
    use_threads(threads)
    from diffpure.experiments.run import estimate_run, run, run_folder

    wanted, limit = read_spec(spec), None if memory is None else int(memory * 2**30)
    if estimate:
        console.print(str(estimate_run(wanted, memory=limit)), soft_wrap=True)
        return
    folder = run_folder(wanted, out)
    try:
        with _RunBar() as bar:
            result = run(
                wanted,
                folder,
                engine=_engine(engine, address),
                memory=limit,
                progress=bar,
                on_estimate=lambda cost: console.print(str(cost), soft_wrap=True),
            )
    except KeyboardInterrupt:
        console.print(f"Stopped; what is done is in {folder}. The same command goes on.", soft_wrap=True)
        raise typer.Exit(130) from None
    console.print(str(result), soft_wrap=True)
    console.print(f"Run: {folder}   Page: diffpure report {folder}", soft_wrap=True)


def _engine(name: str, address: str | None) -> Engine:
    from diffpure.evaluation.engine import Local, Ray

    if name == "local":
        return Local()
    if name == "ray":
        return Ray(address=address)
    raise unknown("engine", name, ["local", "ray"])


@app.command(epilog="Example: diffpure verify runs/0123456789abcdef")
def verify(run: Annotated[Path, typer.Argument(help="The folder of a run.")], threads: Threads = None) -> None:
    """Check a run from its files alone: budget, labels, decisions, rates, weights."""
    use_threads(threads)
    from diffpure.experiments.run import verify_run

    with Bars() as bars:
        found = verify_run(run, progress=lambda done, total: bars("verify", done, total))
    console.print(str(found), soft_wrap=True)
    if not found.passed:
        raise typer.Exit(1)


@app.command(epilog="Example: diffpure attack cifar10-bare-linf -o attacked.npz --images 4")
def attack(
    spec: Spec,
    out: Annotated[Path, typer.Option("--out", "-o", help="An npz file for clean and attacked images and labels.")],
    images: Images = 16,
    threads: Threads = None,
) -> None:
    """Craft adversarial images with the first attack of a spec, and save them as floats in [0, 1]."""
    use_threads(threads)
    import numpy as np

    from diffpure.experiments.run import build

    wanted = read_spec(spec)
    world, attacks = build(wanted), wanted.make_attacks()
    if not attacks:
        raise InputError("The spec names no attack.")
    name, first = next(iter(attacks.items()))
    x, y, threat = world.images[:images], world.labels[:images], wanted.threat.make()
    seeds = [wanted.seeds[0] * 1_000_003 + place for place in wanted.data.images[:images]]
    with Bars() as bars:
        run = first.run(world.model, x, y, threat, seeds=seeds, on_step=lambda r: bars(name, r.step, r.steps))
    made = threat.apply(x, run.z)
    with one_sentence(out), out.open("wb") as file:
        np.savez_compressed(file, clean=x.numpy(), attacked=made.numpy(), labels=y.numpy())
    console.print(
        f"{len(x)} images under {name}, {int(run.broken.sum())} broken by its own count: {out}", soft_wrap=True
    )


@app.command(epilog="Example: diffpure audit cifar10-small-linf --images 2")
def audit(spec: Spec, images: Images = 2, threads: Threads = None) -> None:
    """Audit the gradient of a spec's model against backprop and finite differences."""
    use_threads(threads)
    from diffpure.audit import audit_gradient
    from diffpure.experiments.run import build

    world = build(read_spec(spec))
    x = world.images[:images]
    found = audit_gradient(world.model, x, seeds=range(len(x)))
    console.print(str(found))
    if not found.passed:
        raise typer.Exit(1)


@app.command("suggest-t", epilog="Example: diffpure suggest-t cifar10-small-linf --images 16")
def suggest_t(spec: Spec, images: Images = 64, threads: Threads = None) -> None:
    """Advise on t*: Theorem 2's bound, how far purification moves the images, and the accuracy that is left."""
    use_threads(threads)
    from dataclasses import replace

    from diffpure.advice import suggest_t_star
    from diffpure.experiments.run import build
    from diffpure.purify import Defense

    wanted = read_spec(spec)
    world = build(wanted)
    model, sampler = world.model, wanted.model.make_sampler()
    if not isinstance(model, Defense) or not hasattr(sampler, "t_star"):
        raise InputError("Advice on t* needs a spec with a score model and a sampler that diffuses to t*.")
    advice = suggest_t_star(
        model.purifier.score,
        world.images[:images],
        model.classifier,
        world.labels[:images],
        sampler=lambda t: replace(sampler, t_star=t),  # type: ignore[type-var]
        perturbation=2 * wanted.threat.eps * world.images[0].numel() ** 0.5 if wanted.threat.kind == "linf" else 0.0,
        seeds=range(min(images, len(world.images))),
    )
    console.print(str(advice))


class _RunBar:
    """One bar for the whole run, with the attack under way and an estimate of the time that is left."""

    def __enter__(self) -> _RunBar:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=os.environ.get("TERM") == "dumb")
        self._task = self._bar.add_task("starting", total=1.0, left="…")
        self._bar.start()
        return self

    def __call__(self, tick: Tick) -> None:
        from diffpure.evaluation.estimate import duration

        first, last = tick.images
        where = f"{tick.attack} on images {first}–{last}, step {tick.step}/{tick.steps}, {tick.rows}/{tick.total} rows"
        self._bar.update(self._task, completed=tick.share, description=where, left=duration(tick.left))

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

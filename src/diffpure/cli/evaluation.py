"""`diffpure evaluate`, `attack`, `verify`, `audit` and `suggest-t`: each over the same spec."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from diffpure.cli.base import AsJson, Bars, Threads, app, console, use_threads
from diffpure.errors import InputError, unknown

if TYPE_CHECKING:
    from diffpure.evaluation.engine import Engine
    from diffpure.evaluation.evaluate import Tick
    from diffpure.experiments.load import Loader
    from diffpure.experiments.spec import EvaluationSpec

Spec = Annotated[str, typer.Argument(help="A TOML file, or the name of a spec inside the package.")]
Images = Annotated[int, typer.Option(min=1, help="How many of the spec's images to use.")]
Runs = Annotated[Path, typer.Option("--out", "-o", help="Parent of the run's folder, which is called NAME-HASH.")]
Memory = Annotated[float | None, typer.Option(min=0.1, help="GiB that a batch may take; by default what is free.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or mps.")]
Pngs = Annotated[Path | None, typer.Option("--png", help="Also write the adversarial images here, as PNG files.")]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Load models that run code of their own: python:, TorchScript, ONNX."),
]


def read_spec(name: str) -> tuple[EvaluationSpec, Path | None]:
    """The spec in a file, or the one inside the package of that name, and the folder that its paths start from."""
    from diffpure.experiments.load import shipped_specs
    from diffpure.experiments.spec import EvaluationSpec

    shipped = shipped_specs()
    if name in shipped:
        return EvaluationSpec.read(shipped[name]), None
    if not Path(name).exists() and not name.endswith(".toml"):
        raise unknown("spec", name, [*shipped, "a TOML file"])
    return EvaluationSpec.read(name), Path(name).parent


def make_loader(device: str = "cpu", allow_code: bool = False, base: Path | None = None) -> Loader:
    """What loads a spec's model to a device, if this machine has it."""
    import torch

    from diffpure.experiments.load import Loader

    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device not in there:
        raise unknown("device", device, there)
    if not there[device]:
        has = ", ".join(name for name, found in there.items() if found)
        raise InputError(f"Torch finds no device {device!r} on this machine; it finds {has}.")
    return Loader(base, device, allow_code)


@app.command(epilog="Example: diffpure evaluate cifar10-bare-linf --out runs")
def evaluate(
    spec: Spec,
    out: Runs = Path("runs"),
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what it would cost on this machine.")] = False,
    engine: Annotated[str, typer.Option(help="local, or ray (pip install ray).")] = "local",
    address: Annotated[str | None, typer.Option(help="A Ray cluster; without one, Ray starts here.")] = None,
    cpus: Annotated[float | None, typer.Option(min=0, help="CPUs of a Ray task; by default one per thread.")] = None,
    gpus: Annotated[float | None, typer.Option(min=0, help="GPUs of a Ray task, where it then computes.")] = None,
    device: Device = "cpu",
    memory: Memory = None,
    png: Pngs = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Evaluate a defence or a classifier as a spec says; killed at any moment, the same command goes on."""
    use_threads(threads)
    from diffpure.experiments.load import run_folder, run_spec

    wanted, base = read_spec(spec)
    loader, limit = make_loader(device, allow_code, base), _bytes(memory)
    where = _engine(engine, device, {"address": address, "cpus": cpus, "gpus": gpus})
    if estimate:
        found = loader.evaluation(wanted, memory=limit).estimate()
        _show(vars(found) if as_json else found, as_json)
        return
    folder = run_folder(wanted, out)
    told = None if as_json else _say
    with stoppable(folder), RunBar() as bar:
        result = run_spec(wanted, folder, loader, engine=where, memory=limit, progress=bar, on_estimate=told)
    _show({"folder": str(folder), **result.summary()} if as_json else result, as_json)
    _write_pngs(folder, png)
    if not as_json:
        _say(f"Run: {folder}   Page: diffpure report {folder}")


def _engine(name: str, device: str, options: dict[str, Any]) -> Engine:
    """The engine of that name; `options` are Ray's, None where none was given."""
    from diffpure.evaluation.engine import Local, Ray

    given = {key: value for key, value in options.items() if value is not None}
    if name == "ray":
        if device != "cpu":
            raise InputError("A Ray task computes on the GPUs that --gpus gives it; leave --device out.")
        return Ray(**given)
    if name != "local":
        raise unknown("engine", name, ["local", "ray"])
    if given:
        raise InputError(f"--{next(iter(given))} is for --engine ray; the local engine uses --device and --threads.")
    return Local()


def _bytes(memory: float | None) -> int | None:
    return None if memory is None else int(memory * 2**30)


def _say(what: object) -> None:
    console.print(str(what), soft_wrap=True, markup=False)


def _show(what: object, as_json: bool) -> None:
    if as_json:
        console.print_json(json.dumps(what))
    else:
        _say(what)


@contextlib.contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """Ctrl-C ends with what to do to go on."""
    try:
        yield
    except KeyboardInterrupt:
        _say(f"Stopped; what is done is in {folder}. The same command goes on.")
        raise typer.Exit(130) from None


def _write_pngs(folder: Path, to: Path | None) -> None:
    if to is not None:
        from diffpure.pictures.pngs import save_pngs

        _say(f"{len(save_pngs(folder, to))} PNG files: {to}")


@app.command(epilog="Example: diffpure verify runs/* --again 2")
def verify(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished evaluations, or folders of such folders.")],
    again: Annotated[int, typer.Option(min=0, help="Attacked batches per run, chosen at random, to compute anew.")] = 0,
    base: Annotated[Path | None, typer.Option(help="The folder that paths in the runs' specs start from.")] = None,
    device: Device = "cpu",
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Check runs from their files: what is proven (rows, budgets, decisions, rates) and what is only claimed."""
    use_threads(threads)
    from diffpure.experiments.load import verify_run

    loader, found = make_loader(device, allow_code, base), {}
    folders = run_folders(runs)
    for run in folders:
        try:
            with Bars() as bars:
                checked = verify_run(run, loader, again=again, progress=partial(bars, run.name))
            found[str(run)] = {**vars(checked), "passed": checked.passed}
            text = str(checked)
        except InputError as error:
            if len(folders) == 1:
                raise
            # One folder that holds no run must not hide what is wrong with the others.
            found[str(run)], text = {"problems": [str(error)], "passed": False}, str(error)
        if not as_json:
            _say(f"{run}: {text}")
    if as_json:
        _show(found, as_json)
    if not all(entry["passed"] for entry in found.values()):
        raise typer.Exit(1)


def run_folders(paths: list[Path]) -> list[Path]:
    """The runs that paths name: each itself, or those in the folder that it is."""
    from diffpure.evaluation.rows import ROWS

    found = []
    for path in paths:
        inside = [path] if (path / ROWS).exists() or not path.is_dir() else sorted(p.parent for p in path.rglob(ROWS))
        found += inside or [path]
    return found


@app.command(epilog="Example: diffpure attack cifar10-bare-linf --images 4 --png pictures")
def attack(
    spec: Spec,
    out: Runs = Path("runs"),
    name: Annotated[str | None, typer.Option("--attack", help="Its name in the rows; by default the first.")] = None,
    images: Annotated[int, typer.Option(min=1, help="How many images at least; whole batches are attacked.")] = 16,
    device: Device = "cpu",
    memory: Memory = None,
    png: Pngs = None,
    allow_code: AllowCode = False,
    threads: Threads = None,
) -> None:
    """Craft and save adversarial images: the part of a spec's evaluation that is one attack on its first images.

    They are those that `diffpure evaluate` finds, and it goes on from them.
    """
    use_threads(threads)
    from diffpure.evaluation.store import IMAGES
    from diffpure.evaluation.units import Unit
    from diffpure.experiments.load import run_folder, run_spec

    wanted, base = read_spec(spec)
    attacks = list(wanted.make_attacks())
    if not attacks:
        raise InputError("The spec names no attack.")
    chosen, folder = attacks[0] if name is None else name, run_folder(wanted, out)
    if chosen not in attacks:
        raise unknown("attack", chosen, attacks)

    def part(unit: Unit) -> bool:
        return unit.attack == chosen and unit.start < images

    loader = make_loader(device, allow_code, base)
    with stoppable(folder), RunBar() as bar:
        result = run_spec(wanted, folder, loader, only=part, memory=_bytes(memory), progress=bar)
    rows = [row for row in result.rows if row.attack == chosen]
    misclassified = sum(row.misclassified for row in rows)
    _say(f"{len(rows)} images under {chosen}, {misclassified} misclassified by its own count: {folder / IMAGES}")
    _write_pngs(folder, png)


@app.command(epilog="Example: diffpure audit cifar10-small-linf --images 2")
def audit(spec: Spec, images: Images = 2, allow_code: AllowCode = False, threads: Threads = None) -> None:
    """Audit the gradient of a spec's model against backprop and finite differences."""
    use_threads(threads)
    from diffpure.audit import audit_gradient

    wanted, base = read_spec(spec)
    loader = make_loader(allow_code=allow_code, base=base)
    x = loader.data(wanted).images[:images]
    found = audit_gradient(loader.model(wanted.model), x, seeds=range(len(x)))
    _say(found)
    if not found.passed:
        raise typer.Exit(1)


@app.command("suggest-t", epilog="Example: diffpure suggest-t cifar10-small-linf --images 16")
def suggest_t(spec: Spec, images: Images = 64, allow_code: AllowCode = False, threads: Threads = None) -> None:
    """Advise on t*: Theorem 2's bound, how far purification moves the images, and the accuracy that is left."""
    use_threads(threads)
    from dataclasses import replace

    from diffpure.advice import suggest_t_star
    from diffpure.diffusion.samplers import sampler_of

    wanted, base = read_spec(spec)
    loader = make_loader(allow_code=allow_code, base=base)
    model, data, sampler = loader.model(wanted.model), loader.data(wanted), sampler_of(wanted.model.sampler)
    if wanted.model.score is None or not hasattr(sampler, "t_star"):
        raise InputError("Advice on t* needs a spec with a score model and a sampler that diffuses to t*.")
    advice = suggest_t_star(
        model.purifier.score,  # type: ignore[union-attr, arg-type]
        data.images[:images],
        model.classifier,  # type: ignore[arg-type]
        data.labels[:images],
        sampler=lambda t: replace(sampler, t_star=t),  # type: ignore[type-var]
        perturbation=2 * wanted.threat.eps * data.images[0].numel() ** 0.5,
        seeds=range(min(images, len(data.images))),
    )
    _say(advice)


class RunBar:
    """One bar for the whole run, with the attack under way and an estimate of the time that is left."""

    def __enter__(self) -> RunBar:
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
        from diffpure.evaluation.cost import duration

        first, last = tick.images
        where = f"{tick.attack} on images {first}–{last}, step {tick.step}/{tick.steps}, {tick.rows}/{tick.total} rows"
        self._bar.update(
            self._task, completed=tick.share, description=where, left="…" if tick.left is None else duration(tick.left)
        )

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

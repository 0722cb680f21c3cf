"""`diffpure evaluate`, `attack` and `verify`: each over the same spec."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from diffpure.cli.base import (
    AsJson,
    Bars,
    Device,
    DeviceName,
    Quiet,
    Threads,
    app,
    errors,
    keep_memory,
    say,
    use_device,
    use_threads,
)
from diffpure.cli.output import print_json, show
from diffpure.errors import InputError, unknown

if TYPE_CHECKING:
    from diffpure.evaluation.engine import Engine
    from diffpure.evaluation.evaluate import Tick
    from diffpure.experiments.load import Loader
    from diffpure.experiments.spec import EvaluationSpec
    from diffpure.verification.verify import Verification

Spec = Annotated[str, typer.Argument(help="A TOML file, or the name of a spec inside the package.")]
Images = Annotated[int, typer.Option(min=1, help="How many of the spec's images to use.")]
Runs = Annotated[Path, typer.Option("--out", "-o", help="Parent of the run's folder, which is called NAME-HASH.")]
Memory = Annotated[float | None, typer.Option(min=0.1, help="GiB that a call may take; else half of what is free.")]
Pngs = Annotated[Path | None, typer.Option("--png", help="Also write the adversarial images here, as PNG files.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE,… in the spec, such as model.sampler.t_star=0.05,0.1; one run per value."),
]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Load models that run code of their own: python:, TorchScript, ONNX."),
]


EngineName = Annotated[str, typer.Option(help="local (default), or ray (pip install ray).", show_default=False)]
Address = Annotated[str | None, typer.Option(help="A Ray cluster; without one, Ray starts here.")]
Cpus = Annotated[float | None, typer.Option(min=0, help="CPUs of a Ray task; by default one per thread.")]
Gpus = Annotated[float | None, typer.Option(min=0, help="GPUs of a Ray task, where it then computes.")]
TERMINATED: Final = 128 + signal.SIGTERM


def read_spec(name: str) -> tuple[EvaluationSpec, Path | None]:
    """The spec in a file, or the one inside the package of that name, and the folder that its paths start from."""
    from diffpure.experiments.load import shipped_specs
    from diffpure.experiments.spec import EvaluationSpec

    return EvaluationSpec.read(spec_file(name)), None if name in shipped_specs() else Path(name).parent


def spec_file(name: str) -> Path:
    """The file of a spec: itself, or the one inside the package of that name."""
    from diffpure.experiments.load import shipped_specs

    shipped = shipped_specs()
    if name not in shipped and not Path(name).exists() and not name.endswith(".toml"):
        raise unknown("spec", name, [*shipped, "a TOML file"])
    return shipped.get(name, Path(name))


def make_loader(device: DeviceName = "auto", allow_code: bool = False, base: Path | None = None) -> Loader:
    """What loads a spec's model to a device, if this machine has it."""
    from diffpure.experiments.load import Loader

    return Loader(base, use_device(device), allow_code)


@app.command(epilog="Example: diffpure evaluate cifar10-bare-linf --out runs")
def evaluate(
    spec: Spec,
    out: Runs = Path("runs"),
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what it would cost on this machine.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    device: Device = "auto",
    memory: Memory = None,
    png: Pngs = None,
    settings: Sets = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    threads: Threads = None,
) -> None:
    """Evaluate a defence or a classifier as a spec says; a killed run goes on."""
    use_threads(threads)
    keep_memory()
    from diffpure.experiments.load import run_folder, run_spec

    wanted, base = read_spec(spec)
    where = make_engine(engine, device, {"address": address, "cpus": cpus, "gpus": gpus})
    # A task of Ray moves its copy of the model to its own GPU.
    loader, limit = make_loader("cpu" if engine == "ray" else device, allow_code, base), _bytes(memory)
    if settings:
        from diffpure.cli.tables import Way, sweep

        if png is not None:
            raise InputError("--png is for one evaluation; leave --set or --png out.")
        sweep(spec_file(spec), settings, Way(out, loader, limit, where, estimate, as_json, quiet))
        return
    if estimate:
        found = loader.evaluation(wanted, memory=limit).estimate()
        show(found, as_json)
        return
    folder = run_folder(wanted, out)
    told = None if as_json else say
    with stoppable(folder), RunBar(quiet) as bar:
        result = run_spec(wanted, folder, loader, engine=where, memory=limit, progress=bar, on_estimate=told)
    _write_pngs(folder, png, quiet=as_json)
    if as_json:
        print_json({"folder": folder, **result.summary()})
        return
    say(result)
    say(f"Run: {folder}   Page: diffpure report {folder}")


def make_engine(name: str, device: str, options: dict[str, Any]) -> Engine:
    """The engine of that name; `options` are Ray's, None where none was given."""
    from diffpure.evaluation.engine import Local, Ray

    given = {key: value for key, value in options.items() if value is not None}
    if name == "ray":
        if device != "auto":
            raise InputError("A Ray task computes on the GPUs that --gpus gives it; leave --device out.")
        return Ray(**given)
    if name != "local":
        raise unknown("engine", name, ["local", "ray"])
    if given:
        raise InputError(f"--{next(iter(given))} is for --engine ray; the local engine uses --device and --threads.")
    return Local()


def _bytes(memory: float | None) -> int | None:
    return None if memory is None else int(memory * 2**30)


@contextlib.contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """Ctrl-C and SIGTERM save the attack under way and end with what to do to go on."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stopped:
        say(f"Stopped; what is done is in {folder}. The same command goes on.", errors)
        raise typer.Exit(130 if isinstance(stopped, KeyboardInterrupt) else TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(TERMINATED)


def _write_pngs(folder: Path, to: Path | None, quiet: bool = False) -> None:
    if to is not None:
        from diffpure.pictures.pngs import save_pngs

        files = save_pngs(folder, to)
        if not quiet:
            say(f"{len(files)} PNG files: {to}")


@app.command(epilog="Example: diffpure verify runs/* --again 2")
def verify(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, or folders of such folders.")],
    again: Annotated[
        int, typer.Option(min=0, help="Attacked batches (of certificates: images) per run to compute anew.")
    ] = 0,
    rows_only: Annotated[
        bool, typer.Option("--rows-only", help="Check the files alone, without the model and the data.")
    ] = False,
    base: Annotated[Path | None, typer.Option(help="The folder that paths in the runs' specs start from.")] = None,
    device: Device = "auto",
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    threads: Threads = None,
) -> None:
    """Check runs from their files: what is proven, and what is only claimed."""
    use_threads(threads)
    from diffpure.experiments.measure import FILE as MEASURED
    from diffpure.results.catalogue import find_runs
    from diffpure.results.rows import ROWS

    if rows_only and (again or allow_code):
        raise InputError("--rows-only asks no model, so that --again and --allow-code have nothing to do with it.")
    folders, found = find_runs(runs, (ROWS, MEASURED)), {}
    for run in folders:
        try:
            with Bars(quiet) as bars:
                loader = None if rows_only else partial(make_loader, allow_code=allow_code, base=base)
                checked = _check(run, loader, device, again=again, progress=partial(bars, run.name))
            found[str(run)] = {**vars(checked), "passed": checked.passed}
            text = str(checked)
        except InputError as error:
            if len(folders) == 1:
                raise
            # One folder that holds no run must not hide what is wrong with the others.
            found[str(run)], text = {"problems": [str(error)], "passed": False}, str(error)
        if not as_json:
            say(f"{run}: {text}")
    if as_json:
        print_json(found)
    if not all(entry["passed"] for entry in found.values()):
        raise typer.Exit(1)


def _check(
    run: Path, loader: Callable[[DeviceName], Loader] | None, device: DeviceName, **options: Any
) -> Verification:
    """What is proven of a run, a certificate or a measurement; without a loader, of its files alone."""
    from diffpure.experiments.certify import verify_certificate_run
    from diffpure.experiments.load import verify_run
    from diffpure.experiments.measure import FILE as MEASURED
    from diffpure.experiments.measure import verify_measurement
    from diffpure.results.read import holds_certificates
    from diffpure.verification.certificates import verify_certificates
    from diffpure.verification.files import verify_files
    from diffpure.verification.withheld import is_withheld

    if (run / MEASURED).is_file():
        return verify_measurement(run, loader and loader("cpu" if device == "auto" else device))
    certified = holds_certificates(run)
    if loader is None:
        return verify_certificates(run) if certified else verify_files(run)
    if not certified and not options["again"] and is_withheld(run):
        return verify_files(run)  # whoever has no such images can check what was published
    check = verify_certificate_run if certified else verify_run
    return check(run, loader(_device_of(run) if device == "auto" else device), **options)


def _device_of(run: Path) -> DeviceName:
    """The kind of device that a run was computed on: another kind rounds differently."""
    from diffpure.results.certificates import read_certificates
    from diffpure.results.read import holds_certificates, read_rows

    read = read_certificates if holds_certificates(run) else read_rows
    header, _ = read(run, on_bad=lambda _: None)
    kind = str(header.get("machine", {}).get("device")).partition(":")[0]
    return "cuda" if kind == "cuda" else "mps" if kind == "mps" else "cpu"


@app.command(epilog="Example: diffpure attack cifar10-bare-linf --images 4 --png pictures")
def attack(
    spec: Spec,
    out: Runs = Path("runs"),
    name: Annotated[str | None, typer.Option("--attack", help="Its name in the rows; by default the first.")] = None,
    images: Annotated[int, typer.Option(min=1, help="How many images at least; whole batches are attacked.")] = 16,
    device: Device = "auto",
    memory: Memory = None,
    png: Pngs = None,
    allow_code: AllowCode = False,
    quiet: Quiet = False,
    threads: Threads = None,
) -> None:
    """Craft and save adversarial images: one attack of a spec on its first images.

    They are those that `diffpure evaluate` finds, and it goes on from them.
    """
    use_threads(threads)
    keep_memory()
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
    with stoppable(folder), RunBar(quiet) as bar:
        result = run_spec(wanted, folder, loader, only=part, memory=_bytes(memory), progress=bar)
    rows = [row for row in result.rows if row.attack == chosen]
    misclassified = sum(row.misclassified for row in rows)
    say(f"{len(rows)} images under {chosen}, {misclassified} misclassified by its own count: {folder / IMAGES}")
    _write_pngs(folder, png)


class RunBar:
    """Progress of a whole run, with the attack under way and the time that is left."""

    def __init__(self, quiet: bool = False) -> None:
        self._bars = Bars(quiet)

    def __enter__(self) -> RunBar:
        self._bars.__enter__()
        return self

    def __call__(self, tick: Tick) -> None:
        from diffpure.evaluation.cost import duration

        first, last = tick.images
        rows = f"{tick.rows}/{tick.total} rows"
        where = f"{tick.attack} on images {first}–{last}, step {tick.step}/{tick.steps}, {rows}"
        left = "" if tick.left is None else duration(tick.left)
        self._bars("run", float(tick.share), 1.0, shown=where, left=left)

    def __exit__(self, *_: object) -> None:
        self._bars.__exit__()

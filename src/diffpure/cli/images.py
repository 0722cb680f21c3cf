"""`diffpure purify`: images in, purified images out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diffpure.cli.base import Bars, Device, Quiet, Threads, app, say, use_device, use_threads, visible
from diffpure.errors import InputError, unknown

if TYPE_CHECKING:
    from diffpure.diffusion.samplers import Sampler
    from diffpure.files import Report
    from diffpure.purifiers.diffusion import Purifier

Fit = Literal["auto", "resize", "tiles"]
Backend = Literal["torch", "onnx", "openvino"]
Trajectory = Literal["none", "strip", "gif"]
POSSIBLE = 178_000_000  # where the image library itself refuses


@app.command(epilog="Example: diffpure purify photos -o clean --fit tiles --seed 1")
def purify(
    inputs: Annotated[list[str], typer.Argument(help="Images, folders, globs, npz arrays or tar archives.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results, under the same names.")],
    t_star: Annotated[float | None, typer.Option(help="How far to diffuse, in (0, 1]; default 0.1.")] = None,
    sampler: Annotated[
        str, typer.Option(help="few-step (default), sde, ode, ld, ancestral, ddim, one-shot.", show_default=False)
    ] = "few-step",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the sampler.")] = None,
    model: Annotated[
        str, typer.Option(help="Score model: a name (cifar10-small), a file, a folder.", show_default=False)
    ] = "cifar10-small",
    like: Annotated[str | None, typer.Option(help="The checkpoint that a file is read as.")] = None,
    fit: Annotated[
        Fit, typer.Option(help="Other sizes; auto: tiles above twice the size.", show_default=False)
    ] = "auto",
    seed: Annotated[int | None, typer.Option(help="Same seed, same result; entropy without.")] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Images or tiles purified together; default 16.", show_default=False)
    ] = 16,
    max_pixels: Annotated[
        int | None, typer.Option(min=1, max=POSSIBLE, metavar="<int>", help="Refuse larger images; default 64 million.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    trajectory: Annotated[Trajectory, typer.Option(help="Also draw the way back.", show_default=False)] = "none",
    backend: Annotated[
        Backend,
        typer.Option(help="What computes the network: torch, or onnx or openvino on the CPU.", show_default=False),
    ] = "torch",
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Load a score that is a program.")] = False,
    device: Device = "auto",
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Purify images of any size; damaged files are reported at the end, and a second run continues the first."""
    use_threads(threads)
    where = "cpu" if backend != "torch" and device == "auto" else use_device(device)
    from diffpure.data.images import LARGEST
    from diffpure.exporting.make import backend_score
    from diffpure.files import purify_files
    from diffpure.purifiers.diffusion import Purifier
    from diffpure.scores.load import load_score

    way = make_sampler(sampler, t_star, steps)
    purifier = Purifier(backend_score(load_score(model, like=like, allow_code=allow_code), backend), way).to(where)
    with Bars(quiet) as bars:
        report = purify_files(
            purifier,
            inputs,
            out,
            fit=fit,
            seed=seed,
            batch=batch,
            max_pixels=max_pixels or LARGEST,
            device=where,
            settings=_settings(model, like, sampler, way) | ({} if backend == "torch" else {"backend": backend}),
            overwrite=overwrite,
            on_image=None if trajectory == "none" else _drawer(purifier, trajectory, where),
            progress=bars,
        )
    _show(report, purifier.size)
    if report.failed:
        raise typer.Exit(1)


def _show(report: Report, size: int | None) -> None:
    say(f"{len(report.done)} purified, {len(report.skipped)} already there, {len(report.failed)} failed.")
    if (how := report.fitted(size)) is not None:
        say(how)
    for kind, lines in (("note", report.notes), ("failed", report.failed)):
        for name, reason in lines:
            say(f"{kind:<6}  {visible(f'{name}: {reason}')}")


def _settings(model: str, like: str | None, name: str, sampler: Sampler) -> dict[str, Any]:
    """What decides the result besides the options of files: the weights and the sampler with all its values."""
    from dataclasses import asdict

    from diffpure.models.checkpoints import sha256

    weights = {"weights": sha256(Path(model))} if Path(model).is_file() else {}
    if model.endswith(".xml") and (beside := Path(model).with_suffix(".bin")).is_file():
        weights["weights"] += sha256(beside)  # OpenVINO's two files
    return {"model": model, "like": like, **weights, "sampler": name, **asdict(sampler)}  # type: ignore[call-overload]


def make_sampler(name: str, t_star: float | None, steps: int | None) -> Sampler:
    """A sampler by name; an argument that it does not take is refused."""
    from diffpure.diffusion.samplers import SAMPLERS

    if name not in SAMPLERS:
        raise unknown("sampler", name, SAMPLERS)
    given = {key: value for key, value in {"t_star": t_star, "steps": steps}.items() if value is not None}
    taken = inspect.signature(SAMPLERS[name]).parameters
    for key, value in given.items():
        if key not in taken:
            raise InputError(f"The sampler {name!r} takes no --{key.replace('_', '-')}, got {value}; leave it out.")
    return SAMPLERS[name](**given)


def _drawer(purifier: Purifier, kind: str, device: str) -> Callable[[Path, Any, Any], None]:
    """What draws the way back of an image beside its file: "a.png" has its strip in "a.png.trajectory.png"."""
    from diffpure.report.strips import save_gif, save_strip

    def draw(file: Path, pixels: Any, seeds: Any) -> None:
        # Langevin dynamics walk from time 0 to 1, all others from t* to 0.
        t_star = getattr(purifier.sampler, "t_star", None)
        times = [k / 5 for k in range(6)] if t_star is None else [t_star * k / 5 for k in range(5, -1, -1)]
        given = pixels.expand(-1, purifier.channels or 3, -1, -1)
        back = purifier.trajectory(given.to(device), times, seeds)[:, 0].cpu()
        states = [x.expand(3, -1, -1).numpy() for x in (given[0], *back)]
        target = file.with_name(f"{file.name}.trajectory.{'png' if kind == 'strip' else 'gif'}")
        if kind == "gif":
            save_gif(target, states)
        else:
            names = ["input", *(f"t = {t:.3g}" for t in times)]
            save_strip(target, {name: state[None] for name, state in zip(names, states, strict=True)}, across=True)

    return draw

"""`diffpure purify`: images in, purified images out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from diffpure.cli.base import Bars, Device, Quiet, Threads, app, say, use_device, use_threads, visible
from diffpure.cli.evaluation import Address, Cpus, EngineName, Gpus, make_engine, stoppable
from diffpure.errors import InputError, unknown

if TYPE_CHECKING:
    from diffpure.diffusion.samplers import Sampler
    from diffpure.diffusion.score import ScoreModel
    from diffpure.files import Report
    from diffpure.purifiers.diffusion import Purifier

Fit = Literal["auto", "resize", "tiles"]
Backend = Literal["torch", "onnx", "openvino"]
Trajectory = Literal["none", "strip", "gif"]
POSSIBLE = 178_000_000  # where the image library itself refuses
SMALL, PHOTOS = "cifar10-small", "photos-small"  # without --model: of 32×32 images, and of all others
T_STAR: Final = {PHOTOS: 0.05}  # where it is not the sampler's own default: see docs/photographs.md


@app.command(epilog="Example: diffpure purify photos -o clean --seed 1")
def purify(
    inputs: Annotated[list[str], typer.Argument(help="Images, folders, globs, npz arrays or tar archives.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")],
    t_star: Annotated[float | None, typer.Option(help="In (0, 1]; default 0.1, photos-small 0.05.")] = None,
    sampler: Annotated[
        str, typer.Option(help="few-step (default), sde, ode, ld, ancestral, ddim, one-shot.", show_default=False)
    ] = "few-step",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the sampler.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Score model: a name, a file, a folder; default cifar10-small at 32×32, else photos-small."),
    ] = None,
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
        typer.Option(help="What computes the network.", show_default=False),
    ] = "torch",
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Load a score that is a program.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    device: Device = "auto",
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Purify images of any size; failures are reported, and a second run goes on."""
    use_threads(threads)
    work = make_engine(engine, device, {"address": address, "cpus": cpus, "gpus": gpus})
    where = work.device or ("cpu" if backend != "torch" and device == "auto" else use_device(device))
    from diffpure.data.images import LARGEST
    from diffpure.exporting.make import backend_score
    from diffpure.files import purify_files
    from diffpure.purifiers.diffusion import Purifier
    from diffpure.scores.load import load_score

    models = [SMALL, PHOTOS] if model is None else [model]
    ways = {name: make_sampler(sampler, t_star, steps, T_STAR.get(name)) for name in models}
    scores = {name: load_score(name, like=like, allow_code=allow_code) for name in models}
    purifiers = {name: Purifier(backend_score(scores[name], backend), way) for name, way in ways.items()}
    if work.device is None:  # a Ray worker moves its own copy
        for purifier in purifiers.values():
            purifier.to(where)
    usual = purifiers[models[-1]]
    sizes = {(32, 32): purifiers[SMALL]} if model is None else {}
    with stoppable(out), Bars(quiet) as bars:
        report = purify_files(
            usual,
            inputs,
            out,
            fit=fit,
            seed=seed,
            batch=batch,
            max_pixels=max_pixels or LARGEST,
            device=where,
            settings=_settings(like, sampler, ways, scores) | ({} if backend == "torch" else {"backend": backend}),
            overwrite=overwrite,
            sizes=sizes,
            on_image=None if trajectory == "none" else _drawer(usual, sizes, trajectory, where),
            engine=work,
            progress=bars,
        )
    _show(report, usual.size)
    if report.failed:
        raise typer.Exit(1)


def _show(report: Report, size: int | None) -> None:
    say(f"{len(report.done)} purified, {len(report.skipped)} already there, {len(report.failed)} failed.")
    if (how := report.fitted(size)) is not None:
        say(how)
    for kind, lines in (("note", report.notes), ("failed", report.failed)):
        for name, reason in sorted(lines):  # Ray finishes groups in any order
            say(f"{kind:<6}  {visible(f'{name}: {reason}')}")


def _settings(
    like: str | None, name: str, ways: Mapping[str, Sampler], scores: Mapping[str, ScoreModel]
) -> dict[str, Any]:
    """What decides the result besides the options of files: the weights and the sampler with all its values."""
    from dataclasses import asdict

    from diffpure.models.identity import identify

    values: list[dict[str, Any]] = [asdict(way) for way in ways.values()]  # type: ignore[call-overload]
    same = {key: value for key, value in values[0].items() if all(each[key] == value for each in values)}
    others = [key for key in values[0] if key not in same]
    differing = {key: {model: each[key] for model, each in zip(ways, values, strict=True)} for key in others}
    model = next(iter(ways)) if len(ways) == 1 else f"{SMALL} at 32x32, {PHOTOS} at other sizes"
    weights = " ".join(map(identify, scores.values()))
    return {"model": model, "like": like, "weights": weights, "sampler": name, **same, **differing}


def make_sampler(name: str, t_star: float | None, steps: int | None, usual: float | None = None) -> Sampler:
    """A sampler by name; an argument that it does not take is refused.   usual: t* where none is given."""
    from diffpure.diffusion.samplers import SAMPLERS

    if name not in SAMPLERS:
        raise unknown("sampler", name, SAMPLERS)
    given = {key: value for key, value in {"t_star": t_star, "steps": steps}.items() if value is not None}
    taken = inspect.signature(SAMPLERS[name]).parameters
    for key, value in given.items():
        if key not in taken:
            raise InputError(f"The sampler {name!r} takes no --{key.replace('_', '-')}, got {value}; leave it out.")
    if usual is not None and "t_star" in taken:
        given.setdefault("t_star", usual)
    return SAMPLERS[name](**given)


def _drawer(
    usual: Purifier, sizes: Mapping[tuple[int, int], Purifier], kind: str, device: str
) -> Callable[[Path, Any, Any], None]:
    """What draws the way back of an image beside its file: "a.png" has its strip in "a.png.trajectory.png"."""
    from diffpure.report.strips import save_gif, save_strip

    def draw(file: Path, pixels: Any, seeds: Any) -> None:
        purifier = sizes.get(tuple(pixels.shape[-2:]), usual)
        times = purifier.moments(6)
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

"""`diffpure purify`: images in, purified images out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from diffpure.cli.base import Bars, Threads, app, console, use_threads
from diffpure.errors import InputError, unknown

if TYPE_CHECKING:
    from diffpure.diffusion.samplers import Sampler
    from diffpure.files import Item
    from diffpure.purifiers.diffusion import Purifier

Trajectory = Literal["none", "strip", "gif"]


@app.command(epilog="Example: diffpure purify photos -o clean --fit tiles --seed 1")
def purify(
    inputs: Annotated[list[str], typer.Argument(help="Images, folders, globs, npz arrays or tar archives.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the purified images; names and formats are kept.")
    ],
    t_star: Annotated[float, typer.Option(help="How far to diffuse, in (0, 1].")] = 0.1,
    sampler: Annotated[str, typer.Option(help="sde, few-step, ode, ld, ancestral, ddim or one-shot.")] = "few-step",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the sampler; its own default if not given.")
    ] = None,
    model: Annotated[str, typer.Option(help="Score model: a name, a file, a folder.")] = "cifar10-small",
    like: Annotated[str | None, typer.Option(help="The official checkpoint that a file is read as.")] = None,
    fit: Annotated[
        Literal["resize", "tiles"], typer.Option(help="Other sizes: the whole resized, or tiles.")
    ] = "resize",
    seed: Annotated[int | None, typer.Option(help="Same seed, same result; fresh entropy without.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images purified together.")] = 16,
    trajectory: Annotated[Trajectory, typer.Option(help="Also draw the way back of each image.")] = "none",
    threads: Threads = None,
) -> None:
    """Purify images of any size; damaged files are reported at the end, and a second run continues the first."""
    use_threads(threads)
    from diffpure.files import purify_files
    from diffpure.purifiers.diffusion import Purifier
    from diffpure.scores.load import load_score

    purifier = Purifier(load_score(model, like=like), make_sampler(sampler, t_star, steps))
    draw = None if trajectory == "none" else _drawer(purifier, out, trajectory, t_star)
    with Bars() as bars:
        report = purify_files(purifier, inputs, out, fit=fit, seed=seed, batch=batch, on_image=draw, progress=bars)
    console.print(f"{len(report.done)} purified, {len(report.skipped)} already there, {len(report.failed)} failed.")
    for name, reason in report.failed:
        console.print(f"[red]failed[/red]  {escape(f'{name}: {reason}')}", soft_wrap=True)
    if report.failed:
        raise typer.Exit(1)


def make_sampler(name: str, t_star: float, steps: int | None) -> Sampler:
    """A sampler by name, with the arguments that it takes."""
    from diffpure.diffusion.samplers import SAMPLERS

    if name not in SAMPLERS:
        raise unknown("sampler", name, SAMPLERS)
    given: dict[str, Any] = {"t_star": t_star} if steps is None else {"t_star": t_star, "steps": steps}
    taken = inspect.signature(SAMPLERS[name]).parameters
    if steps is not None and "steps" not in taken:
        raise InputError(f"The sampler {name!r} has no steps to choose.")
    return SAMPLERS[name](**{key: value for key, value in given.items() if key in taken})


def _drawer(purifier: Purifier, out: Path, kind: str, t_star: float) -> Callable[[Item, Any, Any], None]:
    from diffpure.report.strips import save_gif, save_strip

    def draw(item: Item, pixels: Any, seeds: Any) -> None:
        # Langevin dynamics walk from time 0 to 1, all others from t* to 0.
        back = hasattr(purifier.sampler, "t_star")
        times = [t_star * k / 5 for k in range(5, -1, -1)] if back else [k / 5 for k in range(6)]
        states = [pixels[0].numpy(), *purifier.trajectory(pixels, times, seeds)[:, 0].numpy()]
        target = (out / item.name).with_suffix(f".trajectory.{'png' if kind == 'strip' else 'gif'}")
        if kind == "gif":
            save_gif(target, states)
        else:
            names = ["input", *(f"t = {t:.3g}" for t in times)]
            save_strip(target, {name: state[None] for name, state in zip(names, states, strict=True)}, across=True)

    return draw

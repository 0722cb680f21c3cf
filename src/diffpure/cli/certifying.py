"""`diffpure certify`: certificates of the model of a spec, or of the embedded models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diffpure.cli.base import AsJson, Bars, Device, Quiet, Threads, app, say, use_threads
from diffpure.cli.evaluation import AllowCode, Runs, make_loader, read_spec, stoppable
from diffpure.cli.output import print_json

Sigma = Annotated[
    float | None,
    typer.Option(help="Smoothing noise on images in [0, 1]; 0.25, or that of the spec's own t*.", show_default=False),
]


@app.command(epilog="Example: diffpure certify --sigma 0.25 --images 2 --n 100")
def certify(
    spec: Annotated[
        str | None, typer.Argument(help="A spec whose model and images to take; the embedded CIFAR-10 ones without.")
    ] = None,
    sigma: Sigma = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Draws per image that count the class.")] = 1000,
    n0: Annotated[int, typer.Option("--n0", min=1, help="Draws before them, which choose it.")] = 100,
    alpha: Annotated[float, typer.Option(help="Probability that a certificate is wrong.")] = 0.001,
    votes: Annotated[int, typer.Option(min=1, help="Reverse chains per draw; their majority decides.")] = 1,
    sampler: Annotated[
        str | None, typer.Option(help="one-shot, few-step, sde or ode; one-shot, or the spec's own.")
    ] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Only so many images; 200, or the spec's own.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    per_call: Annotated[int, typer.Option(min=1, help="Images in one call of the model.")] = 100,
    out: Runs = Path("runs"),
    device: Device = "auto",
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    threads: Threads = None,
) -> None:
    """Certify ℓ2 radii within which no attack changes the class (randomised smoothing).

    The purifier's forward diffusion is the smoothing noise. A killed run goes on when called again.
    """
    use_threads(threads)
    from diffpure.certificates.certify import Smoothing, run
    from diffpure.experiments.certify import EMBEDDED, certificate_spec
    from diffpure.experiments.load import run_folder

    if spec is None:
        wanted, base, sigma, images = EMBEDDED, None, 0.25 if sigma is None else sigma, images or 200
    else:
        wanted, base = read_spec(spec)
    smoothing = Smoothing(sigma=sigma, n0=n0, n=n, alpha=alpha, votes=votes, seed=seed, per_call=per_call)
    named, work = certificate_spec(wanted, smoothing, sampler, images, make_loader(device, allow_code, base))
    folder = run_folder(named, out)
    with stoppable(folder), Bars(quiet) as bars:
        result = run(work, folder, partial(bars, "draws"))
    if as_json:
        print_json({"folder": folder, **result.summary()})
        return
    say(result)
    say(f"Run: {folder}   Page: diffpure report {folder}")

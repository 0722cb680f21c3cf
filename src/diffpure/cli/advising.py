"""`diffpure audit` and `suggest-t`: is the gradient right, and which t* is good, for the model of a spec."""

from __future__ import annotations

import typer

from diffpure.cli.base import AsJson, Device, Threads, app, use_threads
from diffpure.cli.evaluation import AllowCode, Images, Spec, make_loader, read_spec
from diffpure.cli.output import show
from diffpure.errors import InputError


@app.command(epilog="Example: diffpure audit cifar10-small-linf --images 2")
def audit(
    spec: Spec,
    images: Images = 2,
    device: Device = "auto",
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Audit the gradient of a spec's model against backprop and finite differences."""
    use_threads(threads)
    from diffpure.audit import audit_gradient

    wanted, base = read_spec(spec)
    loader = make_loader(device, allow_code, base)
    x = loader.data(wanted).images[:images].to(loader.device)
    found = audit_gradient(loader.model(wanted.model), x, seeds=range(len(x)))
    show(found, as_json)
    if not found.passed:
        raise typer.Exit(1)


@app.command("suggest-t", epilog="Example: diffpure suggest-t cifar10-small-linf --images 16")
def suggest_t(
    spec: Spec,
    images: Images = 64,
    device: Device = "auto",
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Advise on t*: theory's bounds, and clean and attacked accuracy with intervals."""
    use_threads(threads)
    from dataclasses import replace

    from diffpure.advice import suggest_t_star
    from diffpure.diffusion.samplers import sampler_of

    wanted, base = read_spec(spec)
    sampler = sampler_of(wanted.model.sampler)
    if wanted.model.score is None or not hasattr(sampler, "t_star"):
        raise InputError("Advice on t* needs a spec with a score model and a sampler that diffuses to t*.")
    loader = make_loader(device, allow_code, base)
    model, data = loader.model(wanted.model), loader.data(wanted)
    x, y = data.images[:images].to(loader.device), data.labels[:images].to(loader.device)
    advice = suggest_t_star(
        model.purifier.score,  # type: ignore[union-attr, arg-type]
        x,
        model.classifier,  # type: ignore[arg-type]
        y,
        sampler=lambda t: replace(sampler, t_star=t),  # type: ignore[type-var]
        threat=wanted.threat,
        seeds=range(len(x)),
    )
    show(advice, as_json)

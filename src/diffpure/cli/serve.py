"""`diffpure serve`: the defence as an HTTP service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diffpure.cli.base import Device, Threads, app, errors, say, use_device, use_threads
from diffpure.cli.evaluation import read_spec
from diffpure.cli.images import Fit
from diffpure.errors import InputError

if TYPE_CHECKING:
    from diffpure.serve.load import Plan
    from diffpure.serve.service import Handler

TOKEN = "DIFFPURE_TOKEN"
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
MODELS = {"score": "cifar10-small", "classifier": "cifar10-resnet", "sampler": "few-step"}


@app.command(epilog="Example: diffpure serve --sampler one-shot --draws 16")
def serve(
    spec: Annotated[str | None, typer.Option(help="Serve the model of this spec.")] = None,
    score: Annotated[str | None, typer.Option(help="Score model; default cifar10-small.")] = None,
    classifier: Annotated[str | None, typer.Option(help="Of /classify; default cifar10-resnet.")] = None,
    sampler: Annotated[str | None, typer.Option(help="few-step (default), one-shot, ddim, sde, …")] = None,
    t_star: Annotated[float | None, typer.Option(help="How far to diffuse, in (0, 1]; default 0.1.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the sampler.")] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Purifications per classified image; default 8, or the spec's.")
    ] = None,
    fit: Annotated[
        Fit, typer.Option(help="Other sizes; auto: tiles above twice the size.", show_default=False)
    ] = "auto",
    size: Annotated[int | None, typer.Option(min=1, help="Side of the images that are classified.")] = None,
    backend: Annotated[
        Literal["torch", "onnx", "openvino"], typer.Option(help="Computes the score.", show_default=False)
    ] = "torch",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    token_file: Annotated[Path | None, typer.Option(help=f"The token of clients; or {TOKEN}.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images purified together at most.")] = 32,
    wait: Annotated[float, typer.Option(min=0, help="Milliseconds to wait for others.")] = 5.0,
    queue: Annotated[int, typer.Option(min=1, help="Images at once; beyond it 503.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds; beyond it 504.")] = 30.0,
    max_mib: Annotated[int, typer.Option(min=1, help="MiB per request; beyond it 413.")] = 16,
    max_pixels: Annotated[int, typer.Option(min=1, help="Per image; beyond it 413.")] = 4_000_000,
    max_tiles: Annotated[int, typer.Option(min=1, help="Per image; beyond it 413.")] = 256,
    engine: Annotated[Literal["local", "ray"], typer.Option(help="Here, or Ray replicas.")] = "local",
    replicas: Annotated[int, typer.Option(min=1, help="Of the ray engine.")] = 2,
    address: Annotated[str | None, typer.Option(help="A Ray cluster; without one, Ray starts here.")] = None,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs per replica.")] = 0.0,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Load models that run code of their own.")] = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Purify and classify images over HTTP, in batches across requests and within limits."""
    use_threads(threads)
    token = read_token(token_file)
    server, make_app = _import()
    from diffpure.serve.limits import MIB, Limits

    size_limits: dict[str, int] = {
        "bytes": max_mib * MIB,
        "held": max(128, 8 * max_mib) * MIB,
        "pixels": max_pixels,
        "tiles": max_tiles,
    }
    limits = Limits(batch=batch, wait=wait / 1000, queue=queue, seconds=timeout, **size_limits)
    named = {"score": score, "classifier": classifier, "sampler": sampler, "t_star": t_star, "steps": steps}
    on_cpu = engine == "ray" or (backend != "torch" and device == "auto")
    where = "cpu" if on_cpu else use_device(device)
    plan = _plan(
        spec,
        named,
        {
            "draws": draws,
            "fit": fit,
            "size": size,
            "backend": backend,
            "limits": limits,
            "device": where,
            "allow_code": allow_code,
        },
    )
    listening = server.bind(host, port)  # first: a port that is taken is told before a model is loaded
    handler = _handler(plan, engine, replicas, address, gpus)
    if token is None and host not in LOOPBACK:
        say(f"Warning: whoever reaches {host} may use this service; a token in {TOKEN} keeps others out.", errors)
    name = f"[{host}]" if ":" in host else host
    say(f"Listening on http://{name}:{listening.getsockname()[1]}; Ctrl-C or SIGTERM answers what is there and ends.")
    try:
        server.listen(make_app(handler, token), listening, limits)
    finally:
        say(f"Answered {handler.metrics.answered} of {handler.metrics.accepted} requests.")


def read_token(file: Path | None) -> str | None:
    """The token in a file or in the environment: never an argument, which every user of the machine can read."""
    if file is None:
        token = os.environ.get(TOKEN)
        if token is None:
            return None
    else:
        try:
            token = file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"The token cannot be read from {file}.") from error
    token = token.strip()
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError("A token is 16 or more ASCII characters without spaces; `openssl rand -hex 32` makes one.")
    return token


def _import() -> tuple[Any, Any]:
    """The server and the application, or one sentence on how to install what they need."""
    try:
        from diffpure.serve import server
        from diffpure.serve.app import make_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "diffpure":
            raise
        raise InputError("The service needs FastAPI; install it with `pip install 'diffpure[serve]'`.") from error
    return server, make_app


def _plan(spec: str | None, named: dict[str, Any], options: dict[str, Any]) -> Plan:
    """What is served: the model of a spec, or the one that options name."""
    from diffpure.data.sources import DataSpec
    from diffpure.experiments.spec import ModelSpec
    from diffpure.models.cards import cards
    from diffpure.serve.load import Plan

    given = {key: value for key, value in named.items() if value is not None}
    if spec is not None:
        if given:
            raise InputError(f"A spec names its model itself; leave out --{next(iter(given)).replace('_', '-')}.")
        read, base = read_spec(spec)
        return Plan(model=read.model, data=read.data, base=base and base.resolve(), **options)
    values: dict[str, Any] = {**MODELS, **given}
    way: dict[str, Any] = {
        "kind": values["sampler"],
        **{key: values[key] for key in ("t_star", "steps") if key in values},
    }
    known = cards("classifier").get(values["classifier"])
    data = DataSpec() if known is not None and known.embedded else None  # those are all of CIFAR-10
    model = ModelSpec(score=values["score"], classifier=values["classifier"], sampler=way)
    return Plan(model=model, data=data, **options)


def _handler(plan: Plan, engine: str, replicas: int, address: str | None, gpus: float) -> Handler:
    if engine == "local":
        import torch

        from diffpure.serve.apart import Apart

        return plan.service(Apart(plan, torch.get_num_threads()))
    from diffpure.serve.ray import connect

    return connect(plan, replicas=replicas, address=address, gpus=gpus)

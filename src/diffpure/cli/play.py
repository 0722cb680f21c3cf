"""`diffpure play`: the playground in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from diffpure.cli.base import Device, Threads, app, say, use_threads
from diffpure.cli.evaluation import AllowCode, make_loader, read_spec
from diffpure.errors import InputError


@app.command(epilog="Example: diffpure play --port 7861")
def play(
    host: Annotated[
        str, typer.Option(help="Address to listen on; the usual one is for this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    spec: Annotated[
        str | None, typer.Option(help="A TOML file: its model is the defence, its images are those to choose from.")
    ] = None,
    device: Device = "auto",
    allow_code: AllowCode = False,
    threads: Threads = None,
) -> None:
    """Attack and purify one image at a time, with its probabilities, in a browser."""
    use_threads(threads)
    try:
        from diffpure.play.page import start
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise InputError("The playground needs the package gradio: pip install 'diffpure[play]'.") from error
    from diffpure.play.session import Bench

    given, base = (None, None) if spec is None else read_spec(spec)
    page, address = start(Bench(given, make_loader(device, allow_code, base)), host, port)
    say(f"Playground: {address} (Ctrl-C ends it)")
    page.block_thread()

"""What the tests of the service share: services with known answers, and a client that needs no socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import torch
from torch import Tensor

import diffpure as dp
from diffpure.serve.app import make_app
from diffpure.serve.limits import Limits
from diffpure.serve.model import Model
from diffpure.serve.service import Handler, Service
from pictures import identity

PNG = {"Content-Type": "image/png"}


def means(images: Tensor) -> Tensor:
    """Logits (B, 3): the means of the three channels."""
    return images.mean((2, 3))


def service(
    purifier: Any = None, classifier: Any = means, *, limits: dict[str, Any] | None = None, **more: Any
) -> Service:
    """A service whose purifier is the identity on 16×16 pixels, unless another is given."""
    size = more.pop("size", None)
    bounds = Limits(**{"decoders": 1, **(limits or {})})
    model = Model(dp.Defense(identity() if purifier is None else purifier, classifier), batch=bounds.batch, **more)
    return Service(model, bounds, size=size)


@contextlib.asynccontextmanager
async def client(handler: Handler, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application of a handler, which runs in the same loop."""
    app = make_app(handler, token)
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as each,
    ):
        yield each


def asked(handler: Handler, ask: Callable[[httpx.AsyncClient], Awaitable[Any]], token: str | None = None) -> Any:
    """What a coroutine finds with a client."""

    async def run() -> Any:
        async with client(handler, token) as each:
            return await ask(each)

    return asyncio.run(run())


def posted(handler: Handler, path: str, data: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    """The answer to one request."""
    return asked(handler, lambda each: each.post(path, content=data, headers=headers or PNG))


class Slow(dp.EpsilonScore):
    """A score that counts its calls, each of which waits until `gate` is open, or for a moment."""

    def __init__(self, moment: float = 0.02) -> None:
        super().__init__(dp.VPSDE(), size=16, channels=3)
        self.calls: list[int] = []
        self.moment = moment

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        import time

        self.calls.append(len(x))
        time.sleep(self.moment)
        return torch.zeros_like(x)

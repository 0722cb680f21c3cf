"""The service as a FastAPI application.

    POST /purify            an image file → the purified file, in the same format
    POST /classify          an image file → averaged logits, probabilities and their spread
    POST /purify/batch      {"images": [base64, …]} → {"results": [{"image": base64, "type": …} or {"error": …}, …]}
    POST /classify/batch    the same, with classifications
    GET  /healthz  /metrics  /openapi.json

A body is read with limits on its bytes and its time; whoever hangs up takes their work back. Whatever is refused is
answered {"error": "one sentence"}.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from typing import Any, Final, final

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from diffpure import __version__
from diffpure.serve import schema
from diffpure.serve.limits import GONE, Refusal, full
from diffpure.serve.metrics import TYPE, Metrics
from diffpure.serve.model import Classification
from diffpure.serve.service import File, Handler

log: Final = logging.getLogger("diffpure.serve")
_DRAIN: Final = 4  # bodies of up to so many times the limit are read to their end, so that their sender hears why


def make_app(handler: Handler, token: str | None = None) -> FastAPI:
    """The application of a handler; with a token every address but /healthz and /openapi.json asks for it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await handler.start()
        yield
        await handler.close()

    app = FastAPI(title="diffpure", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    own, limits = _Endpoints(handler, token), handler.limits
    # For the schema alone: `_check` compares.
    closed: dict[str, Any] = {"dependencies": [Depends(HTTPBearer(auto_error=False))]} if token else {}
    posts: dict[str, tuple[Any, dict[str, Any]]] = {
        "/purify": (own.purify, schema.purify()),
        "/classify": (own.classify, schema.classify()),
        "/purify/batch": (own.purify_batch, schema.purify_batch(limits)),
        "/classify/batch": (own.classify_batch, schema.classify_batch(limits)),
    }
    for path, (endpoint, described) in posts.items():
        app.add_api_route(path, endpoint, methods=["POST"], response_class=Response, **described, **closed)
    health = schema.text(schema.JSON, "The service answers.", 503)
    numbers = schema.text(TYPE, "Counters for Prometheus.", *([401] if token else []))
    app.add_api_route("/healthz", own.healthz, response_class=Response, **health)
    app.add_api_route("/metrics", own.metrics, response_class=Response, **numbers, **closed)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_middleware(_Counted, metrics=handler.metrics, paths={*posts, "/healthz", "/metrics", "/openapi.json"})
    return app


@final
class _Endpoints:
    """The addresses; each is `_answer` with the work that it does."""

    def __init__(self, handler: Handler, token: str | None) -> None:
        self._handler, self._token = handler, token
        self._held = 0  # bytes of bodies and of parts of answers

    async def healthz(self) -> Response:
        """Whether the service answers requests."""
        if not self._handler.ready:
            return _refused(Refusal(503, "The service does not compute.", retry_after=10))
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        try:
            self._check(request)
        except Refusal as refusal:
            return _refused(refusal)
        return Response(self._handler.metrics.text(), media_type=TYPE)

    async def purify(self, request: Request) -> Response:
        """Purify one image file; the answer has its format."""

        async def work(data: bytes) -> Response:
            file = await self._handler.purify(data)
            return Response(file.data, media_type=file.type)

        return await self._answer(request, schema.IMAGES, work)

    async def classify(self, request: Request) -> Response:
        """Classify one image file behind the purifier."""

        async def work(data: bytes) -> Response:
            return JSONResponse((await self._handler.classify(data)).plain())

        return await self._answer(request, schema.IMAGES, work)

    async def purify_batch(self, request: Request) -> Response:
        """Purify many image files; an error of one leaves the others alone."""
        return await self._answer(request, [schema.JSON], lambda body: self._batch(body, self._handler.purify))

    async def classify_batch(self, request: Request) -> Response:
        """Classify many image files; an error of one leaves the others alone."""
        return await self._answer(request, [schema.JSON], lambda body: self._batch(body, self._handler.classify))

    async def _answer(
        self, request: Request, types: Collection[str], work: Callable[[bytes], Coroutine[Any, Any, Response]]
    ) -> Response:
        """The answer to a request whose body is of one of the types; never an exception."""
        try:
            self._check(request)
            given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if given not in types:
                raise Refusal(415, f"The content type is one of {', '.join(sorted(types))}.")
            async with self._body(request) as body:
                return await _unless_gone(request, work(body))
        except Refusal as refusal:
            return _refused(refusal)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception as error:  # a mistake of ours; its traceback would show paths
            log.error("A request failed (%s).", type(error).__name__)
            return _refused(Refusal(503, "The service could not answer this request.", retry_after=10))

    def _check(self, request: Request) -> None:
        """Refuse a request without the token; compared in constant time."""
        if self._token is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if not hmac.compare_digest(given.strip().encode(), self._token.encode()) or scheme.lower() != "bearer":
                raise Refusal(401, "This service wants the header `Authorization: Bearer TOKEN`.")

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """The body, which counts among what is held until it is answered."""
        limits, body = self._handler.limits, bytearray()
        try:
            try:
                async with asyncio.timeout(limits.read):
                    size = await self._read(request, body)
            except TimeoutError:
                raise Refusal(408, f"The body did not arrive within {limits.read:g} seconds.") from None
            if size > limits.bytes:
                raise Refusal(413, f"The body is too long; at most {limits.bytes:,} bytes are accepted.")
            if not body:
                raise Refusal(400, "The body is empty.")
            yield bytes(body)
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> int:
        """Read as much of the body as is accepted; its size, or one beyond the limit."""
        limit = self._handler.limits.bytes
        claimed = request.headers.get("content-length", "")
        if claimed.isdecimal() and int(claimed[:18]) > _DRAIN * limit:
            return limit + 1
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > _DRAIN * limit:
                break
            if size <= limit:
                self._hold(len(chunk))
                body += chunk
        return size

    def _hold(self, count: int) -> None:
        if self._held + count > self._handler.limits.held:
            raise full()
        self._held += count

    async def _batch(self, body: bytes, work: Callable[[bytes], Awaitable[File | Classification]]) -> Response:
        """A result or an error for each image of a batch."""
        images = await asyncio.to_thread(_images, body, self._handler.limits.images)
        held = 0

        async def one(text: str) -> dict[str, Any]:
            nonlocal held
            try:
                result = await work(_decoded(text))
                if isinstance(result, Classification):
                    return result.plain()
                self._hold(len(result.data))
                held += len(result.data)
                return {"image": base64.b64encode(result.data).decode(), "type": result.type}
            except Refusal as refusal:
                return {"error": refusal.sentence, "status": refusal.status}

        try:
            return JSONResponse({"results": await asyncio.gather(*map(one, images))})
        finally:
            self._held -= held


@final
class _Counted:
    """An application whose requests are counted by address and status, and how long they took."""

    def __init__(self, app: Any, metrics: Metrics, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._metrics.accepted += 1
        path, began = scope["path"] if scope["path"] in self._paths else "other", time.monotonic()
        status: int | None = None

        async def noted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._metrics.answered += status is not None
            self._metrics.requests.labels(path, status or GONE).inc()
            self._metrics.seconds.labels(path).observe(time.monotonic() - began)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer, unless whoever asked hangs up before it is there: then its work is taken back."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _not_found(request: Request, error: Exception) -> Response:
    """404 and 405 in the words of all refusals."""
    assert isinstance(error, HTTPException)
    sentence = "This address does not take this method." if error.status_code == 405 else "There is no such address."
    told = f"{sentence[:-1]}; /openapi.json describes them all."
    return JSONResponse({"error": told}, error.status_code, headers=dict(error.headers or {}))


def _refused(refusal: Refusal) -> Response:
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refusal.status in (408, 413):  # what is left of the body is not waited for
        headers["Connection"] = "close"
    return JSONResponse({"error": refusal.sentence}, refusal.status, headers=headers)


def _images(body: bytes, most: int) -> list[str]:
    """The strings of a batch."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, 'The body is no JSON; {"images": ["base64", …]} is accepted.') from None
    images = content.get("images") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(images, list) or not images or not all(isinstance(image, str) for image in images):
        raise Refusal(422, 'The body is {"images": ["base64", …]} with one image or more, and nothing else.')
    if len(images) > most:
        raise Refusal(422, f"A batch has at most {most} images, got {len(images)}.")
    return images


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise Refusal(422, "The image is not in base64.") from None

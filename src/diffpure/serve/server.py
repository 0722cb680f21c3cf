"""The process that listens: uvicorn, which answers what it has accepted before it ends on SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn
from fastapi import FastAPI

from diffpure.errors import InputError
from diffpure.serve.limits import Limits

Idle = WeakKeyDictionary[Any, tuple[Any, float]]


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"There is no listening on {host}:{port} ({reason}); give another --host or --port."
        ) from error


def listen(app: FastAPI, at: socket.socket, limits: Limits) -> None:
    """Answer requests until SIGTERM or Ctrl-C; everything that was accepted is answered first.

    Requests are not logged: the metrics count them.
    """
    config = uvicorn.Config(
        app,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        log_level="error",
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(limits.read + limits.seconds) + 5,
        timeout_notify=1,
    )
    server = uvicorn.Server(config)
    idle: Idle = WeakKeyDictionary()

    async def tidy() -> None:
        cut_idle(server.server_state.connections, idle, time.monotonic(), limits.seconds)

    config.callback_notify = tidy
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # raised by uvicorn once everything is answered
    server.run(sockets=[at])


def cut_idle(connections: Iterable[Any], idle: Idle, now: float, longest: float) -> None:
    """Cut connections that have had no request under way for too long: headers, or readers, that never end.

    idle: since when, and after which request, a connection of uvicorn has had nothing to do.
    """
    for connection in list(connections):
        cycle = connection.cycle
        if cycle is not None and not cycle.response_complete:
            idle.pop(connection, None)
        elif idle.setdefault(connection, (cycle, now))[0] is not cycle:
            idle[connection] = (cycle, now)
        elif now - idle[connection][1] > longest:
            connection.transport.abort()

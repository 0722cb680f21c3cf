"""The clients of `benchmarks/service.py`, which run in a process of their own: good ones, and hostile ones."""

from __future__ import annotations

import asyncio
import collections
import io
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

PNG = "image/png"


def head(path: str, length: int, kind: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n".encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status of one answer, which is read to its end, and whether the connection stays open."""
    status = int((await reader.readline()).split()[1])
    length, keep = 0, True
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
        keep = keep and (name.lower(), value.strip().lower()) != (b"connection", b"close")
    await reader.readexactly(length)
    return status, keep


async def clients(port: int, works: Iterator[Any], concurrency: int, one: Callable[..., Any]) -> list[Any]:
    """What `one` finds for each of the works, so many at once, each on a connection that it keeps."""
    found: list[Any] = []

    async def run() -> None:
        streams: Any = None
        for work in works:
            began = time.perf_counter()
            try:
                if streams is None or streams[1].is_closing():
                    streams = await asyncio.open_connection("127.0.0.1", port)
                status, keep = await one(*streams, work)
            except (OSError, asyncio.IncompleteReadError, IndexError):
                status, keep = 0, False
            found.append((work, status, time.perf_counter() - began))
            if not keep and streams is not None:
                streams[1].close()
                streams = None

    await asyncio.gather(*(run() for _ in range(concurrency)))
    return found


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> tuple[int, bool]:
    writer.write(head("/purify", len(data), PNG) + data)
    return await answer(reader)


def load(port: int, count: int, concurrency: int) -> dict[str, Any]:
    """Images per second and latency of many good requests; run in the second process."""
    files = images(64)
    works = (files[i % len(files)] for i in range(count))
    began = time.perf_counter()
    found = asyncio.run(clients(port, works, concurrency, post))
    seconds = time.perf_counter() - began
    times = sorted(each for _, status, each in found if status == 200)
    codes = collections.Counter(status for _, status, _ in found)
    return {
        "images": count,
        "concurrency": concurrency,
        "statuses": dict(sorted(codes.items())),
        "per_second": len(times) / seconds,
        "p50_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[int(0.99 * (len(times) - 1))],
    }


def images(count: int) -> list[bytes]:
    """The first embedded images as PNG files."""
    from PIL import Image

    import diffpure as dp

    found = []
    for image in dp.samples(count)[0]:
        out = io.BytesIO()
        Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(out, "PNG")
        found.append(out.getvalue())
    return found


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(side: int) -> bytes:
    """A few kilobytes that unpack to side × side grey pixels."""
    rows = zlib.compress(bytes((1 + side) * side), 9)
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


HOSTILE = ("truncated", "text", "header bomb", "pixel bomb", "type", "empty", "claim", "slow", "stuck", "gone", "half",
           "garbage")  # fmt: skip


async def attack(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, work: tuple[str, bytes]
) -> tuple[int, bool]:
    """One request, good or of a hostile kind; status -1 where no answer is expected."""
    kind, data = work
    if kind in ("truncated", "header bomb", "pixel bomb", "good"):
        data = {"truncated": data[: len(data) // 2], "good": data}.get(kind, data)
        return await post(reader, writer, data)
    if kind == "text":
        return await post(reader, writer, b"this is not an image")
    if kind in ("type", "empty"):
        body = data if kind == "type" else b""
        writer.write(head("/purify", len(body), "text/html" if kind == "type" else PNG) + body)
        return await answer(reader)
    if kind == "claim":
        writer.write(head("/purify", 10**12, PNG) + data)
        return (await answer(reader))[0], False
    if kind == "garbage":
        writer.write(os.urandom(200) + b"\r\n\r\n")
        return (await answer(reader))[0], False
    if kind in ("gone", "half"):
        writer.write(head("/purify", len(data), PNG) + (data if kind == "gone" else data[:50]))
        await writer.drain()
        return -1, False
    writer.write(head("/purify", len(data), PNG))
    if kind == "stuck":  # the server's own time for a body
        return (await answer(reader))[0], False
    for i in range(10):
        writer.write(data[i : i + 1])
        await asyncio.sleep(0.1)
    return -1, False


def hostilities(port: int, first: int, count: int) -> dict[str, Any]:
    """Every third request is hostile; `stuck` ones are few, because each waits for the time of a body."""
    files, pixels = images(16), bomb(1900)
    huge = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    huge += chunk(b"IDAT", bytes(20))
    works = []
    for i in range(first, first + count):
        turn = i // 3
        kind = "good" if i % 3 else HOSTILE[turn % len(HOSTILE)]
        if kind in ("stuck", "pixel bomb") and turn // len(HOSTILE) % 8:
            kind = "gone"
        data = {"pixel bomb": pixels, "header bomb": huge}.get(kind, files[i % len(files)])
        works.append((kind, data))
    found = asyncio.run(clients(port, iter(works), 48, attack))
    told: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for (kind, _), status, _ in found:
        told[kind][status] += 1
    return {kind: {str(k): n for k, n in sorted(codes.items())} for kind, codes in sorted(told.items())}

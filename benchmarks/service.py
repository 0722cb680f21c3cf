"""`diffpure serve` measured from a second process, on this machine and over its loopback only; stops by itself.

    python benchmarks/service.py [--images 2000] [--batches 1 4 16 32] [--threads 1]   throughput and latency
    python benchmarks/service.py --hostile [--requests 10000]                          a third of them hostile
    python benchmarks/service.py --fuzz [--examples 100]                               schemathesis over /openapi.json
    python benchmarks/service.py --ray [--images 500]                                  two replicas, one is killed

Throughput is that of 32×32 PNG files through OneShot, as a ratio to calling the purifier itself at its best batch, in a
process of its own with as many threads. Each finished piece is a line of --out (JSON), and is not measured again; the
file is removed by hand for new measurements.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PNG = "image/png"
TOKEN = "0123456789abcdef0123456789abcdef"
Answer = tuple[int, float]  # status, seconds

# ------------------------------------------------------------------------------------------------------ the server


class Server:
    """`diffpure serve` in a process of its own."""

    def __init__(self, *options: object, token: str = "") -> None:
        words = ["serve", "--sampler", "one-shot", "--port", "0", *map(str, options)]
        command = [sys.executable, "-c", "from diffpure.cli import main; main()", *words]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        environment.pop("DIFFPURE_TOKEN", None)
        if token:
            environment["DIFFPURE_TOKEN"] = token
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if not found:
            raise SystemExit(f"The server did not start: {line}")
        self.port, self.url = int(found[1]), found[0]
        for _ in range(1200):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/healthz", timeout=5).read()
                return
            time.sleep(0.1)
        raise SystemExit("The server is not healthy after two minutes.")

    def stop(self) -> str:
        """What it says at its end: how many requests it accepted and answered."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=120)
        return out.strip().splitlines()[-1]

    def memory(self) -> dict[str, float]:
        """MiB resident: of the server, and of all its processes."""
        family = [self.process.pid, *descendants(self.process.pid)]
        sizes = [resident(pid) for pid in family]
        return {"server_mib": round(sizes[0], 1), "all_mib": round(sum(sizes), 1)}


def resident(pid: int) -> float:
    with contextlib.suppress(OSError):
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, more = [], [pid]
    while more:
        below = [child for child, parent in parents.items() if parent == more[0]]
        found, more = found + below, more[1:] + below
    return found


# ------------------------------------------------------------------------------------------------------ the client


def head(path: str, length: int, kind: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n".encode()


async def answer(reader: asyncio.StreamReader) -> int:
    """The status of one answer, which is read to its end."""
    status = int((await reader.readline()).split()[1])
    length = 0
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    await reader.readexactly(length)
    return status


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
    return await answer(reader), True


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


def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


# ---------------------------------------------------------------------------------------------------- measurements


def direct(batch: int, count: int, threads: int) -> float:
    """Images per second of the purifier itself."""
    import torch

    import diffpure as dp

    torch.set_num_threads(threads)
    purifier = dp.Purifier(dp.load_score("cifar10-small"), dp.OneShot())
    x = dp.samples(batch)[0]
    with torch.no_grad():
        purifier(x)
        began = time.perf_counter()
        rounds = max(1, count // batch)
        for _ in range(rounds):
            purifier(x)
    return rounds * batch / (time.perf_counter() - began)


def throughput(options: argparse.Namespace, keep: Callable[..., Any]) -> None:
    setting = f"{options.threads} threads, {options.images} images"
    best = max(
        keep(f"direct, batch {batch}, {setting}", elsewhere, direct, batch, options.images, options.threads)
        for batch in options.batches
    )
    for batch in options.batches:

        def measure(batch: int = batch) -> dict[str, Any]:
            server = Server("--batch", batch, "--threads", options.threads)
            elsewhere(load, server.port, 4 * batch, 2 * batch)  # warm
            found: dict[str, Any] = elsewhere(load, server.port, options.images, min(128, 4 * batch))
            return {**found, **server.memory(), "end": server.stop()}

        found = keep(f"served, batch {batch}, {setting}", measure)
        ratio = found["per_second"] / best
        rate = f"{found['per_second']:.1f} images/s, {ratio:.2f} of {best:.1f} called directly"
        times = f"p50 {found['p50_ms']:.0f} ms, p99 {found['p99_ms']:.0f} ms at {found['concurrency']} clients"
        print(f"batch {batch}: {rate}; {times}", flush=True)


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
        return await answer(reader), True
    if kind == "claim":
        writer.write(head("/purify", 10**12, PNG) + data)
        return await answer(reader), False
    if kind == "garbage":
        writer.write(os.urandom(200) + b"\r\n\r\n")
        return await answer(reader), False
    if kind in ("gone", "half"):
        writer.write(head("/purify", len(data), PNG) + (data if kind == "gone" else data[:50]))
        await writer.drain()
        return -1, False
    writer.write(head("/purify", len(data), PNG))
    if kind == "stuck":  # the server's own time for a body
        return await answer(reader), False
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


def hostile(options: argparse.Namespace, keep: Callable[..., Any]) -> None:
    def measure() -> dict[str, Any]:
        server = Server("--threads", options.threads)
        told: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        memory = [server.memory()]
        part = max(1, options.requests // 20)
        for first in range(0, options.requests, part):
            for kind, codes in elsewhere(hostilities, server.port, first, min(part, options.requests - first)).items():
                told[kind].update(codes)
            memory.append(server.memory())
            print(f"{min(first + part, options.requests):,} requests: {memory[-1]}", flush=True)
        codes = sum(told.values(), collections.Counter())
        return {"statuses": told, "memory": memory, "status_500": codes["500"], "end": server.stop()}

    found = keep(f"hostile, {options.requests} requests", measure)
    sizes = [each["server_mib"] for each in found["memory"][1:]]
    print(json.dumps(found["statuses"], indent=1))
    print(f"500s: {found['status_500']}; {found['end']} Server: {sizes[0]:.0f} MiB after the first twentieth, "
          f"{sizes[-1]:.0f} after the last, at most {max(sizes):.0f}.")  # fmt: skip


def fuzz(options: argparse.Namespace, keep: Callable[..., Any]) -> None:
    # Bytes that the schema allows need not be an image: 422 is an answer to valid data, too.
    config = "[checks]\npositive_data_acceptance.expected-statuses = [200, 422]\n"
    for token in ("", TOKEN):

        def measure(token: str = token) -> dict[str, Any]:
            server = Server("--threads", options.threads, token=token)
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "schemathesis.toml").write_text(config)
                command = [sys.executable, "-m", "schemathesis.cli", "--config-file", f"{folder}/schemathesis.toml"]
                command += ["run", f"{server.url}/openapi.json", "--max-examples", str(options.examples)]
                command += ["--header", f"Authorization: Bearer {token}"] if token else []
                ran = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=3600)
            print(ran.stdout[-6000:], flush=True)
            return {"exit": ran.returncode, "end": server.stop()}

        found = keep(f"fuzz, {options.examples} examples, {'with' if token else 'without'} token", measure)
        print(f"schemathesis {'with' if token else 'without'} a token: exit code {found['exit']}; {found['end']}")


def replicas(options: argparse.Namespace, keep: Callable[..., Any]) -> None:
    def measure() -> dict[str, Any]:
        server = Server("--engine", "ray", "--replicas", 2, "--threads", options.threads, "--timeout", 120)
        elsewhere(load, server.port, 32, 16)  # warm
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            running = pool.apply_async(load, (server.port, options.images, 32))
            time.sleep(2)
            found = [pid for pid in descendants(server.process.pid)
                     if b"ServeReplica" in Path(f"/proc/{pid}/cmdline").read_bytes()]  # fmt: skip
            early = running.ready()
            os.kill(found[0], signal.SIGKILL)
            result: dict[str, Any] = running.get(timeout=600)
        return {**result, "replicas": len(found), "under_load": not early, "end": server.stop()}

    found = keep(f"ray, {options.images} images", measure)
    print(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("hostile", "fuzz", "ray"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/service.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {each["what"]: each["found"] for each in map(json.loads, lines)}

    def keep(what: str, measure: Callable[..., Any], *arguments: Any) -> Any:
        """What was measured before, or is now and is kept."""
        if what not in done:
            done[what] = measure(*arguments)
            with options.out.open("a") as file:
                file.write(json.dumps({"what": what, "found": done[what]}) + "\n")
        return done[what]

    chosen = hostile if options.hostile else fuzz if options.fuzz else replicas if options.ray else throughput
    chosen(options, keep)


if __name__ == "__main__":
    main()

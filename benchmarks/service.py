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
import atexit
import collections
import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service_clients import hostilities, load

TOKEN = "0123456789abcdef0123456789abcdef"

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
        atexit.register(self.process.kill)  # nothing is left running, whatever happens here
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

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far: of the server, and of the processes below it, which compute, decode and encode."""
        return {"server": spent(self.process.pid), "below": sum(map(spent, descendants(self.process.pid)))}


def spent(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


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


def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


# ---------------------------------------------------------------------------------------------------- measurements


def direct(batch: int, count: int, threads: int) -> tuple[float, float]:
    """Images per second of the purifier itself, and its CPU milliseconds per image."""
    import torch

    import diffpure as dp

    torch.set_num_threads(threads)
    purifier = dp.Purifier(dp.load_score("cifar10-small"), dp.OneShot())
    x = dp.samples(batch)[0]
    with torch.no_grad():
        purifier(x)
        began, used = time.perf_counter(), time.process_time()
        rounds = max(1, count // batch)
        for _ in range(rounds):
            purifier(x)
    images = rounds * batch
    return images / (time.perf_counter() - began), 1000 * (time.process_time() - used) / images


def throughput(options: argparse.Namespace, keep: Callable[..., Any]) -> None:
    setting = f"{options.threads} threads, {options.images} images"
    best, cpu = max(
        keep(f"direct, batch {batch}, {setting}", elsewhere, direct, batch, options.images, options.threads)
        for batch in options.batches
    )
    for batch in options.batches:

        def measure(batch: int = batch) -> dict[str, Any]:
            server = Server("--batch", batch, "--threads", options.threads)
            elsewhere(load, server.port, 4 * batch, 2 * batch)  # warm
            before = server.cpu()
            found: dict[str, Any] = elsewhere(load, server.port, options.images, min(128, 4 * batch))
            used = {f"{who}_cpu_ms": 1000 * (server.cpu()[who] - before[who]) / options.images for who in before}
            return {**found, **used, **server.memory(), "end": server.stop()}

        found = keep(f"served, batch {batch}, {setting}", measure)
        ratio = found["per_second"] / best
        rate = f"{found['per_second']:.1f} images/s, {ratio:.2f} of {best:.1f} called directly"
        times = f"p50 {found['p50_ms']:.0f} ms, p99 {found['p99_ms']:.0f} ms at {found['concurrency']} clients"
        files = found["below_cpu_ms"] - cpu  # what the model itself takes is known from the direct call
        cost = f"{found['server_cpu_ms']:.2f} ms of CPU per image for HTTP, about {files:.2f} to decode and encode"
        print(f"batch {batch}: {rate}; {times}; {cost}", flush=True)


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
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

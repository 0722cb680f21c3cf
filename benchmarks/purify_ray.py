"""A folder of images purified here and on a Ray cluster of this machine that loses a worker: same bytes, what speed?

    python benchmarks/purify_ray.py [--files 2000] [--workers 2] [--work FOLDER]

The images are the embedded CIFAR-10 samples, written again and again under other names; purifier: cifar10-small, ten
few-step steps, t* = 0.1, seed 1, one thread in every process. Half-way through the Ray run, one worker kills itself
with SIGKILL. The two folders must agree to the last bit; speeds are files per second, side by side in one call, after
workers have started and loaded the model. A finished part is kept in FOLDER/parts.jsonl and not measured again; an
unfinished one begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import diffpure as dp
from diffpure.evaluation.engine import Engine, Local, Ray
from diffpure.files import purify_files


class Deadly(dp.Purifier):
    """A purifier that kills its process once, when so many files lie in a folder."""

    def kill_at(self, count: int, folder: Path, marker: Path) -> Deadly:
        """Say when; the marker tells that it has happened."""
        self.moment = (count, folder, marker)
        return self

    def forward(self, images: Tensor, seeds: Sequence[int] | None = None) -> Tensor:
        count, folder, marker = self.moment
        if not marker.exists() and folder.is_dir() and len(os.listdir(folder)) >= count:
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images, seeds)


def write_images(folder: Path, count: int) -> None:
    """So many PNG files; what is there is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = [(x.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy() for x in dp.samples(64)[0]]
    for i in range(count):
        if not (file := folder / f"{i:07d}.png").exists():
            Image.fromarray(pixels[i % len(pixels)]).save(file)


def digest(folder: Path) -> str:
    """The SHA-256 of the names and bytes of all files in a folder."""
    found = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        found.update(repr((file.name, hashlib.sha256(file.read_bytes()).hexdigest())).encode())
    return found.hexdigest()


def measure(purifier: dp.Purifier, source: Path, out: Path, engine: Engine) -> dict[str, Any]:
    """Purify a folder from the beginning."""
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    report = purify_files(purifier, [str(source)], out, seed=1, engine=engine)
    seconds = time.perf_counter() - began
    return {"files": len(report.done), "failed": len(report.failed), "seconds": seconds, "sha256": digest(out)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("purify-ray"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    score, sampler = dp.load_score("cifar10-small"), dp.FewStep(t_star=0.1)
    source, warm, log = args.work / f"in-{args.files}", args.work / "in-warm", args.work / "parts.jsonl"
    write_images(source, args.files)
    write_images(warm, 32 * args.workers)
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    parts = {line["part"]: line for line in lines if (line["of"], line["workers"]) == (args.files, args.workers)}
    for part in ("local", "ray"):
        if part in parts:
            continue
        out = args.work / f"{part}-{args.files}"
        purifier, engine, extra = dp.Purifier(score, sampler), Local(), {}
        if part == "ray":
            marker = args.work / "killed"
            marker.unlink(missing_ok=True)
            purifier = Deadly(score, sampler).kill_at(args.files // 2, out, marker)
            engine = Ray(workers=args.workers)
            engine.connect(importlib.import_module("ray"))
        measure(purifier, warm, args.work / "warm", engine)
        found = measure(purifier, source, out, engine)
        if part == "ray":
            extra["killed"] = int(marker.exists())
        parts[part] = {"part": part, "of": args.files, "workers": args.workers, **found, **extra}
        with log.open("a") as file:
            file.write(json.dumps(parts[part]) + "\n")
        print(json.dumps(parts[part]), flush=True)
    local, remote = parts["local"], parts["ray"]
    same = local["sha256"] == remote["sha256"]
    here, there = (part["files"] / part["seconds"] for part in (local, remote))
    print(
        f"{args.files:,} files, {remote['killed']} of {args.workers} workers killed: "
        f"{'the same bytes' if same else 'OTHER BYTES'}; {here:.1f} files per second here, {there:.1f} on Ray, "
        f"a ratio of {there / here:.2f}."
    )
    sys.exit(0 if same and remote["killed"] and local["files"] == remote["files"] == args.files else 1)


if __name__ == "__main__":
    main()

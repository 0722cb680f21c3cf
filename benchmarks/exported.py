"""Time per image and purified accuracy of a score on torch, ONNX Runtime and OpenVINO, float32 and int8.

Times are those of one call of the score (ε̂, no gradient), per image: the variants take turns of five calls, as many
as a purification by DDIM makes, in one process per number of threads; medians over rounds. Then embedded test images
are purified several times each, with the same noise, by float32 torch and by each other variant, and the classifier's
answers are compared pair by pair: accuracy of both, how many images change class, and how many pairs are right on one
side only (McNemar's discordant pairs).

    python benchmarks/exported.py --out exported.jsonl [--rounds 30] [--images 400] [--seeds 3] [--threads 1 2]
    python benchmarks/exported.py --out tiny.jsonl --tiny

One JSON line for each finished piece; the same command goes on where a killed one stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import diffpure as dp
from diffpure.diffusion.score import ScoreModel
from diffpure.exporting.int8 import quantise
from diffpure.exporting.make import backend_score, write
from diffpure.scores.load import load_score

CALLS = 5  # in a turn: a single one would find the weights of the others in the cache
CALIBRATION = 100  # images, of which none is among those that are purified
Variants = dict[str, Callable[[], ScoreModel]]


def variants(folder: Path, tiny: bool) -> Variants:
    """What is compared; int8 is calibrated once on images that the comparison does not use, and kept in the folder."""
    score = load_score("cifar10-small")
    sampler = dp.FewStep(t_star=0.1, steps=2 if tiny else 10)
    file = folder / "int8.xml"
    if not file.exists():
        some = 10 if tiny else CALIBRATION
        images, _ = dp.samples()
        write(quantise(score, sampler, images[-some:], range(some)).network, file)
    return {
        "eager": lambda: score,
        "eager, channels last": lambda: ChannelsLast(score),
        "onnx": lambda: backend_score(score, "onnx"),
        "openvino": lambda: backend_score(score, "openvino"),
        "openvino int8": lambda: load_score(file, allow_code=True),
    }


class ChannelsLast(torch.nn.Module):
    """The score on images that are channels-last in memory already."""

    def __init__(self, score: Any) -> None:
        super().__init__()
        self.score, self.sde, self.size, self.channels = score, score.sde, score.size, score.channels

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = self.score(x.contiguous(memory_format=torch.channels_last), t)
        return out


@torch.no_grad()
def times(folder: Path, batch: int, rounds: int, tiny: bool) -> dict[str, Any]:
    """Milliseconds per image of each variant, and its share of eager's: medians over rounds."""
    made = {name: make() for name, make in variants(folder, tiny).items()}
    x, t = torch.randn(batch, 3, 32, 32), torch.full((batch,), 0.1, dtype=torch.float64)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for k in range(rounds + 2):  # two to warm up
        for name, score in made.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                score(x, t)
            if k >= 2:
                seconds[name].append((time.perf_counter() - start) / CALLS)
    ratios = {
        name: statistics.median(a / b for a, b in zip(taken, seconds["eager"], strict=True))
        for name, taken in seconds.items()
    }
    return {
        name: {"ms_per_image": 1000 * statistics.median(taken) / batch, "of_eager": ratios[name]}
        for name, taken in seconds.items()
    }


@torch.no_grad()
def predictions(name: str, folder: Path, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What the classifier says of the purified images, by one variant with the noise of one seed."""
    score = variants(folder, args.tiny)[name]()
    images, labels = dp.samples()
    images, labels = images[: args.images], labels[: args.images]
    model = dp.Defense(
        dp.Purifier(score, dp.FewStep(t_star=0.1, steps=2 if args.tiny else 10)), dp.load_classifier("cifar10-resnet")
    )
    said: list[int] = []
    start = time.perf_counter()
    for first in range(0, len(images), 20):
        rows = range(first, min(first + 20, len(images)))
        said += model(images[first : first + 20], [seed * len(images) + k for k in rows]).argmax(1).tolist()
    return {"predictions": said, "labels": labels.tolist(), "seconds": time.perf_counter() - start}


def piece(args: argparse.Namespace, key: dict[str, Any]) -> dict[str, Any]:
    """Compute one piece in a process of its own, so that its threads are those it was started with."""
    threads = str(key.get("threads", max(args.threads)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, __file__, *sys.argv[1:], "--piece", json.dumps(key)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tiny", action="store_true", help="two rounds, four images, one seed, two steps")
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.images, args.seeds, args.threads = 2, 4, 1, [1]
    args.images = min(args.images, len(dp.samples()[0]) - CALIBRATION)
    folder = args.out.with_suffix(".files")
    folder.mkdir(parents=True, exist_ok=True)
    if args.piece:
        key = json.loads(args.piece)
        torch.set_num_threads(key.get("threads", max(args.threads)))
        found = (
            times(folder, key["batch"], args.rounds, args.tiny)
            if key["what"] == "times"
            else predictions(key["variant"], folder, args, key["seed"])
        )
        print(json.dumps(found))
        return
    keys: list[dict[str, Any]] = [
        {"what": "times", "threads": threads, "batch": batch} for threads in args.threads for batch in (1, 16)
    ]
    keys += [
        {"what": "predictions", "variant": name, "seed": seed}
        for seed in range(args.seeds)
        for name in ("eager", "onnx", "openvino", "openvino int8")
    ]
    done = {}
    if args.out.exists():
        done = {json.dumps(line.pop("key")): line for line in map(json.loads, args.out.read_text().splitlines())}
    with args.out.open("a") as file:
        for key in keys:
            if (name := json.dumps(key)) not in done:
                done[name] = piece(args, key)
                file.write(json.dumps({"key": key, **done[name]}) + "\n")
                file.flush()
            if key["what"] == "times":
                print(name, json.dumps(done[name], indent=1))
    summary(args, done)


def summary(args: argparse.Namespace, done: dict[str, Any]) -> None:
    """Accuracy and agreement, each variant against eager, pair by pair over images and seeds."""

    def rows(variant: str) -> list[tuple[int, int]]:
        found = (
            done[json.dumps({"what": "predictions", "variant": variant, "seed": seed})] for seed in range(args.seeds)
        )
        return [pair for each in found for pair in zip(each["predictions"], each["labels"], strict=True)]

    eager = rows("eager")
    for variant in ("eager", "onnx", "openvino", "openvino int8"):
        other = rows(variant)
        correct = sum(said == label for said, label in other)
        same = sum(a == b for (a, _), (b, _) in zip(eager, other, strict=True))
        lost = sum(a == y != b for (a, y), (b, _) in zip(eager, other, strict=True))
        won = sum(b == y != a for (a, y), (b, _) in zip(eager, other, strict=True))
        print(
            f"{variant:15} correct {correct} of {len(other)}, same class as eager {same}, "
            f"right only by eager {lost}, right only by it {won}"
        )


if __name__ == "__main__":
    main()

"""What it saves an attack that the C library keeps freed memory: CPU seconds with and without, in turn.

    python benchmarks/freed_memory.py [--images 32] [--gradients 6] [--rounds 5]

Each measurement is a process of its own with one thread, since what was kept once stays kept: so many gradients through
three ancestral steps and a classifier, after one to warm up, by each exact gradient mode. Prints the medians, their
ratio, and the peak memory of both. On a C library that is not glibc there is nothing to measure.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch.nn import functional as F

import diffpure as dp
from diffpure.cli.base import keep_memory
from diffpure.diffusion.gradients import GRADIENT_MODES

MODES = ("exact", "backprop")


def child(mode: str, keep: bool, images: int, gradients: int) -> None:
    """One measurement: CPU seconds and peak memory in MiB, as JSON."""
    torch.set_num_threads(1)
    if keep:
        keep_memory()
    x, y = dp.samples(images)
    purifier = dp.Purifier(dp.load_score("cifar10-small"), dp.Ancestral(t_star=0.1, steps=3), GRADIENT_MODES[mode]())
    model = dp.Defense(purifier, dp.load_classifier("cifar10-resnet"))
    began = 0.0
    for step in range(gradients + 1):
        z = x.clone().requires_grad_()
        F.cross_entropy(model(z, seeds=range(images)), y).backward()
        began = began if step else time.process_time()
    print(json.dumps([time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def main() -> None:
    given = parse()
    if given.child:
        mode, keep = given.child
        child(mode, keep == "True", given.images, given.gradients)
        return
    found: dict[tuple[str, bool], list[list[float]]] = {(mode, keep): [] for mode in MODES for keep in (False, True)}
    size = ["--images", str(given.images), "--gradients", str(given.gradients)]
    for _ in range(given.rounds):
        for (mode, keep), rows in found.items():
            command = [sys.executable, __file__, *size, "--child", mode, str(keep)]
            rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    for mode in MODES:
        (seconds, peak), (kept_seconds, kept_peak) = (map(statistics.median, zip(*found[mode, keep], strict=True))
                                                      for keep in (False, True))  # fmt: skip
        print(
            f"{mode}: {seconds:.2f} s, kept {kept_seconds:.2f} s, ratio {kept_seconds / seconds:.3f}; "
            f"peak memory {peak:.0f} and {kept_peak:.0f} MiB"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--gradients", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

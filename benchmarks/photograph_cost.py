"""What purification of a photograph costs: seconds and peak memory per image, as ratios to the classifier alone.

    python benchmarks/photograph_cost.py [--sizes 224 512 2048] [--models OneShot …] [--repeats 5] [--threads 1]
                                         [--out cost.json]

The classifier is EfficientNet-Lite0 on the image reduced to 224 × 224; a defence purifies the image at its own size by
photos-small (in exact tiles where it is large) and then classifies it. Seconds: classifier and defences in turn,
`repeats` times after one call each that prepares kernels; the ratio is the median of the ratios taken in one turn.
Memory: the peak of a process of its own that imports the package, loads the model and classifies one image. Every
finished size is printed and written at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import diffpure as dp
from diffpure.disk import write_whole

BARE = "classifier alone"
SAMPLERS: dict[str, dp.OneShot | dp.DDIM | dp.FewStep] = {
    "OneShot": dp.OneShot(0.05),
    "DDIM, 5 steps": dp.DDIM(0.05, steps=5),
    "FewStep, 5 steps": dp.FewStep(0.05, steps=5),
}


def model(name: str) -> nn.Module:
    """The classifier, alone or behind a purifier."""
    classifier = dp.load_classifier("efficientnet_lite_pytorch:efficientnet-lite0")
    if name == BARE:
        return classifier
    return dp.Defense(dp.Purifier(dp.TiledScore(dp.load_score("photos-small")), SAMPLERS[name]), classifier)


def photograph(size: int) -> Tensor:
    """A square image of some size; what it shows costs nothing."""
    return torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def seconds(models: dict[str, nn.Module], size: int, repeats: int) -> dict[str, list[float]]:
    """The seconds of each call, all models in turn."""
    x, taken = photograph(size), {name: list[float]() for name in models}
    for turn in range(repeats + 1):
        for name, each in models.items():
            began = time.perf_counter()
            each(x)
            if turn:
                taken[name].append(time.perf_counter() - began)
    return taken


@torch.no_grad()
def peak(name: str, size: int) -> int:
    """The MiB that this process took at most, one call of a model included; on Linux."""
    model(name)(photograph(size))  # getrusage would count the parent's memory before exec, too
    (most,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(most.split()[1]) >> 10  # KiB


def measure(names: list[str], size: int, repeats: int, threads: int) -> dict[str, Any]:
    """Seconds, ratios and memory of every model at one size."""
    taken, found = seconds({name: model(name) for name in (BARE, *names)}, size, repeats), dict[str, Any]()
    for name, each in taken.items():
        command = [sys.executable, __file__, "--peak", name, "--sizes", str(size), "--threads", str(threads)]
        memory = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        ratio = statistics.median(a / b for a, b in zip(each, taken[BARE], strict=True))
        found[name] = {"seconds": statistics.median(each), "ratio": ratio, "MiB": memory}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 512, 2048])
    parser.add_argument("--models", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peak", metavar="MODEL", help="only print the MiB of one call of this model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak is not None:
        print(peak(options.peak, options.sizes[0]))
        return
    report = {}
    print(f"{'size':>6}  {'model':<18}{'seconds':>10}{'ratio':>9}{'MiB':>8}")
    for size in options.sizes:
        report[size] = measure(options.models, size, options.repeats, options.threads)
        for name, each in report[size].items():
            print(f"{size:>6}  {name:<18}{each['seconds']:>10.3f}{each['ratio']:>9.1f}{each['MiB']:>8}", flush=True)
        if options.out:
            content = {"threads": options.threads, "repeats": options.repeats, "cost": report}
            write_whole(options.out, json.dumps(content, indent=1).encode())


if __name__ == "__main__":
    main()

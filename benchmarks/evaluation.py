"""An evaluation under stress: killed at random moments, cut into other batches, and given ten times the images.

    python benchmarks/evaluation.py [--kills 20] [--seed 0]

1. `kill -9` at so many random moments of one evaluation, resumed each time: the final rows and adversarial images must
   be those of an uninterrupted run, no row lost and none twice.
2. Batch plans of 1, 7 and 32 images: purified predictions must agree for every image; where an attack's outcome
   differs, through rounding, it is counted.
3. The peak memory of a process that evaluates 200 and 2,000 tiny images must agree within 10 %.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffpure.attacks import APGD, EOT, PGD
from diffpure.diffusion.samplers import ReverseSDE
from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import VPSDE, over
from diffpure.evaluation.engine import Local
from diffpure.evaluation.evaluate import Progress, evaluate
from diffpure.evaluation.store import read_tensors
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from diffpure.results.read import read_rows
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN, Row
from diffpure.threats import Linf

STEPS = 8 * 2 * 11  # of the evaluation below: eight batches, two attacks, eleven steps


class TinyScore(EpsilonScore):
    """Two convolutions: small, but with sums that round."""

    def __init__(self) -> None:
        super().__init__(VPSDE(), size=None, channels=3)
        self.enter, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        return over(self.sde.std(t), x) * x + 0.3 * self.leave(F.silu(self.enter(x)))


def world(count: int) -> tuple[Defense, Tensor, Tensor]:
    """A defence, images and the labels that it gives them, the same in every process."""
    torch.manual_seed(0)
    classifier = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.SiLU(), nn.Flatten(), nn.Linear(72, 10))
    model = Defense(Purifier(TinyScore(), ReverseSDE(t_star=0.1, steps=10)), classifier.requires_grad_(False))
    x = torch.rand(count, 3, 8, 8)
    with torch.no_grad():
        return model, x, model(x, seeds=range(count)).argmax(1)


def settle(folder: Path | None, batch: int, save_every: float = 60.0, progress: Progress | None = None) -> Result:
    """The evaluation that is put under stress: 32 images, two attacks."""
    model, x, y = world(32)
    attacks = [PGD(iterations=10, eot=EOT(8)), APGD(iterations=10, loss="dlr", eot=EOT(8))]
    rules = ["one-shot", "average of 5", "worst of 5", "majority of 5"]
    plan = {"rules": rules, "batch": batch, "per_call": 64, "engine": Local(save_every)}
    return evaluate(model, x, y, Linf(8 / 255), attacks, **plan, out=folder, progress=progress)


def timeless(rows: tuple[Row, ...] | list[Row]) -> list[Row]:
    """Rows without the only thing that may differ."""
    return [replace(row, seconds=0.0) for row in rows]


def kill_and_resume(kills: int, seed: int) -> None:
    """Start the evaluation in a new process again and again, and kill it, until it has been killed so often."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        whole, folder = Path(place) / "whole", Path(place) / "killed"
        began = time.perf_counter()
        reference = settle(whole, batch=4)
        seconds = time.perf_counter() - began
        done, moments = 0, []
        while done < kills:
            child = subprocess.Popen([sys.executable, __file__, "--child", str(folder)], stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.read(chance.randint(0, 2 * STEPS // kills - 2))  # a byte a step
            time.sleep(chance.uniform(0, 0.1))
            if child.poll() is not None:
                break
            child.send_signal(signal.SIGKILL)
            child.wait()
            done += 1
            moments.append(len(read_rows(folder, on_bad=lambda _: None)[1]) if (folder / "rows.jsonl").exists() else 0)
        final = settle(folder, batch=4)
        _, rows = read_rows(folder)
        same = timeless(final.rows) == timeless(reference.rows)
        once = len(rows) == len({row.key for row in rows}) == len(reference.rows)
        files = sorted(file.name for file in (whole / "adversarial").iterdir())
        images = files == sorted(file.name for file in (folder / "adversarial").iterdir()) and all(
            torch.equal(read_tensors(whole / "adversarial" / name)[key], value)
            for name in files
            for key, value in read_tensors(folder / "adversarial" / name).items()
        )
    print(
        f"kill -9 at {done} moments of a run of {seconds:.1f} s and {len(rows)} rows, of which were written: {moments}"
    )
    print(f"  equal rows: {same}   every row once: {once}   equal adversarial images: {images}")
    if not (same and once and images and done == kills):
        sys.exit(1)


def other_plans() -> None:
    """The same evaluation in batches of 1, 7 and 32."""
    found = {batch: timeless(settle(None, batch).rows) for batch in (1, 7, 32)}
    for batch in (7, 32):
        pairs = list(zip(found[1], found[batch], strict=True))
        clean = sum(a != b for a, b in pairs if a.attack == CLEAN)
        attacked = sum((a.predictions, a.averages) != (b.predictions, b.averages) for a, b in pairs)
        print(f"batch {batch} against 1: {clean} clean rows differ, {attacked} of {len(pairs)} decisions differ")
        if clean:
            sys.exit(1)


def memory() -> None:
    """The peak memory of whole processes."""
    peaks = []
    for count in (200, 2000):
        command = [sys.executable, __file__, "--count", str(count)]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(out.stdout))
    print(f"peak memory: {peaks[0] / 1024:.0f} MiB for 200 images, {peaks[1] / 1024:.0f} MiB for 2,000")
    if peaks[1] > 1.1 * peaks[0]:
        sys.exit(1)


def main() -> None:
    """Parse and run; --child and --count are what this script calls itself with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child is not None:
        settle(arguments.child, batch=4, save_every=0.05, progress=lambda _: print(end=".", flush=True))
    elif arguments.count is not None:
        model, x, y = world(arguments.count)
        attack = PGD(iterations=1, eot=EOT(2))
        with tempfile.TemporaryDirectory() as place:
            evaluate(model, x, y, Linf(8 / 255), attack, rules=["one-shot"], per_call=64, out=Path(place) / "r")
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    else:
        kill_and_resume(arguments.kills, arguments.seed)
        other_plans()
        memory()


if __name__ == "__main__":
    main()

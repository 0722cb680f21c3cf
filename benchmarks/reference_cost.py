"""What the reference evaluation costs beside what it cost before: seconds and images left, block by block in turn.

    python benchmarks/reference_cost.py [--images 48] [--block 48] [--threads 1]

Before, `cifar10-small-linf` had PGD-20 and AutoAttack-rand with 20 iterations, eight EOT samples per step: 480
gradients per image in three attacks, on batches of 16 images and so in calls of 128. Now it has the attack `strong`
with 80, one sample per step, and calls of 48. Both evaluate the same images in the same process, one block after the
other, clean accuracy and judging included; which of them begins changes from block to block. Prints CPU seconds, their
ratio per block, and how many images are correct under the minimum of attacks (of a block).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from typing import Final

import torch

from diffpure.experiments.load import run_spec, shipped_specs
from diffpure.experiments.spec import EvaluationSpec

SPEC: Final = "cifar10-small-linf"
BEFORE: Final = (
    {"kind": "pgd", "iterations": 20, "step_size": "2/255", "eot": 8},
    {"kind": "autoattack-rand", "iterations": 20, "eot": 8},
)
BATCH: Final = 16  # images; eight samples of each are in a call
RULE: Final = "average of 10"


def main() -> None:
    given = parse()
    torch.set_num_threads(given.threads)
    now = EvaluationSpec.read(shipped_specs()[SPEC])
    specs = {"now": now, "before": replace(now, attacks=BEFORE, batch=BATCH)}
    spent, left = dict.fromkeys(specs, 0.0), dict.fromkeys(specs, 0.0)
    firsts = range(0, given.images, given.block)
    for turn, first in enumerate(firsts):
        block = f"{first}-{min(first + given.block, given.images) - 1}"
        seconds = {}
        for name in sorted(specs, reverse=turn % 2 == 1):
            spec = replace(specs[name], data=replace(now.data, images=block))
            began = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                result = run_spec(spec, folder)
            seconds[name] = time.process_time() - began
            spent[name] += seconds[name]
            left[name] += result.rate("minimum", RULE).correct
        times = ", ".join(f"{name} {seconds[name]:.0f} s" for name in specs)
        print(f"images {block}: {times}, ratio {seconds['now'] / seconds['before']:.3f}", flush=True)
    correct = ", ".join(f"{name} {count:.0f}" for name, count in left.items())
    ratio = spent["now"] / spent["before"]
    print(f"in all: ratio {ratio:.3f} on {given.images} images; correct by the {RULE}: {correct}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--block", type=int, default=48, help="the batch of the spec by default")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()

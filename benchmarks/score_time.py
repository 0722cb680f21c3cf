"""Time of one score call of the embedded cifar10-small against a diffusers UNet of the same parameter count.

    python benchmarks/score_time.py [--rounds 15] [--batches 1 8 32] [--threads 1]

The UNet has the shape of google/ddpm-cifar10-32, the usual diffusers network for these images, narrowed to 24, 40, 48
and 48 channels: 1.15 million parameters against 1.12. Both are frozen, channels-last and called as a purifier calls
them, score(x, t), and with the gradient of the input as an attack asks for; medians of runs taken in turn.
"""

from __future__ import annotations

import argparse

import torch
from networks import forward, gradient, medians, unet

from diffpure.models.checkpoints import frozen
from diffpure.scores.hf import HFScore, unet2d
from diffpure.scores.load import load_score
from diffpure.training.cost import multiply_adds, parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = {
        "ours": load_score("cifar10-small"),
        "diffusers": frozen(HFScore(unet2d(unet(32, [24, 40, 48, 48], 2, 1, norm_num_groups=8)), size=32)),
    }
    for name, model in models.items():
        work = multiply_adds(model, torch.zeros(1, 3, 32, 32), torch.tensor([0.1]))
        print(f"{name:9} {parameters(model):9,} parameters {work / 1e6:6.1f} million multiply-adds")
    print("             ms an image, a call           ms an image, call and gradient")
    print("batch      ours  diffusers   ratio        ours  diffusers   ratio")
    for batch in options.batches:
        x, t = torch.randn(batch, 3, 32, 32), torch.full((batch,), 0.1, dtype=torch.float64)
        line = f"{batch:5}"
        for kind in (forward, gradient):
            took = medians({name: kind(model, x, t) for name, model in models.items()}, options.rounds)
            ms = {name: 1e3 * seconds / batch for name, seconds in took.items()}
            line += f"{ms['ours']:10.2f} {ms['diffusers']:10.2f} {ms['diffusers'] / ms['ours']:7.2f}  "
        print(line, flush=True)


if __name__ == "__main__":
    main()

"""Time per forward and per input gradient of our networks against diffusers' UNet, per multiply-add, on this machine.

Each pair has the same widths, blocks and attention, so nearly the same multiply-adds (counted); the ratio is of time
per multiply-add, from medians of interleaved runs, and below 1 is faster than diffusers. The last two columns are what
channels-last memory and the fused attention kernel save of our own forward.

    python benchmarks/networks.py [--rounds 15] [--batch 4]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diffpure.models.checkpoints import frozen
from diffpure.scores.ddpm import DDPMUNet
from diffpure.scores.ddpmpp import DDPMpp
from diffpure.scores.guided import GuidedUNet
from diffpure.scores.hf import unet2d


@dataclass(frozen=True)
class Pair:
    """One of our networks and the diffusers UNet of the same shape."""

    size: int
    ours: Callable[[], nn.Module]
    theirs: dict[str, Any]


def unet(size: int, widths: list[int], blocks: int, attention: int, **more: Any) -> dict[str, Any]:
    """A diffusers configuration with attention at one level, counted from the finest."""
    down = ["AttnDownBlock2D" if level == attention else "DownBlock2D" for level in range(len(widths))]
    up = [name.replace("Down", "Up") for name in reversed(down)]
    return {
        "sample_size": size, "block_out_channels": widths, "layers_per_block": blocks, "down_block_types": down,
        "up_block_types": up, "norm_num_groups": 32, "downsample_padding": 0, "attention_head_dim": None, **more,
    }  # fmt: skip


PAIRS = {
    "DDPM": Pair(
        64,
        lambda: DDPMUNet(size=64, width=64, multipliers=(1, 2, 2), blocks=2, attention=(32,)),
        unet(64, [64, 128, 128], 2, 1),
    ),
    "DDPM++": Pair(
        32,
        lambda: DDPMpp(size=32, width=64, multipliers=(1, 2, 2), blocks=2, attention=(16,)),
        unet(32, [64, 128, 128], 2, 1, downsample_type="resnet", upsample_type="resnet"),
    ),
    "guided": Pair(
        64,
        lambda: GuidedUNet(width=64, multipliers=(1, 2, 2), blocks=2, attention=(2,), heads=lambda c: c // 64),
        unet(
            64, [64, 128, 128], 2, 1, downsample_type="resnet", upsample_type="resnet", attention_head_dim=64,
            resnet_time_scale_shift="scale_shift", out_channels=6,
        ),
    ),
}  # fmt: skip


def output(network: nn.Module, x: Tensor, steps: Tensor) -> Tensor:
    y = network(x, steps)
    return y if isinstance(y, Tensor) else y.sample


def multiply_adds(network: nn.Module, x: Tensor, steps: Tensor) -> int:
    # The plain attention kernel, because the counter does not know every fused one.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        output(network, x, steps)
    return int(counter.get_total_flops()) // 2


def medians(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each run, taken in turn so that all see the same weather."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # the first one warms up


def forward(network: nn.Module, x: Tensor, steps: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> Tensor:
        return output(network, x, steps)

    return run


def gradient(network: nn.Module, x: Tensor, steps: Tensor) -> Callable[[], object]:
    def run() -> Tensor:
        inputs = x.detach().requires_grad_()
        return torch.autograd.grad(output(network, inputs, steps).square().sum(), inputs)[0]

    return run


def unfused(run: Callable[[], object]) -> Callable[[], object]:
    def slow() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return run()

    return slow


def row(name: str, pair: Pair, rounds: int, batch: int) -> str:
    """One line of the table."""
    x, steps = torch.randn(batch, 3, pair.size, pair.size), torch.arange(batch)
    x = x.contiguous(memory_format=torch.channels_last)
    ours, theirs, plain = frozen(pair.ours()), frozen(unet2d(pair.theirs)), pair.ours().eval().requires_grad_(False)
    our_work, their_work = multiply_adds(ours, x, steps), multiply_adds(theirs, x, steps)
    fast = forward(ours, x, steps)
    t = medians(
        {
            "ours": fast,
            "theirs": forward(theirs, x, steps),
            "contiguous": forward(plain, x.contiguous(), steps),
            "unfused": unfused(fast),
            "our gradient": gradient(ours, x, steps),
            "their gradient": gradient(theirs, x, steps),
        },
        rounds,
    )
    work = our_work / their_work
    return (
        f"{name:8} {our_work / batch / 1e9:8.3f} {their_work / batch / 1e9:10.3f} {t['ours'] / batch * 1e3:9.1f} "
        f"{t['theirs'] / batch * 1e3:10.1f} {t['ours'] / t['theirs'] / work:9.2f} "
        f"{t['our gradient'] / t['their gradient'] / work:10.2f} {t['contiguous'] / t['ours']:14.2f} "
        f"{t['unfused'] / t['ours']:12.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    print("                 GMAC an image          ms an image          ratio per MAC        gain of our forward")
    print("network      ours  diffusers      ours  diffusers   forward   gradient  channels-last  fused attn.")
    for name, pair in PAIRS.items():
        print(row(name, pair, options.rounds, options.batch), flush=True)


if __name__ == "__main__":
    main()

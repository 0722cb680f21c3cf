"""AutoAttack for random defences against the public package's, on one purified model: survivors, wall time, ratio.

    python benchmarks/attacks.py [--images 12] [--batch 4] [--iterations 10] [--samples 20] [--steps 3] [--judges 50]
                                 [--eps 8] [--threads 2]

The embedded CIFAR-10 ResNet behind the embedded score model (ancestral sampling at t* = 0.1, exact gradients). Both
sides run APGD-CE and APGD-DLR on every image, batch by batch, with the same number of samples and of score calls: ours
looks at the clean image, too, and so makes one move less. They take turns on each batch, and the ratio is the median
over batches. The judge is the mean logits of fresh samples, and the mean number of right images in single samples.

Ours asks for all samples of all images in one call; the public package loops over samples. So the ratio is large
where a call is too small to use the machine well, and tends to 1 where one draw of a batch already fills it: the first
lines show it on one gradient, by batch size.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable

import torch
from parity import public_rand
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import diffpure as dp
from diffpure.attacks import expect, margin
from diffpure.attacks.losses import MARGIN
from diffpure.data.samples import samples
from diffpure.evaluation.checks import EVALUATION

LOSSES = ("ce", "dlr")  # of AutoAttack-rand
Side = Callable[[nn.Module, Tensor, Tensor, str, argparse.Namespace], Tensor]


class Counted(nn.Module):
    """A defence that counts the images it was shown."""

    def __init__(self, model: dp.Defense) -> None:
        super().__init__()
        self.model, self.shown = model, 0
        self.stochastic = model.stochastic

    def forward(self, x: Tensor, seeds: object = None) -> Tensor:
        self.shown += len(x)
        return self.model(x, seeds)


def defence(steps: int) -> dp.Defense:
    """The embedded models, with a short sampler."""
    purifier = dp.Purifier(dp.load_score("cifar10-small"), dp.Ancestral(t_star=0.1, steps=steps))
    return dp.Defense(purifier, dp.load_classifier("cifar10-resnet"))


def public(model: nn.Module, x: Tensor, y: Tensor, loss: str, options: argparse.Namespace) -> Tensor:
    return public_rand(model, x, y, dp.Linf(options.eps / 255), loss, options.iterations, options.samples)


def ours(model: nn.Module, x: Tensor, y: Tensor, loss: str, options: argparse.Namespace) -> Tensor:
    """Our APGD with as many looks: the start and every move on either side, and for ours the clean image."""
    attack = dp.APGD(loss=loss, iterations=options.iterations - 1, eot=dp.EOT(options.samples, per_call=512))
    threat = dp.Linf(options.eps / 255)
    return threat.apply(x, attack(model, x, y, threat, seeds=range(len(x))))


SIDES: dict[str, Side] = {"public": public, "ours": ours}


def race(model: dp.Defense, x: Tensor, y: Tensor, loss: str, options: argparse.Namespace) -> dict[str, tuple]:
    """Both sides in turn on each batch: seconds of each batch, images shown, adversarial images."""
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    found: dict[str, list[Tensor]] = {name: [] for name in SIDES}
    shown = dict.fromkeys(SIDES, 0)
    pairs = list(zip(x.split(options.batch), y.split(options.batch), strict=True))
    for xs, ys in track(pairs, f"apgd-{loss}", console=Console(stderr=True)):
        for name, attack in SIDES.items():
            counted = Counted(model)
            begin = time.perf_counter()
            found[name].append(attack(counted, xs, ys, loss, options))
            seconds[name].append(time.perf_counter() - begin)
            shown[name] += counted.shown
    return {name: (seconds[name], shown[name], torch.cat(found[name])) for name in SIDES}


def ratio(found: dict[str, tuple]) -> str:
    each = [a / b for a, b in zip(found["public"][0], found["ours"][0], strict=True)]
    return f"{statistics.median(each):.2f} times faster ({min(each):.2f} … {max(each):.2f})"


def judged(model: nn.Module, x: Tensor, y: Tensor, judges: int) -> tuple[Tensor, float]:
    """Which images the mean of fresh samples gets right, and how many single samples do."""
    seeds = tuple(range(len(x)))
    mean = expect(model, x, y, MARGIN, dp.EOT(judges, "logits"), seeds, EVALUATION).logits
    single = [expect(model, x, y, MARGIN, dp.EOT(1), seeds, EVALUATION + d).loss for d in range(1, 9)]
    return margin(mean, y) <= 0, sum((loss <= 0).sum().item() for loss in single) / len(single)


def main() -> None:
    options = parse()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(options.threads)
    model = defence(options.steps)
    x, y = samples(options.images)
    alive, single = judged(model, x, y, options.judges)
    print(
        f"{len(x)} images, no attack: {alive.sum()} right by the mean of {options.judges} samples, {single:.1f} by one"
    )
    for n in (n for n in (1, 2, 4, 8) if n <= len(x)):
        faster = gradient_ratio(model, x[:n], y[:n], options.samples)
        print(f"one gradient, {n} images, {options.samples} samples: {faster:.2f} times faster in one call than singly")
    left = dict.fromkeys(SIDES, alive)
    for loss in LOSSES:
        found = race(model, x, y, loss, options)
        for name, (seconds, shown, adversarial) in found.items():
            alive, single = judged(model, adversarial, y, options.judges)
            left[name] = left[name] & alive
            calls = f"{shown * options.steps} score calls, {sum(seconds):.0f} s"
            print(f"apgd-{loss} {name}: survivors {alive.sum()}, {single:.1f} in single samples; {calls}", flush=True)
        print(f"apgd-{loss}: ours {ratio(found)}", flush=True)
    print("AutoAttack-rand, worst case per image: " + ", ".join(f"{name} {left[name].sum()}" for name in SIDES))


def gradient_ratio(model: dp.Defense, x: Tensor, y: Tensor, samples: int) -> float:
    """How much longer a gradient takes draw by draw than with all samples in one call; median of three turns."""
    seeds, ratios = tuple(range(len(x))), []
    for _ in range(3):
        begin = time.perf_counter()
        for draw in range(samples):
            expect(model, x, y, MARGIN, dp.EOT(1), seeds, draw, gradient=True)
        middle = time.perf_counter()
        expect(model, x, y, MARGIN, dp.EOT(samples, per_call=512), seeds, 0, gradient=True)
        ratios.append((middle - begin) / (time.perf_counter() - middle))
    return statistics.median(ratios)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = {"images": 12, "batch": 4, "iterations": 10, "samples": 20, "steps": 3, "judges": 50, "threads": 2}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--eps", type=float, default=8.0, help="the budget in 1/255")
    return parser.parse_args()


if __name__ == "__main__":
    main()

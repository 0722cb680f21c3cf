"""Purification and its gradient, side by side with their bare cost and with torchsde, as ratios from one run.

    python benchmarks/solver.py [--batch 16] [--steps 100] [--rounds 5] [--threads 2]

All contestants run the same network (the package's small UNet, random weights, frozen), on the same images with the
same number of steps. They take turns within each round, and the medians over rounds are compared, so that a busy
machine slows all of them alike. torchsde runs in its best case: Euler both ways, its adjoint, no parameter gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torchsde
from torch import Tensor, nn

import diffpure as dp
from diffpure.diffusion.samplers import reverse_drift
from diffpure.scores.small import SmallUNet


class TorchSDE(nn.Module):
    """The reverse VP-SDE in torchsde's form: t' = 1 - t rises from 1 - t* to 1 - 1e-5."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, score: dp.ScoreModel, shape: torch.Size) -> None:
        super().__init__()
        self.score, self.shape, self.drift = score, shape, reverse_drift(score)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        x = y.reshape(self.shape)
        return -self.drift(x, (1 - t).double().expand(len(x)), None).flatten(1)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return self.score.sde.beta(1 - t).sqrt().to(y.dtype).expand_as(y)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    score = SmallUNet().requires_grad_(False).eval().to(memory_format=torch.channels_last)
    images = torch.rand(arguments.batch, 3, 32, 32)
    seeds = range(arguments.batch)
    steps, t_star = arguments.steps, arguments.steps / 1000
    weights = torch.randn_like(images)
    purifiers = {
        name: dp.Purifier(score, dp.ReverseSDE(t_star=t_star), mode)
        for name, mode in {"small": dp.Exact(), "all": dp.Exact(memory=None), "backprop": dp.Backprop()}.items()
    }
    t = torch.full((arguments.batch,), t_star, dtype=torch.float64)

    def bare_calls() -> None:
        x = 2 * images - 1
        with torch.no_grad():
            for _ in range(steps):
                score(x, t)

    def bare_gradient() -> None:
        x = 2 * images - 1
        for _ in range(steps):
            with torch.no_grad():
                score(x, t)
            leaf = x.clone().requires_grad_()
            torch.autograd.grad(score(leaf, t), leaf, weights)

    def purify() -> None:
        with torch.no_grad():
            purifiers["small"](images, seeds)

    gradients: dict[str, Tensor] = {}

    def differentiate(name: str) -> Callable[[], None]:
        def run() -> None:
            x = images.clone().requires_grad_()
            (purifiers[name](x, seeds) * weights).sum().backward()
            assert x.grad is not None
            gradients[name] = x.grad

        return run

    sde = TorchSDE(score, images.shape)
    times = torch.tensor([1 - t_star, 1 - 1e-5])

    def torchsde_run(solve: Callable[..., Tensor], key: str, **options: object) -> None:
        y = (2 * images - 1).flatten(1).requires_grad_()
        noise = torchsde.BrownianInterval(times[0], times[1], size=y.shape, entropy=0, cache_size=200)
        out = solve(sde, y, times, bm=noise, method="euler", dt=1e-3, **options)[-1]
        (out * weights.flatten(1)).sum().backward()
        gradients[key] = y.grad

    def torchsde_adjoint() -> None:
        torchsde_run(torchsde.sdeint_adjoint, "torchsde adjoint", adjoint_params=(), adjoint_method="euler")

    contestants = {
        "bare score calls": bare_calls,
        "purify": purify,
        "bare forward + forward with graph + backward": bare_gradient,
        "exact gradient, smallest budget": differentiate("small"),
        "exact gradient, every step fits": differentiate("all"),
        "torchsde adjoint": torchsde_adjoint,
    }
    seconds = race(contestants, arguments.rounds)
    differentiate("backprop")()
    torchsde_run(torchsde.sdeint, "torchsde backprop")
    report(arguments, seconds, gradients)


def race(contestants: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taking turns; one round more to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


def relative(found: Tensor, known: Tensor) -> float:
    return ((found - known).norm() / known.norm()).item()


def report(arguments: argparse.Namespace, seconds: dict[str, float], gradients: dict[str, Tensor]) -> None:
    size = f"batch {arguments.batch}, {arguments.steps} steps, {arguments.threads} threads"
    print(f"{size}, median of {arguments.rounds} rounds; torch {torch.__version__}, torchsde {torchsde.__version__}\n")
    for name, value in seconds.items():
        print(f"{value:8.2f} s  {name}")
    bare = "bare forward + forward with graph + backward"
    small, fits, adjoint = "exact gradient, smallest budget", "exact gradient, every step fits", "torchsde adjoint"
    rows = [
        ("(a) purify / its bare score calls", "purify", "bare score calls", 1.05),
        ("(b) exact gradient / its bare cost", small, bare, 1.10),
        (f"(c) {small} / {adjoint}", small, adjoint, 1.05),
        (f"(c) {fits} / {adjoint}", fits, adjoint, 0.80),
    ]
    print()
    for title, ours, theirs, target in rows:
        print(f"{seconds[ours] / seconds[theirs]:8.3f}  {title} (target at most {target:.2f})")
    print("\nrelative error of the gradient against plain backprop through the same solver:")
    print(f"{relative(gradients['small'], gradients['backprop']):10.1e}  exact, smallest budget")
    print(f"{relative(gradients['all'], gradients['backprop']):10.1e}  exact, every step fits")
    print(f"{relative(gradients['torchsde adjoint'], gradients['torchsde backprop']):10.1e}  torchsde adjoint")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()

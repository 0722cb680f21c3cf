"""The defence's two equations, and the attacker's gradients, on one real model: the embedded CIFAR-10 score and ResNet.

    python benchmarks/ode_against_sde.py [--images 32] [--iterations 20] [--samples 4] [--steps 8] [--t-star 0.05]
                                         [--eps 4] [--judges 16] [--threads 2]

VP-SDE and VP-ODE with the same t*, grid and attack (PGD with EOT, exact gradients): the paper, with its adjoint, found
the ODE far weaker. Then, on the VP-SDE, the same attack with ever worse gradients: theory demands exact ≤ surrogate (a
quarter of the steps) ≤ BPDA ≤ transfer in survivors. An image survives if the mean logits of `judges` fresh samples are
right; beside it stands the mean over single samples, both with 95 % intervals. A sign test says which differences are
more than chance.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise

import torch
from torch import Tensor

import diffpure as dp
from diffpure.attacks import Attack, Transfer, expect
from diffpure.attacks.losses import MARGIN
from diffpure.data.samples import samples
from diffpure.evaluation.checks import JUDGE, fewer, survivors
from diffpure.evaluation.rows import Rate

SAMPLERS = {"VP-SDE": dp.ReverseSDE, "VP-ODE": dp.ProbabilityFlow}


def defence(sampler: str, options: argparse.Namespace) -> dp.Defense:
    """The embedded models behind one equation, on a grid that is dense where the noise is small."""
    equation = SAMPLERS[sampler](
        t_star=options.t_star, steps=options.steps, spacing="root_sigma", end=1e-3, denoise=True
    )
    purifier = dp.Purifier(dp.load_score("cifar10-small"), equation, dp.Exact(memory=None))
    return dp.Defense(purifier, dp.load_classifier("cifar10-resnet"))


def judged(name: str, model: dp.Defense, attack: Attack | None, options: argparse.Namespace) -> list[bool]:
    """Attack, judge by fresh samples, print a line, and return who survived."""
    x, y = samples(options.images)
    threat, seeds, begin = dp.Linf(options.eps / 255), range(len(x)), time.perf_counter()
    z = threat.zeros(x) if attack is None else attack(model, x, y, threat, seeds=seeds)
    assert threat.within(x, z).all()
    alive = survivors(model, x, y, threat, z, seeds, dp.EOT(options.judges))
    single = Rate(sum(one_draw(model, threat.apply(x, z), y, d) for d in range(4)) / 4, len(x))
    seconds = time.perf_counter() - begin
    print(f"{name:28} {Rate(sum(alive), len(x))}   single samples {single}   {seconds:.0f} s", flush=True)
    return alive


def one_draw(model: dp.Defense, images: Tensor, y: Tensor, draw: int) -> int:
    """How many images are right in one fresh draw."""
    seen = expect(model, images, y, MARGIN, dp.EOT(1), tuple(range(len(images))), JUDGE + 1 + draw)
    return int((seen.loss <= 0).sum())


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    white = dp.PGD(iterations=options.iterations, eot=dp.EOT(options.samples, rows=options.rows))
    models = {name: defence(name, options) for name in SAMPLERS}
    attack = f"PGD-{options.iterations} with EOT {options.samples}, Linf {options.eps:g}/255"
    print(f"{options.images} images, t* = {options.t_star}, {options.steps} steps, {attack}")
    for name, model in models.items():
        judged(f"{name}, no attack", model, None, options)
    left = {name: judged(f"{name}, exact", model, white, options) for name, model in models.items()}
    print(f"VP-ODE against VP-SDE: {verdict(left['VP-ODE'], left['VP-SDE'])}")
    sde = models["VP-SDE"]
    order = {"exact": left["VP-SDE"]}
    for name, mode in {"surrogate": dp.Surrogate(max(1, options.steps // 4)), "bpda": dp.BPDA()}.items():
        order[name] = judged(f"VP-SDE, {name}", sde.with_gradient(mode), white, options)
    bare = dp.PGD(iterations=options.iterations)
    order["transfer"] = judged("VP-SDE, transfer", sde, Transfer(attack=bare), options)
    for better, worse in pairwise(order):
        print(f"{better} against {worse}: {verdict(order[better], order[worse])}")


def verdict(a: list[bool], b: list[bool]) -> str:
    """Who leaves fewer survivors, if that is more than chance."""
    if n := fewer(b, a, random=True):
        return f"the first leaves {n} fewer survivors"
    if n := fewer(a, b, random=True):
        return f"the second leaves {n} fewer survivors"
    return f"no difference beyond chance ({sum(a)} and {sum(b)} of {len(a)})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = {"images": 32, "iterations": 20, "samples": 4, "steps": 8, "judges": 16, "rows": 64, "threads": 2}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, number in {"t-star": 0.05, "eps": 4.0}.items():
        parser.add_argument(f"--{name}", type=float, default=number)
    return parser.parse_args()


if __name__ == "__main__":
    main()

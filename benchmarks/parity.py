"""Our attacks against the public AutoAttack package's on the embedded CIFAR-10 ResNet: survivors, attack by attack.

    python benchmarks/parity.py [--images 200] [--iterations 100] [--queries 5000] [--attacks apgd-ce fab-t …]

Both sides get the same images (those the classifier gets right), iterations, queries, targets and one restart. The
budgets are so small that some images survive: at 8/255 an undefended classifier loses them all.
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import replace

import torch
from pyautoattack import AutoAttack
from torch import Tensor, nn

import diffpure as dp
from diffpure.attacks import Attack
from diffpure.data.samples import samples

ATTACKS: dict[str, Attack] = {
    "apgd-ce": dp.APGD(loss="ce", skip_broken=True),
    "apgd-dlr": dp.APGD(loss="dlr", skip_broken=True),
    "apgd-t": dp.APGD(loss="dlr-targeted", skip_broken=True),
    "fab-t": dp.FAB(skip_broken=True),
    "square": dp.Square(skip_broken=True),
}


def public(
    net: nn.Module, x: Tensor, y: Tensor, threat: dp.Linf | dp.L2, name: str, options: argparse.Namespace
) -> Tensor:
    suite = AutoAttack(
        net, norm=type(threat).__name__, eps=threat.eps, version="custom", attacks=[name], device="cpu", seed=0
    )
    suite.verbose = False
    for attack in (suite.apgd, suite.apgd_targeted, suite.fab):
        attack.n_restarts, attack.n_iter = 1, options.iterations
    for attack in (suite.apgd, suite.apgd_targeted):  # checkpoints, which it computes once for 100 iterations
        attack.n_iter_2, attack.n_iter_min, attack.size_decr = (
            max(int(share * options.iterations), 1) for share in (0.22, 0.06, 0.03)
        )
    suite.square.n_queries = options.queries
    return suite.run_standard_evaluation(x, y, batch_size=len(x))[0]


def ours(
    net: nn.Module, x: Tensor, y: Tensor, threat: dp.Linf | dp.L2, name: str, options: argparse.Namespace
) -> Tensor:
    attack = ATTACKS[name]
    size = {"queries": options.queries} if name == "square" else {"iterations": options.iterations}
    return threat.apply(x, replace(attack, **size)(net, x, y, threat, seeds=range(len(x))))


def main() -> None:
    options = parse()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(options.threads)
    net = dp.load_classifier("cifar10-resnet")
    x, y = samples(min(500, 2 * options.images))
    right = (net(x).argmax(1) == y).nonzero()[: options.images, 0]
    x, y = x[right], y[right]
    for threat in (dp.Linf(options.linf / 255), dp.L2(options.l2)):
        for name in options.attacks:
            line = []
            for side in (public, ours):
                begin = time.perf_counter()
                adversarial = side(net, x, y, threat, name, options)
                survivors = int((net(adversarial).argmax(1) == y).sum())
                line.append(f"{side.__name__} {survivors} ({time.perf_counter() - begin:.0f} s)")
            print(f"{threat} {name}: {', '.join(line)} of {len(x)}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in {"images": 200, "iterations": 100, "queries": 5000, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"linf": 0.75, "l2": 0.12}.items():
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    return parser.parse_args()


if __name__ == "__main__":
    main()

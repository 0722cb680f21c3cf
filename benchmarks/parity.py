"""Our attacks against the public AutoAttack package's on the embedded CIFAR-10 ResNet: survivors, attack by attack.

    python benchmarks/parity.py --out parity.jsonl [--attacks apgd-ce fab-t …] [--linf 1.0] [--l2 0.14] [--images 200]
                                [--iterations 100] [--queries 5000] [--seed 0] [--starts own] [--threads 1]

Both sides get the same images (the first that the classifier gets right), iterations, queries, targets and one
restart; "standard" is the whole suite, each attack on what the one before left. The budgets are so small that some
images survive: at 8/255 an undefended classifier loses them all, and Square, which has no gradients, wants larger ones
than the rest. A piece (attack, threat, side) is one line of the file, and a piece that is there is not run again.

From seed to seed both sides vary by one or two images, as some images fall from some random starts only: compare means
over seeds, or give our APGD the public one's starts.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pyautoattack import AutoAttack
from torch import Tensor, nn

import diffpure as dp
from diffpure.attacks import Attack, Suite
from diffpure.data.samples import samples
from diffpure.threats import per_image

ATTACKS: dict[str, Attack] = {
    "apgd-ce": dp.APGD(loss="ce"),
    "apgd-dlr": dp.APGD(loss="dlr"),
    "apgd-t": dp.APGD(loss="dlr-targeted"),
    "fab-t": dp.FAB(),
    "square": dp.Square(),
    "standard": Suite(attacks=dp.AUTOATTACK_STANDARD),
}
Threat = dp.Linf | dp.L2
Row = dict[str, Any]


class Watched(nn.Module):
    """The classifier, which says every ten seconds how many images it was shown."""

    def __init__(self, net: nn.Module, name: str) -> None:
        super().__init__()
        self.net, self.name, self.shown = net, name, 0
        self.begin, self.said = time.perf_counter(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.shown += len(x)
        seconds = time.perf_counter() - self.begin
        if seconds > self.said + 10:
            self.said = seconds
            print(f"\r{self.name}: {self.shown} images shown in {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        return self.net(x)


def set_iterations(apgd: Any, iterations: int) -> None:
    """Set the public APGD's number of iterations and its checkpoints, which it computes once for 100."""
    apgd.n_iter = iterations
    apgd.n_iter_2, apgd.n_iter_min, apgd.size_decr = (max(int(p * iterations), 1) for p in (0.22, 0.06, 0.03))


def public(net: nn.Module, x: Tensor, y: Tensor, threat: Threat, name: str, options: argparse.Namespace) -> Tensor:
    names = [attack.name for attack in dp.AUTOATTACK_STANDARD] if name == "standard" else [name]
    norm = type(threat).__name__
    suite = AutoAttack(net, norm=norm, eps=threat.eps, version="custom", attacks=names, device="cpu", seed=options.seed)
    suite.verbose = False
    for attack in (suite.apgd, suite.apgd_targeted):
        set_iterations(attack, options.iterations)
    suite.fab.n_iter, suite.square.n_queries = options.iterations, options.queries
    suite.apgd.n_restarts = suite.fab.n_restarts = 1
    return suite.run_standard_evaluation(x, y, batch_size=len(x))[0]


def ours(net: nn.Module, x: Tensor, y: Tensor, threat: Threat, name: str, options: argparse.Namespace) -> Tensor:
    attack = replace(sized(ATTACKS[name], options), skip_broken=True)
    starts = mock.patch.object(type(threat), "random", public_starts(options.seed))
    with starts if options.starts == "public" else nullcontext():
        z = attack(net, x, y, threat, seeds=range(options.seed * len(x), (options.seed + 1) * len(x)))
    assert threat.within(x, z).all()
    return threat.apply(x, z)


def public_starts(seed: int) -> Callable[..., Tensor]:
    """The random starts of the public APGD: for all images at hand from one generator, seeded once an attack."""
    generator = torch.Generator().manual_seed(seed)

    def random(threat: Threat, x: Tensor, noise: object, step: int = 0) -> Tensor:
        linf = isinstance(threat, dp.Linf)
        z = 2 * torch.rand(x.shape, generator=generator) - 1 if linf else torch.randn(x.shape, generator=generator)
        return threat.project(x, threat.eps * z / per_image(threat.size(z), z))

    return random


def sized(attack: Attack, options: argparse.Namespace) -> Attack:
    """The attack with the iterations or queries asked for."""
    if isinstance(attack, Suite):
        return replace(attack, attacks=tuple(sized(member, options) for member in attack.attacks))
    if isinstance(attack, dp.Square):
        return replace(attack, queries=options.queries)
    return replace(attack, iterations=options.iterations)


SIDES = {"public": public, "ours": ours}


def main() -> None:
    options = parse()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(options.threads)
    net = dp.load_classifier("cifar10-resnet")
    x, y = samples()
    right = (net(x).argmax(1) == y).nonzero()[: options.images, 0]
    x, y = x[right], y[right]
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for name in options.attacks:
        for threat in (dp.Linf(options.linf / 255), dp.L2(options.l2)):
            pair = [piece(net, x, y, threat, name, side, options, done) for side in SIDES]
            print(sentence(*pair), flush=True)


def piece(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    name: str,
    side: str,
    options: argparse.Namespace,
    done: list[Row],
) -> Row:
    """The row of one side of one attack, from the file if it is there, else measured and appended."""
    size = {"queries": options.queries} if name == "square" else {"iterations": options.iterations}
    if name == "standard":
        size = {"iterations": options.iterations, "queries": options.queries}
    key: Row = {"attack": name, "threat": str(threat), "side": side, "images": len(x), "seed": options.seed, **size}
    if side == "ours" and options.starts != "own":
        key["starts"] = options.starts
    for row in done:
        if {k: row.get(k) for k in {**key, "starts": None}} == {"starts": None, **key}:
            return row
    watched = Watched(net, f"{name} {threat} {side}")
    adversarial = SIDES[side](watched, x, y, threat, name, options)
    alive = (net(adversarial).argmax(1) == y).nonzero()[:, 0].tolist()
    seconds = round(time.perf_counter() - watched.begin)
    row = {**key, "survivors": len(alive), "shown": watched.shown, "seconds": seconds, "alive": alive}
    with options.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(file=sys.stderr)
    return row


def sentence(public: Row, ours: Row) -> str:
    """Both sides of one attack, and on which images they differ."""
    a, b = set(public["alive"]), set(ours["alive"])
    sides = ", ".join(f"{row['side']} {row['survivors']} ({row['seconds']} s)" for row in (public, ours))
    return (
        f"{ours['attack']} {ours['threat']}: survivors of {ours['images']}: {sides}, difference {len(b) - len(a):+d} "
        f"({len(a - b)} survive only the public one, {len(b - a)} only ours)"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in {"images": 200, "iterations": 100, "queries": 5000, "seed": 0, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"linf": 1.0, "l2": 0.14}.items():
        parser.add_argument(f"--{name}", type=float, default=value, help="the budget (linf in 1/255)")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--starts", choices=("own", "public"), default="own", help="whose random starts our APGD has")
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON lines, a piece each; those there are not run again"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

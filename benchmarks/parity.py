"""Our attacks against the public AutoAttack package's on the embedded CIFAR-10 ResNet: survivors, attack by attack.

    python benchmarks/parity.py --out parity.jsonl [--attacks apgd-ce fab-t …] [--linf 1.0] [--l2 0.14] [--images 200]
                                [--iterations 100] [--queries 5000] [--seeds 0] [--random own] [--threads 1]

Both sides get the same images (the first that the classifier gets right), iterations, queries, targets and one
restart; "standard" is the whole suite, each attack on what the one before left. The budgets are so small that some
images survive: at 8/255 an undefended classifier loses them all, and Square, which has no gradients, wants larger ones
than the rest. A piece (attack, threat, side, seed) is one line of the file, and a piece that is there is not run again.

From seed to seed both sides vary, as some images fall to some random choices only: compare means over several seeds, or
let ours choose what the public side chooses (`--random public`, for APGD and Square; FAB-T makes no random choice).
Then both sides of Square compute in float64 around the float32 network, as one rounding that tips one image shifts all
that is drawn after it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from public_random import public_random
from pyautoattack import AutoAttack
from torch import Tensor, nn

import diffpure as dp
from diffpure.attacks import Attack, Suite
from diffpure.data.samples import samples

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
    """The classifier, in float32, which says every ten seconds how many images it was shown."""

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
        return self.net(x.float()).to(x.dtype)


def set_iterations(apgd: Any, iterations: int) -> None:
    """Set the public APGD's number of iterations and its checkpoints, which it computes once for 100."""
    apgd.n_iter = iterations
    apgd.n_iter_2, apgd.n_iter_min, apgd.size_decr = (max(int(p * iterations), 1) for p in (0.22, 0.06, 0.03))


def public(
    net: nn.Module, x: Tensor, y: Tensor, threat: Threat, name: str, seed: int, options: argparse.Namespace
) -> Tensor:
    names = [attack.name for attack in dp.AUTOATTACK_STANDARD] if name == "standard" else [name]
    norm = type(threat).__name__
    suite = AutoAttack(net, norm=norm, eps=threat.eps, version="custom", attacks=names, device="cpu", seed=seed)
    suite.verbose = False
    for attack in (suite.apgd, suite.apgd_targeted):
        set_iterations(attack, options.iterations)
    suite.fab.n_iter, suite.square.n_queries = options.iterations, options.queries
    suite.apgd.n_restarts = suite.fab.n_restarts = 1
    return suite.run_standard_evaluation(x, y, batch_size=len(x))[0]


def public_rand(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, loss: str, iterations: int, samples: int
) -> Tensor:
    """The adversarial images of one attack of the public package's version for random defences, on every image."""
    norm = type(threat).__name__
    apgd = AutoAttack(model, norm=norm, eps=threat.eps, version="rand", device="cpu", seed=0).apgd
    set_iterations(apgd, iterations)
    apgd.eot_iter, apgd.loss = samples, loss
    apgd.init_hyperparam(x)
    torch.manual_seed(0)
    return apgd.attack_single_run(x, y)[3]  # the last misclassified iterate: what it returns as adversarial


def ours(
    net: nn.Module, x: Tensor, y: Tensor, threat: Threat, name: str, seed: int, options: argparse.Namespace
) -> Tensor:
    attack = replace(sized(ATTACKS[name], options), skip_misclassified=True)
    with public_random(seed) if options.random == "public" else nullcontext():
        z = attack(net, x, y, threat, seeds=range(seed * len(x), (seed + 1) * len(x)))
    assert threat.within(x, z).all()
    return threat.apply(x, z)


def sized(attack: Attack, options: argparse.Namespace) -> Attack:
    """The attack with the iterations or queries asked for; the public package does not count Square's start."""
    if isinstance(attack, Suite):
        return replace(attack, attacks=tuple(sized(member, options) for member in attack.attacks))
    if isinstance(attack, dp.Square):
        return replace(attack, queries=options.queries + 1)
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
        dtype = torch.float64 if name == "square" and options.random == "public" else torch.float32
        torch.set_default_dtype(dtype)  # of the tensors that the public package makes
        x = x.to(dtype)
        for threat in (dp.Linf(options.linf / 255), dp.L2(options.l2)):
            pairs = []
            for seed in options.seeds:
                pairs.append([piece(net, x, y, threat, name, side, seed, options, done) for side in SIDES])
                print(sentence(*pairs[-1]), flush=True)
            if len(pairs) > 1:
                print(f"{name} {threat}: {means(pairs)}", flush=True)


def piece(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    name: str,
    side: str,
    seed: int,
    options: argparse.Namespace,
    done: list[Row],
) -> Row:
    """The row of one side of one attack, from the file if it is there, else measured and appended."""
    size = {"queries": options.queries} if name == "square" else {"iterations": options.iterations}
    if name == "standard":
        size = {"iterations": options.iterations, "queries": options.queries}
    key: Row = {"attack": name, "threat": str(threat), "side": side, "images": len(x), "random": options.random}
    key = {**key, "seed": seed, **size}
    for row in done:
        if {k: row.get(k) for k in key} == key:
            return row
    watched = Watched(net, f"{name} {threat} {side}")
    adversarial = SIDES[side](watched, x, y, threat, name, seed, options)
    alive = (net(adversarial.float()).argmax(1) == y).nonzero()[:, 0].tolist()
    seconds = round(time.perf_counter() - watched.begin)
    row = {**key, "survivors": len(alive), "shown": watched.shown, "seconds": seconds, "alive": alive}
    with options.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(file=sys.stderr)
    return row


def sentence(public: Row, ours: Row) -> str:
    """Both sides of one attack with one seed, and on which images they differ."""
    a, b = set(public["alive"]), set(ours["alive"])
    what = "{attack} {threat} seed {seed}: survivors of {images}".format(**ours)
    sides = ", ".join(f"{row['side']} {row['survivors']} ({row['seconds']} s)" for row in (public, ours))
    apart = f"{len(a - b)} survive only the public one, {len(b - a)} only ours"
    return f"{what}: {sides}, difference {len(b) - len(a):+d} ({apart})"


def means(pairs: list[list[Row]]) -> str:
    """The mean number of survivors over the seeds, of either side, and each number."""
    public, ours = ([row["survivors"] for row in side] for side in zip(*pairs, strict=True))
    return f"mean survivors over {len(pairs)} seeds: public {fmean(public):.1f} {public}, ours {fmean(ours):.1f} {ours}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in {"images": 200, "iterations": 100, "queries": 5000, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"linf": 1.0, "l2": 0.14}.items():
        parser.add_argument(f"--{name}", type=float, default=value, help="the budget (linf in 1/255)")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--random", choices=("own", "public"), default="own", help="whose random choices ours makes")
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON lines, a piece each; those there are not run again"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

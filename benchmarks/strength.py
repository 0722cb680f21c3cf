"""Accuracy left against gradients per image and seconds: our attacks and the public AutoAttack, on seven defences.

    python benchmarks/strength.py --out strength.jsonl [--images 64] [--first 0] [--batch 16] [--seeds 0 1 2]
                                  [--budgets 20 40 80] [--defences ancestral …] [--attacks strong …] [--judges 64]
                                  [--threads 1] [--table]

The budget is the number of gradients of the whole model per image: EOT samples × steps. `strong` is
`dp.strong(budget)` (`dp.STRONG` is that of 80), `two-losses` divides the budget between the losses, `momentum` has
the cross-entropy alone, `four-classes` a run towards each of four. A step of DiffHammer is one gradient and ten
purifications, counted as 1 + 10/3 gradients. Network and classifier calls are counted where they are made, and stand
in each row with the seconds. The accuracy left of an image is the share of fresh evaluation samples (`--judges`; one
where the model is not random) that are right. The threat is ℓ∞ 8/255. `standard` is AutoAttack's standard suite, for a
model that is not random, whatever the budget.

Attacks take turns on each batch, the smallest budget first. A piece (defence, attack, budget, seed, batch) is one line
of the file, flushed; a piece that is there is not run again. `--table` prints what is there: means over images and
seeds, with 95 % bootstrap intervals over images, also of the paired difference to `strong` at the same budget, and the
ratio of the times of both where they were taken in turn. `strength_figure.py` draws it.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity import public_rand
from torch import Tensor, nn

import diffpure as dp
from diffpure.attacks import Attack, attacks_of, sample_seeds
from diffpure.attacks.compose import Suite
from diffpure.attacks.presets import STANDARD_SUITE
from diffpure.data.samples import samples
from diffpure.evaluation.checks import EVALUATION, right
from diffpure.evaluation.cost import duration
from diffpure.meter import metered
from diffpure.noise import Noise, mix

Row = dict[str, Any]
KEY = ("defence", "attack", "budget", "seed", "start", "stop", "judges")
THREAT = dp.Linf(8 / 255)
EOT = 4  # of PGD, APGD and the public APGD
DRAWS = 10  # of DiffHammer
TURN = 10  # lines that lie further apart in a file were not taken in turn, and perhaps not on one machine


def behind(sampler: Any, classifier: str) -> Callable[[], nn.Module]:
    """A purified classifier; `Backprop` is the exact gradient with every graph kept, the fastest where they fit."""
    purifier = functools.partial(dp.Purifier, sampler=sampler, gradient=dp.Backprop())
    return lambda: dp.Defense(purifier(dp.load_score("cifar10-small")), dp.load_classifier(classifier))


ANCESTRAL = dp.Ancestral(t_star=0.1, steps=3)
DEFENCES: dict[str, Callable[[], nn.Module]] = {
    "resnet-at": lambda: dp.load_classifier("cifar10-resnet-at"),
    "ancestral": behind(ANCESTRAL, "cifar10-resnet"),
    "ancestral-at": behind(ANCESTRAL, "cifar10-resnet-at"),
    "few-step": behind(dp.FewStep(t_star=0.1, steps=3, end=0.02), "cifar10-resnet"),
    "one-shot": behind(dp.OneShot(t_star=0.1), "cifar10-resnet"),
    "one-shot-at": behind(dp.OneShot(t_star=0.1), "cifar10-resnet-at"),
    "robust": lambda: dp.load_defense("cifar10-robust").with_gradient(dp.Backprop()),
}


def two_losses(budget: int, stop: float = 0.0) -> Attack:
    """`dp.TWO_LOSSES` with another number of gradients."""
    (attack,) = attacks_of({"kind": "two-losses", "iterations": budget // 2, "stop": stop})
    return attack


def towards(classes: int, iterations: int) -> dp.MomentumPGD:
    """The momentum attack towards the classes with the highest logits, one run each."""
    return dp.MomentumPGD(loss="difference", targets=classes, iterations=iterations, antithetic=True)


def both(budget: int) -> Attack:
    """Half of the gradients on the margin, a quarter each towards two classes; an image keeps the stronger one."""
    return Suite(attacks=(dp.strong(budget // 2), towards(2, budget // 4)))


def sampled(kind: type[dp.PGD] | type[dp.APGD], budget: int, random: bool) -> Attack:
    return kind(iterations=budget // EOT, eot=EOT) if random else kind(iterations=budget)


ATTACKS: dict[str, Callable[[int, bool], Attack | None]] = {
    "strong": lambda budget, random: dp.strong(budget),
    "two-losses": lambda budget, random: two_losses(budget),
    "two-losses-stop": lambda budget, random: two_losses(budget, 0.05) if random else None,
    "momentum": lambda budget, random: dp.MomentumPGD(iterations=budget),
    "four-classes": lambda budget, random: towards(4, budget // 4) if random else None,
    "margin-and-two-classes": lambda budget, random: both(budget) if random else None,
    "pgd": lambda budget, random: sampled(dp.PGD, budget, random),
    "apgd": lambda budget, random: sampled(dp.APGD, budget, random),
    "diffhammer": lambda budget, random: (
        dp.DiffHammer(iterations=max(1, round(budget / (1 + DRAWS / 3))), eot=DRAWS) if random else None
    ),
    "standard": lambda budget, random: None if random else STANDARD_SUITE,
}
PUBLIC = "public"  # the public package's APGD-CE


class Counting(nn.Module):
    """A random defence for a package that knows no seeds: each call has its own, which follow from the batch's."""

    def __init__(self, model: nn.Module, seeds: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.noise, self.calls = model, Noise(seeds), 0

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self.model, "stochastic", False):
            return self.model(x)
        self.calls += 1
        return self.model(x, seeds=self.noise.child(self.calls).seeds)


def adversarial(model: nn.Module, x: Tensor, y: Tensor, name: str, budget: int, seeds: tuple[int, ...]) -> Tensor:
    random = bool(getattr(model, "stochastic", False))
    if name == PUBLIC:  # it evaluates at its start and after every step
        eot = EOT if random else 1
        return public_rand(Counting(model, seeds), x, y, THREAT, "ce", max(1, budget // eot - 1), eot)
    attack = ATTACKS[name](budget, random)
    assert attack is not None
    attack = attack if random else attack.unsampled()
    return THREAT.apply(x, attack(model, x, y, THREAT, seeds=seeds))


def planned(options: argparse.Namespace) -> Iterator[Row]:
    """All pieces, the cheapest first, attacks in turn."""
    for budget in sorted(options.budgets):
        for seed in options.seeds:
            for start in range(options.first, options.first + options.images, options.batch):
                for defence in options.defences:
                    random = defence != "resnet-at"
                    for attack in options.attacks:
                        if attack != PUBLIC and ATTACKS[attack](budget, random) is None:
                            continue
                        stop = min(start + options.batch, options.first + options.images)
                        whole = 0 if attack == "standard" else budget
                        judges = options.judges if random else 1
                        values = (defence, attack, whole, seed, start, stop, judges)
                        yield dict(zip(KEY, values, strict=True))


def measured(piece: Row, model: nn.Module, x: Tensor, y: Tensor) -> Row:
    span = slice(piece["start"], piece["stop"])
    x, y = x[span], y[span]
    seeds = tuple(mix(piece["seed"], index) for index in range(piece["start"], piece["stop"]))
    began = time.perf_counter()
    with metered() as calls:
        found = adversarial(model, x, y, piece["attack"], piece["budget"], seeds)
    seconds = (time.perf_counter() - began) / len(x)
    assert (found - x).abs().amax() <= THREAT.eps + 1e-6  # the difference of two float32 images is rounded
    judged = right(model, found, y, sample_seeds(seeds, EVALUATION, piece["judges"]))
    shares = [count / piece["judges"] for count in judged]
    return {**piece, "right": shares, "seconds": seconds, "calls": {key: n / len(x) for key, n in calls.items()}}


def read(path: Path) -> dict[tuple[Any, ...], Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    rows = ({**json.loads(line), "line": i} for i, line in enumerate(lines) if line.endswith("}"))
    return {tuple(row[key] for key in KEY): row for row in rows}


def run(options: argparse.Namespace) -> None:
    x, y = samples(options.first + options.images)
    made = functools.cache(lambda name: DEFENCES[name]())
    done = read(options.out)
    pieces = {tuple(piece.values()): piece for piece in planned(options)}
    left = {key: piece for key, piece in pieces.items() if key not in done}
    weight = {key: max(piece["budget"], 20) * (piece["stop"] - piece["start"]) for key, piece in left.items()}
    began, spent = time.perf_counter(), 0
    for key, piece in left.items():
        row = measured(piece, made(piece["defence"]), x, y)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        spent += weight[key]
        rest = (time.perf_counter() - began) / spent * (sum(weight.values()) - spent)
        what = " ".join(str(piece[name]) for name in ("defence", "attack", "budget", "seed", "start"))
        accuracy = sum(row["right"]) / len(row["right"])
        print(f"{what}: {accuracy:.3f}, {row['seconds']:.1f} s per image; about {duration(rest)} left", file=sys.stderr)


def interval(values: np.ndarray) -> str:
    """The mean of one number per image, with its 95 % bootstrap interval."""
    low, high = interval_of(values)
    return f"{values.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def interval_of(values: np.ndarray) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean of one number per image."""
    chosen = np.random.default_rng(0).integers(0, len(values), (5000, len(values)))
    low, high = np.percentile(values[chosen].mean(1), [2.5, 97.5])
    return float(low), float(high)


def table(rows: list[Row]) -> Iterator[str]:
    """One line per defence, budget and attack."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["defence"], row["budget"], row["attack"]), []).append(row)
    yield "| defence | budget | attack | images × seeds | accuracy left | minus strong | gradients | time / strong |"
    yield "|---|---|---|---|---|---|---|---|"
    for (defence, budget, attack), group in sorted(groups.items()):
        own, strong = by_image(group), groups.get((defence, budget, "strong"), [])
        left = interval(np.array([np.mean(list(v.values())) for v in own.values()])).replace("+", "")
        against = (
            ("", "") if attack == "strong" or not strong else (difference(own, by_image(strong)), ratio(group, strong))
        )
        size = sum(len(row["right"]) for row in group)
        gradients = sum(_gradients(row["calls"]) * len(row["right"]) for row in group) / size
        count = f"{len(own)} × {len({row['seed'] for row in group})}"
        yield f"| {defence} | {budget} | {attack} | {count} | {left} | {against[0]} | {gradients:.0f} | {against[1]} |"


def _gradients(calls: dict[str, float]) -> float:
    """Gradients of the network per image, or of the classifier where there is no network."""
    return calls["network_gradient"] or calls["classifier_gradient"]


def difference(own: dict[int, dict[int, float]], strong: dict[int, dict[int, float]]) -> str:
    apart = differences(own, strong)
    return interval(apart) if len(apart) else ""


def differences(own: dict[int, dict[int, float]], strong: dict[int, dict[int, float]]) -> np.ndarray:
    """The accuracy left minus that of `strong`, paired by image and seed, its mean over seeds for each image."""
    apart: dict[int, list[float]] = {}
    for image, seed in [(i, s) for i in own for s in own[i] if s in strong.get(i, {})]:
        apart.setdefault(image, []).append(own[image][seed] - strong[image][seed])
    return np.array([np.mean(v) for v in apart.values()])


def ratio(group: list[Row], strong: list[Row]) -> str:
    """The time that the attack took, in that of `strong` on the same images with the same seeds, taken in turn."""
    place = ("seed", "start", "stop")
    base = {tuple(row[key] for key in place): row for row in strong}
    pairs = [(row, base[key]) for row in group if (key := tuple(row[k] for k in place)) in base]
    both = [(own["seconds"], other["seconds"]) for own, other in pairs if abs(own["line"] - other["line"]) <= TURN]
    return f"{sum(a for a, _ in both) / sum(b for _, b in both):.2f}" if both else ""


def by_image(group: list[Row]) -> dict[int, dict[int, float]]:
    """The accuracy left of each image, by seed."""
    found: dict[int, dict[int, float]] = {}
    for row in group:
        for offset, share in enumerate(row["right"]):
            found.setdefault(row["start"] + offset, {})[row["seed"]] = share
    return found


def main() -> None:
    options = parse()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(options.threads)
    if not options.table:
        run(options)
    print("\n".join(table(list(read(options.out).values()))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in {"images": 64, "first": 0, "batch": 16, "judges": 64, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--defences", nargs="+", choices=DEFENCES, default=list(DEFENCES))
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS, PUBLIC], default=[*ATTACKS, PUBLIC])
    parser.add_argument("--budgets", nargs="+", type=int, default=[20, 40, 80, 160, 640], help="gradients per image")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; a piece that is there is not run again")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    return parser.parse_args()


if __name__ == "__main__":
    main()

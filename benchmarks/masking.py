"""Signs of masked gradients in a defence: what white-box, stronger, weaker and unbounded attackers leave of it.

    python benchmarks/masking.py [--defence cifar10-robust] [--images 128] [--out runs/masking] [--threads 1]
                                 [--siblings cifar10-resnet-at cifar10-diffpure-at]
                                 [--score NAME-OR-FILE --classifier NAME-OR-FILE --like NAME --t-star 0.1]

Where gradients lead an attack, it leaves no more images than one that has none (Square) or that was made for another
model (the siblings), more steps and more EOT samples change little, and without a budget nothing is left (Athalye et
al. 2018; Carlini et al. 2019). An audit holds the gradient of eight images against finite differences first. The images
are the first embedded CIFAR-10 test images, the threat is ℓ∞ 8/255, seed 0. Every row is an evaluation of its own under
`--out`, which goes on where it was stopped. Prints how many images are correct by one draw, by the average of ten
and by all ten. With `--score` and `--classifier`, of which one may be a file of weights, the defence is one-step
purification at `--t-star` with these two, and `--defence` only names its folder.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import diffpure as dp
from diffpure.attacks import Attack
from diffpure.attacks.base import Model
from diffpure.attacks.compose import Transfer
from diffpure.errors import InputError

RULES = ["one-shot", "average of 10", "worst of 10"]
BOUNDED, UNBOUNDED = dp.Linf(8 / 255), dp.Linf(1.0)
ATTACKS: dict[str, tuple[Attack, dp.Linf]] = {
    "strong": (dp.STRONG, BOUNDED),
    "four classes": (dp.MomentumPGD(loss="difference", targets=4, iterations=20, antithetic=True), BOUNDED),
    "160 steps": (dp.strong(160), BOUNDED),
    "40 steps, EOT 4": (replace(dp.strong(40), eot=dp.EOT(4)), BOUNDED),
    "Square, 300 queries": (dp.Square(queries=300), BOUNDED),
    "no budget": (dp.strong(40), UNBOUNDED),
}


def sibling(name: str) -> Attack:
    """An attack of forty steps on another model of the package, a defence or a classifier."""
    try:
        model: Model = dp.load_defense(name)
    except InputError:
        model = dp.load_classifier(name)

    def part(_: Model) -> Model:
        return model

    part.__name__ = name
    return Transfer(attack=dp.strong(40), part=part)


def main() -> None:
    given = parse()
    torch.set_num_threads(given.threads)
    defence = made(given).with_gradient(dp.Backprop())
    images, labels = dp.samples(given.images)
    first = images[:8]
    print(f"audit of {len(first)} images: {dp.audit_gradient(defence, first, seeds=range(len(first)))}", flush=True)
    chosen = {**ATTACKS, **{f"transferred from {name}": (sibling(name), BOUNDED) for name in given.siblings}}
    print(f"\n{given.defence}, {given.images} images: correct by " + ", ".join(RULES), flush=True)
    for name, (attack, threat) in chosen.items():
        out = given.out / given.defence / name.replace(" ", "-")
        result = dp.evaluate(defence, images, labels, threat, attack, rules=RULES, batch=32, out=out, pictures=0)
        if name == "strong":
            print("  no attack:", counts(result, "clean"))
        print(f"  {name}:", counts(result, "minimum"), flush=True)


def made(given: argparse.Namespace) -> dp.Defense:
    """The defence that is named, or made of a score and a classifier."""
    if given.score is None:
        return dp.load_defense(given.defence)
    score = dp.load_score(given.score, like="cifar10-small" if Path(given.score).is_file() else None)
    classifier = dp.load_classifier(given.classifier, like=given.like if Path(given.classifier).is_file() else None)
    return dp.Defense(dp.Purifier(score, dp.OneShot(given.t_star)), classifier)


def counts(result: dp.Result, what: str) -> str:
    """How many images are correct under each rule, and the interval of each."""
    rates = (result.rate(what, rule) for rule in RULES)
    return ", ".join(f"{rate.correct:.0f} {rate}" for rate in rates)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defence", default="cifar10-robust")
    parser.add_argument("--score", help="a score for a defence of your own: a name, or weights like cifar10-small's")
    parser.add_argument("--classifier", default="cifar10-resnet", help="its classifier: a name, or a file of weights")
    parser.add_argument("--like", default="cifar10-resnet-at", help="what the classifier's weights belong to")
    parser.add_argument("--t-star", type=float, default=0.1)
    parser.add_argument("--siblings", nargs="*", default=["cifar10-resnet-at", "cifar10-diffpure-at"])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/masking"), help="a folder for the evaluations")
    return parser.parse_args()


if __name__ == "__main__":
    main()

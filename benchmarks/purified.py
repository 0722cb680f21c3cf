"""Accuracy of a classifier behind a score model by sampler and t*, clean and under a transferred AutoAttack.

    python benchmarks/purified.py [--score cifar10-small] [--classifier cifar10-resnet] [--images 1000] [--threads 2]

The images are the first N of CIFAR-10's test set that are not embedded samples. One draw an image; its seed, for the
purifier and for the attack, is its place in the test set. The attack is the standard AutoAttack (ℓ∞ 8/255, an image is
left alone once it is misclassified) on the undefended classifier: it does not know of the purifier. Attacked images and
predictions are kept, piece by piece, under the hashes of the weights, so that a killed run goes on and a changed
network begins anew. Prints a table with Wilson's 95 % intervals, and the lines of a card.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffpure.evaluation.describe import brief
from torch import Tensor, nn

import diffpure as dp
from diffpure.attacks import Suite
from diffpure.classifiers.load import load_classifier
from diffpure.data import cifar10, samples
from diffpure.diffusion.samplers import DDIM, Ancestral, FewStep, OneShot, ProbabilityFlow, ReverseSDE, Sampler
from diffpure.disk import home, write_whole
from diffpure.evaluation.rows import Rate
from diffpure.threats import Linf

THREAT = Linf(8 / 255)
PIECE = 100  # images attacked or purified together
SAMPLERS: dict[str, Callable[[float], Sampler]] = {
    "one-shot": lambda t: OneShot(t_star=t),
    "few-step": lambda t: FewStep(t_star=t),
    "five-step": lambda t: FewStep(t_star=t, steps=5, end=0.02),
    "ddim": lambda t: DDIM(t_star=t, steps=5),
    "ancestral": lambda t: Ancestral(t_star=t, steps=10),
    "ode": lambda t: ProbabilityFlow(t_star=t, steps=20),
    "sde": lambda t: ReverseSDE(t_star=t),
}


def held_out(images: int) -> Tensor:
    """The indices of the first test images that are not embedded samples, (images,)."""
    embedded = set(samples.indices().tolist())
    return torch.tensor([place for place in range(10_000) if place not in embedded][:images])


def fingerprint(model: nn.Module) -> str:
    """Eight digits of the hash of a model's weights."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:8]


def attacked(classifier: nn.Module, x: Tensor, y: Tensor, indices: Tensor, folder: Path) -> Tensor:
    """The images after AutoAttack on the bare classifier, from `folder` where an earlier run left them."""
    suite = Suite(attacks=dp.AUTOATTACK_STANDARD, skip_misclassified=True)
    pieces = []
    for rows in torch.arange(len(x)).split(PIECE):
        file = folder / f"{indices[rows[0]]}-{len(rows)}.pt"
        if not file.is_file():
            start = time.perf_counter()
            z = suite(classifier, x[rows], y[rows], THREAT, seeds=indices[rows])
            assert THREAT.size(z).max() <= THREAT.eps * (1 + 1e-6)
            data = io.BytesIO()
            torch.save(THREAT.apply(x[rows], z), data)
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, data.getvalue())
            print(f"# attacked {rows[-1] + 1} of {len(x)}, {time.perf_counter() - start:.0f} s", flush=True)
        pieces.append(torch.load(file, weights_only=True))
    return torch.cat(pieces)


class Predictions:
    """What was predicted so far, kept in one file: for each name the classes of the first images."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: dict[str, list[int]] = json.loads(file.read_text()) if file.is_file() else {}

    @torch.no_grad()
    def __call__(self, name: str, model: Callable[[Tensor, Tensor], Tensor], x: Tensor, indices: Tensor) -> Tensor:
        """The classes (N,) of the images x, whose seeds are their indices."""
        found = self.known.setdefault(name, [])
        for rows in torch.arange(len(found), max(len(found), len(x))).split(PIECE):
            if len(rows):
                found += model(x[rows], indices[rows]).argmax(1).tolist()
                self.file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self.file, json.dumps(self.known).encode())
        return torch.tensor(found[: len(x)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--score", default="cifar10-small")
    parser.add_argument("--classifier", default="cifar10-resnet")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--times", type=float, nargs="+", default=[0.05, 0.1, 0.15], help="the t* of every sampler")
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--on", nargs="+", choices=["clean", "autoattack"], default=["clean", "autoattack"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=home() / "runs" / "purified", help="for what is kept")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    score, classifier = dp.load_score(options.score), load_classifier(options.classifier)
    indices = held_out(options.images)
    test = cifar10.load("test")[indices]
    x, y = test.float(), test.labels
    folder = options.folder / f"{options.classifier}-{fingerprint(classifier)}"
    views = {"clean": x}
    if "autoattack" in options.on:
        views["autoattack"] = attacked(classifier, x, y, indices, folder / "autoattack")
    bare = Predictions(folder / "bare.json")
    behind = Predictions(folder / f"{options.score}-{fingerprint(score)}.json")

    rates: dict[str, Rate] = {}
    for view, images in views.items():
        predicted = bare(view, lambda piece, _: classifier(piece), images, indices)
        print(line(f"bare on {view}", rate(predicted, y)), flush=True)
    for name in options.samplers:
        for t_star in options.times:
            sampler = SAMPLERS[name](t_star)
            defence = dp.Defense(dp.Purifier(score, sampler), classifier)
            for view in options.on:
                key = brief(sampler) + ("" if view == "clean" else f" on {view}")
                rates[key] = rate(behind(key, defence, views[view], indices), y)
                print(line(key, rates[key]), flush=True)
    print(f"\n[{options.score}.purified]")
    for key, found in sorted(rates.items(), key=lambda item: " on " in item[0]):
        low, high = found.interval
        print(f'"{key}" = {{correct = {found.correct:.0f}, total = {len(x)}, interval = [{low:.4f}, {high:.4f}]}}')


def rate(predicted: Tensor, y: Tensor) -> Rate:
    return Rate(int((predicted == y).sum()), len(y))


def line(name: str, found: Rate) -> str:
    return f"{name:48} {found.correct:5.0f} of {found.total}  {found}"


if __name__ == "__main__":
    main()

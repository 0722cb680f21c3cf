"""What the card of a CIFAR-10 score model says: errors of the noise, and accuracy behind it by sampler and t*.

    python benchmarks/score_card.py [--score cifar10-small | FILE --like cifar10-small] [--images 1000] [--skip 0]
                                    [--classifier cifar10-resnet] [--samplers one-shot …] [--on clean autoattack]
                                    [--threads 1]

The images are the first N (after the first `--skip`) of CIFAR-10's test set that are not embedded samples (`diffpure
data fetch cifar10`). One evaluation sample per image; its seed, for the purifier and for the attack, is its
dataset index. The attack is the standard AutoAttack (ℓ∞ 8/255) on the undefended classifier, which knows nothing of the
purifier. Attacked images and counts are kept, piece by piece, under the hash of the weights: a killed run goes on, and
other weights begin anew. Prints the lines of a card, with Wilson's 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import diffpure as dp
from diffpure.attacks.presets import STANDARD_SUITE
from diffpure.data import cifar10, samples
from diffpure.disk import home, write_whole
from diffpure.models.identity import identify
from diffpure.results.rows import Rate
from diffpure.training.score import TIMES, epsilon_error

THREAT = dp.Linf(8 / 255)
PIECE = 100  # images attacked or purified together
SAMPLERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "one-shot": (dp.OneShot, {}),
    "ddim": (dp.DDIM, {"steps": 5}),
    "five-step": (dp.FewStep, {"steps": 5, "end": 0.02}),
    "few-step": (dp.FewStep, {}),
    "ancestral": (dp.Ancestral, {"steps": 10}),
    "ode": (dp.ProbabilityFlow, {"steps": 20}),
    "sde": (dp.ReverseSDE, {}),
}


def attacked(classifier: nn.Module, x: Tensor, y: Tensor, indices: Tensor, folder: Path) -> Tensor:
    """The images after AutoAttack on the undefended classifier, from `folder` where an earlier run left them."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    for rows in torch.arange(len(x)).split(PIECE):
        file = folder / f"{indices[rows[0]]}-{len(rows)}.safetensors"
        if not file.is_file():
            attack = STANDARD_SUITE.unsampled()
            z = attack(classifier, x[rows], y[rows], THREAT, seeds=tuple(indices[rows].tolist()))
            save_file({"x": THREAT.apply(x[rows], z)}, file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
            print(f"# attacked {rows[-1] + 1} of {len(x)}", flush=True)
        pieces.append(load_file(file)["x"])
    return torch.cat(pieces)


class Counts:
    """How many images of each piece were classified correctly, kept in one file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: dict[str, list[int]] = json.loads(file.read_text()) if file.is_file() else {}

    @torch.no_grad()
    def __call__(self, name: str, model: nn.Module, x: Tensor, y: Tensor, indices: Tensor) -> Rate:
        done = self.known.setdefault(name, [])
        pieces = list(torch.arange(len(x)).split(PIECE))
        for rows in pieces[len(done) :]:
            logits = model(x[rows], seeds=tuple(indices[rows].tolist()))
            done.append(int((logits.argmax(1) == y[rows]).sum()))
            write_whole(self.file, json.dumps(self.known).encode())
        return Rate(sum(done[: len(pieces)]), len(x))


def main() -> None:
    given = parse()
    torch.set_num_threads(given.threads)
    score, classifier = dp.load_score(given.score, like=given.like), dp.load_classifier(given.classifier)
    embedded = set(samples.indices().tolist())
    indices = torch.tensor([index for index in range(10_000) if index not in embedded])
    indices = indices[given.skip : given.skip + given.images]
    test = cifar10.load("test")[indices]
    x, y = test.float(), test.labels
    print(f"[{Path(given.score).stem}.epsilon_error]", flush=True)
    for t, error in epsilon_error(score, test, TIMES).items():
        print(f'"{t:g}" = {error:.5f}', flush=True)
    given.folder.mkdir(parents=True, exist_ok=True)
    views = {"clean": x}
    if "autoattack" in given.on:
        views["autoattack"] = attacked(classifier, x, y, indices, given.folder / identify(classifier)[:8])
    counts = Counts(given.folder / f"{identify(score)[:8]}-{identify(classifier)[:8]}-{given.skip}-{len(x)}.json")
    print(f"\n[{Path(given.score).stem}.purified]")
    for view in given.on:
        for name in given.samplers:
            for t_star in given.times:
                kind, fields = SAMPLERS[name]
                fields = {"t_star": t_star, **fields}
                key = f"{kind.__name__}({', '.join(f'{field}={value:g}' for field, value in fields.items())})"
                key += "" if view == "clean" else f" on {view}"
                model = dp.Defense(dp.Purifier(score, kind(**fields)), classifier)
                found = counts(key, model, views[view], y, indices)
                low, high = found.interval
                numbers = f"correct = {found.correct:.0f}, total = {len(x)}, interval = [{low:.4f}, {high:.4f}]"
                print(f'"{key}" = {{{numbers}}}', flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--score", default="cifar10-small")
    parser.add_argument("--like", help="the model that a file is read as")
    parser.add_argument("--classifier", default="cifar10-resnet", help="a name or a file")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--skip", type=int, default=0, help="begin so many images later")
    parser.add_argument("--times", type=float, nargs="+", default=[0.05, 0.1, 0.15], help="the t* of every sampler")
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--on", nargs="+", choices=["clean", "autoattack"], default=["clean", "autoattack"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=home() / "runs" / "score-card", help="for what is kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What purification keeps of photographs and brings back after an attack: top-1 accuracy of a classifier on ImageNet.

    python benchmarks/photographs.py FOLDER [--images 500] [--skip 0] [--threat "linf 4/255"] [--draws 1]
        [--views one both] [--samplers one-shot ddim few-step] [--recalibrate FOLDER] [--minutes 40] [--threads 2]
        [--out runs/photographs]

FOLDER holds validation images of ImageNet in any layout that the source `imagenet` reads. A random choice of them, the
same every time (`--skip N`: what comes after the first N of it), is cropped to 224 × 224 and attacked once, PGD-20 on
the undefended classifier, ℓ∞ 4/255 unless said; the same perturbations are then given to every purifier (a transfer
attack: it does not know of the purification, so what is printed is no robustness against an attacker who does).
Purifiers: photos-small with OneShot, DDIM in 5 steps and FewStep in 5 steps (1, 5 and 11 network calls per image) at
every t*; with `--draws N` the average of N draws decides, with `--views both` the classifier sees the horizontal flip
of an image, too (`dp.FlipAverage`), and with `--recalibrate FOLDER` it is recalibrated on 200 images of that folder
(`dp.recalibrate`).

A table of specs would attack again in every run, 20 gradients per image and purifier. Here images go in blocks through
the attack and all purifiers: after every block each purifier has been measured on the same images, every finished piece
is on the disk, and the same command goes on after a stop. `perturbations-*.safetensors` hold perturbations, no image.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

import diffpure as dp
from diffpure.data import imagenet
from diffpure.disk import write_whole
from diffpure.errors import InputError
from diffpure.models.identity import identify
from diffpure.noise import mix
from diffpure.results.rows import Rate
from diffpure.threats import threat_of

Model = nn.Module
Row = dict[str, Any]
BARE = "undefended"
VIEWS = {"one": "", "both": ", with the flip"}
SAMPLERS = {
    "one-shot": lambda t: dp.OneShot(t),
    "ddim": lambda t: dp.DDIM(t, steps=5),
    "few-step": lambda t: dp.FewStep(t, steps=5),
}


def defences(score: dp.ScoreModel, classifier: Model, options: argparse.Namespace) -> dict[str, Model]:
    """The undefended classifier and a defence for each number of draws, sampler and t*, cheapest first."""
    seen = {"one": classifier, "both": dp.FlipAverage(classifier)}
    found: dict[str, Model] = {BARE + VIEWS[view]: seen[view] for view in options.views}
    for draws, name, t_star, view in product(sorted(options.draws), options.samplers, options.t_stars, options.views):
        model = dp.Defense(dp.Purifier(score, SAMPLERS[name](t_star)), seen[view], draws=draws)
        title = model.purifier.title + (f", average of {draws} draws" if draws > 1 else "") + VIEWS[view]
        if options.recalibrate:
            found[f"{title}, recalibrated"] = Recalibrated(model, options.recalibrate)
        else:
            found[title] = model
    return found


class Recalibrated(nn.Module):
    """A defence whose classifier is recalibrated on the first 200 images of a folder, once it is needed."""

    def __init__(self, model: dp.Defense, folder: Path) -> None:
        super().__init__()
        self.given, self.folder = model, folder

    @functools.cached_property
    def model(self) -> dp.Defense:
        return dp.recalibrate(self.given, imagenet.read(self.folder).batch(list(range(200)))[0])

    def forward(self, x: Tensor, seeds: list[int]) -> Tensor:
        return self.model(x, seeds)


@torch.no_grad()
def classes(model: Model, x: Tensor, indices: list[int], tag: int) -> list[int]:
    """The class of each image, purified with noise that depends on its index and the tag alone."""
    seeds = [mix(index, tag) for index in indices]
    logits = model(x, seeds) if isinstance(model, dp.Defense | Recalibrated) else model(x)
    found: list[int] = logits.argmax(1).tolist()
    return found


class Rows:
    """Rows on the disk, one per image and defence; a piece that a kill cut short is measured again."""

    def __init__(self, folder: Path, header: Row) -> None:
        self.file = folder / "rows.jsonl"
        self.done = {(row["image"], row["defence"]): row for row in _read(self.file, header)}
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{"header": header}, *self.done.values()]
        write_whole(self.file, "".join(json.dumps(each) + "\n" for each in lines).encode())

    def add(self, rows: list[Row]) -> None:
        """Append rows and flush them."""
        with self.file.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        self.done |= {(row["image"], row["defence"]): row for row in rows}


def _read(file: Path, header: Row) -> Iterator[Row]:
    """The rows of an earlier call with the same header; a line that was cut short ends them."""
    if not file.is_file():
        return
    first, *lines = file.read_text().splitlines()
    if json.loads(first) != {"header": header}:
        raise InputError(f"{file} holds rows of other models, images or settings; give another --out.")
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            return


def measure(options: argparse.Namespace) -> list[Row]:
    """Attack and purify block by block, until all is done or the time is over; all rows."""
    began = time.monotonic()
    classifier = dp.load_classifier(options.classifier)
    score = dp.load_score(options.score, like=options.like)
    models = defences(score, classifier, options)
    data = imagenet.read(options.data)
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = chosen[options.skip : options.skip + options.images]
    threat, attack = threat_of(options.threat), dp.PGD(iterations=options.iterations)
    header = {
        "score": identify(score), "classifier": identify(classifier), "threat": str(threat), "attack": attack.title,
        "available": len(data), "block": options.block,
    }  # fmt: skip
    rows = Rows(options.out, header)
    for start in range(0, len(chosen), options.block):
        indices = chosen[start : start + options.block]
        missing = [name for name in models if any((i, name) not in rows.done for i in indices)]
        if not missing:
            continue
        x, y = data.batch(indices)
        file = options.out / f"perturbations-{options.skip + start:05d}.safetensors"
        if not file.is_file():
            z = attack(classifier, x, y, threat, seeds=[mix(index, 0) for index in indices])
            write_whole(file, save({"z": z.contiguous(), "indices": torch.tensor(indices)}))
        kept = load_file(file)
        if kept["indices"].tolist() != indices:
            raise InputError(f"{file} holds perturbations of other images; give another --out.")
        attacked = threat.apply(x, kept["z"])
        for name in missing:
            found = zip(indices, y.tolist(), classes(models[name], x, indices, 1),
                        classes(models[name], attacked, indices, 2), strict=True)  # fmt: skip
            rows.add([{"image": i, "label": k, "defence": name, "clean": a, "attacked": b} for i, k, a, b in found])
            minutes = (time.monotonic() - began) / 60
            print(f"{minutes:6.1f} min  images {start}–{start + len(indices) - 1}  {name}", flush=True)
            if options.minutes is not None and minutes > options.minutes:
                return list(rows.done.values())
    return list(rows.done.values())


def table(rows: list[Row]) -> list[str]:
    """One line per defence: accuracy without attack and under the transferred one."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        counts[row["defence"], "images"] += 1
        for key in ("clean", "attacked"):
            counts[row["defence"], key] += row[key] == row["label"]
    lines = ["| defence | images | clean | transferred attack |", "|---|---|---|---|"]
    for name in dict.fromkeys(row["defence"] for row in rows):
        images = counts[name, "images"]
        lines.append(f"| {name} | {images} | {Rate(counts[name, 'clean'], images)} | "
                     f"{Rate(counts[name, 'attacked'], images)} |")  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of validation images of ImageNet")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--skip", type=int, default=0, help="images of the random choice that come before")
    parser.add_argument("--block", type=int, default=25, help="images that go through everything together")
    parser.add_argument("--threat", default="linf 4/255")
    parser.add_argument("--iterations", type=int, default=20, help="of the attack")
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--t-stars", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.15])
    parser.add_argument("--draws", type=int, nargs="+", default=[1], help="of the noise, whose average logits decide")
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=["one"], help="both: each image and its flip")
    parser.add_argument("--recalibrate", type=Path, help="folder of other images to recalibrate on")
    parser.add_argument("--score", default="photos-small")
    parser.add_argument("--like", help="the embedded model that a file is read as")
    parser.add_argument("--classifier", default="efficientnet_lite_pytorch:efficientnet-lite0")
    parser.add_argument("--minutes", type=float, help="stop after the piece that is under way then")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/photographs"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = measure(options)
    about = f"Accuracy [95 % interval]; transferred attack: PGD on the undefended classifier, {options.threat}."
    text = "\n".join([about, "", *table(rows)])
    write_whole(options.out / "table.md", (text + "\n").encode())
    print(text)


if __name__ == "__main__":
    main()

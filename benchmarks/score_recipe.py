"""What each choice in the recipe of `cifar10-small` buys: its network from scratch, with one choice changed at a time.

    python benchmarks/score_recipe.py --out FILE [--steps 400] [--variants recipe without-flips …] [--threads 1]
                                      [--precision auto] [--table]

Every variant sees the same number of images with the same seed, and is measured as E|ε̂ - ε|² per pixel on the 500
training images that nothing trains on. Averages of the weights with several decays run beside each training, so that
one run says what their length buys. A variant is one line of the file, flushed; one that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from diffpure.data.cifar10 import Images, load
from diffpure.scores.small import SmallUNet
from diffpure.training.loop import Schedule, Workers, averaged, cosine, generator
from diffpure.training.optimisers import OPTIMISERS
from diffpure.training.precision import settle
from diffpure.training.recipes import HELD_OUT
from diffpure.training.score import ScoreConfig, drawn, epsilon_error, epsilon_loss

TIMES: Final = (0.01, 0.05, 0.1, 0.2)
DECAYS: Final = (0.0, 0.9, 0.97, 0.99, 0.995, 0.999)
SHIFT: Final = 2  # pixels


def shifted(images: Images) -> Images:
    """The images moved by up to two pixels each way, as often as not; edges are continued by their reflection."""
    random = generator(0, 0, 9)
    pad = F.pad(images.pixels.float(), (SHIFT,) * 4, mode="reflect").to(torch.uint8)
    size = images.pixels.shape[-1]
    out = images.pixels.clone()
    for i, (down, right) in enumerate(torch.randint(2 * SHIFT + 1, (len(images), 2), generator=random).tolist()):
        if i % 2:
            out[i] = pad[i, :, down : down + size, right : right + size]
    return Images(out, images.labels)


class Variant(NamedTuple):
    """A change of the recipe: fields of its configuration, its schedule, and what is done to the images."""

    changes: dict[str, Any]
    schedule: Schedule = cosine()
    images: Callable[[Images], Images] = lambda images: images


VARIANTS: Final = {
    "recipe": Variant({}),
    "constant-rate": Variant({}, cosine(end=1.0)),
    "without-flips": Variant({"flip": False}),
    "small-shifts": Variant({}, images=shifted),
    "times-to-0.15": Variant({"t_max": 0.15}),
    "times-evenly": Variant({"power": 1.0}),
    "epsilon-weighting": Variant({"weighting": "epsilon"}),
    "muon": Variant({"optimiser": "muon", "rate": 1e-2}),
}


def measured(variant: Variant, options: argparse.Namespace, training: Images) -> dict[str, dict[str, float]]:
    """The errors by decay and time."""
    config = replace(ScoreConfig(), **variant.changes)
    seen, held_out = variant.images(training[:-HELD_OUT]), training[-HELD_OUT:]
    torch.manual_seed(config.seed)
    model = SmallUNet().train()
    optimiser = OPTIMISERS[config.optimiser](model, config.rate)
    rates = [group["lr"] for group in optimiser.param_groups]
    averages = {decay: {k: v.detach().clone() for k, v in model.state_dict().items()} for decay in DECAYS}
    batch = partial(drawn, seen, config)

    def loss(replica: SmallUNet, x0: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        predicted = replica.epsilon(replica.sde.diffuse(x0, t, eps), t)
        return epsilon_loss(replica.sde, t, predicted, eps, config.weighting)

    with Workers(model, loss, options.threads, settle(options.precision)) as workers:
        for step in track(range(options.steps), "training", transient=True):
            factor = variant.schedule(step / options.steps)
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            workers.gradient(*batch(step))
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimiser.step()
            for decay, average in averages.items():
                share = 1 - min(decay, (step + 1) / (step + 11))
                for name, value in model.state_dict().items():
                    average[name].lerp_(value, share)
    errors = {}
    for decay, average in averages.items():
        with averaged(model, average):
            errors[f"{decay:g}"] = {f"{t:g}": round(e, 5) for t, e in epsilon_error(model, held_out, TIMES).items()}
    return errors


def table(rows: dict[str, dict[str, dict[str, float]]], decay: str) -> Iterator[str]:
    """The errors of each variant with one average, and of the recipe with all of them."""
    yield "| variant | average | " + " | ".join(f"t = {t:g}" for t in TIMES) + " |"
    yield "|---" * (2 + len(TIMES)) + "|"
    for name, errors in rows.items():
        for kept in errors if name == "recipe" else (decay,):
            yield f"| {name} | {kept} | " + " | ".join(f"{errors[kept][f'{t:g}']:.4f}" for t in TIMES) + " |"


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    rows = {row["variant"]: row["errors"] for row in map(json.loads, lines) if row["steps"] == options.steps}
    if not options.table:
        training = load("train")
        for name in (name for name in options.variants if name not in rows):
            rows[name] = measured(VARIANTS[name], options, training)
            with options.out.open("a") as file:
                file.write(json.dumps({"variant": name, "steps": options.steps, "errors": rows[name]}) + "\n")
    print("\n".join(table(rows, options.decay)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; a variant that is there is not run again")
    parser.add_argument("--steps", type=int, default=400, help="of 64 images")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--decay", default="0.99", help="the average that the table shows")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    return parser.parse_args()


if __name__ == "__main__":
    main()

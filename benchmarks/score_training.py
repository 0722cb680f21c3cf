"""ε-error by t of our small score network against plain diffusers UNets of equal multiply-adds, trained alike.

    python benchmarks/score_training.py [--examples 60000] [--pilot 6000] [--threads 2] [--out scores.json]

    ours    SmallUNet: one block a level, skips added, preconditioned, conditioned on the noise level
    ddpm    diffusers' UNet2DModel in the shape of google/ddpm-cifar10-32 (ε-prediction, time embedding, attention at
            16×16) at an eighth of its width, which is where its multiply-adds equal ours
    wide    UNet2DModel with one block a level and widths that grow downwards: our multiply-adds, twice our parameters

All see the same images in the same order with the same times and noise, the same loss, optimiser, schedule, clipping
and average (`train_score`). The learning rate is each network's own: each of --rates is tried for --pilot images, and
the better one on the last 500 training images (mean ε-error over the times) is trained for --examples. The table is
of the first 500 test images that are not embedded samples. Killed at any moment, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from networks import medians, unet
from purified import held_out
from rich.console import Console

from diffpure.data.cifar10 import Images, load
from diffpure.diffusion.score import EpsilonScore
from diffpure.disk import home, write_whole
from diffpure.scores.hf import HFScore, unet2d
from diffpure.scores.small import SmallUNet
from diffpure.training.cost import multiply_adds, parameters
from diffpure.training.recipes import HELD_OUT
from diffpure.training.score import TIMES, ScoreConfig, epsilon_error, train_score


def plain(widths: Sequence[int], blocks: int, attention: int) -> EpsilonScore:
    network = unet2d(unet(32, list(widths), blocks, attention, norm_num_groups=8))
    return HFScore(network.to(memory_format=torch.channels_last), size=32)


NETWORKS: dict[str, Callable[[], EpsilonScore]] = {
    "ours": SmallUNet,
    "ddpm": lambda: plain((16, 32, 32, 32), blocks=2, attention=1),
    "wide": lambda: plain((16, 32, 64, 112), blocks=1, attention=2),
}


def trained(name: str, config: ScoreConfig, training: Images, folder: Path) -> EpsilonScore:
    """The network with the averaged weights of its run, which is begun, continued or found finished in `folder`."""
    torch.manual_seed(config.seed)
    model = NETWORKS[name]()
    own = folder / f"{name}-{config.rate:g}-{config.decay:g}-{config.examples}"
    console = Console(stderr=True)
    console.print(own.name, highlight=False)
    state = train_score(model, training[:-HELD_OUT], config, training[-HELD_OUT:], own, console)
    model.load_state_dict(state)
    return model.eval()


def milliseconds(models: dict[str, EpsilonScore], rounds: int, batch: int = 32) -> dict[str, dict[str, float]]:
    """Milliseconds an image of a score call and of a training step's gradient, taken in turn."""
    x, t = torch.randn(batch, 3, 32, 32), torch.full((batch,), 0.1, dtype=torch.float64)

    def call(model: EpsilonScore) -> Callable[[], object]:
        return torch.no_grad()(lambda: model(x, t))

    def step(model: EpsilonScore) -> Callable[[], object]:
        weights = list(model.parameters())
        return lambda: torch.autograd.grad(model.epsilon(x, t).square().mean(), weights)

    calls = medians({name: call(model) for name, model in models.items()}, rounds)
    steps = medians({name: step(model) for name, model in models.items()}, rounds)
    return {name: {"call": 1e3 * calls[name] / batch, "step": 1e3 * steps[name] / batch} for name in models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=60_000, help="images that each network sees")
    parser.add_argument("--pilot", type=int, default=6_000, help="images to choose the learning rate with")
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3])
    parser.add_argument("--decay", type=float, default=0.99, help="of the average: a short run must forget its start")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="of the timing")
    parser.add_argument("--folder", type=Path, default=home() / "runs" / "score-training", help="for checkpoints")
    parser.add_argument("--out", type=Path, default=Path("score_training.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    training, test = load("train"), load("test")
    test = test[held_out(500)]
    config = ScoreConfig(examples=options.examples, decay=options.decay, threads=options.threads)
    report, models = {}, {}
    for name in options.networks:
        pilots = {}
        for rate in options.rates if len(options.rates) > 1 else ():
            pilot = trained(name, replace(config, rate=rate, examples=options.pilot), training, options.folder)
            pilots[rate] = mean(epsilon_error(pilot, training[-HELD_OUT:]).values())
        rate = min(pilots, key=lambda rate: pilots[rate]) if pilots else options.rates[0]
        model = models[name] = trained(name, replace(config, rate=rate), training, options.folder)
        report[name] = {
            "parameters": parameters(model),
            "multiply_adds": multiply_adds(model, torch.zeros(1, 3, 32, 32), torch.tensor([0.1])),
            "rate": rate,
            "pilots": pilots,
            "epsilon_error": {f"{t:g}": error for t, error in epsilon_error(model, test).items()},
        }
    for name, times in milliseconds(models, options.rounds).items():
        report[name]["milliseconds_an_image"] = times
    about = {
        "examples": options.examples,
        "pilot": options.pilot,
        "decay": options.decay,
        "seed": config.seed,
        "test_images": len(test),
    }
    write_whole(options.out, json.dumps({**about, "networks": report}, indent=1).encode())
    print(table(report, options.examples))


def table(report: dict[str, dict], examples: int) -> str:
    """E|ε̂ - ε|² a pixel by t, a column a network."""
    lines = [f"{examples} images each", "t        " + "".join(f"{name:>10}" for name in report)]
    lines += [
        f"{t:<9g}" + "".join(f"{each['epsilon_error'][f'{t:g}']:10.5f}" for each in report.values()) for t in TIMES
    ]
    rows = {
        "Mparam": lambda each: each["parameters"] / 1e6,
        "MMAC": lambda each: each["multiply_adds"] / 1e6,
        "rate": lambda each: each["rate"],
        "ms call": lambda each: each["milliseconds_an_image"]["call"],
        "ms step": lambda each: each["milliseconds_an_image"]["step"],
    }
    lines += [f"{row:<9}" + "".join(f"{value(each):10.4g}" for each in report.values()) for row, value in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

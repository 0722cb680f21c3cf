"""AutoAttack for random defences against the public package's, on one purified model: survivors, wall time, ratio.

    python benchmarks/attacks.py [--images 16] [--iterations 10] [--draws 20] [--steps 4] [--rounds 3] [--threads 1]

Strength and speed: digits behind a diffusion whose network is trained here (half a minute). Both attack the same
images for the same number of iterations and draws, so with the same number of score calls but for the clean image;
they take turns within each round and medians are compared. The judge is the mean of 100 fresh draws, and the mean
number of right images over 32 single draws. Speed alone: the package's 32 x 32 network, random weights, by batch.

Ours asks for all draws of all images in one call; the public package loops over draws. So the ratio is large where a
call is too small to use the machine well, and tends to 1 where one draw of all images already fills it.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from pyautoattack import AutoAttack
from sklearn.datasets import load_digits
from torch import Tensor, nn

import diffpure as dp
from diffpure.attacks import look, margin
from diffpure.attacks.losses import MARGIN
from diffpure.scores.small import SmallUNet

JUDGE = 1 << 40


class Counted(nn.Module):
    """A model that counts the images it was shown."""

    def __init__(self, model: dp.Defense) -> None:
        super().__init__()
        self.model, self.shown = model, 0
        self.stochastic = model.stochastic

    def forward(self, x: Tensor, seeds: object = None) -> Tensor:
        self.shown += len(x)
        return self.model(x, seeds)


def digits() -> tuple[Tensor, Tensor]:
    """All digits (1797, 1, 8, 8) in [0, 1] and their labels; the first 1500 are for training."""
    data = load_digits()
    return torch.tensor(data.images / 16, dtype=torch.float32)[:, None], torch.tensor(data.target)


def held_out(images: int) -> tuple[Tensor, Tensor]:
    x, y = digits()
    return x[1500 : 1500 + images], y[1500 : 1500 + images]


def digits_defence(steps: int) -> dp.Defense:
    """A score network and a classifier, trained here."""
    x, y = digits()
    score = SmallUNet(widths=(32, 64), channels=1, size=8)
    classifier = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10))

    def denoise(batch: Tensor) -> Tensor:
        t, noise = torch.rand(len(batch), dtype=torch.float64) * 0.3 + 1e-3, torch.randn(len(batch), 1, 8, 8)
        return (score.epsilon(score.sde.diffuse(2 * x[batch] - 1, t, noise), t) - noise).square().mean()

    def classify(batch: Tensor) -> Tensor:
        return F.cross_entropy(classifier(x[batch] + 0.1 * torch.randn_like(x[batch])), y[batch])

    fit(score, denoise, 800)
    fit(classifier, classify, 300)
    defence = dp.Defense(dp.Purifier(score, dp.ReverseSDE(t_star=0.1, steps=steps)), classifier.requires_grad_(False))
    return defence


def fit(net: nn.Module, loss: Callable[[Tensor], Tensor], steps: int) -> None:
    adam = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(steps):
        adam.zero_grad()
        loss(torch.randint(1500, (64,))).backward()
        adam.step()


def public(model: nn.Module, x: Tensor, y: Tensor, loss: str, eps: float, iterations: int, draws: int) -> Tensor:
    """The public package's APGD on every image, as its rand version runs it."""
    suite = AutoAttack(model, norm="Linf", eps=eps, version="rand", device="cpu", seed=0)
    apgd = suite.apgd
    apgd.n_iter, apgd.eot_iter, apgd.loss = iterations, draws, loss
    # Its checkpoints, which it computes once for 100 iterations.
    apgd.n_iter_2, apgd.n_iter_min, apgd.size_decr = (max(int(share * iterations), 1) for share in (0.22, 0.06, 0.03))
    apgd.init_hyperparam(x)
    torch.manual_seed(0)
    return apgd.attack_single_run(x, y)[3]  # the last misclassified iterate: what it returns as adversarial


def ours(model: nn.Module, x: Tensor, y: Tensor, loss: str, eps: float, iterations: int, draws: int) -> Tensor:
    attack = dp.APGD(loss=loss, iterations=iterations, eot=dp.EOT(draws, rows=512))
    return dp.Linf(eps).apply(x, attack(model, x, y, dp.Linf(eps), seeds=range(len(x))))


CONTESTANTS = {"public": public, "ours": ours}


def judged(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, float]:
    """Survivors by the mean of 100 draws, and by draws one by one (in images)."""
    seeds = tuple(range(len(x)))
    mean = look(model, x, y, MARGIN, dp.EOT(100, "logits"), seeds, JUDGE).logits
    single = [look(model, x, y, MARGIN, dp.EOT(1), seeds, JUDGE + d).logits for d in range(1, 33)]
    return int((margin(mean, y) <= 0).sum()), sum((margin(s, y) <= 0).float().sum().item() for s in single) / 32


def race(
    model: dp.Defense, x: Tensor, y: Tensor, loss: str, eps: float, arguments: argparse.Namespace
) -> dict[str, tuple]:
    """Both contestants in turn, `rounds` times: median seconds, images shown, adversarial images."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    last = {}
    for _ in range(arguments.rounds):
        for name, attack in CONTESTANTS.items():
            counted = Counted(model)
            begin = time.perf_counter()
            adversarial = attack(counted, x, y, loss, eps, arguments.iterations, arguments.draws)
            seconds[name].append(time.perf_counter() - begin)
            last[name] = counted.shown, adversarial
    return {name: (statistics.median(seconds[name]), *last[name]) for name in CONTESTANTS}


def main() -> None:
    arguments = parse()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = digits_defence(arguments.steps)
    x, y = held_out(arguments.images)
    whole, single = judged(model, x, y)
    print(f"digits, {len(x)} images, unattacked: {whole} right by the mean of 100 draws, {single:.1f} by single draws")
    for loss in ("ce", "dlr"):
        found = race(model, x, y, loss, 0.15, arguments)
        for name, (seconds, shown, adversarial) in found.items():
            whole, single = judged(model, adversarial, y)
            calls = shown * arguments.steps
            print(f"apgd-{loss} {name:7} {seconds:7.2f} s  {calls} score calls  survivors {whole} / {single:.1f}")
        print(f"apgd-{loss} ratio   {found['public'][0] / found['ours'][0]:.2f} times faster")
    compare_samplers(model, arguments)
    score = SmallUNet().to(memory_format=torch.channels_last)
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)).requires_grad_(False)
    model = dp.Defense(dp.Purifier(score, dp.ReverseSDE(t_star=0.1, steps=2)), classifier)
    arguments.iterations = 2
    for batch in (1, 2, 4, 8):
        x = torch.rand(batch, 3, 32, 32)
        found = race(model, x, model.classifier(x).argmax(1), "ce", 8 / 255, arguments)
        seconds = {name: found[name][0] for name in CONTESTANTS}
        ratio = seconds["public"] / seconds["ours"]
        times = ", ".join(f"{name} {took:.2f} s" for name, took in seconds.items())
        print(f"32 x 32, {batch} images: {times}, {ratio:.2f} times faster")


def compare_samplers(model: dp.Defense, arguments: argparse.Namespace) -> None:
    """VP-ODE against VP-SDE, both with exact gradients (the paper, with its adjoint, found the ODE far weaker)."""
    x, y = held_out(3 * arguments.images)
    for name, sampler in {"VP-SDE": dp.ReverseSDE, "VP-ODE": dp.ProbabilityFlow}.items():
        purifier = dp.Purifier(model.purifier.score, sampler(t_star=0.1, steps=arguments.steps))
        defence = dp.Defense(purifier, model.classifier)
        draws = arguments.draws if defence.stochastic else 1
        rows = []
        for loss in ("ce", "dlr"):
            adversarial = ours(defence, x, y, loss, 0.15, 2 * arguments.iterations, draws)
            rows.append(f"apgd-{loss} {judged(defence, adversarial, y)[1]:.1f}")
        print(f"{name}: clean {judged(defence, x, y)[1]:.1f} of {len(x)}, single draws; survivors {', '.join(rows)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    defaults = {"images": 16, "iterations": 10, "draws": 20, "steps": 4, "rounds": 3, "threads": 1}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()

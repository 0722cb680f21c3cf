"""How often the gradient audit fails on right gradients and passes wrong ones, by architecture.

    python benchmarks/audit_alarms.py [--audits 30] [--images 2] [--directions 4] [--only TEXT]

Each audit takes other embedded CIFAR-10 images and other seeds, one image where there is a purifier. The gradient is
plain autograd for classifiers and the exact mode for defences, so every failure of the first two columns is a false
alarm: of central differences with one step of 1e-7, and of the audit. The last column but one plants a gradient that is
1 % too long and counts how often the audit finds it. Networks with random weights have their normalisation fitted to
the embedded images. One thread.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import diffpure as dp
from diffpure.audit import _generic
from diffpure.classifiers.small import small_vit, small_wrn
from diffpure.data.samples import samples
from diffpure.noise import Noise


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """A 3×3 convolution without bias."""
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


def unit(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Convolution, normalisation, ReLU."""
    return nn.Sequential(conv(inputs, outputs, stride), nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    """A residual block; `pre` puts normalisation and ReLU before the convolutions (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, pre: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm2d
        if pre:
            first, second = (norm(inputs), nn.ReLU(), conv(inputs, outputs, stride)), (norm(outputs), nn.ReLU())
            self.body = nn.Sequential(*first, *second, conv(outputs, outputs))
        else:
            self.body = nn.Sequential(unit(inputs, outputs, stride), conv(outputs, outputs), norm(outputs))
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.last = nn.Identity() if pre else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.skip(x) + self.body(x))
        return out


class Dense(nn.Module):
    """A layer of a DenseNet: its output is appended to its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), conv(inputs, growth))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def head(channels: int) -> list[nn.Module]:
    """Global mean, logits."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]


def resnet(*, pre: bool = False) -> nn.Module:
    """ResNet-20: three stages of three blocks, 16 to 64 channels."""
    widths, strides = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64), (1, 1, 1, 2, 1, 1, 2, 1, 1)
    blocks = [Residual(widths[i], widths[i + 1], strides[i], pre) for i in range(9)]
    return nn.Sequential(unit(3, 16), *blocks, *([nn.BatchNorm2d(64), nn.ReLU()] if pre else []), *head(64))


def densenet(growth: int = 12, depth: int = 6) -> nn.Module:
    """Three dense blocks with mean pooling between."""
    layers: list[nn.Module] = [conv(3, 16)]
    channels = 16
    for block in range(3):
        for _ in range(depth):
            layers.append(Dense(channels, growth))
            channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        if block < 2:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return nn.Sequential(*layers, *head(channels))


def vgg() -> nn.Module:
    """VGG-11 at a quarter of its width, with max-pooling."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 0, 32, 0, 64, 64, 0, 128, 128, 0, 128, 128, 0):
        layers.append(unit(channels, width) if width else nn.MaxPool2d(2))
        channels = width or channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


def fitted(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A network with random weights whose batch normalisation has seen the embedded images."""
    torch.manual_seed(seed)
    model = build().train()
    with torch.no_grad():
        for _ in range(20):
            model(samples(100)[0])
    return model.requires_grad_(False).eval()


def behind(score: str, classifier: nn.Module, sampler: dp.FewStep | dp.DDIM) -> nn.Module:
    """A defence with exact gradients."""
    return dp.Defense(dp.Purifier(dp.load_score(score), sampler), classifier)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-20, random": lambda: fitted(resnet),
    "PreAct ResNet-20, random": lambda: fitted(lambda: resnet(pre=True)),
    "DenseNet-24, random": lambda: fitted(densenet),
    "VGG-11 with max-pooling, random": lambda: fitted(vgg),
    "WRN-16-2, random": lambda: fitted(small_wrn),
    "ViT, random": lambda: fitted(small_vit),
    "`cifar10-resnet`": lambda: dp.load_classifier("cifar10-resnet"),
    "`cifar10-resnet-at`": lambda: dp.load_classifier("cifar10-resnet-at"),
    "`cifar10-vit-tiny`": lambda: dp.load_classifier("cifar10-vit-tiny"),
    "`FewStep`, one step, before `cifar10-resnet`": lambda: behind(
        "cifar10-small", dp.load_classifier("cifar10-resnet"), dp.FewStep(0.1, steps=1)
    ),
    "`DDIM`, two steps, before VGG-11": lambda: behind("cifar10-small", fitted(vgg), dp.DDIM(0.1, steps=2)),
    "`DDIM`, two steps, before ResNet-20": lambda: behind("cifar10-small", fitted(resnet), dp.DDIM(0.1, steps=2)),
}


COLUMNS = (
    "false alarms, one step of 1e-7",
    "false alarms, this audit",
    "largest error",
    "1 % found",
    "CPU seconds per audit",
)


class TooLong(nn.Module):
    """A model whose gradient is 1 % too long."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.stochastic = getattr(model, "stochastic", False)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        logits: Tensor = self.model(1.01 * x - 0.01 * x.detach(), **options)
        return logits


def one_step(model: nn.Module, x: Tensor, seeds: range, directions: int, h: float = 1e-7) -> float:
    """The relative error against central differences of one step, as a plain audit takes it."""
    double, options = copy.deepcopy(model).double(), {"seeds": seeds} if getattr(model, "stochastic", False) else {}
    x = _generic(x.double(), Noise.of(seeds, len(x)), h).requires_grad_()
    own = F.one_hot(double(x, **options).argmax(1), 10).bool()

    def odds(z: Tensor) -> Tensor:
        out = double(z, **options)
        return out.masked_fill(own, -torch.inf).logsumexp(1) - out[own]

    (gradient,) = torch.autograd.grad(odds(x).sum(), x)
    random = torch.Generator().manual_seed(seeds[0])
    vectors = [torch.randn(x.shape, generator=random).sign().double() for _ in range(directions)]
    with torch.no_grad():
        measured = torch.stack([(odds(x + h * v) - odds(x - h * v)) / (2 * h) for v in vectors], 1)
    along = torch.stack([(gradient * v).flatten(1).sum(1) for v in vectors], 1)
    return float(((along - measured).norm(dim=1) / measured.norm(dim=1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--audits", type=int, default=30)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--directions", type=int, default=4)
    parser.add_argument("--only", default="", help="the models whose line in the table contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = samples()[0]
    print(f"| model | {' | '.join(COLUMNS)} |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, build in MODELS.items():
        if options.only not in name:
            continue
        model = build()
        n = 1 if isinstance(model, dp.Defense) else options.images
        before, alarms, found, largest, seconds = 0, 0, 0, 0.0, 0.0
        for k in range(options.audits):
            batch, seeds = x[k * n : (k + 1) * n], range(1000 * k, 1000 * k + n)
            before += one_step(model, batch, seeds, options.directions) > 1e-4
            began = time.process_time()
            audit = dp.audit_gradient(model, batch, seeds=seeds, directions=options.directions)
            seconds += time.process_time() - began
            alarms += not audit.passed
            largest = max(largest, audit.differences.relative_error)
            planted = dp.audit_gradient(TooLong(model), batch, seeds=seeds, directions=options.directions)
            found += not planted.passed
        of = f"of {options.audits}"
        counts = f"{before} {of} | {alarms} {of} | {largest:.0e} | {found} {of}"
        print(f"| {name} | {counts} | {seconds / options.audits:.2f} |", flush=True)


if __name__ == "__main__":
    main()

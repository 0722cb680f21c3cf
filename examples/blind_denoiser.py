"""Any blind denoiser purifies: a local Wiener filter (Lee 1980) made of convolutions, on a photograph of 224 × 224.

D(y) = μ + (v - σ²)₊/v · (y - μ) with local mean μ and variance v, and σ found from y itself (Immerkær 1996).
"""

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image

import diffpure as dp
from diffpure.scores import DenoiserScore

LAPLACIANS = torch.tensor([[1.0, -2, 1], [-2, 4, -2], [1, -2, 1]]).expand(3, 1, 3, 3)


def local_mean(y: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(F.pad(y, (2, 2, 2, 2), mode="reflect"), 5, stride=1)


def wiener(y: torch.Tensor) -> torch.Tensor:
    sigma = math.sqrt(math.pi / 2) / 6 * F.conv2d(y, LAPLACIANS, groups=3).abs().mean((1, 2, 3), keepdim=True)
    mean = local_mean(y)
    variance = local_mean((y - mean) ** 2).clamp(min=1e-6)
    return mean + (1 - sigma**2 / variance).clamp(min=0) * (y - mean)


photo = torch.from_numpy(load_sample_image("flower.jpg")[100:324, 200:424].copy()).permute(2, 0, 1)[None] / 255
perturbation = 8 / 255 * torch.randn(photo.shape, generator=torch.Generator().manual_seed(0)).sign()
purifier = dp.Purifier(DenoiserScore(wiener, blind=True), dp.ReverseSDE(t_star=0.02))

pure, pure_perturbed = purifier(photo, seeds=[0]), purifier((photo + perturbation).clamp(0, 1), seeds=[0])
left = (pure_perturbed - pure).norm() / perturbation.norm()
psnr = -10 * torch.log10((pure_perturbed - photo).square().mean())
print(f"{left:.0%} of the perturbation is left; the photograph is kept at {psnr:.1f} dB")

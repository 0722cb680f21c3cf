"""How far apart two images look to a network: the distance of its activations, each pixel's scaled to length one.

    d(x, y)² = Σ_l 1/|l| Σ_p ‖ φ_l(x)(p) / ‖φ_l(x)(p)‖ - φ_l(y)(p) / ‖φ_l(y)(p)‖ ‖²,      l the stages of the network

That is LPIPS (Zhang et al. 2018) without its learned weights, as Laidlaw et al. 2021 bound perceptual attacks.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.classifiers.load import load_classifier
from diffpure.errors import InputError

SIDE: Final = 32  # smaller images are enlarged: every stage must have pixels left


@cache
def network(name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The classifier of that name whose stages are asked."""
    net = load_classifier(name).to(device=device, dtype=dtype)
    if not isinstance(getattr(net, "stages", None), nn.Sequential):
        raise InputError(
            f"Perceptual distances need a classifier with `stages`, such as cifar10-resnet-at, not {name!r}."
        )
    return net


def activations(net: nn.Module, x: Tensor) -> Tensor:
    """What all stages say, pixels scaled to length one and stages to the same weight: (B, F)."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
        unit = output / output.square().sum(1, keepdim=True).add(1e-10).sqrt()
        found.append(unit.flatten(1) / (unit.shape[-1] * unit.shape[-2]) ** 0.5)

    x = x if x.shape[1] == 3 else x.expand(-1, 3, -1, -1)
    if min(x.shape[-2:]) < SIDE:
        x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    hooks = [stage.register_forward_hook(keep) for stage in net.get_submodule("stages").children()]
    try:
        net(x)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(found, 1)


def distance(name: str, x: Tensor, y: Tensor) -> Tensor:
    """d(x, y) of images (B, C, H, W) in [0, 1]: (B,)."""
    net = network(name, x.dtype, x.device)
    # A little under the root keeps its derivative finite where both images are the same.
    return (activations(net, y) - activations(net, x)).square().sum(1).add(1e-20).sqrt()

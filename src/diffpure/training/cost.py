"""What a call of a network costs: multiply-adds, counted as the network runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


@torch.no_grad()
def multiply_adds(model: nn.Module, *inputs: Tensor) -> int:
    """The multiply-adds of the convolutions, matrix products and attention of one call of the model on the inputs."""
    # The fused attention of the CPU is invisible to the counter; its plain form is not.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs)
    return int(counter.get_total_flops()) // 2


def parameters(model: nn.Module) -> int:
    """The number of weights, frozen ones included."""
    return sum(weight.numel() for weight in model.parameters())

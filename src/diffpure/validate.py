"""The door for tensors: images and labels are checked here, once, before anything is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from diffpure.errors import InputError

TOLERANCE = 1e-4  # how far outside [0, 1] rounding may carry an image


def check_images(images: Tensor, channels: int | None = None) -> None:
    """Raise unless images is a non-empty float (B, C, H, W) tensor of finite values in [0, 1]."""
    if not isinstance(images, Tensor):
        raise InputError(f"Images are a float tensor (B, C, H, W) in [0, 1], got {type(images).__name__}.")
    if not images.is_floating_point():
        raise InputError(f"Images are a float tensor in [0, 1], got dtype {images.dtype}; divide 8-bit images by 255.")
    if images.ndim != 4:
        shape = tuple(images.shape)
        raise InputError(f"Images are a batch (B, C, H, W), got shape {shape}; add a batch dimension to one image.")
    if images.numel() == 0:
        raise InputError(f"The batch of images is empty: shape {tuple(images.shape)}.")
    if channels is not None and images.shape[1] != channels:
        raise InputError(f"Images have {images.shape[1]} channels, but this score model wants {channels}.")
    low, high = (v.item() for v in torch.aminmax(images.detach()))
    if not (torch.isfinite(torch.tensor([low, high])).all() and not images.detach().isnan().any()):
        raise InputError("Images hold NaN or infinite values; values in [0, 1] are accepted.")
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        hint = "; divide 8-bit images by 255" if high > 2 else ""
        raise InputError(f"Images are in [0, 1], got values from {low:.4g} to {high:.4g}{hint}.")


def check_labels(labels: Tensor, batch: int, classes: int | None = None) -> None:
    """Raise unless labels is an integer (B,) tensor with every label in [0, classes)."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != (batch,):
        got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"Labels are an integer tensor ({batch},), one an image, got {got}.")
    if labels.numel() and (int(labels.min()) < 0 or (classes is not None and int(labels.max()) >= classes)):
        raise InputError(f"Labels are in [0, {classes or '…'}), got {int(labels.min())} to {int(labels.max())}.")

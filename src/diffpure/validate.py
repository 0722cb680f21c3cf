"""The door for arrays: images, labels and logits are checked here, once, before anything is computed with them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from diffpure.errors import InputError

TOLERANCE: Final = 1e-4  # how far outside [0, 1] rounding may carry an image


def as_images(given: Any, channels: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Images as a non-empty float tensor (B, C, H, W) of finite values in [0, 1].

    Arrays and lists become tensors. The numbers become `dtype` where one is given; otherwise half precision becomes
    float32 and everything else stays.
    """
    images = _tensor(given, "Images are a float tensor (B, C, H, W) in [0, 1]")
    if not images.is_floating_point():
        raise InputError(f"Images are a float tensor in [0, 1], got dtype {images.dtype}; divide 8-bit images by 255.")
    if images.ndim != 4:
        shape = tuple(images.shape)
        raise InputError(f"Images are a batch (B, C, H, W), got shape {shape}; add a batch dimension to one image.")
    if images.numel() == 0:
        raise InputError(f"The batch of images is empty: shape {tuple(images.shape)}.")
    if channels is not None and images.shape[1] != channels:
        raise InputError(f"Images have {images.shape[1]} channels, but this purifier wants {channels}.")
    low, high = (v.item() for v in torch.aminmax(images.detach()))
    if not np.isfinite([low, high]).all() or images.detach().isnan().any():
        raise InputError("Images hold NaN or infinite values; values in [0, 1] are accepted.")
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        hint = "; divide 8-bit images by 255" if high > 2 else ""
        raise InputError(f"Images are in [0, 1], got values from {low:.4g} to {high:.4g}{hint}.")
    if images.is_inference() and not torch.is_inference_mode_enabled():
        images = images.clone()  # autograd takes no tensor that inference mode made
    half = images.dtype in (torch.float16, torch.bfloat16)
    return images.to(dtype or (torch.float32 if half else images.dtype))


def as_labels(given: Any, batch: int, classes: int | None = None) -> Tensor:
    """Labels as an int64 tensor (B,), every one in [0, classes)."""
    labels = _tensor(given, f"Labels are integers ({batch},), one per image")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or labels.shape != (batch,):
        got = f"{labels.dtype} {tuple(labels.shape)}"
        raise InputError(f"Labels are an integer tensor ({batch},), one per image, got {got}.")
    labels = labels.long()
    if labels.numel() and (int(labels.min()) < 0 or (classes is not None and int(labels.max()) >= classes)):
        raise InputError(f"Labels are in [0, {classes or '…'}), got {int(labels.min())} to {int(labels.max())}.")
    return labels


def check_logits(logits: Any, batch: int) -> Tensor:
    """The logits, if they are finite and (batch, two or more classes)."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != batch or logits.shape[1] < 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(f"A classifier returns logits ({batch}, two or more classes), got {got}.")
    if not torch.isfinite(logits.detach()).all():
        raise InputError("The classifier returned logits that are NaN or infinite; finite logits are accepted.")
    return logits


def _tensor(values: Any, wanted: str) -> Tensor:
    """A tensor of what a tensor, an array or a list of numbers holds."""
    if isinstance(values, Tensor):
        return values
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "fiub":
            raise TypeError
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        raise InputError(f"{wanted}, got {type(values).__name__}.") from None

"""Adversarial images as PNG files. An 8-bit image cannot hold every perturbation: each pixel is rounded towards the
clean image, so that the picture keeps the budget too. The exact images are in the safetensors files of the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from diffpure.disk import one_sentence
from diffpure.errors import InputError
from diffpure.evaluation.store import IMAGES, read_tensors
from diffpure.threats import towards


def save_pngs(folder: str | Path, out: str | Path) -> list[Path]:
    """Write every adversarial image of a run to `out`/<attack>-seed<seed>/<dataset index>.png; returns the files."""
    files = sorted((Path(folder) / IMAGES).glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder} holds no adversarial images.")
    written = []
    for file in files:
        tensors = read_tensors(file)
        target = Path(out) / file.stem.rpartition("-")[0]
        with one_sentence(target):
            target.mkdir(parents=True, exist_ok=True)
            for index, image in zip(tensors["indices"].tolist(), _levels(tensors["images"], tensors["z"]), strict=True):
                written.append(target / f"{index:06d}.png")
                pixels = image.permute(1, 2, 0).numpy().astype(np.uint8)
                Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(written[-1])
    return written


def _levels(images: Tensor, z: Tensor) -> Tensor:
    """Levels 0 … 255 of images (B, C, H, W); where z is added to the image, rounded towards the clean one."""
    return towards(images - z, images) if z.shape == images.shape else towards(images, images)

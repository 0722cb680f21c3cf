"""Pictures: the pixels of an image file, and what is needed to write the purified pixels as the same kind of file."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from diffpure.data.images import LARGEST, has_more_frames, layers_of, name_of, open_image
from diffpure.errors import InputError

SAVE_OPTIONS: Final[dict[str, dict[str, Any]]] = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}
PROFILED: Final = frozenset({"JPEG", "PNG", "WEBP", "TIFF"})  # formats that are written with a colour profile
LAYERED_GREY: Final = frozenset({"PNG", "TIFF"})  # formats that hold grey with transparency


@final
@dataclass(frozen=True)
class Picture:
    """An image and what its file was.

    pixels (1 or 3, H, W), 8-bit or float32 in [0, 1]; alpha (H, W) 8-bit or None; profile: the ICC profile that
    describes the pixels; notes: what of the file is not kept.
    """

    pixels: Tensor
    alpha: NDArray[np.uint8] | None = None
    format: str = "PNG"
    profile: bytes | None = None
    notes: tuple[str, ...] = ()

    @property
    def grey(self) -> bool:
        """Whether the file holds greyscale."""
        return len(self.pixels) == 1


def read_picture(source: Path | bytes, largest: int = LARGEST) -> Picture:
    """An image file with its transparency set aside."""
    image = open_image(source, largest)
    layers = layers_of(image, name_of(source))
    pixels = torch.from_numpy(np.array(layers.pixels)).permute(2, 0, 1)
    kind = "JPEG" if image.format == "MPO" else image.format or "PNG"  # MPO: a JPEG with further pictures behind it
    profile, notes = image.info.get("icc_profile") or None, []
    if profile is not None and (kind not in PROFILED or profile[16:20] != (b"GRAY" if len(pixels) == 1 else b"RGB ")):
        profile = None
        notes.append("its colour profile does not describe the purified pixels and was dropped")
    if has_more_frames(image):  # asked last: it rewinds the image
        notes.append("only the first frame was kept")
    return Picture(pixels, layers.alpha, kind, profile, tuple(notes))


def encode(picture: Picture, pixels: Tensor) -> bytes:
    """Purified 8-bit pixels (1 or 3, H, W) in the format of the picture they came from."""
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(array[:, :, 0] if picture.grey else array)
    if picture.alpha is not None:
        image = image if not picture.grey or picture.format in LAYERED_GREY else image.convert("RGB")
        image.putalpha(Image.fromarray(picture.alpha))
    options = dict(SAVE_OPTIONS.get(picture.format, {}))
    if picture.profile is not None:
        options["icc_profile"] = picture.profile
    out = io.BytesIO()
    try:
        image.save(out, picture.format, **options)
    except Exception as error:  # encoders fail in ways of their own, for example on a profile that is too long
        raise InputError(f"The purified image cannot be written as {picture.format} ({error}).") from error
    return out.getvalue()


def eight_bits(pixels: Tensor) -> Tensor:
    """Pixels near [0, 1] as 8-bit values."""
    return (pixels.clamp(0, 1) * 255).round_().to(torch.uint8)

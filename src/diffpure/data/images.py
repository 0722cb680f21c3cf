"""The one door for image files: everything that is read from a disk or an upload passes here.

A file becomes layers: grey or colour, with the alpha channel apart. Palettes and CMYK become RGB; 16-bit greyscale
keeps its precision; the orientation in the EXIF data is applied; of an animation the first frame is taken. `read_image`
lays transparency over white. A file that is truncated, too large for its header to be true, not an image or not finite
is refused in one sentence, before its pixels are used.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from diffpure.errors import InputError

Source = str | Path | bytes  # a file, or the content of one

LARGEST: Final = 64_000_000  # pixels; more is a mistake or an attack, unless the caller says otherwise
FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")  # no format whose reader runs a program
SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"})
_DEEP: Final = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I", "F"})  # greyscale with more than 8 bits
_GREY: Final = frozenset({"1", "L", "LA", "La"})


@final
@dataclass(frozen=True)
class Layers:
    """What a decoded image holds: pixels (H, W, 1 or 3), 8-bit or float32 in [0, 1]; alpha (H, W) 8-bit, or None."""

    pixels: npt.NDArray[Any]
    alpha: npt.NDArray[np.uint8] | None

    def over_white(self) -> npt.NDArray[Any]:
        """The pixels with what is transparent laid over white."""
        if self.alpha is None:
            return self.pixels
        if self.pixels.dtype != np.uint8:
            return np.where(self.alpha[:, :, None] == 0, np.float32(1), self.pixels)
        layer = Image.fromarray(np.dstack([np.broadcast_to(self.pixels, (*self.alpha.shape, 3)), self.alpha]))
        return np.asarray(Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB"))


def read_image(source: Source) -> Tensor:
    """An image file as float32 (3, H, W) in [0, 1]."""
    return pixels_of(open_image(source), name_of(source))


def pixels_of(image: Image.Image, name: str = "The image") -> Tensor:
    """A decoded image of any mode as float32 (3, H, W) in [0, 1]."""
    pixels = layers_of(image, name).over_white()
    values = pixels.astype(np.float32) / np.float32(255 if pixels.dtype == np.uint8 else 1)
    return torch.from_numpy(values).permute(2, 0, 1).expand(3, -1, -1).contiguous()


def read_rgb(source: Source) -> Image.Image:
    """An image file as an 8-bit RGB picture, for resizing as the datasets' own pipelines do."""
    pixels = layers_of(open_image(source), name_of(source)).over_white()
    if pixels.dtype != np.uint8:
        pixels = (pixels * 255).round().astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3))))


def layers_of(image: Image.Image, name: str = "The image") -> Layers:
    """A decoded image of any mode, grey or colour, with its alpha channel apart."""
    clear = image.info.get("transparency")
    if image.mode in _DEEP:
        raw = np.asarray(image)
        alpha = np.where(raw == clear, 0, 255).astype(np.uint8) if isinstance(clear, int) else None
        return Layers(_deep(raw, image.mode, name)[:, :, None], alpha)
    kind = "L" if image.mode in _GREY else "RGB"
    transparent = clear is not None or bool({"A", "a"} & set(image.getbands()))
    try:
        pixels = np.asarray(image.convert({"L": "LA", "RGB": "RGBA"}[kind] if transparent else kind))
    except ValueError as error:
        raise InputError(f"{name} has the colour mode {image.mode}, which cannot be turned into RGB.") from error
    if transparent:
        return Layers(pixels[:, :, :-1], np.ascontiguousarray(pixels[:, :, -1]))
    return Layers(pixels[:, :, None] if pixels.ndim == 2 else pixels, None)


def to_tensor(image: Image.Image) -> Tensor:
    """An 8-bit RGB picture as float32 (3, H, W) in [0, 1]."""
    pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / 255
    return torch.from_numpy(np.ascontiguousarray(pixels))


def resize(image: Image.Image, size: int) -> Image.Image:
    """The picture with its shorter side at `size`, bilinear and antialiased as torchvision's Resize does it."""
    width, height = image.size
    short = min(width, height)
    if short == size:
        return image
    larger = int(size * max(width, height) / short)
    target = (size, larger) if width <= height else (larger, size)
    return image.resize(target, Image.Resampling.BILINEAR)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The square of side `size` in the middle, rounded as torchvision's CenterCrop rounds."""
    width, height = image.size
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def open_image(source: Source, largest: int = LARGEST) -> Image.Image:
    """The decoded first frame of a file, upright, in the colour mode of the file; its format is kept."""
    name = name_of(source)
    try:
        with warnings.catch_warnings(action="ignore"):  # of Pillow about sizes: ours are errors
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
            width, height = image.size
            if width * height > largest:
                raise InputError(f"{name} says it is {width}×{height} pixels; at most {largest:,} are accepted.")
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image
    except FileNotFoundError:
        raise InputError(f"There is no image file {name}.") from None
    except UnidentifiedImageError:
        raise InputError(f"{name} is not an image that can be read; JPEG, PNG, WebP, BMP and TIFF are.") from None
    except Image.DecompressionBombError:
        raise InputError(f"{name} is too large; at most {largest:,} pixels are accepted.") from None
    except InputError:
        raise
    except Exception as error:  # decoders fail in ways of their own on damaged data
        raise InputError(f"{name} is damaged or cut short and cannot be decoded.") from error


def claimed_pixels(source: Source) -> int:
    """How many pixels the header of a file claims, without decoding it; 0 if it cannot be read."""
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    with (
        contextlib.suppress(Exception),
        warnings.catch_warnings(action="ignore"),
        Image.open(file, formats=FORMATS) as image,
    ):
        return image.width * image.height
    return 0


def has_more_frames(image: Image.Image) -> bool:
    """Whether a file holds frames or pages after the first one; further frames may be damaged."""
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
        return bool(getattr(image, "is_animated", False))
    return False


def name_of(source: Source) -> str:
    """What an error calls a source."""
    return "The image" if isinstance(source, bytes) else Path(source).name


def _deep(pixels: npt.NDArray[np.generic], mode: str, name: str) -> npt.NDArray[np.float32]:
    """Greyscale of more than 8 bits as float32 (H, W) in [0, 1]: integers of 16 bits, or numbers already in [0, 1]."""
    values = pixels.astype(np.float32) / np.float32(1 if mode == "F" else 65535)
    if not np.isfinite(values).all():
        raise InputError(f"{name} holds NaN or infinite values; finite values in [0, 1] are accepted.")
    if values.min() < 0 or values.max() > 1:
        raise InputError(f"{name} has values outside its range; 8 and 16 bits, or numbers in [0, 1], are accepted.")
    return values

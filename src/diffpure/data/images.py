"""The door for image files: everything that is read from a disk or an upload passes here and leaves as clean RGB.

Palettes, CMYK and greyscale become RGB; 16-bit greyscale keeps its precision; transparency is laid over white; the
orientation in the EXIF data is applied. A file that is truncated, too large for its header to be true, not an image
or not finite is refused in one sentence, before its pixels are used.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from diffpure.errors import InputError

Source = str | Path | bytes  # a file, or the content of one

LARGEST: Final = 64_000_000  # pixels; more is a mistake or an attack
FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")  # no format whose reader runs a program
SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"})
_DEEP: Final = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I", "F"})  # greyscale with more than 8 bits


def read_image(source: Source) -> Tensor:
    """An image file as float32 (3, H, W) in [0, 1]."""
    return pixels_of(open_image(source), _name(source))


def pixels_of(image: Image.Image, name: str = "The image") -> Tensor:
    """A decoded image of any mode as float32 (3, H, W) in [0, 1]."""
    if image.mode in _DEEP:
        return torch.from_numpy(_deep(np.asarray(image), image.mode, name)).expand(3, -1, -1).clone()
    return to_tensor(_rgb(image, name))


def read_rgb(source: Source) -> Image.Image:
    """An image file as an 8-bit RGB picture, for resizing as the datasets' own pipelines do."""
    image = open_image(source)
    if image.mode in _DEEP:
        grey = _deep(np.asarray(image), image.mode, _name(source))
        image = Image.fromarray((grey * 255).round().astype(np.uint8))
    return _rgb(image, _name(source))


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


def open_image(source: Source) -> Image.Image:
    """The decoded first frame of a file, upright, in the colour mode of the file; its format is kept."""
    name = _name(source)
    try:
        with warnings.catch_warnings(action="ignore"):  # of Pillow about sizes: ours are errors
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
            width, height = image.size
            if width * height > LARGEST:
                raise InputError(f"{name} says it is {width}×{height} pixels; at most {LARGEST:,} are accepted.")
            image.load()
            upright = ImageOps.exif_transpose(image)
            upright.format = image.format
            return upright
    except FileNotFoundError:
        raise InputError(f"There is no image file {name}.") from None
    except UnidentifiedImageError:
        raise InputError(f"{name} is not an image that can be read; JPEG, PNG, WebP, BMP and TIFF are.") from None
    except Image.DecompressionBombError:
        raise InputError(f"{name} is too large; at most {LARGEST:,} pixels are accepted.") from None
    except InputError:
        raise
    except Exception as error:  # decoders fail in ways of their own on damaged data
        raise InputError(f"{name} is damaged or cut short and cannot be decoded.") from error


def _name(source: Source) -> str:
    return "The image" if isinstance(source, bytes) else Path(source).name


def _rgb(image: Image.Image, name: str) -> Image.Image:
    if "A" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        ground = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(ground, layer).convert("RGB")
    try:
        return image.convert("RGB")
    except ValueError as error:
        raise InputError(f"{name} has the colour mode {image.mode}, which cannot be turned into RGB.") from error


def _deep(pixels: npt.NDArray[np.generic], mode: str, name: str) -> npt.NDArray[np.float32]:
    """Greyscale of more than 8 bits as float32 (H, W) in [0, 1]: integers of 16 bits, or numbers already in [0, 1]."""
    values = pixels.astype(np.float32) / np.float32(1 if mode == "F" else 65535)
    if not np.isfinite(values).all():
        raise InputError(f"{name} holds NaN or infinite values; finite values in [0, 1] are accepted.")
    if values.min() < 0 or values.max() > 1:
        raise InputError(f"{name} has values outside its range; 8 and 16 bits, or numbers in [0, 1], are accepted.")
    return values

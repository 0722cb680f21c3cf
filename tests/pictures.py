"""What the tests of files share: purifiers with known results, and image files, tars and npz files made in memory."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import diffpure as dp
from diffpure.diffusion.sde import VPSDE


class Silent(dp.EpsilonScore):
    """A score of exactly 0 at 16 pixels: with the deterministic Langevin sampler, purification is the identity."""

    def __init__(self, size: int = 16, channels: int = 3) -> None:
        super().__init__(VPSDE(), size=size, channels=channels)

    def epsilon(self, x, t):
        return torch.zeros_like(x)


def identity(size: int = 16, channels: int = 3) -> dp.Purifier:
    return dp.Purifier(Silent(size, channels), dp.Langevin(eta=0.0, steps=1))


def noisy(size: int = 16, channels: int = 3) -> dp.Purifier:
    return dp.Purifier(Silent(size, channels), dp.OneShot(t_star=0.01))


class Counting:
    """A purifier whose result tells how many images it was given at once, as last digits do on a real machine."""

    size, channels = 16, 3

    def __init__(self, dies_at: int | None = None) -> None:
        self.calls = 0
        self.dies_at = dies_at

    def __call__(self, images, seeds):
        self.calls += 1
        if self.calls == self.dies_at:
            raise KeyboardInterrupt
        return images * 0 + len(images) / 255


def smooth(height: int, width: int, channels: int = 3) -> np.ndarray:
    """A smooth gradient that survives resizing and JPEG."""
    rows = np.linspace(20, 230, height)[:, None, None]
    columns = np.linspace(0, 20, width)[None, :, None]
    return (rows + columns + np.arange(channels)).round().astype(np.uint8)


def encoded(array: np.ndarray | None = None, kind: str = "PNG", **options: Any) -> bytes:
    """An image file in memory."""
    out = io.BytesIO()
    Image.fromarray(smooth(16, 16) if array is None else array).save(out, kind, **options)
    return out.getvalue()


def write_tar(file: Path, members: Iterable[tuple[str, bytes]], mode: str = "w", **options: Any) -> Path:
    """A tar archive of members, under exactly the names given."""
    with tarfile.open(file, mode, **options) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file


def npy(array: np.ndarray) -> bytes:
    """An array as NumPy saves it."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def npz(**arrays: bytes | np.ndarray) -> bytes:
    """An npz file of arrays, or of bytes in their place."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", array if isinstance(array, bytes) else npy(array))
    return out.getvalue()


def tree(folder: Path) -> set[str]:
    """The names of all files below a folder, without what an output folder says of itself."""
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir()}
    return found - {".diffpure.json"}

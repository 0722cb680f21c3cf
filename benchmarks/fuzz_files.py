"""Fuzz what `diffpure purify` reads: images, tar archives and npz files, made or damaged at random, each from its seed.

    python benchmarks/fuzz_files.py --hours 2            # until the time is over, or something is found
    python benchmarks/fuzz_files.py --first 4711 --cases 1 --kind tars     # one case again

A case is a folder with hostile inputs and a few good images. Purifying it must end without a traceback (one sentence is
fine), write nothing outside the output folder, change no input, purify the good images, and stay below a limit of
memory. Cases run in processes of their own, so that a crash or a lack of memory is a finding, too.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import multiprocessing
import random
import resource
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import diffpure as dp
from diffpure.diffusion.sde import VPSDE
from diffpure.errors import InputError
from diffpure.files import purify_files

PIECES = (
    "..",
    ".",
    "",
    "a",
    "b.png",
    "~",
    "a b",
    "C:",
    "\\",
    "x" * 250,
    "é",
    "\udcff",
    "\x1b[31m",
    "\n",
    ".diffpure.json",
)
SUFFIXES = (".png", ".jpg", ".gif", ".webp", ".tif", ".bmp", ".ppm", ".PNG", "")
FORMATS: dict[str, dict[str, Any]] = {
    "PNG": {}, "JPEG": {}, "WEBP": {}, "BMP": {}, "GIF": {}, "PPM": {}, "TIFF": {"compression": "tiff_lzw"},
}  # fmt: skip
MODES = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "TIFF": ("RGB", "F", "CMYK"),
}
GOOD = ("good-1.png", "good-2.png")
MIB = 1 << 20


class Silent(dp.EpsilonScore):
    """A score of exactly 0, so that purification costs nothing."""

    def __init__(self) -> None:
        super().__init__(VPSDE(), size=16, channels=3)

    def epsilon(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def image(draw: random.Random) -> bytes:
    """An image file of a random format, mode and size."""
    kind = draw.choice(list(FORMATS))
    mode = draw.choice(MODES.get(kind, ("RGB", "L")))
    size = draw.choice([(16, 16), (1, 1), (draw.randint(1, 90), draw.randint(1, 90))])
    pixels = np.random.default_rng(draw.getrandbits(32)).integers(0, 256, (*size, 3), np.uint8)
    if mode in ("I;16", "F"):
        picture = Image.fromarray(pixels[:, :, 0].astype(np.uint16 if mode == "I;16" else np.float32))
    else:
        picture = Image.fromarray(pixels).convert(mode)
    options = dict(FORMATS[kind])
    if draw.random() < 0.2 and kind in ("PNG", "JPEG", "WEBP", "TIFF"):
        options["icc_profile"] = draw.randbytes(draw.randint(0, 300))
    if draw.random() < 0.2 and kind in ("GIF", "PNG", "WEBP", "TIFF"):
        options |= {"save_all": True, "append_images": [picture.copy()] * draw.randint(1, 3)}
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Bytes with some of them changed, cut, doubled or inserted; often as they are."""
    found = bytearray(data)
    for _ in range(draw.choice((0, 0, 1, 2, 8))):
        where = draw.randrange(len(found) + 1) if draw.random() < 0.5 else min(len(found), draw.randrange(1, 600))
        match draw.randrange(5):
            case 0 if found:
                found[where % len(found)] = draw.randrange(256)
            case 1:
                found[where : where + 4] = draw.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\xff\xff"))
            case 2:
                del found[where:]
            case 3:
                found[where:where] = found[: draw.randrange(64)]
            case _:
                found[where : where + 8] = draw.randbytes(8)
    return bytes(found)


def name(draw: random.Random) -> str:
    """A name that may lead anywhere."""
    return (
        draw.choice(("", "/", "../../")) + "/".join(draw.choices(PIECES, k=draw.randint(1, 4))) + draw.choice(SUFFIXES)
    )


def images(draw: random.Random, folder: Path) -> None:
    """Damaged image files, under endings that may be wrong."""
    for i in range(draw.randint(1, 6)):
        (folder / f"{i}{draw.choice(SUFFIXES[:-1])}").write_bytes(damaged(draw, image(draw)))


def tars(draw: random.Random, folder: Path) -> None:
    """A tar archive of members with hostile names and headers, perhaps compressed, perhaps damaged."""
    out = io.BytesIO()
    kind = draw.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
        for _ in range(draw.randint(1, 6)):
            info, content = tarfile.TarInfo(name(draw)), damaged(draw, image(draw))
            info.type = draw.choice((tarfile.REGTYPE,) * 8 + (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE))
            info.linkname = name(draw)
            if draw.random() < 0.2 and kind == tarfile.PAX_FORMAT:
                info.pax_headers = {
                    draw.choice(("path", "size", "GNU.sparse.name")): draw.choice(("\0.png", "9" * 12, "-1"))
                }
            if draw.random() < 0.05:
                content += bytes(draw.choice((1, 40)) * MIB)
            info.size = len(content) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(content))
    data = damaged(draw, out.getvalue())
    if draw.random() < 0.5:
        data = damaged(draw, gzip.compress(data, 1))
    ending = draw.choice((".tar", ".tar.gz", ".tgz"))
    (folder / (draw.choice(("set", ".album", "..", "a.b")) + ending)).write_bytes(data)


def arrays(draw: random.Random, folder: Path) -> None:
    """An npz file of arrays of any type and shape under hostile names, perhaps damaged."""
    out = io.BytesIO()
    with zipfile.ZipFile(
        out, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    ) as archive:
        for key in {draw.choice(("x", "y", "z", name(draw).replace("\udcff", ""))) for _ in range(draw.randint(1, 3))}:
            shape = draw.choice(
                ((2, 16, 16, 3), (2, 3, 8, 8), (4, 16, 16), (9,), (0, 4, 4, 3), (16, 16, 3), (3, 9, 9), ())
            )
            kind = draw.choice(("u1", "u1", "f4", "f8", "f2", "i8", "U3", "?"))
            saved = io.BytesIO()
            np.save(saved, np.ones(shape).astype(kind) if draw.random() < 0.9 else np.zeros((300, 16, 16, 3), "u1"))
            archive.writestr(f"{key}.npy", damaged(draw, saved.getvalue()))
    (folder / "set.npz").write_bytes(damaged(draw, out.getvalue()))


KINDS: dict[str, Callable[[random.Random, Path], None]] = {"images": images, "tars": tars, "arrays": arrays}


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file below a folder."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def run(kind: str, seed: int) -> None:
    """One case; raises AssertionError, or anything else, for a finding."""
    draw = random.Random(f"{kind} {seed}")
    with tempfile.TemporaryDirectory() as top:
        root = Path(top) / "deep" / "deeper"
        inputs, out = root / "in", root / "out"
        inputs.mkdir(parents=True)
        for i, good in enumerate(GOOD):
            Image.new("RGB", (16 + i, 16), "teal").save(inputs / good)
        KINDS[kind](draw, inputs)
        before = contents(Path(top))
        purifier = dp.Purifier(Silent(), dp.Langevin(eta=0.0, steps=1))
        for _ in range(2):  # the second run goes on from the first
            try:
                report = purify_files(
                    purifier, [str(inputs)], out, seed=draw.choice((None, 1)), batch=3, max_pixels=1_000_000,
                    overwrite=draw.random() < 0.5,
                )  # fmt: skip
            except InputError as error:
                if "holds images purified with" not in str(error):  # the second run may have another seed
                    raise
                continue
            assert all((out / good).is_file() for good in GOOD), "a good image was not purified"
            assert all(reason.endswith(".") and "Traceback" not in reason for _, reason in report.failed)
        after = contents(Path(top))
        outside = {file: digest for file, digest in after.items() if not file.startswith("deep/deeper/out/")}
        assert outside == before, "something outside the output folder changed"
        assert not [file for file in after if file.endswith(".part")], "a part of a file was left"


def work(kind: str, seeds: range, limit: int, found: Any) -> None:
    """Run cases one after the other; (seed, what was found) for each finding, and the largest memory at the end."""
    torch.set_num_threads(1)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        found.put((seed, None))
        try:
            run(kind, seed)
        except BaseException:
            found.put((seed, traceback.format_exc()))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024
        if grown > limit:
            found.put((seed, f"{grown} MiB of memory, more than {limit}"))
            return


def fuzz(kind: str, seeds: range, limit: int) -> list[str]:
    """The findings of some cases in a process of their own."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=work, args=(kind, seeds, limit, found))
    process.start()
    last, findings = seeds.start, []
    while process.is_alive() or not found.empty():
        try:
            seed, what = found.get(timeout=0.5)
        except Exception:
            continue
        last = seed
        if what is not None:
            findings.append(f"--kind {kind} --first {seed} --cases 1\n{what}")
    process.join()
    if process.exitcode:
        findings.append(f"--kind {kind} --first {last} --cases 1\nthe process ended with {process.exitcode}")
    return findings


def main() -> None:
    """Fuzz until the time or the cases are over; exit code 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.02, help="how long, if --cases is not given")
    parser.add_argument("--cases", type=int, help="how many cases of each kind")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="only these kinds")
    parser.add_argument("--memory", type=int, default=400, help="MiB that a process may grow by")
    parser.add_argument("--batch", type=int, default=200, help="cases of one process")
    chosen = parser.parse_args()
    end = time.monotonic() + 3600 * chosen.hours
    seed, count, findings = chosen.first, 0, list[str]()
    while (chosen.cases is None and time.monotonic() < end) or (
        chosen.cases is not None and seed - chosen.first < chosen.cases
    ):
        size = chosen.batch if chosen.cases is None else min(chosen.batch, chosen.first + chosen.cases - seed)
        for kind in chosen.kind or KINDS:
            findings += fuzz(kind, range(seed, seed + size), chosen.memory)
            count += size
        seed += size
        print(f"{count} cases, seeds {chosen.first} to {seed - 1}, {len(findings)} findings", flush=True)
    print("\n\n".join(findings))
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()

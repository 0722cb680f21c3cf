"""Names of outputs: cleaned here and nowhere else, so that none leads out of the output folder.

An archive may call its members anything: "../../x.png", "/etc/x.png", names with NUL, names longer than a file system
takes. `clean` drops what leads elsewhere and refuses what no file can be called; `place` refuses a target that a link
inside the folder would carry outside.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from diffpure.disk import one_sentence
from diffpure.errors import InputError
from diffpure.noise import Noise, mix

LONGEST: Final = 250  # bytes of one part of a name: 255 are allowed, and ".part" is added while a file is written
ARCHIVE: Final = re.compile(r"(?:\.tar)?\.(?:tar|tgz|gz|npz)$", re.IGNORECASE)
RECORD: Final = ".diffpure.json"  # the settings of an output folder
WORK: Final = ".diffpure-work"  # the finished batches of npz files that are not whole yet
RESERVED: Final = frozenset({RECORD, f"{RECORD}.part", WORK})
# What the system says when a name is the trouble: other images can still be written.
_NAMES: Final = frozenset(
    {errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EILSEQ, errno.ELOOP}
)
_SEPARATORS: Final = re.compile(r"[/\\]" if os.name == "nt" else "/")


class Unwritable(InputError):
    """The output folder cannot be written to, whatever the image."""


def clean(*parts: str) -> str:
    """One name below the output folder out of the parts that files and archives give, without "/", "." and ".."."""
    pieces = [piece for part in parts for piece in _SEPARATORS.split(part) if piece not in ("", ".", "..")]
    name = "/".join(pieces)
    if not pieces:
        raise InputError(f"The name {'/'.join(parts)!r} holds nothing that a file can be called.")
    if pieces[0] in RESERVED:
        raise InputError(f"The name {name!r} is kept for what the output folder says of itself.")
    if "\0" in name or (os.name == "nt" and ":" in name):
        raise InputError(f"The name {name!r} holds a character that no file name can hold.")
    try:
        longest = max(len(os.fsencode(piece)) for piece in pieces)
    except UnicodeEncodeError:
        raise InputError(f"The name {name!r} cannot be written in this system's encoding.") from None
    if longest > LONGEST:
        raise InputError(f"A part of the name has {longest} bytes; at most {LONGEST} are accepted.")
    return name


def stem(file: str) -> str:
    """What an archive's folder is called: its name without the endings of archives, never empty."""
    return ARCHIVE.sub("", file) or "archive"


def place(out: Path, name: str) -> Path:
    """The file of a cleaned name in the output folder, unless a link leads elsewhere."""
    target = out / name
    if not target.resolve().is_relative_to(out.resolve()):
        raise InputError(f"A link in the output folder leads outside it; nothing is written to {target}.")
    return target


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Tell a name that cannot be written, one image's trouble, from a folder that cannot, everybody's."""
    try:
        with one_sentence(out):
            yield
    except InputError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise
        if cause.errno in _NAMES:
            raise InputError(f"No file can be written under this name ({cause.strerror}).") from cause
        raise Unwritable(str(error)) from cause


def seed_of(name: str, seed: int | None) -> int:
    """The seed of an image: from its name, so that it does not depend on what else is purified; or entropy."""
    if seed is None:
        return Noise.of(None, 1).seeds[0]
    return mix(seed, int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "little"))

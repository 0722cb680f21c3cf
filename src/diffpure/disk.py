"""The user's cache, files that are there whole or not at all, and the operating system's errors as one sentence."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from diffpure.errors import InputError


def home() -> Path:
    """The user's cache: $DIFFPURE_CACHE, or diffpure under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("DIFFPURE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffpure"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, and still there after a power cut."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself
    finally:
        os.close(folder)


@contextlib.contextmanager
def one_sentence(path: Path) -> Iterator[None]:
    """Say what the operating system refused in one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{path} cannot be written or read ({reason}); what was finished before is kept.") from error

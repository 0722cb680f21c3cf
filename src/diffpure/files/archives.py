"""Tar archives, read once from the front to the back, within limits that hold before anything is unpacked.

A few bytes can claim to be many: an archive may unpack to 1 GiB, or to a hundred times its own size if that is more,
and a header or a member is refused by the size it claims before it is read. Only one member is in memory at a time.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Final

from diffpure.data.images import SUFFIXES
from diffpure.errors import InputError

UNPACKED: Final = 1 << 30  # bytes that any archive may unpack to
FACTOR: Final = 100  # or this many times its own size, if that is more
HEADER: Final = 1 << 16  # bytes of a header's long name or attributes


def unpacked_limit(path: Path) -> int:
    """The bytes that an archive may unpack to."""
    return max(UNPACKED, FACTOR * path.stat().st_size)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say in one sentence that an archive could not be read."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # readers of archives fail in ways of their own on damaged or hostile data
        raise InputError(f"{path.name} is damaged, encrypted or no archive of images, and cannot be read.") from error


class _Forward(io.RawIOBase):
    """A stream that is read forwards only, up to a limit, and never more at once than `most` bytes."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, limit: int, name: str) -> None:
        super().__init__()
        self._stream, self._limit, self._name = stream, limit, name
        self._position = 0
        self.most = HEADER
        self.last = b""  # what was read last

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.most:
            raise InputError(f"{self._name} holds a header of {size:,} bytes; at most {self.most:,} are accepted.")
        self._advance(self._position + size)
        self.last = self._stream.read(size)
        self._position += len(self.last)
        return self.last

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or offset < self._position:
            raise InputError(f"{self._name} holds a header that points backwards, and cannot be read.")
        self._advance(offset)
        self._position = self._stream.seek(offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def _advance(self, position: int) -> None:
        if position > self._limit:
            raise InputError(f"{self._name} unpacks to more than {self._limit:,} bytes, which is not accepted.")


def tar_images(path: Path, largest: int) -> Iterator[tuple[str, bytes | InputError]]:
    """The names and contents of the image files in a tar archive, in its order; an error for more than `largest` bytes.

    Raises when the archive is damaged, after what came before the damage.
    """
    with readable(path), contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream: IO[bytes] | gzip.GzipFile = stack.enter_context(gzip.GzipFile(fileobj=file)) if packed else file
        forward = _Forward(stream, unpacked_limit(path), path.name)
        archive = stack.enter_context(tarfile.open(fileobj=forward, mode="r:"))
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # a list that only grows
            if not member.isfile() or PurePosixPath(member.name).suffix.lower() not in SUFFIXES:
                continue
            if member.size > largest or member.issparse():
                yield member.name, InputError(f"It unpacks to {member.size:,} bytes; at most {largest:,} are accepted.")
                continue
            content = archive.extractfile(member)
            forward.most = member.size
            yield member.name, content.read() if content is not None else b""
            forward.most = HEADER
        if forward.last.strip(b"\0"):  # tarfile takes anything that is no header for the end
            raise InputError(f"{path.name} is damaged: what follows its last whole member cannot be read.")

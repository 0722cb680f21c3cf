"""The user's cache, files that are there whole or not at all, folders with one writer, downloads that go on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from diffpure.errors import InputError

Progress = Callable[[int, int | None], None]  # bytes done, bytes in all if the server says
_BLOCK: Final = 1 << 20


def home() -> Path:
    """The user's cache: $DIFFPURE_CACHE, or diffpure under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("DIFFPURE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "diffpure"
    try:
        return Path.home() / ".cache" / "diffpure"
    except RuntimeError as error:
        raise InputError("There is no home folder to keep a cache in; name a folder in DIFFPURE_CACHE.") from error


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
    if os.name == "nt":  # a folder cannot be opened there
        return
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


def hold(folder: Path) -> int:
    """Hold a folder for this process until the descriptor that is returned is closed or the process ends.

    Where the system has no such locks (Windows, some network file systems) the folder is held by agreement alone.
    """
    descriptor = os.open(folder, os.O_RDONLY) if os.name != "nt" else os.open(os.devnull, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise InputError(f"Another process is writing to {folder}; wait for it or give a new folder.") from error
    except (ImportError, OSError):
        pass
    return descriptor


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, made where it is missing, for this process: one at a time writes to it."""
    with one_sentence(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = hold(folder)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Finish a short piece of work before Ctrl-C or SIGTERM is heeded; only the main thread hears signals at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for heard in came:
        signal.raise_signal(heard)


def download(url: str, part: Path, progress: Progress | None = None) -> None:
    """Fetch `url` into `part`, after what is there already; a connection that ends early is an OSError."""
    import http.client
    import urllib.error
    import urllib.request

    done = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=20)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # nothing is left to send: the file is complete
            return
        raise
    with response:
        if response.status != 206:  # the server starts over
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if done else "wb") as file:
            try:
                while block := response.read(_BLOCK):
                    file.write(block)
                    done += len(block)
                    if progress is not None:
                        progress(done, total)
            except http.client.HTTPException as error:  # which is no OSError
                raise OSError(f"the connection ended after {done} bytes") from error
    if total is not None and done < total:
        raise OSError(f"the connection ended after {done} of {total} bytes")

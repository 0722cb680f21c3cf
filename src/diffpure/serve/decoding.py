"""Image files are read and written in worker processes: a file that bursts a decoder takes one of them, no more.

A worker has a limit on its address space (what it has when it starts, and so much more) and on the CPU time of a job;
past either, or past the time on the clock, it dies and the next job starts another. What comes back from a worker is
read as plain arrays (safetensors), never as a pickle, so that even a decoder that was taken over can only send pixels.

The pools of the standard library do not serve here: one dead worker breaks the whole pool, and a job cannot be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from diffpure.data.images import center_crop, claimed_pixels, read_rgb, resize
from diffpure.errors import InputError
from diffpure.files.pictures import Picture, encode, read_picture
from diffpure.serve.child import Child
from diffpure.serve.limits import Limits, Refusal

Arrays = dict[str, NDArray[Any]]
TYPES: Final = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "BMP": "image/bmp",
    "TIFF": "image/tiff",
    "GIF": "image/gif",
    "PPM": "image/x-portable-anymap",
}  # the formats that are read and written, as HTTP calls them
_PER_PIXEL: Final = 16  # bytes: three floats and alpha
_HEADROOM: Final = 1 << 24  # bytes of an answer that are not pixels, such as a colour profile


@final
class Decoders:
    """A pool of workers; `restarts` counts those that died and were replaced."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.decoders, "decoder")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(limits) for _ in range(limits.decoders)]
        for worker in self._workers:
            self._idle.put(worker)

    @property
    def restarts(self) -> int:
        """How many workers died."""
        return sum(worker.deaths for worker in self._workers)

    def start(self) -> None:
        """Start the workers, so that the first request need not wait for them."""
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        """End the workers."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    async def picture(self, data: bytes) -> Picture:
        """An image file as its pixels and what its file was."""
        found = await self._run(_read, data, self._limits.pixels)
        alpha, profile = found.get("alpha"), found.get("profile")
        pixels, kind = torch.from_numpy(found["pixels"]), found["format"].tobytes().decode()
        return Picture(pixels, alpha, kind, None if profile is None else profile.tobytes())

    async def rgb(self, data: bytes, size: int | None) -> Tensor:
        """An image file as 8-bit RGB (3, H, W), or the middle (3, size, size) of it with its shorter side resized."""
        return torch.from_numpy((await self._run(_read_rgb, data, self._limits.pixels, size))["pixels"])

    async def encoded(self, picture: Picture, pixels: Tensor) -> bytes:
        """8-bit pixels in the format of the picture they came from."""
        parts = (picture.alpha, picture.format, picture.profile)
        return (await self._run(_write, pixels.numpy(), *parts))["data"].tobytes()

    async def _run(self, job: Callable[..., Arrays], *arguments: Any) -> Arrays:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, job, arguments)

    def _call(self, job: Callable[..., Arrays], arguments: tuple[Any, ...]) -> Arrays:
        # As many threads as workers, so that one is always idle here. The thread gives it back, and not whoever waits
        # for the answer: who may be gone by then.
        worker = self._idle.get()
        try:
            return worker.call(job, arguments)
        finally:
            self._idle.put(worker)


class _Worker(Child):
    """One process, started again when it has died."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits
        self.deaths = 0

    def start(self) -> Connection:
        """The connection to a living process."""
        if self.connection is None:
            connection = self.fork(_work, self._limits.decoder_memory, self._limits.decoder_seconds)
            connection.recv_bytes()  # it has imported everything
        assert self.connection is not None
        return self.connection

    def call(self, job: Callable[..., Arrays], arguments: tuple[Any, ...]) -> Arrays:
        """What a job answers; its refusal, or one for a worker that died of it."""
        longest = _PER_PIXEL * self._limits.pixels + _HEADROOM
        try:
            connection = self.start()
            connection.send((job, arguments))
            if not connection.poll(2 * self._limits.decoder_seconds):
                raise TimeoutError
            found: Arrays = safetensors.numpy.load(connection.recv_bytes(longest))
        except (EOFError, OSError, safetensors.SafetensorError) as error:
            self.stop()
            self.deaths += 1
            raise Refusal(422, "The image takes more memory or time to decode than is allowed.") from error
        if "refusal" in found:
            raise Refusal(int(found["status"][0]), found["refusal"].tobytes().decode())
        return found


# ------------------------------------------------------------------------------------------------- in the worker


def _work(connection: Connection, memory: int, seconds: float) -> None:
    """Do one job after the other until the service is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches everybody; the service ends its workers
    torch.set_num_threads(1)
    Image.MAX_IMAGE_PIXELS = None  # ours is checked, and told with its number
    _limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(OSError, ValueError):  # a system without /proc
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
    with contextlib.suppress(EOFError, OSError):
        connection.send_bytes(b"ready")
        while True:
            job, arguments = connection.recv()
            _limit(resource.RLIMIT_CPU, int(time.process_time() + seconds) + 1)
            connection.send_bytes(safetensors.numpy.save(_answer(job, arguments)))


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _answer(job: Callable[..., Arrays], arguments: tuple[Any, ...]) -> Arrays:
    try:
        return job(*arguments)
    except Refusal as refusal:
        return _refused(refusal.status, refusal.sentence)
    except InputError as error:
        return _refused(422, str(error))
    except MemoryError:
        return _refused(422, "The image takes more memory to decode than is allowed.")


def _refused(status: int, sentence: str) -> Arrays:
    return {"status": np.array([status]), "refusal": _bytes(sentence.encode())}


def _read(data: bytes, largest: int) -> Arrays:
    """A file as its pixels (C, H, W), its alpha, format and colour profile."""
    _check_pixels(data, largest)
    picture = read_picture(data, largest)
    alpha = {} if picture.alpha is None else {"alpha": np.ascontiguousarray(picture.alpha)}
    profile = {} if picture.profile is None else {"profile": _bytes(picture.profile)}
    return {
        "pixels": picture.pixels.contiguous().numpy(),
        "format": _bytes(picture.format.encode()),
        **alpha,
        **profile,
    }


def _read_rgb(data: bytes, largest: int, size: int | None) -> Arrays:
    """A file as 8-bit RGB (3, H, W), or the middle of it (3, size, size)."""
    _check_pixels(data, largest)
    image: Image.Image = read_rgb(data)
    if size is not None:
        width, height = image.size
        if max(width, height) > 64 * min(width, height):  # a line of pixels would become an endless band
            raise Refusal(422, f"The image is {width}×{height} pixels; at most 64 times as long as wide is accepted.")
        image = center_crop(resize(image, size), size)
    return {"pixels": np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))}


def _write(pixels: NDArray[np.uint8], alpha: NDArray[np.uint8] | None, kind: str, profile: bytes | None) -> Arrays:
    tensor = torch.from_numpy(pixels)
    return {"data": _bytes(encode(Picture(tensor, alpha, kind, profile), tensor))}


def _check_pixels(data: bytes, largest: int) -> None:
    if (claimed := claimed_pixels(data)) > largest:
        raise Refusal(413, f"The image says it is {claimed:,} pixels; at most {largest:,} are accepted.")


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)

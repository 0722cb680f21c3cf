"""A whole purifier in a file of `diffpure export`: images and noise in, purified images out.

The times of its sampler are constants of the file, and its noise is an input, so that the same seeds give the same
images as the purifier that was exported, up to rounding. It gives no gradients: BPDA and black-box attacks need none.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch
from torch import Tensor

from diffpure.diffusion.gradients import Gradient
from diffpure.diffusion.paths import Path as StepPath
from diffpure.errors import InputError
from diffpure.models.code import SOURCE, require_code_allowed
from diffpure.models.runtime import Compiled, Runtime, no_gradient, read_files
from diffpure.noise import Noise
from diffpure.purify import CallPath, PurifierBase


@final
class ExportedPurifier(PurifierBase):
    """A purifier in a file of `diffpure export`, without gradients."""

    def __init__(self, network: Compiled, gradient: Gradient = "exact") -> None:
        info = network.info
        if info.get("what") != "purifier":
            raise InputError(f"{network.origin} holds a {info.get('what')}, where a purifier is wanted.")
        try:
            size, channels, stride = info["size"], info["channels"], max(1, int(info["stride"]))
            title, draws, rounds = str(info["title"]), [int(step) for step in info["draws"]], int(info["rounds"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{network.origin} does not say which images and noise its purifier takes.") from error
        super().__init__(gradient, rounds=rounds)
        self.draws, self.stride, self.runtime = draws, stride, network.runtime
        self._size: int | None = size
        self._channels: int | None = channels
        self._title, self._network = title, network
        setattr(self, SOURCE, network.sha256)

    @property
    def network(self) -> Compiled:
        """What is run."""
        return self._network

    @property
    def size(self) -> int | None:
        return self._size

    @property
    def channels(self) -> int | None:
        return self._channels

    @property
    def stochastic(self) -> bool:
        return bool(self.draws)

    @property
    def title(self) -> str:
        return f"{self._title} on {self.runtime}"

    def begin(self, images: Tensor, noise: Noise) -> tuple[Tensor, StepPath]:
        sides = images.shape[-2:]
        if self._size is not None and sides != (self._size, self._size):
            raise InputError(f"{self._network.origin} takes images of {self._size}×{self._size}, got {tuple(sides)}.")
        if any(side % self.stride for side in sides):
            raise InputError(f"{self._network.origin} takes sides that {self.stride} divides, got {tuple(sides)}.")
        return images, CallPath(lambda x: self._run(x, noise))

    def finish(self, state: Tensor, images: Tensor) -> Tensor:
        return state

    def _run(self, x: Tensor, noise: Noise) -> Tensor:
        inputs = {"images": x.float()}
        if self.draws:
            inputs["noise"] = torch.stack([noise(step, inputs["images"]) for step in self.draws], 1)
        return no_gradient(x, self._network(inputs).to(x), self._network.origin)


def load_purifier(path: str | Path, runtime: Runtime | None = None, *, allow_code: bool = False) -> ExportedPurifier:
    """The purifier in a file FILE.onnx, or FILE.xml with FILE.bin beside it.

    runtime: "onnx" or "openvino"; that of the file unless given.   allow_code: such files are programs.
    """
    path = Path(path)
    require_code_allowed(f"{path.name}, a file of a network,", allow_code)
    own: Runtime = "openvino" if path.suffix.lower() == ".xml" else "onnx"
    return ExportedPurifier(read_files(runtime or own, path))

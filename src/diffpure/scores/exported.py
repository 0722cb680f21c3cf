"""A score that ONNX Runtime or OpenVINO computes: `diffpure export` writes it, and any purifier takes it.

The file holds ε̂ as a function of x (B, C, H, W) in [-1, 1] and of what its network reads of the time: t itself or

    log_snr = λ(t) = log(√α(t)/std(t)),

which is computed here, outside the file, in float64 on the schedule that the file names. Gradients are refused: an
attack that could not differentiate it would find a gradient of zero and call the defence robust.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

from torch import Tensor

from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import VPSDE, DiscreteVP, Schedule
from diffpure.errors import InputError
from diffpure.models.code import SOURCE
from diffpure.models.runtime import Compiled, no_gradient, read_files
from diffpure.scores.photos import mirrored


@final
class ExportedScore(EpsilonScore):
    """A score in a file of `diffpure export`, without gradients; images of any size where its network takes any."""

    def __init__(self, network: Compiled) -> None:
        info = network.info
        if info.get("what") != "score":
            raise InputError(f"{network.origin} holds a {info.get('what')}, where a score is wanted.")
        try:
            super().__init__(schedule_of(info["schedule"]), info["size"], info["channels"])
            self.stride = max(1, int(info["stride"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{network.origin} does not say which schedule and size its score has.") from error
        if isinstance(reach := info.get("receptive_field"), int):
            self.receptive_field = reach
        self.runtime = network.runtime
        self._network = network  # hidden from `identify`, which reads the hash of its bytes
        setattr(self, SOURCE, network.sha256)

    @property
    def network(self) -> Compiled:
        """What is run."""
        return self._network

    @property
    def title(self) -> str:
        """What it is, in a few words."""
        return f"{self._network.origin} on {self.runtime}"

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        return no_gradient(x, self._network(self.inputs(x, t))[..., :height, :width].to(x), self._network.origin)

    def inputs(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        """What its network reads, by name: the image mirrored to a multiple of the stride, and the time."""
        height, width = x.shape[-2:]
        values = {
            "x": mirrored(x, height + -height % self.stride, width + -width % self.stride).float(),
            "t": t.double().expand(x.shape[0]),
            "log_snr": self.sde.log_snr(t).float().expand(x.shape[0]),
        }
        return {name: values[name] for name in self._network.inputs}


def schedule_table(sde: Schedule) -> dict[str, Any]:
    """A schedule as a table of plain values."""
    if isinstance(sde, VPSDE):
        return {"beta_min": sde.beta_min, "beta_max": sde.beta_max}
    if isinstance(sde, DiscreteVP):
        return {"betas": list(sde.betas)}
    raise InputError(f"A {type(sde).__name__} cannot be written to a file; VPSDE and DiscreteVP can.")


def schedule_of(table: Mapping[str, Any]) -> Schedule:
    """The schedule of a table."""
    if "betas" in table:
        return DiscreteVP(tuple(float(beta) for beta in table["betas"]))
    return VPSDE(float(table["beta_min"]), float(table["beta_max"]))


def _ending(suffix: str) -> Callable[[Path], bool]:
    return lambda path: path.suffix.lower() == suffix


# Files that hold a network as a program: how to know one, and how to load it.
PROGRAMS: Final[dict[str, tuple[Callable[[Path], bool], Callable[[Path], ExportedScore]]]] = {
    "ONNX": (_ending(".onnx"), lambda path: ExportedScore(read_files("onnx", path))),
    "OpenVINO": (_ending(".xml"), lambda path: ExportedScore(read_files("openvino", path))),
}

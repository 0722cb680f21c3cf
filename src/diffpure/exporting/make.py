"""Export, and compare with torch before anything is written or used.

A file whose network differs from torch's by more than TOLERANCE (of ε̂, whose values are about 1, or of images in
[0, 1]) at any of the times, batch sizes and image sizes tried is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from diffpure.diffusion.score import ScoreModel
from diffpure.diffusion.sde import STEPS, over
from diffpure.disk import home, one_sentence, write_whole
from diffpure.errors import InputError
from diffpure.exporting.graphs import example, purifier_graph, score_graph
from diffpure.models.identity import identify
from diffpure.models.runtime import KEY, Compiled, Runtime, openvino_model, package, require
from diffpure.purifiers.diffusion import Purifier
from diffpure.purifiers.exported import ExportedPurifier
from diffpure.scores.exported import ExportedScore

TOLERANCE: Final = 1e-4
TIMES: Final = (1e-5, 1e-3, 0.05, 0.1, 0.4, 1.0)
BATCHES: Final = (1, 3)
REVISION: Final = 2  # of what is written, for names in the cache


def export_score(score: ScoreModel, runtime: Runtime = "onnx") -> tuple[ExportedScore, float]:
    """The score as a network of that runtime, and by how much it differs from torch, at most."""
    require(runtime)
    exported = ExportedScore(_network(score_graph(score), runtime, _name(score)))
    return exported, check_score(score, exported)


def export_purifier(purifier: Purifier, runtime: Runtime = "onnx") -> tuple[ExportedPurifier, float]:
    """The purifier as a network of that runtime, and by how much its images differ from torch's, at most."""
    require(runtime)
    exported = ExportedPurifier(_network(purifier_graph(purifier), runtime, _name(purifier.score)))
    return exported, check_purifier(purifier, exported)


def backend_score(score: ScoreModel, backend: str) -> ScoreModel:
    """The score computed by "torch" (as it is), "onnx" or "openvino"; it is exported once and kept in the cache.

    Whatever comes out of the cache is compared with torch again, and exported anew if it differs or cannot be read.
    """
    if backend == "torch":
        return score
    if backend not in ("onnx", "openvino"):
        raise InputError(f"A backend is torch, onnx or openvino, got {backend!r}.")
    runtime: Runtime = "onnx" if backend == "onnx" else "openvino"
    require(runtime)
    file = cache_file(score)
    with contextlib.suppress(InputError, OSError):
        cached = ExportedScore(Compiled(runtime, file.read_bytes(), origin=_name(score)))
        check_score(score, cached)
        return cached
    exported = ExportedScore(Compiled(runtime, score_graph(score), origin=_name(score)))
    check_score(score, exported)
    with contextlib.suppress(OSError):  # without a cache it is exported every time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, exported.network.data)
    return exported


def cache_file(score: ScoreModel) -> Path:
    """Where the cache keeps the network of a score: its name is made of the weights and of what exported them."""
    version = torch.__version__.partition("+")[0]
    return home() / "exported" / f"{identify(score)[:32]}-torch{version}-{REVISION}.onnx"


@torch.no_grad()
def check_score(score: ScoreModel, exported: ExportedScore) -> float:
    """The largest difference of ε̂ from torch's, of its largest value where that is above 1; refused above TOLERANCE."""
    worst = 0.0
    for batch, strides in itertools.product(BATCHES, ((5, 6), (4, 9)) if score.size is None else ((0, 0),)):
        x = example(score, batch, strides)
        if score.size is None:  # the backend mirrors the image to a multiple of the stride
            x = x[..., : x.shape[-2] - batch, : x.shape[-1] - 1]
        for t in TIMES:
            times = torch.full((batch,), t, dtype=torch.float64)
            steps = (STEPS * times - 1).round().clamp(min=0).long()
            std = over(score.sde.std(times), x)  # which makes the noise of a score
            worst = max(
                worst,
                _difference(std * exported(x, times), std * score(x, times)),
                _difference(exported.epsilon_step(x, steps), score.epsilon_step(x, steps)),
            )
    return _accepted(worst, exported.title)


@torch.no_grad()
def check_purifier(purifier: Purifier, exported: ExportedPurifier) -> float:
    """The largest difference of purified images from torch's, for the same seeds; refused above TOLERANCE."""
    worst = 0.0
    for batch in BATCHES:
        images = (example(purifier.score, batch, (4, 3)) / 4 + 0.5).clamp(0, 1)
        seeds = list(range(batch))
        worst = max(worst, _difference(exported(images, seeds), purifier(images, seeds)))
    return _accepted(worst, exported.title)


def write(network: Compiled, path: Path) -> list[Path]:
    """Write a network to FILE.onnx, or to FILE.xml and FILE.bin: the files."""
    if (path.suffix.lower() == ".xml") != bool(network.weights):
        wanted = ".xml" if network.weights else ".onnx"
        raise InputError(f"A file of this format ends in {wanted}, got {path.name}.")
    files = {path.with_suffix(".bin"): network.weights, path: network.data} if network.weights else {path: network.data}
    with one_sentence(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            write_whole(file, data)
    return list(files)


def to_openvino(network: Compiled, change: Callable[[Any], Any] = lambda model: model) -> Compiled:
    """A network as OpenVINO's two files, after a change of its model."""
    model = change(openvino_model(network))
    model.set_rt_info(json.dumps(network.info), [KEY])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.xml"
        package("openvino", "openvino").save_model(model, file, compress_to_fp16=False)
        return Compiled("openvino", file.read_bytes(), file.with_suffix(".bin").read_bytes(), origin=network.origin)


def _network(data: bytes, runtime: Runtime, origin: str) -> Compiled:
    """ONNX as a network in the format of the runtime."""
    network = Compiled(runtime, data, origin=origin)
    return network if runtime == "onnx" else to_openvino(network)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, of the largest value where that is above 1; infinite where anything is not finite."""
    worst = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
    return worst if math.isfinite(worst) else math.inf


def _accepted(worst: float, title: str) -> float:
    if worst > TOLERANCE:
        raise InputError(f"{title} differs from torch by {worst:.2g}, and up to {TOLERANCE:g} is accepted.")
    return worst


def _name(score: ScoreModel) -> str:
    return f"The exported {type(score).__name__}"

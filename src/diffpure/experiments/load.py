"""From a spec to its evaluation: load what it names, then estimate, run or verify.

spec = EvaluationSpec.read("specs/cifar10-small-linf.toml")
result = run(spec, run_folder(spec))            # killed at any moment, the same call goes on
print(result, verify_run(run_folder(spec)))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from diffpure.classifiers.load import load_classifier
from diffpure.data import cifar10, samples
from diffpure.errors import InputError, unknown
from diffpure.evaluation.engine import Engine
from diffpure.evaluation.estimate import Estimate
from diffpure.evaluation.evaluate import Choice, Progress, Ready, evaluate, prepare
from diffpure.evaluation.results import Result, read_rows
from diffpure.evaluation.spec import DataSpec, EvaluationSpec, ModelSpec
from diffpure.evaluation.verify import Verification, verify
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from diffpure.scores.load import load_score

WEIGHTS: Final = (".pt", ".pth", ".ckpt", ".onnx", ".safetensors")  # how a file of weights ends


@final
@dataclass(frozen=True)
class World:
    """What a spec names, loaded: a model, images (B, C, H, W) in [0, 1] and labels (B,)."""

    model: nn.Module
    images: Tensor
    labels: Tensor


Build = Callable[[EvaluationSpec], World]


def build(spec: EvaluationSpec, device: str | torch.device = "cpu") -> World:
    """Load the model and the images of a spec."""
    images, labels = load_images(spec.data)
    return World(load_model(spec.model).to(device), images, labels)


def load_model(spec: ModelSpec) -> nn.Module:
    """The bare classifier, or the defence that purifies before it."""
    classifier = load_classifier(_name_or_file(spec.classifier), like=spec.classifier_like)
    if spec.score is None:
        return classifier
    score = load_score(_name_or_file(spec.score), like=spec.score_like)
    purifier = Purifier(score, spec.make_sampler(), spec.gradient, rounds=spec.rounds)
    return Defense(purifier, classifier)


def load_images(spec: DataSpec) -> tuple[Tensor, Tensor]:
    """The chosen images (N, C, H, W) and their labels (N,)."""
    if spec.source not in SOURCES:
        raise unknown("source of images", spec.source, SOURCES)
    images, labels = SOURCES[spec.source](spec.path)
    if (last := max(spec.images)) >= len(images):
        raise InputError(f"The source {spec.source!r} has {len(images)} images, so there is no image {last}.")
    chosen = torch.tensor(spec.images)
    return images[chosen], labels[chosen]


def _name_or_file(name: str) -> str:
    """A name as it is; what looks like a file must be there."""
    looks_like_file = Path(name).suffix in WEIGHTS or name.startswith((".", "/"))
    if looks_like_file and not Path(name).exists():
        raise InputError(f"The spec names the file {name}, which is not there.")
    return name


def _samples(path: str | None) -> tuple[Tensor, Tensor]:
    return samples.samples()


def _cifar10(path: str | None) -> tuple[Tensor, Tensor]:
    stored = cifar10.load("test", path)
    return stored.float(), stored.labels


def _file(path: str | None) -> tuple[Tensor, Tensor]:
    if path is None or not Path(path).is_file():
        raise InputError(f"A source of kind 'file' needs a path to a safetensors file, and {path} is none.")
    try:
        tensors = load_file(path)
        return tensors["images"], tensors["labels"]
    except (SafetensorError, KeyError) as error:
        raise InputError(f"{path} is no safetensors file with `images` and `labels`.") from error


# Where images come from, by the name a spec calls it; each is given the spec's path.
SOURCES: Final[dict[str, Callable[[str | None], tuple[Tensor, Tensor]]]] = {
    "cifar10-samples": _samples,
    "cifar10": _cifar10,
    "file": _file,
}


def run_folder(spec: EvaluationSpec, parent: str | Path = "runs") -> Path:
    """The folder of a run: its hash names it."""
    return Path(parent) / spec.hash


def run(
    spec: EvaluationSpec,
    folder: str | Path,
    *,
    engine: Engine | None = None,
    memory: int | None = None,
    only: Choice | None = None,
    progress: Progress | None = None,
    on_estimate: Callable[[Estimate], None] | None = None,
    build: Build = build,
) -> Result:
    """Evaluate a spec into a folder; called again after a kill, it goes on and ends with the same rows."""
    world = build(spec)
    return evaluate(
        world.model,
        world.images,
        world.labels,
        spec.threat.make(),
        spec.make_attacks(),
        **_settings(spec),
        memory=memory,
        probe=spec.probe,
        only=only,
        out=folder,
        engine=engine,
        progress=progress,
        on_estimate=on_estimate,
    )


def estimate_run(spec: EvaluationSpec, *, memory: int | None = None, build: Build = build) -> Estimate:
    """What a spec will cost on this machine."""
    return _ready(spec, memory, build).estimate


def verify_run(
    folder: str | Path, *, build: Build = build, progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Check a run of a spec from its files alone."""
    header, _ = read_rows(folder, on_bad=lambda _: None)
    if header.get("spec") is None:
        raise InputError(f"{folder} was made without a spec; check it with `verify` and the model itself.")
    return verify(folder, _ready(EvaluationSpec.of(header["spec"]), None, build), progress=progress)


def _ready(spec: EvaluationSpec, memory: int | None, build: Build) -> Ready:
    world = build(spec)
    threat, attacks = spec.threat.make(), spec.make_attacks()
    return prepare(world.model, world.images, world.labels, threat, attacks, **_settings(spec), memory=memory)


def _settings(spec: EvaluationSpec) -> dict[str, Any]:
    return {
        "rules": spec.rules,
        "seeds": spec.seeds,
        "batch": spec.batch,
        "indices": spec.data.images,
        "name": spec.name,
        "spec": {key: value for key, value in spec.plain().items() if key != "name"},
    }


def shipped_specs() -> dict[str, Path]:
    """The specs inside the package, by name."""
    folder = Path(str(resources.files("diffpure.experiments").joinpath("specs")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}

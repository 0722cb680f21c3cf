"""The pictures of a run, made from its files: the spec gives the model back, and the recorded seeds its noise.

`gallery_of` keeps what it makes in the run's folder; the purified picture of an image is the one that the run's first
final draw classified.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diffpure.attacks.losses import Model, call
from diffpure.data.cifar10 import CLASSES
from diffpure.errors import InputError
from diffpure.evaluation.describe import weight_hashes
from diffpure.evaluation.gallery import GIVEN, Gallery, eight_bits, strongest
from diffpure.evaluation.results import CLEAN, Result
from diffpure.evaluation.spec import EvaluationSpec
from diffpure.evaluation.store import IMAGES, read_tensors
from diffpure.evaluation.units import Job, Unit, attack_seeds, judge_seeds, threads
from diffpure.experiments.run import Build, World, build
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense

# The names of the classes, by the source of the images or, where that is a user's file, by the classifier.
NAMES: Final[dict[str, tuple[str, ...]]] = {
    "cifar10": CLASSES,
    "cifar10-samples": CLASSES,
    "cifar10-resnet": CLASSES,
    "cifar10-resnet-at": CLASSES,
    "cifar10-vit-tiny": CLASSES,
}


def gallery_of(folder: str | Path, count: int = 8, *, build: Build = build) -> Gallery:
    """The pictures of a finished run: those that were kept, or new ones of the first images under its strongest attack.

    A run without attacks shows its images as they were given.
    """
    folder, result = Path(folder), Result.load(folder)
    kept = Gallery.load(folder, result.header)
    if kept is not None and len(kept.labels) >= min(count, len(result.header["images"]), result.header["batch"]):
        return kept
    if result.header.get("spec") is None:
        raise InputError("The run was made without a spec, so its model cannot be loaded.")
    spec = EvaluationSpec.of(result.header["spec"])
    world = build(spec)
    if weight_hashes(world.model) != result.header["weights"]:
        raise InputError("The weights at hand are not those of the run.")
    with threads(result.header["threads"]):
        made = _gallery(folder, result, spec, world, count)
    made.save(folder, result.header)
    return made


@torch.no_grad()
def _gallery(folder: Path, result: Result, spec: EvaluationSpec, world: World, count: int) -> Gallery:
    attack = strongest(result)
    unit = Unit(result.seeds[0], attack, 0, min(result.header["batch"], len(world.images)))
    shown = slice(0, min(count, unit.stop))
    stages = {GIVEN if attack == CLEAN else "clean": world.images[shown]}
    if attack != CLEAN:
        stages["attacked"] = read_tensors(folder / IMAGES / unit.file)["images"][shown]
    job = Job(world.model, spec.threat.make(), spec.make_attacks(), result.rules, unit.stop)
    seeds = judge_seeds(job, unit, attack_seeds(unit, result.header["images"][shown]))[
        :: job.samples
    ]  # the first samples
    classifier: Model = lambda x: call(world.model, x, seeds)  # noqa: E731
    if isinstance(world.model, Defense):
        stages |= _way_back(world.model.purifier, list(stages.values())[-1], seeds)
        classifier = world.model.classifier
    sure, classes = torch.stack([classifier(x).softmax(1) for x in stages.values()]).max(2)
    return Gallery(
        attack=attack,
        stages=tuple(stages),
        pictures=np.stack([eight_bits(x.numpy()) for x in stages.values()]),
        classes=classes.numpy(),
        confidence=sure.float().numpy(),
        labels=world.labels[shown].numpy(),
        names=NAMES.get(spec.data.source, NAMES.get(spec.model.classifier, ())),
    )


def _way_back(purifier: Purifier, images: Tensor, seeds: tuple[int, ...]) -> dict[str, Tensor]:
    """The diffused (where the sampler diffuses) and the purified images."""
    if not hasattr(purifier.sampler, "t_star"):
        return {"purified": purifier(images, seeds)}
    diffused, purified = purifier.trajectory(images, [1.0, 0.0], seeds)
    return {"diffused": diffused, "purified": purified if purifier.rounds == 1 else purifier(images, seeds)}

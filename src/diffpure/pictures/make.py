"""The pictures of a run, made with its model: what the recorded seeds and the kept adversarial images give again.

The purified picture of an image is the one that the first evaluation sample classified, of a vote its first draw.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diffpure.attacks.losses import call
from diffpure.errors import InputError
from diffpure.evaluation.setup import Evaluation
from diffpure.evaluation.store import IMAGES, read_tensors
from diffpure.evaluation.units import attack_seeds, device_of, evaluation_seeds, threads
from diffpure.pictures.gallery import GIVEN, Gallery, eight_bits, kept_gallery, strongest
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN


def make_gallery(folder: str | Path, evaluation: Evaluation, count: int = 8) -> Gallery:
    """The first images of a finished run under its strongest attack, in stages; they are kept in its folder.

    A run without attacks shows its images as they were given.
    """
    folder, result = Path(folder), Result.load(folder)
    if evaluation.header["model"]["parts"] != result.header["model"]["parts"]:
        raise InputError("The model at hand is not that of the run.")
    if evaluation.header["data"] != result.header["data"]:
        raise InputError("The images at hand are not those of the run.")
    with threads(result.header["threads"]):
        made = _gallery(folder, result, evaluation.planned(result.header), count)
    made.save(folder, result.header)
    return made


def keep_pictures(folder: str | Path, evaluation: Evaluation, count: int = 8) -> Gallery | None:
    """The pictures of a finished run: those that are kept, else new ones; None of images that no picture can show."""
    if kept := kept_gallery(Path(folder), Result.load(folder), count):
        return kept
    if evaluation.images.shape[1] not in (1, 3):
        return None
    return make_gallery(folder, evaluation, count)


@torch.no_grad()
def _gallery(folder: Path, result: Result, evaluation: Evaluation, count: int) -> Gallery:
    attack, job, device = strongest(result), evaluation.job, device_of(evaluation.job.model)
    units = [u for u in evaluation.units if u.attack == attack and u.seed == result.seeds[0] and u.start < count]
    shown = slice(0, min(count, units[-1].stop))
    stages = {GIVEN if attack == CLEAN else "clean": evaluation.images[shown].to(device)}
    if attack != CLEAN:
        kept = [read_tensors(folder / IMAGES / unit.file)["images"] for unit in units]
        stages["attacked"] = torch.cat(kept)[shown].to(device)
    seeds = evaluation_seeds(job, units[0], attack_seeds(units[0], result.indices[shown]))[:: job.samples]
    purifier = getattr(job.model, "purifier", None)
    if purifier is not None:
        stages |= getattr(job.model, "stages", purifier.stages)(list(stages.values())[-1], seeds)
    classifier = job.model if purifier is None else job.model.classifier  # type: ignore[attr-defined]
    sure, classes = torch.stack([_probabilities(classifier, x, seeds) for x in stages.values()]).max(2)
    return Gallery(
        attack=attack,
        stages=tuple(stages),
        pictures=np.stack([eight_bits(x.cpu().numpy()) for x in stages.values()]),
        classes=classes.cpu().numpy(),
        confidence=sure.float().cpu().numpy(),
        labels=evaluation.labels[shown].numpy(),
        names=tuple(result.header["classes"]),
    )


def _probabilities(classifier: object, x: Tensor, seeds: tuple[int, ...]) -> Tensor:
    logits: Tensor = call(classifier, x, seeds)  # type: ignore[arg-type]
    return logits.softmax(1)

"""Let a classifier expect purified images: its batch normalisations take the statistics that purified images have.

A batch normalisation subtracts the mean m and divides by the standard deviation √v of the features of the images that
the classifier was trained on. Purified images are smoother, so their features have others, m' and v'. With share s

    m ← (1 - s) m + s m',      v ← (1 - s) v + s v',

which needs a few hundred images of the kind that will be purified, no labels and no gradient (Schneider et al. 2020 do
so for corrupted images). m' and v' are the means, over batches, of what each batch has; a batch is normalised by its
own statistics on its way, as in training. Weights stay as they are, and so does the classifier that was given.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from diffpure.errors import InputError
from diffpure.noise import Noise, Seeds
from diffpure.purify import Defense
from diffpure.validate import as_images


@torch.no_grad()
def recalibrate(model: Defense, images: Any, *, share: float = 0.5, batch: int = 50, seeds: Seeds = 0) -> Defense:
    """The defence with a copy of its classifier whose batch normalisations know purified images.

    images: unlabelled images (N, C, H, W) in [0, 1] of the kind that will be purified, a hundred or more; never those
    that it is measured on.   share: of their statistics, in [0, 1]; 0 changes nothing.   batch: images per call.
    seeds: of the noise that they are purified with.
    """
    images = as_images(images)
    if not 0 <= share <= 1 or batch < 2:
        raise InputError(f"Recalibration takes a share in [0, 1] and batches of 2 or more, got {share} and {batch}.")
    if len(images) < 2:
        raise InputError("Recalibration takes the statistics of two images or more, got one.")
    classifier = copy.deepcopy(model.classifier)
    norms = _norms(classifier)
    expected = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
    modes = [(norm.momentum, norm.training) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    drawn = Noise.of(seeds, len(images)).seeds
    for rows in _batches(len(images), batch):
        classifier(model.purifier(images[rows], drawn[rows]))
    for norm, (mean, variance), (momentum, training) in zip(norms, expected, modes, strict=True):
        norm.running_mean.lerp_(mean, 1 - share)
        norm.running_var.lerp_(variance, 1 - share)
        norm.momentum = momentum
        norm.train(training)
    return model.with_classifier(classifier)


def _norms(classifier: Any) -> list[Any]:
    """The batch normalisations that keep statistics."""
    modules = classifier.modules() if isinstance(classifier, nn.Module) else ()
    found = [m for m in modules if isinstance(m, _BatchNorm) and isinstance(m.running_mean, Tensor)]
    if not found:
        raise InputError("The classifier has no batch normalisation with statistics, so nothing can be recalibrated.")
    return found


def _batches(count: int, size: int) -> list[slice]:
    """Batches of nearly equal size, none of one image: each weighs the same in the mean over batches."""
    number = max(1, min(-(-count // size), count // 2))
    edges = [count * i // number for i in range(number + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]

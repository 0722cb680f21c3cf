"""`certify`: within which ℓ2 radius no perturbation whatever changes the class of an image, up to probability α.

For each image, n₀ draws of the smoothing noise choose a class and n others count it (`diffpure.smoothing`). All
randomness is named by the image, so a row does not depend on the other images or on a kill:

    image seed      = mix(seed of the run, dataset index)
    seed of draw i  = mix(mix(image seed, SELECT or COUNT), i)        never used for both

A row is written as soon as its image is finished; a run that is killed goes on with the next one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from diffpure.certificates.smoothed import decisions, same_noise, smoothing_noise
from diffpure.errors import InputError
from diffpure.evaluation.setup import about_model, distinct, refuse_training, surroundings
from diffpure.evaluation.store import Log
from diffpure.evaluation.units import device_of, threads
from diffpure.meter import metered
from diffpure.models.checkpoints import digest
from diffpure.named import check_fields
from diffpure.noise import mix, mix_all
from diffpure.purify import Defense
from diffpure.results.certificates import FORMAT, CertificateRow, Certification, read_certificates
from diffpure.results.read import CERTIFICATES
from diffpure.smoothing import MOST, check_alpha
from diffpure.validate import as_images, as_labels

SELECT: Final = 0x5E1E
COUNT: Final = 0xC047
PER_CALL: Final = 100  # images in one call of the model, where nobody says otherwise

# What fixes the rows of a run.
IDENTITY: Final = (
    "format", "kind", "spec", "model", "data", "indices", "sigma", "n0", "n", "alpha", "votes", "seed",
)  # fmt: skip

Progress = Callable[[int, int], None]  # images given to the model so far, and in all


@final
@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """How certificates are made.

    sigma: the noise on images in [0, 1]; None takes that of the model, any other than the model's is refused.
    n0, n: draws that choose the class, and draws that count it.   alpha: the probability that a certificate is wrong.
    votes: reverse chains per draw, whose majority is its decision.   seed: of all draws.
    per_call: images in one call of the model.
    """

    sigma: float | None = None
    n0: int = 100
    n: int = 1000
    alpha: float = 0.001
    votes: int = 1
    seed: int = 0
    per_call: int = PER_CALL

    def __post_init__(self) -> None:
        check_fields(self)
        check_alpha(self.alpha)
        if not (1 <= self.n0 <= MOST and 1 <= self.n <= MOST):
            raise InputError(f"n0 and n are draws, from 1 to {MOST:,}, got {self.n0} and {self.n}.")
        if self.votes < 1 or self.per_call < 1:
            raise InputError(f"votes and per_call are at least 1, got {self.votes} and {self.per_call}.")

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Smoothing:
        """How the certificates of a run were made, from its header."""
        return cls(**{field.name: header[field.name] for field in fields(cls)})


@final
class CertificateLog(Log[CertificateRow]):
    """An open run of certificates."""

    kind, identity = "certification", IDENTITY

    @staticmethod
    def read(folder: Path) -> tuple[dict[str, Any], list[CertificateRow]]:
        return read_certificates(folder)


@final
@dataclass(frozen=True)
class Certifying:
    """A checked certification that has not begun: the model, its images (N, C, H, W), labels (N,), and the header."""

    model: Defense
    images: Tensor
    labels: Tensor
    header: Mapping[str, Any]

    def row(self, i: int, on_call: Callable[[int], None] = lambda _: None) -> CertificateRow:
        """The certificate of the image in place i: a pure function of the header, the image and its dataset index."""
        began, about = time.perf_counter(), self.header
        index, image = about["indices"][i], self.images[i].to(device_of(self.model))
        with metered() as calls:
            selection, counts = (
                decisions(self.model, image, seeds, about["votes"], about["per_call"], on_call)
                for seeds in draw_seeds(about["seed"], index, about["n0"], about["n"])
            )
        row = CertificateRow.of_draws(index, int(self.labels[i]), selection, counts, about)
        seconds = round(time.perf_counter() - began, 4)
        return replace(row, network=calls["network"], classifier=calls["classifier"], seconds=seconds)

    @property
    def calls(self) -> int:
        """Images given to the model for one certificate."""
        return int((self.header["n0"] + self.header["n"]) * self.header["votes"])


def draw_seeds(seed: int, index: int, n0: int, n: int) -> tuple[list[int], list[int]]:
    """The seeds of the draws of one image: those that choose, and those that count."""
    own = mix(seed, index)
    selecting, counting = (
        mix_all(np.array([mix(own, tag)], np.uint64), np.arange(size)).tolist()
        for tag, size in ((SELECT, n0), (COUNT, n))
    )
    return selecting, counting


def set_up(
    model: Any,
    images: Any,
    labels: Any,
    smoothing: Smoothing | None = None,
    *,
    indices: Sequence[int] | None = None,
    name: str = "",
    class_names: Sequence[str] = (),
    spec: Mapping[str, Any] | None = None,
) -> Certifying:
    """Check everything, and write the header."""
    smoothing = smoothing or Smoothing()
    images = as_images(images, dtype=torch.float32)
    sigma = smoothing_noise(model, images, smoothing.votes)
    refuse_training(model)
    images = as_images(images, model.purifier.channels)
    device = device_of(model)
    with torch.no_grad():
        classes = model.classify(images[:1].to(device)).shape[1]
    labels = as_labels(labels, len(images), classes)
    if smoothing.sigma is not None:
        if not same_noise(smoothing.sigma, sigma):
            raise InputError(
                f"The model's t* adds noise of sigma {sigma:.6g}, not {smoothing.sigma:.6g}; "
                "`smoothed(score, classifier, sigma)` makes a model for a sigma."
            )
        sigma = smoothing.sigma
    header = {
        "format": FORMAT,
        "kind": CERTIFICATES,
        "name": name,
        "spec": spec,
        "model": about_model(model),
        "data": digest(images, labels),
        "indices": distinct(range(len(images)) if indices is None else indices, "dataset index", len(images)),
        "classes": list(class_names),
        "sigma": sigma,
        "t_star": model.purifier.sampler.t_star,
        "n0": smoothing.n0,
        "n": smoothing.n,
        "alpha": smoothing.alpha,
        "votes": smoothing.votes,
        "seed": smoothing.seed,
        "per_call": smoothing.per_call,
        **surroundings(device),
    }
    return Certifying(model, images, labels, json.loads(json.dumps(header)))


def run(work: Certifying, out: str | Path | None = None, progress: Progress | None = None) -> Certification:
    """Certify every image, or those that the run in `out` has no row of yet.

    A run that goes on keeps its images per call and its number of threads, as both decide how sums round.
    """
    if out is None:
        return Certification.of(work.header, list(_rows(work, range(len(work.images)), progress)))
    with CertificateLog.open(out, work.header) as log:
        work, have = replace(work, header=log.header), {row.image for row in log.rows}
        missing = [i for i, index in enumerate(work.header["indices"]) if index not in have]
        with threads(log.header["threads"]):
            for row in _rows(work, missing, progress):
                log.append([row])
        found = Certification.of(log.header, log.rows, Path(out))
        log.save_summary(found.summary())
    return found


def _rows(work: Certifying, places: Sequence[int], progress: Progress | None) -> Iterator[CertificateRow]:
    total = len(work.images) * work.calls
    done = total - len(places) * work.calls

    def on_call(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    if places:
        on_call(0)
    for i in places:
        yield work.row(i, on_call)


def certify(
    model: Any,
    images: Any,
    labels: Any,
    sigma: float | None = None,
    *,
    n0: int = 100,
    n: int = 1000,
    alpha: float = 0.001,
    votes: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    per_call: int = PER_CALL,
    indices: Sequence[int] | None = None,
    name: str = "",
    class_names: Sequence[str] = (),
    progress: Progress | None = None,
) -> Certification:
    """Certify the class of each image; with `out`, a folder, it can be killed at any time and called again to go on.

    model: a `Defense` whose forward diffusion is the smoothing noise, as `smoothed(score, classifier, sigma)` makes it.
    images (B, C, H, W) in [0, 1], labels (B,).   sigma: the noise on them, checked against the model's t*.
    n0, n: draws that choose the class, and draws that count it.   alpha: the probability that a certificate is wrong.
    votes: reverse chains per draw, whose majority is its decision.   indices: the images' dataset indices, which name
    their noise.   progress: hears the images given to the model so far, and in all.
    """
    smoothing = Smoothing(sigma=sigma, n0=n0, n=n, alpha=alpha, votes=votes, seed=seed, per_call=per_call)
    work = set_up(model, images, labels, smoothing, indices=indices, name=name, class_names=class_names)
    return run(work, out, progress)

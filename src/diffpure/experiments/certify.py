"""Certificates of a spec's model: from its names to a checked certification, and from a run back to it.

    named, work = certificate_spec(EvaluationSpec.read("mine.toml"), Smoothing(sigma=0.25))
    result = run(work, run_folder(named))           # killed at any moment, the same call goes on

A spec's model is certified with its own sampler, its t* replaced by that of σ; without a σ, as it stands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from diffpure.certificates.certify import Certifying, Smoothing, set_up
from diffpure.certificates.smoothed import same_noise, sigma_of, smoothing_noise, t_star_of
from diffpure.data.choice import ALL, first
from diffpure.data.sources import DataSpec
from diffpure.diffusion.samplers import AnySampler, sampler_of
from diffpure.errors import InputError
from diffpure.experiments.load import PLAIN, Loader
from diffpure.experiments.spec import EvaluationSpec, ModelSpec, named_folder
from diffpure.results.certificates import FORMAT, read_certificates
from diffpure.verification.certificates import verify_certificates
from diffpure.verification.verify import Verification

# What is certified, by diffusion denoised smoothing, when no spec is named.
EMBEDDED: Final = EvaluationSpec(
    name="CIFAR-10, small models",
    model=ModelSpec(classifier="cifar10-resnet", score="cifar10-small", sampler="one-shot"),
    data=DataSpec(images=ALL),
)


@final
@dataclass(frozen=True)
class CertificateSpec:
    """The model and the images of a spec (its attacks play no part), and how they are certified."""

    spec: EvaluationSpec
    smoothing: Smoothing

    @property
    def name(self) -> str:
        """What the result is called."""
        return self.spec.name

    @property
    def hash(self) -> str:
        """A hash of everything that fixes the rows."""
        settings = {key: value for key, value in asdict(self.smoothing).items() if key != "per_call"}
        content = {"format": FORMAT, "spec": self.spec.plain(), "smoothing": settings}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder_name(self) -> str:
        """The name of the run's folder."""
        return named_folder(f"certified sigma {self.smoothing.sigma:g} {self.name}", self.hash)


def certificate_spec(
    spec: EvaluationSpec,
    smoothing: Smoothing,
    sampler: str | None = None,
    images: int | None = None,
    loader: Loader = PLAIN,
) -> tuple[CertificateSpec, Certifying]:
    """The certification of a spec's model and images, by its values and ready to run.

    sampler: another way back than the spec's, by name.   images: only so many of the spec's, its first.
    """
    if spec.model.score is None:
        raise InputError("A certificate needs a [model] with a score: its forward diffusion is the smoothing noise.")
    back = _table(spec.model.sampler if sampler is None else sampler)
    model = loader.model(replace(spec.model, sampler=back))
    purifier: Any = model.purifier
    sde, sigma = purifier.score.sde, smoothing.sigma
    own = sigma_of(sde, purifier.sampler.t_star) if hasattr(purifier.sampler, "t_star") else None
    if sigma is not None and own is not None and not same_noise(own, sigma):
        back = {**back, "t_star": t_star_of(sde, sigma)}
        purifier.sampler = sampler_of(back)
    data = spec.data if images is None else replace(spec.data, images=first(str(spec.data.images or ALL), images))
    plain = EvaluationSpec(name=spec.name, model=replace(spec.model, sampler=back), data=data)
    chosen = loader.data(plain)
    if sigma is None:
        smoothing = replace(smoothing, sigma=smoothing_noise(model, chosen.images, smoothing.votes))
    work = set_up(
        model,
        chosen.images,
        chosen.labels,
        smoothing,
        indices=chosen.indices,
        name=spec.name,
        class_names=chosen.class_names,
        spec=plain.plain(),
    )
    return CertificateSpec(plain, smoothing), work


def _table(sampler: AnySampler) -> dict[str, Any]:
    """A sampler of a spec as a table."""
    return dict(sampler) if isinstance(sampler, Mapping) else {"kind": sampler}


def verify_certificate_run(
    folder: str | Path,
    loader: Loader = PLAIN,
    *,
    again: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check a run of `diffpure certify`: its files, and the model and images that it names."""
    header, _ = read_certificates(folder, on_bad=lambda _: None)
    if header.get("spec") is None:
        raise InputError(f"{folder} was made without a spec; check it with `dp.verify` and the model itself.")
    spec = replace(EvaluationSpec.of(header["spec"]), name=str(header.get("name", "")))
    try:
        _, work = certificate_spec(spec, Smoothing.of(header), loader=loader)
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}; `--rows-only` checks what the files alone can show.") from error
    return verify_certificates(folder, work, again=again, progress=progress)

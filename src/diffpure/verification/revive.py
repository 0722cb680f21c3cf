"""`dp.verify`: check a run that was made in Python, with the model and the images at hand.

The header of a run holds the values of its threat and attacks, its rules, seeds and batches. From them the evaluation
is set up again around the given model and images, and then verified as a run of a spec is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from diffpure.attacks import revive_attack
from diffpure.attacks.losses import Model
from diffpure.certificates.certify import Certifying, Smoothing
from diffpure.certificates.certify import set_up as set_up_certificates
from diffpure.errors import InputError
from diffpure.evaluation.setup import Evaluation, Settings, set_up
from diffpure.named import revive
from diffpure.results.certificates import read_certificates
from diffpure.results.read import holds_certificates, read_rows
from diffpure.threats import THREATS, ThreatModel
from diffpure.verification.certificates import verify_certificates
from diffpure.verification.verify import Verification
from diffpure.verification.verify import verify as verify_evaluation

CLAIMED_SPEC: Final = "that the spec in the header was evaluated (`diffpure verify` loads what it names)"


def verify(
    folder: str | Path,
    model: Model,
    images: Any,
    labels: Any,
    *,
    again: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check the run in a folder against the model, images (B, C, H, W) in [0, 1] and labels (B,) that it is about.

    again: how many attacked units, chosen at random, to compute anew; of a run of certificates, how many images.
    """
    if holds_certificates(folder):
        return verify_certificates(folder, certifying_of(folder, model, images, labels), again=again, progress=progress)
    header, _ = read_rows(folder, on_bad=lambda _: None)
    found = verify_evaluation(folder, evaluation_of(header, model, images, labels), again=again, progress=progress)
    return found if header.get("spec") is None else replace(found, claimed=(*found.claimed, CLAIMED_SPEC))


def certifying_of(folder: str | Path, model: Model, images: Any, labels: Any) -> Certifying:
    """The certification that a run's header describes, of the model and images at hand."""
    header, _ = read_certificates(folder, on_bad=lambda _: None)
    about = {"indices": header["indices"], "name": header.get("name", ""), "spec": header.get("spec")}
    return set_up_certificates(
        model, images, labels, Smoothing.of(header), class_names=header.get("classes", ()), **about
    )


def evaluation_of(header: Mapping[str, Any], model: Model, images: Any, labels: Any) -> Evaluation:
    """The evaluation that a run's header describes, of the model and images at hand."""
    settings = Settings(
        rules=header["rules"],
        seeds=header["seeds"],
        batch=header["batch"],
        per_call=header["per_call"],
        indices=header["indices"],
        name=header.get("name", ""),
        class_names=header.get("classes", ()),
        spec=header.get("spec"),
    )
    attacks = {name: _attack(name, about) for name, about in header["attacks"].items()}
    return set_up(model, images, labels, _threat(header), attacks, settings)


def _attack(name: str, about: Mapping[str, Any]) -> Any:
    try:
        return revive_attack(about.get("value"))
    except InputError as error:
        raise InputError(f"The attack {name!r} of the run cannot be made from its header: {error}") from error


def _threat(header: Mapping[str, Any]) -> ThreatModel:
    made = revive(header.get("budget"), {cls.__name__: cls for cls in THREATS.values()})
    if not isinstance(made, ThreatModel):
        raise InputError(f"The header of the run does not hold the value of its threat {header['threat']}.")
    return made

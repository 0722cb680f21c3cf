"""The warnings of an evaluation: what its rows and header alone can tell, and what a few questions to the model add.

`of_rows` is a pure function of what a run keeps, so that `verify` computes it again; the rest asks the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from diffpure.attacks import sample_seeds
from diffpure.evaluation import checks
from diffpure.evaluation.setup import Evaluation
from diffpure.evaluation.units import Unit, attack_seeds, device_of, evaluation_seeds
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN
from diffpure.threats import L2, Linf, Perceptual, ThreatModel

_ASKED: Final = 16  # images whose cross-entropy is computed
_LARGE: Final = 0.5  # an ℓ∞ budget that no image survives


def warnings_of(evaluation: Evaluation, result: Result, probe: int) -> tuple[str, ...]:
    """All warnings of a complete result; with `probe` images also what must be tried."""
    job, model = evaluation.job, evaluation.job.model
    images, labels = (tensor.to(device_of(model)) for tensor in (evaluation.images, evaluation.labels))
    found: list[str | None] = [*of_rows(result), *_threat(job.threat, evaluation), *_size(evaluation)]
    if job.attacks:
        found.append(checks.saturated_cross_entropy(model, images[:_ASKED], labels[:_ASKED]))
        found.append(checks.not_probed(probe))
    if probe:
        x, y = images[:probe], labels[:probe]
        audited = False
        for name, attack in job.attacks.items():
            unit = Unit(evaluation.header["seeds"][0], name, 0, len(x))
            seeds = attack_seeds(unit, evaluation.indices[: len(x)])  # those of the run, which a defence may know
            if attack.uses_gradients and not audited:
                first, audited = sample_seeds(seeds[:1], 0, 1), True
                found += [checks.audited(model, x[:1], first), checks.looks_at_gradients(model, x[:1], first)]
            judged = evaluation_seeds(job, unit, seeds)
            found += [f"{name}: {text}" for text in checks.probe(attack, model, x, y, job.threat, seeds, judged)]
    return checks.doubts(found)


def of_rows(result: Result) -> tuple[str, ...]:
    """The warnings that follow from the header and the rows alone."""
    header, attacked = result.header, [row for row in result.rows if row.attack != CLEAN]
    gradients = sum(row.gradients for row in attacked)
    found: list[str | None] = [
        None if result.attacks else "The evaluation has no attack: robust accuracy was not measured.",
        checks.bad_gradients(sum(r.zero for r in attacked), sum(r.nonfinite for r in attacked), gradients),
        checks.budget_exceeded([row.within for row in attacked]),
    ]
    for name, about in header["attacks"].items():
        if about["approximate"]:
            found.append(checks.approximate_gradient(name, about["gradient"]))
        if header["model"].get("stochastic") and about.get("samples") == 1:
            found.append(f"{name}: {checks.ONE_SAMPLE}")
        if "stop" in about:
            rows = [row for row in attacked if row.attack == name]
            left = [row for row in rows if row.gradients < about["stop"]["gradients"]]
            samples = [k == row.label for row in left for k in row.predictions]
            found.append(checks.stopped(name, len(left), len(rows), about["stop"]["error"], samples))
    return checks.doubts([*found, *_black_box(result)])


def _black_box(result: Result) -> Iterator[str | None]:
    """Black-box attacks against the best of the white-box ones, under the steadiest rule that there is."""
    attacks = result.header["attacks"]
    black = [name for name, about in attacks.items() if not about["gradient"]]
    white = [name for name in attacks if name not in black]
    rule = next((r for r in result.rules if r.kind in ("average", "majority")), result.rules[0])
    wrong = {row.key for row in result.rows if not rule.right(row)}
    pairs = sorted({(row.seed, row.image) for row in result.rows})
    random = bool(result.header["model"].get("stochastic"))
    for name in black if white else ():
        left = [not any((*pair, other) in wrong for other in white) for pair in pairs]
        yield checks.black_box_beats_white_box(left, [(*pair, name) not in wrong for pair in pairs], random=random)


def _threat(threat: ThreatModel, evaluation: Evaluation) -> Iterator[str]:
    """Budgets under which any image can become any other."""
    if isinstance(threat, Linf) and threat.eps > _LARGE:
        yield f"An ℓ∞ budget of {threat.eps:g} lets every image become grey: nothing is robust under it."
    if isinstance(threat, Perceptual):
        yield f"The budget {threat.eps:g} is a distance in the features of {threat.features}, which bounds no ℓp norm."
    if isinstance(threat, L2) and threat.eps > math.sqrt(evaluation.images[0].numel()):
        yield f"An ℓ2 budget of {threat.eps:g} is longer than the diagonal of the images: nothing is robust under it."


def _size(evaluation: Evaluation) -> Iterator[str]:
    """Images that the purifier resizes by more than a factor of two."""
    size = getattr(getattr(evaluation.job.model, "purifier", None), "size", None)
    height, width = evaluation.images.shape[-2:]
    if size is not None and not size / 2 <= min(height, width) <= max(height, width) <= 2 * size:
        yield f"The images are {height}×{width}, but the purifier works at {size}×{size}: most of their detail is lost."

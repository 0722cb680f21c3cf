"""An evaluation that doubts itself: each check is a sentence that says what is wrong, or None.

The first half are pure functions of what a run has measured. The second half asks the model again: does its
cross-entropy saturate, is its gradient right, does it answer otherwise when a gradient is asked for or when it can know
its seeds, and does the attack still get stronger with more EOT samples, more steps or an unlimited budget?
The list is that of Carlini et al. 2019, Tramèr et al. 2020 and Croce et al. 2022, and of what went wrong since.

Survivors are booleans, one per image, True where the attack failed. Two attacks are compared on the same images. On a
deterministic model any difference is a fact; on a random one it has to pass a one-sided sign test at 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from diffpure.attacks.base import Attack, SampledAttack
from diffpure.attacks.expectation import EOT, expect
from diffpure.attacks.losses import MARGIN, Model, call, margin
from diffpure.attacks.seeds import sample_seeds
from diffpure.audit import audit_gradient
from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.threats import ThreatModel

Seeds = Sequence[int] | Tensor | None
Survivors = Sequence[bool]

EVALUATION: Final = 1 << 40  # the step of the samples that evaluate: far beyond the steps of any attack


def doubts(checks: Iterable[str | None]) -> tuple[str, ...]:
    """The sentences of the checks that found something, each once."""
    return tuple(dict.fromkeys(text for text in checks if text is not None))


# ------------------------------------------------------------------------------------------- functions of numbers


def bad_gradients(zero: int, nonfinite: int, gradients: int) -> str | None:
    """Gradients that are exactly zero, or not finite, lead an attack nowhere."""
    if not zero and not nonfinite:
        return None
    found = [f"{n} were {what}" for n, what in ((zero, "exactly zero"), (nonfinite, "NaN or infinite")) if n]
    return f"Of {gradients} gradients {' and '.join(found)}: robustness may be due to masked gradients."


def approximate_gradient(attack: str, mode: str) -> str:
    """A gradient that is not that of the computation makes a weaker attack."""
    return f"{attack}: the gradient mode {mode!r} is approximate: exact gradients may leave fewer survivors."


def fewer(before: Survivors, after: Survivors, *, random: bool) -> int:
    """How many fewer survive `after` than `before` on the same images; 0 unless that is more than chance."""
    lost = sum(b and not a for b, a in zip(before, after, strict=True))
    gained = sum(a and not b for b, a in zip(before, after, strict=True))
    if lost <= gained:
        return 0
    n = lost + gained
    chance = sum(math.comb(n, k) for k in range(lost, n + 1)) / 2**n  # P(at least so many lost | a fair coin)
    return 0 if random and chance > 0.05 else lost - gained


def black_box_beats_white_box(white: Survivors, black: Survivors, *, random: bool) -> str | None:
    """An attack with gradients contains the attack without."""
    n = fewer(white, [w and b for w, b in zip(white, black, strict=True)], random=random)
    if not n:
        return None
    return f"The black-box attack broke {n} images that the white-box attacks left: their gradients mislead them."


def still_falling(what: str, few: int, many: int, before: Survivors, after: Survivors, *, random: bool) -> str | None:
    """More of `what` (samples, iterations) should not matter any more."""
    n = fewer(before, after, random=random)
    if not n:
        return None
    return f"{many} {what} instead of {few} broke {n} more of {len(before)} images: the attack has not converged."


def unbounded_survivors(survivors: Survivors) -> str | None:
    """Without a budget any image can be turned into one of another class."""
    n = sum(survivors)
    return (
        f"{n} of {len(survivors)} images survived an attack without a budget: the attack does not work." if n else None
    )


def budget_exceeded(within: Sequence[bool]) -> str | None:
    """A perturbation outside the threat proves nothing."""
    n = len(within) - sum(within)
    return f"{n} of {len(within)} perturbations exceeded their budget; each was moved back inside." if n else None


def stopped(attack: str, images: int, of: int, error: float, right: Sequence[bool]) -> str | None:
    """Images that were left alone before the end of an attack, and how many of their evaluation samples are right."""
    if not images:
        return None
    told = f"{100 * sum(right) / len(right):.1f} % of {len(right)} evaluation samples are right"
    return (
        f"{attack}: {images} of {of} images were left alone once confirmed as misclassified, each by mistake with a "
        f"chance of at most {100 * error:g} %; {told}."
    )


def looks_at_seeds(which: str, known: Sequence[int], fresh: Sequence[int], samples: int) -> str | None:
    """Right samples per image, of `samples` with seeds that follow from the run and of as many with unpredictable ones.

    Given their sum, chance splits them by a hypergeometric law; four deviations are under one run in ten thousand.
    """
    shares = [(a + b) / (2 * samples) for a, b in zip(known, fresh, strict=True)]
    variance = sum(4 * samples**2 / (2 * samples - 1) * share * (1 - share) for share in shares)
    if (sum(known) - sum(fresh)) ** 2 <= 16 * variance:
        return None
    said, free = (f"{100 * sum(right) / (samples * len(right)):.0f} %" for right in (known, fresh))
    return f"With the seeds of {which} {said} of samples are right, with unpredictable ones {free}: it knows its seeds."


ONE_SAMPLE: Final = "The defence is random, but was attacked with one EOT sample per step: use 10 or more."


def not_probed(probe: int) -> str | None:
    """What was not asked cannot be doubted: say so."""
    if probe:
        return None
    return (
        "Not tried: whether more EOT samples, more iterations or an unlimited budget matter, and whether an audit "
        "confirms the gradient; `probe` = 8 images tries."
    )


# -------------------------------------------------------------------------------------------- questions to a model


@torch.no_grad()
def saturated_cross_entropy(model: Model, x: Tensor, y: Tensor) -> str | None:
    """Where the cross-entropy is exactly zero in float32, other attacks on it see no gradient."""
    logits = call(model, x, range(len(x))).float()
    saturated = int((F.cross_entropy(logits, y, reduction="none") == 0).sum())
    if not saturated:
        return None
    return (
        f"The cross-entropy of {saturated} of {len(x)} images is zero in float32: attacks of other packages see no "
        "gradient there; those of this one ascend its logarithm."
    )


def audited(model: Model, x: Tensor, seeds: Sequence[int]) -> str | None:
    """Whether the gradient at images x is that of backprop and of finite differences, in two directions."""
    try:
        audit = audit_gradient(model, x, seeds=seeds, directions=2)
    except InputError as error:
        return f"The gradient audit could not be made: {error}"
    if audit.passed:
        return None
    worst = max(filter(None, (audit.backprop, audit.differences)), key=lambda found: found.relative_error)
    off = f"cosine {worst.cosine:.4f}, relative error {worst.relative_error:.2g}, tolerated {audit.tolerance:.2g}"
    return f"The gradient audit disagrees with the gradient mode {audit.gradient!r} ({off})."


def looks_at_gradients(model: Model, x: Tensor, seeds: Sequence[int]) -> str | None:
    """Logits are the same whether a gradient is asked for, as an attack does, or not, as an evaluation does."""
    with torch.no_grad():
        plain = call(model, x, seeds)
    with torch.enable_grad():
        asked = call(model, x.clone().requires_grad_(), seeds).detach()
    off, most = float((asked - plain).abs().amax()), float(plain.abs().amax())
    if off <= 1e-3 * most:
        return None
    return f"Logits of up to {most:.3g} change by {off:.2g} when a gradient is asked for: attacks see another model."


@torch.no_grad()
def right(model: Model, x: Tensor, y: Tensor, seeds: Sequence[int]) -> list[int]:
    """How many samples of each image x (B, C, H, W) are right; seeds (B · D), one image after the other."""
    samples, found = len(seeds) // len(x), []
    for i, (image, label) in enumerate(zip(x, y, strict=True)):
        logits = call(model, image.expand(samples, -1, -1, -1), seeds[i * samples : (i + 1) * samples])
        found.append(int((logits.argmax(1) == label).sum()))
    return found


def survivors(
    model: Model, x: Tensor, y: Tensor, threat: ThreatModel, z: Tensor, seeds: Sequence[int], eot: EOT
) -> list[bool]:
    """Which images the mean logits of fresh samples classify correctly."""
    seen = expect(model, threat.apply(x, z), y, MARGIN, replace(eot, average="logits"), seeds, EVALUATION)
    return [] if seen.logits is None else (margin(seen.logits, y) <= 0).tolist()


def attacked(
    attack: Attack,
    model: Model,
    x: Tensor,
    y: Tensor,
    threat: ThreatModel,
    seeds: Seeds = None,
    samples: int | None = None,
) -> list[bool]:
    """The survivors of an attack, evaluated with as many samples as it takes itself unless told."""
    chosen = Noise.of(seeds, len(x)).seeds
    z = attack(model, x, y, threat, seeds=chosen)
    eot = attack.ranking if samples is None else replace(attack.ranking, samples=samples)
    return survivors(model, x, y, threat, z, chosen, eot)


def strengthened(attack: Attack, *, samples: int = 1, steps: int = 1) -> Attack:
    """The attack with so many times the EOT samples and so many times the steps, in each of its parts."""

    def change(part: Any) -> Any:
        if part.parts():
            return part
        longer = {key: steps * getattr(part, key) for key in ("iterations", "queries") if hasattr(part, key)}
        if isinstance(part, SampledAttack):
            longer["eot"] = replace(part.eot, samples=samples * part.eot.samples)
        return replace(part, **longer)

    return attack.mapped(change)


def probe(
    attack: Attack,
    model: Model,
    x: Tensor,
    y: Tensor,
    threat: ThreatModel,
    seeds: Seeds = None,
    evaluated: Sequence[int] = (),
) -> tuple[str, ...]:
    """All that can be asked of one attack on a few images, at about eight times its cost: do EOT samples, steps and the
    budget still matter, and does a random model answer otherwise to the seeds of the attack and to those that evaluate
    it (`evaluated`, as many per image as are to be compared)?"""
    chosen = Noise.of(seeds, len(x)).seeds
    random = bool(getattr(model, "stochastic", False))
    judges = attack.ranking if not random else replace(attack.ranking, samples=4 * attack.ranking.samples)
    z = attack(model, x, y, threat, seeds=chosen)
    plain = survivors(model, x, y, threat, z, chosen, judges)
    longer = attacked(strengthened(attack, steps=2), model, x, y, threat, chosen, judges.samples)
    free = attacked(attack, model, x, y, threat.unbounded(x), chosen, judges.samples)
    found = [
        still_falling("times the steps", 1, 2, plain, longer, random=random),
        unbounded_survivors(free),
    ]
    if random:
        n = attack.ranking.samples
        wider = attacked(strengthened(attack, samples=4), model, x, y, threat, chosen, judges.samples)
        found.append(still_falling("EOT samples", n, 4 * n, plain, wider, random=True))
    if random and evaluated and not attack.ranking.fixed:
        n = len(evaluated) // len(x)
        steps = [sample_seeds([seed], step, 1)[0] for seed in chosen for step in range(n)]  # the attack's first ones
        for which, images, known in (("the attack", x, steps), ("the evaluation", threat.apply(x, z), evaluated)):
            fresh = right(model, images, y, Noise.of(None, len(known)).seeds)
            found.append(looks_at_seeds(which, right(model, images, y, known), fresh, n))
    return doubts(found)

"""Threat models: what an attacker may do to an image. The threat owns the geometry, so that one attack serves all.

A perturbation z is free inside a set and becomes an image by `apply`:

    Linf, L2    x' = x + z,                 ‖z‖ ≤ ε, x' in [0, 1]          z shaped like x
    Flow        x'(p) = x(p + z(p)),        |z| ≤ bound in every component  z (B, H, W, 2), bilinear sampling (StAdv)
    Perceptual  x' = x + z,                 d(x, x') ≤ ε, x' in [0, 1]      z the change and x, d the features' distance
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from diffpure.errors import InputError
from diffpure.named import make, number
from diffpure.threats.base import LEVELS, ThreatModel, per_image, towards, wide
from diffpure.threats.flow import Flow
from diffpure.threats.norms import L2, Linf, Norm
from diffpure.threats.perceptual import Perceptual

__all__ = [
    "L2",
    "LEVELS",
    "THREATS",
    "AnyThreat",
    "Flow",
    "Linf",
    "Norm",
    "Perceptual",
    "ThreatModel",
    "per_image",
    "threat_of",
    "towards",
    "wide",
]

THREATS: Final[dict[str, type[ThreatModel]]] = {"linf": Linf, "l2": L2, "flow": Flow, "perceptual": Perceptual}


AnyThreat = str | Mapping[str, Any] | ThreatModel  # "linf 8/255", {kind = "linf", eps = "8/255"}, or a threat


def threat_of(value: AnyThreat) -> ThreatModel:
    """A threat in words, by table, or the given one."""
    if isinstance(value, str):
        kind, _, eps = value.strip().partition(" ")
        value = {"kind": kind.lower(), "eps": _float(number(eps), value)}
    made: ThreatModel = make(value, ThreatModel, THREATS, "threat")
    return made


def _float(text: Any, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"A threat is a kind and a budget, such as 'linf 8/255', got {whole!r}.") from None

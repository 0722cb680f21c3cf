"""Defend an image classifier with a diffusion model, and find out honestly how robust it then is.

Names are imported when they are first used, so that `import diffpure` (and `diffpure --help`) does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from diffpure.advice import Advice as Advice
    from diffpure.advice import suggest_t_star as suggest_t_star
    from diffpure.attacks import APGD as APGD
    from diffpure.attacks import AUTOATTACK_RAND as AUTOATTACK_RAND
    from diffpure.attacks import AUTOATTACK_STANDARD as AUTOATTACK_STANDARD
    from diffpure.attacks import BPDA_EOT as BPDA_EOT
    from diffpure.attacks import DIFFUSION_ONLY as DIFFUSION_ONLY
    from diffpure.attacks import EOT as EOT
    from diffpure.attacks import FAB as FAB
    from diffpure.attacks import PGD as PGD
    from diffpure.attacks import PGD_LEE_KIM as PGD_LEE_KIM
    from diffpure.attacks import STRONG as STRONG
    from diffpure.attacks import TRANSFER as TRANSFER
    from diffpure.attacks import TWO_LOSSES as TWO_LOSSES
    from diffpure.attacks import DiffHammer as DiffHammer
    from diffpure.attacks import LowFrequency as LowFrequency
    from diffpure.attacks import MomentumPGD as MomentumPGD
    from diffpure.attacks import Square as Square
    from diffpure.attacks import StAdv as StAdv
    from diffpure.attacks import Transfer as Transfer
    from diffpure.attacks import strong as strong
    from diffpure.audit import Audit as Audit
    from diffpure.audit import audit_gradient as audit_gradient
    from diffpure.certificates.certify import certify as certify
    from diffpure.certificates.smoothed import smoothed as smoothed
    from diffpure.classifiers.foreign import from_timm as from_timm
    from diffpure.classifiers.load import load_classifier as load_classifier
    from diffpure.data.samples import class_names as class_names
    from diffpure.data.samples import samples as samples
    from diffpure.diffusion.gradients import BPDA as BPDA
    from diffpure.diffusion.gradients import Adjoint as Adjoint
    from diffpure.diffusion.gradients import Backprop as Backprop
    from diffpure.diffusion.gradients import Exact as Exact
    from diffpure.diffusion.gradients import Surrogate as Surrogate
    from diffpure.diffusion.langevin import Langevin as Langevin
    from diffpure.diffusion.samplers import DDIM as DDIM
    from diffpure.diffusion.samplers import Ancestral as Ancestral
    from diffpure.diffusion.samplers import FewStep as FewStep
    from diffpure.diffusion.samplers import OneShot as OneShot
    from diffpure.diffusion.samplers import ProbabilityFlow as ProbabilityFlow
    from diffpure.diffusion.samplers import ReverseSDE as ReverseSDE
    from diffpure.diffusion.score import EpsilonScore as EpsilonScore
    from diffpure.diffusion.score import GaussianScore as GaussianScore
    from diffpure.diffusion.score import ScoreModel as ScoreModel
    from diffpure.diffusion.sde import VPSDE as VPSDE
    from diffpure.diffusion.sde import DiscreteVP as DiscreteVP
    from diffpure.errors import InputError as InputError
    from diffpure.evaluation.evaluate import evaluate as evaluate
    from diffpure.experiments.load import load_defense as load_defense
    from diffpure.noise import Noise as Noise
    from diffpure.pictures.make import keep_pictures as keep_pictures
    from diffpure.purifiers.diffusion import Purifier as Purifier
    from diffpure.purify import Defense as Defense
    from diffpure.purify import PurifierBase as PurifierBase
    from diffpure.recalibrate import recalibrate as recalibrate
    from diffpure.report.page import write_report as write_report
    from diffpure.results.certificates import Certification as Certification
    from diffpure.results.compare import Comparison as Comparison
    from diffpure.results.compare import compare as compare
    from diffpure.results.result import Result as Result
    from diffpure.scores.denoiser import DenoiserScore as DenoiserScore
    from diffpure.scores.hf import from_diffusers as from_diffusers
    from diffpure.scores.load import load_score as load_score
    from diffpure.scores.tiled import TiledScore as TiledScore
    from diffpure.threats import L2 as L2
    from diffpure.threats import Flow as Flow
    from diffpure.threats import Linf as Linf
    from diffpure.threats import Perceptual as Perceptual
    from diffpure.tuning import tune as tune
    from diffpure.verification.revive import verify as verify
    from diffpure.views import FlipAverage as FlipAverage

_HOMES = {
    "diffpure.advice": (
        "Advice",
        "suggest_t_star",
    ),
    "diffpure.attacks": (
        "APGD",
        "AUTOATTACK_RAND",
        "AUTOATTACK_STANDARD",
        "BPDA_EOT",
        "DIFFUSION_ONLY",
        "DiffHammer",
        "EOT",
        "FAB",
        "LowFrequency",
        "MomentumPGD",
        "PGD",
        "PGD_LEE_KIM",
        "STRONG",
        "Square",
        "StAdv",
        "TRANSFER",
        "TWO_LOSSES",
        "Transfer",
        "strong",
    ),
    "diffpure.audit": (
        "Audit",
        "audit_gradient",
    ),
    "diffpure.classifiers.foreign": ("from_timm",),
    "diffpure.classifiers.load": ("load_classifier",),
    "diffpure.data.samples": (
        "class_names",
        "samples",
    ),
    "diffpure.errors": ("InputError",),
    "diffpure.results.compare": (
        "Comparison",
        "compare",
    ),
    "diffpure.certificates.certify": ("certify",),
    "diffpure.evaluation.evaluate": ("evaluate",),
    "diffpure.results.result": ("Result",),
    "diffpure.verification.revive": ("verify",),
    "diffpure.certificates.smoothed": ("smoothed",),
    "diffpure.results.certificates": ("Certification",),
    "diffpure.pictures.make": ("keep_pictures",),
    "diffpure.report.page": ("write_report",),
    "diffpure.diffusion.gradients": (
        "Adjoint",
        "BPDA",
        "Backprop",
        "Exact",
        "Surrogate",
    ),
    "diffpure.purifiers.diffusion": ("Purifier",),
    "diffpure.purify": (
        "Defense",
        "PurifierBase",
    ),
    "diffpure.recalibrate": ("recalibrate",),
    "diffpure.tuning": ("tune",),
    "diffpure.diffusion.langevin": ("Langevin",),
    "diffpure.diffusion.samplers": (
        "Ancestral",
        "DDIM",
        "FewStep",
        "OneShot",
        "ProbabilityFlow",
        "ReverseSDE",
    ),
    "diffpure.diffusion.score": (
        "EpsilonScore",
        "GaussianScore",
        "ScoreModel",
    ),
    "diffpure.scores.denoiser": ("DenoiserScore",),
    "diffpure.scores.hf": ("from_diffusers",),
    "diffpure.scores.load": ("load_score",),
    "diffpure.scores.tiled": ("TiledScore",),
    "diffpure.diffusion.sde": (
        "DiscreteVP",
        "VPSDE",
    ),
    "diffpure.experiments.load": ("load_defense",),
    "diffpure.noise": ("Noise",),
    "diffpure.views": ("FlipAverage",),
    "diffpure.threats": (
        "Flow",
        "L2",
        "Linf",
        "Perceptual",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'diffpure' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

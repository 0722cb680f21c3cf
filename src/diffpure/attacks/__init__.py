"""Attacks on any module from images in [0, 1] to logits. They see the model and the threat, nothing else."""

from diffpure.attacks.apgd import APGD
from diffpure.attacks.base import Attack, Cost, SampledAttack, Spending
from diffpure.attacks.compose import Several, Suite, Transfer, TwoStage
from diffpure.attacks.diffattack import DIFFATTACK
from diffpure.attacks.diffhammer import DIFFHAMMER, DiffHammer
from diffpure.attacks.expectation import EOT, Expectation, expect
from diffpure.attacks.fab import FAB
from diffpure.attacks.losses import LOSSES, Deviated, LogitLoss, Objective, Reconstruction, margin
from diffpure.attacks.lowfrequency import LowFrequency
from diffpure.attacks.momentum import MomentumPGD
from diffpure.attacks.pgd import PGD, PGD_LEE_KIM
from diffpure.attacks.presets import (
    ATTACKS,
    AUTOATTACK_RAND,
    AUTOATTACK_STANDARD,
    BPDA_EOT,
    DIFFUSION_ONLY,
    STRONG,
    TRANSFER,
    TWO_LOSSES,
    attacks_of,
    by_name,
    kind_of,
    revive_attack,
    strong,
)
from diffpure.attacks.seeds import sample_seeds
from diffpure.attacks.square import Square
from diffpure.attacks.stadv import StAdv
from diffpure.attacks.state import AttackRun, Problem, State

__all__ = [
    "APGD",
    "ATTACKS",
    "AUTOATTACK_RAND",
    "AUTOATTACK_STANDARD",
    "BPDA_EOT",
    "DIFFATTACK",
    "DIFFHAMMER",
    "DIFFUSION_ONLY",
    "EOT",
    "FAB",
    "LOSSES",
    "PGD",
    "PGD_LEE_KIM",
    "STRONG",
    "TRANSFER",
    "TWO_LOSSES",
    "Attack",
    "AttackRun",
    "Cost",
    "Deviated",
    "DiffHammer",
    "Expectation",
    "LogitLoss",
    "LowFrequency",
    "MomentumPGD",
    "Objective",
    "Problem",
    "Reconstruction",
    "SampledAttack",
    "Several",
    "Spending",
    "Square",
    "StAdv",
    "State",
    "Suite",
    "Transfer",
    "TwoStage",
    "attacks_of",
    "by_name",
    "expect",
    "kind_of",
    "margin",
    "revive_attack",
    "sample_seeds",
    "strong",
]

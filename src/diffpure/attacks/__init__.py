"""Attacks on any module from images in [0, 1] to logits. They see the model and the threat, nothing else."""

from diffpure.attacks.apgd import APGD
from diffpure.attacks.autoattack import AUTOATTACK_RAND, AUTOATTACK_STANDARD, Suite
from diffpure.attacks.base import Attack, AttackRun, Cost, Problem, State
from diffpure.attacks.bpda import BPDA_EOT, TwoStage
from diffpure.attacks.expectation import EOT, Expectation, expect
from diffpure.attacks.fab import FAB
from diffpure.attacks.losses import LOSSES, Deviated, LogitLoss, Objective, Reconstruction, margin
from diffpure.attacks.pgd import PGD, PGD_LEE_KIM
from diffpure.attacks.seeds import sample_seeds
from diffpure.attacks.square import Square
from diffpure.attacks.stadv import StAdv
from diffpure.attacks.transfer import DIFFUSION_ONLY, TRANSFER, Transfer

__all__ = [
    "APGD",
    "AUTOATTACK_RAND",
    "AUTOATTACK_STANDARD",
    "BPDA_EOT",
    "DIFFUSION_ONLY",
    "EOT",
    "FAB",
    "LOSSES",
    "PGD",
    "PGD_LEE_KIM",
    "TRANSFER",
    "Attack",
    "AttackRun",
    "Cost",
    "Deviated",
    "Expectation",
    "LogitLoss",
    "Objective",
    "Problem",
    "Reconstruction",
    "Square",
    "StAdv",
    "State",
    "Suite",
    "Transfer",
    "TwoStage",
    "expect",
    "margin",
    "sample_seeds",
]

"""Attacks on any module from images in [0, 1] to logits. They see the model and the threat, nothing else."""

from diffpure.attacks.apgd import APGD
from diffpure.attacks.autoattack import AUTOATTACK_RAND, AUTOATTACK_STANDARD, Suite
from diffpure.attacks.base import Attack, Cost, Problem, Run, State
from diffpure.attacks.bpda import BPDA_EOT, TwoStage
from diffpure.attacks.draws import draw_seeds
from diffpure.attacks.eot import EOT, Look, look
from diffpure.attacks.fab import FAB
from diffpure.attacks.losses import LOSSES, Deviated, LogitLoss, Objective, Reconstruction, margin
from diffpure.attacks.pgd import PGD, PGD_LEE_KIM
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
    "Cost",
    "Deviated",
    "LogitLoss",
    "Look",
    "Objective",
    "Problem",
    "Reconstruction",
    "Run",
    "Square",
    "StAdv",
    "State",
    "Suite",
    "Transfer",
    "TwoStage",
    "draw_seeds",
    "look",
    "margin",
]

"""Evaluation protocols of the literature for CIFAR-10, ℓ∞ 8/255, as data: what is run, what counts, and who says so.

    protocol = protocols.PROTOCOLS["diffbreak"]
    purifier = Purifier(score, protocol.sampler, protocol.gradient)

`dataclasses.replace` makes variants. Each states where it departs from its source: an honest name is worth more than
a famous one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from diffpure.attacks import APGD, AUTOATTACK_RAND, AUTOATTACK_STANDARD, EOT, PGD_LEE_KIM, Attack, Suite
from diffpure.data.subsets import SUBSETS, Subset
from diffpure.diffusion.samplers import ReverseSDE, Sampler
from diffpure.evaluation.results import Rule
from diffpure.threats import Linf, ThreatModel

LINF: Final = Linf(8 / 255)


@final
@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One way to evaluate a purified classifier, with its provenance.

    gradient: the mode the attack differentiates through.   rules: when an image counts as right.   minimum: whether
    the headline is the paper's minimum over attacks of their accuracies, not the worst case of each image.
    """

    source: str
    reported: str
    departs: str
    sampler: Sampler
    gradient: str
    attacks: tuple[Attack, ...]
    rules: tuple[Rule, ...]
    minimum: bool = False
    threat: ThreatModel = LINF
    subset: Subset = SUBSETS["cifar10"]
    seeds: tuple[int, ...] = (0,)


ONE_SHOT: Final = Rule("one-shot")
VP_SDE: Final = ReverseSDE(t_star=0.1, dt=1e-3)

PROTOCOLS: Final[dict[str, Protocol]] = {
    "paper": Protocol(
        source="Nie et al., ICML 2022, Table 1, as the authors' code runs it (NVlabs/DiffPure 985703f)",
        reported="WRN-28-10 70.64 %, WRN-70-16 71.29 %",
        departs="the adjoint runs on the forward pass's own grid; theirs begins at t = 1e-5, which that never visits",
        sampler=ReverseSDE(t_star=0.1, dt=1e-3, forward="discrete"),
        gradient="adjoint",
        attacks=(Suite(attacks=AUTOATTACK_RAND), Suite(attacks=AUTOATTACK_STANDARD)),
        rules=(ONE_SHOT,),
        minimum=True,
        seeds=(121, 122, 123),
    ),
    "lee-kim": Protocol(
        source="Lee & Kim, ICCV 2023: PGD+EOT, 200 steps of 0.007, 20 samples, through a coarser surrogate of the path",
        reported="WRN-28-10 46.8–51.3 % (versions differ), WRN-70-16 57.0 %",
        departs="the purifier is the paper's VP-SDE, the images are the paper's subset",
        sampler=VP_SDE,
        gradient="surrogate",
        attacks=(PGD_LEE_KIM,),
        rules=(ONE_SHOT,),
    ),
    "diffhammer": Protocol(
        source="DiffHammer, 2024: the average and the worst of 10 submissions, clean accuracy under the same rules",
        reported="WRN-70-16 42.54 % average, 22.66 % worst (clean 90.98 %, 76.56 %)",
        departs="its rules only: for its own attack stands APGD with exact gradients and 20 samples",
        sampler=VP_SDE,
        gradient="exact",
        attacks=AUTOATTACK_RAND,
        rules=(Rule("average", 10), Rule("worst", 10)),
    ),
    "diffbreak": Protocol(
        source="DiffBreak, NeurIPS 2025: exact gradients; one-shot, worst of 10, majority of 10 and of 128",
        reported="one-shot WRN-28-10 48.05 %, WRN-70-16 35.16 %; worst of 10 17.19 %, majority 39.45 % and 47.72 %",
        departs="64 samples, where their variance levels off, and 100 steps, as is current practice",
        sampler=VP_SDE,
        gradient="exact",
        attacks=(APGD(loss="ce", eot=EOT(64)), APGD(loss="dlr", eot=EOT(64))),
        rules=(ONE_SHOT, Rule("worst", 10), Rule("majority", 10), Rule("majority", 128)),
    ),
}

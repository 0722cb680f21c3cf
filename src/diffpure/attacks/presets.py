"""Attacks by name, with published settings; a name may stand for several attacks.

    AutoAttack (Croce & Hein 2020)   100 iterations, 1 restart, 9 targets, 5,000 queries; `rand` has 20 EOT samples
    BPDA+EOT (paper, section 5.4)    50 steps of 2/255 through the identity, 15 samples, confirmed by 150
    transfer (appendix C.1)          AutoAttack standard on the undefended classifier, evaluated on the defence
    diffusion-only (appendix C.7)    APGD on the purifier's reconstruction error, 20 EOT samples

Adding an attack means its file and one line of `ATTACKS`.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from diffpure.attacks.apgd import APGD
from diffpure.attacks.base import Attack
from diffpure.attacks.compose import Several, Suite, Transfer, TwoStage
from diffpure.attacks.diffattack import DIFFATTACK, Deviating
from diffpure.attacks.diffhammer import DIFFHAMMER, DiffHammer
from diffpure.attacks.expectation import EOT
from diffpure.attacks.fab import FAB
from diffpure.attacks.losses import Deviated, Reconstruction
from diffpure.attacks.lowfrequency import LowFrequency
from diffpure.attacks.momentum import MomentumPGD
from diffpure.attacks.pgd import PGD, PGD_LEE_KIM
from diffpure.attacks.square import Square
from diffpure.attacks.stadv import StAdv
from diffpure.diffusion.gradients import BPDA, GRADIENT_MODES
from diffpure.errors import InputError, unknown
from diffpure.named import checked, number, revive

AUTOATTACK_STANDARD: Final = Several((APGD(loss="ce"), APGD(loss="dlr-targeted"), FAB(), Square()))
AUTOATTACK_RAND: Final = Several((APGD(loss="ce", eot=EOT(20)), APGD(loss="dlr", eot=EOT(20))))
STANDARD_SUITE: Final = Suite(label="autoattack-standard", attacks=tuple(AUTOATTACK_STANDARD), skip_misclassified=True)
BPDA_EOT: Final = TwoStage(
    label="bpda-eot",
    attack=PGD(iterations=50, step_size=2 / 255, eot=EOT(15, "logits"), gradient=BPDA()),
    defence_samples=150,
)
TRANSFER: Final = Transfer(label="transfer", attack=STANDARD_SUITE, eot=EOT(20))
DIFFUSION_ONLY: Final = Transfer(
    label="diffusion-only", attack=APGD(loss="reconstruction", eot=EOT(20)), part="purifier", eot=EOT(20)
)

# Every image keeps the stronger perturbation of two losses, so that a defence which hides one of them is attacked all
# the same. At equal cost it leaves more images of purified plain classifiers than `strong` does.
TWO_LOSSES: Final = Suite(label="two-losses", attacks=(MomentumPGD(loss="ce"), MomentumPGD(loss="margin")))


def strong(gradients: int) -> MomentumPGD:
    """The strong attack with another number of gradients per image.

    On a random model all are spent on the margin, with antithetic steps; on another one, twenty each towards the
    classes with the highest logits.
    """
    return MomentumPGD(label="strong", loss="margin", iterations=gradients, antithetic=True, per_target=20)


STRONG: Final = strong(80)  # what an evaluation runs when no attack is named


ATTACKS: Final[dict[str, tuple[Attack, ...]]] = {
    "strong": (STRONG,),
    "two-losses": (TWO_LOSSES,),
    "momentum": (MomentumPGD(),),
    "pgd": (PGD(),),
    "apgd-ce": (APGD(loss="ce"),),
    "apgd-dlr": (APGD(loss="dlr"),),
    "apgd-t": (APGD(loss="dlr-targeted"),),
    "fab-t": (FAB(),),
    "square": (Square(),),
    "stadv": (StAdv(eot=EOT(20)),),
    "low-frequency": (LowFrequency(),),
    "autoattack-rand": AUTOATTACK_RAND,
    "autoattack-standard": (STANDARD_SUITE,),
    "bpda-eot": (BPDA_EOT,),
    "pgd-lee-kim": (PGD_LEE_KIM,),
    "transfer": (TRANSFER,),
    "diffusion-only": (DIFFUSION_ONLY,),
    "diffattack": (DIFFATTACK,),
    "diffhammer": (DIFFHAMMER,),
}

_CLASSES: Final[tuple[type[Any], ...]] = (
    *(APGD, DiffHammer, FAB, LowFrequency, MomentumPGD, PGD, Square, StAdv, Suite, Transfer, TwoStage),
    *(EOT, Deviated, Reconstruction, *GRADIENT_MODES.values()),
)
# What canonical values of attacks are made of, by the names that they have there.
VALUES: Final[dict[str, Any]] = {**{cls.__name__: cls for cls in _CLASSES}, repr(Deviating): Deviating}

AnyAttack = str | Mapping[str, Any] | Attack | Several


def attacks_of(value: AnyAttack) -> tuple[Attack, ...]:
    """The attacks of a name, or of a table: those of its kind, with every other key an argument of all that have it."""
    if isinstance(value, Several):
        return tuple(value)
    if isinstance(value, Attack):
        return (value,)
    table = {"kind": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or "kind" not in table:
        raise InputError(f"An attack is a name or a table with a kind, one of {', '.join(ATTACKS)}; got {value!r}.")
    kind, arguments = kind_of(table["kind"]), {key: v for key, v in table.items() if key != "kind"}
    attacks, known = ATTACKS[kind], kind_keys(kind)
    for key in arguments:
        if key not in known:
            raise unknown(f"argument of the attack {table['kind']!r}", key, known)
    label = arguments.pop("label", None)
    made = tuple(attack.mapped(lambda part: _with_arguments(part, arguments)) for attack in attacks)
    return made if label is None else tuple(replace(attack, label=str(label)) for attack in made)


def kind_of(name: Any) -> str:
    """The kind that a name stands for: itself, the name of its rows (`pgd-ce`) or the name of its class (`PGD`)."""
    single = {key: attacks[0] for key, attacks in ATTACKS.items() if len(attacks) == 1}
    classes = {type(a).__name__.lower(): key for key, a in reversed(single.items()) if not (a.parts() or a.label)}
    names = {**classes, **{a.name.partition("@")[0]: key for key, a in single.items()}, **{key: key for key in ATTACKS}}
    kind = names.get(str(name).lower())
    if kind is None or not isinstance(name, str):
        raise unknown("attack", name, ATTACKS)
    return kind


def revive_attack(plain: Any) -> Attack:
    """The attack whose canonical value this is, as the header of a run keeps it."""
    made = revive(plain, VALUES)
    if not isinstance(made, Attack):
        raise InputError(f"The canonical value of an attack is a table with its class, got {plain!r}.")
    return made


def own_keys(attack: Attack) -> set[str]:
    """The arguments that a table may give an attack itself: its fields that are no attacks."""
    nested = set(map(id, attack.parts()))
    return {f.name for f in fields(attack) if not _holds(getattr(attack, f.name), nested)} - {"part"}


def kind_keys(kind: str) -> list[str]:
    """The arguments that a table may give a kind of attack."""
    return sorted({key for attack in ATTACKS[kind] for part in attack.walk() for key in own_keys(part)})


def _holds(value: Any, parts: set[int]) -> bool:
    return any(id(v) in parts for v in (value if isinstance(value, tuple) else (value,)))


def _with_arguments(attack: Attack, arguments: Mapping[str, Any]) -> Attack:
    """The attack with those arguments that it has itself; a gradient is for what differentiates: the innermost."""
    hints, changes = typing.get_type_hints(type(attack)), dict[str, Any]()
    for key in own_keys(attack) & arguments.keys():
        value = arguments[key]
        if key == "eot":
            changes[key] = EOT.of(value, getattr(attack, key))
        elif key != "gradient":
            changes[key] = checked(number(value), hints[key], f"{key!r}, argument of the attack {attack.kind!r}")
        elif not attack.parts():
            changes[key] = value
    return replace(attack, **changes) if changes else attack


def by_name(attacks: AnyAttack | Sequence[AnyAttack] | Mapping[str, AnyAttack]) -> dict[str, Attack]:
    """Attacks by the names of their rows; the second of a name becomes name-2, and so on."""
    if isinstance(attacks, Mapping) and "kind" not in attacks:
        return {name: _one(name, value) for name, value in attacks.items()}
    several: Sequence[Any] = attacks if isinstance(attacks, Sequence) and not isinstance(attacks, str) else (attacks,)
    out: dict[str, Attack] = {}
    for attack in [a for value in several for a in attacks_of(value)]:
        name, n = attack.name, 1
        while name in out:
            n += 1
            name = f"{attack.name}-{n}"
        out[name] = attack
    return out


def _one(name: str, value: AnyAttack) -> Attack:
    attacks = attacks_of(value)
    if len(attacks) > 1:
        raise InputError(f"{value!r} is {len(attacks)} attacks, which the one name {name!r} cannot stand for.")
    return attacks[0]

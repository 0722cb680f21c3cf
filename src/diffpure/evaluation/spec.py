"""`EvaluationSpec`: one row of a table, written by people as a small TOML file; its hash names the run.

    name = "Purified CIFAR-10"

    [model]
    classifier = "cifar10-resnet"       # a name or a file, as `load_classifier` takes it
    score = "cifar10-small"             # without it the bare classifier is evaluated
    sampler = {kind = "sde", t_star = 0.1}
    gradient = "exact"

    [data]
    source = "cifar10-samples"
    images = "0-63"                     # or [0, 5, 9], or "0-9, 20-29"

    [threat]
    kind = "linf"
    eps = "8/255"

    [[attacks]]
    kind = "pgd"                        # any further key is an argument of the attack
    iterations = 20
    eot = 10

Further keys: rules, seeds, batch. A key that is not known is an error that names the nearest one that is.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Self, TypeVar, final

from diffpure.adapters import DIFFATTACK
from diffpure.attacks import (
    APGD,
    AUTOATTACK_RAND,
    AUTOATTACK_STANDARD,
    BPDA_EOT,
    DIFFUSION_ONLY,
    EOT,
    FAB,
    PGD,
    PGD_LEE_KIM,
    TRANSFER,
    Attack,
    Square,
    StAdv,
    Suite,
    Transfer,
)
from diffpure.diffusion.gradients import GRADIENT_MODES
from diffpure.diffusion.samplers import SAMPLERS, Sampler
from diffpure.errors import InputError, unknown
from diffpure.evaluation.results import DEFAULT_RULES, Rule
from diffpure.threats import THREATS, ThreatModel, threat

Table = Mapping[str, Any]
T = TypeVar("T")

# Attacks by the name a spec calls them; a preset may be several attacks.
ATTACKS: Final[dict[str, tuple[Attack, ...]]] = {
    "pgd": (PGD(),),
    "apgd-ce": (APGD(loss="ce"),),
    "apgd-dlr": (APGD(loss="dlr"),),
    "apgd-t": (APGD(loss="dlr-targeted"),),
    "fab-t": (FAB(),),
    "square": (Square(),),
    "stadv": (StAdv(eot=EOT(20)),),
    "autoattack-rand": AUTOATTACK_RAND,
    "autoattack-standard": (Suite(attacks=AUTOATTACK_STANDARD, skip_misclassified=True),),
    "bpda-eot": (BPDA_EOT,),
    "pgd-lee-kim": (PGD_LEE_KIM,),
    "transfer": (TRANSFER,),
    "diffusion-only": (DIFFUSION_ONLY,),
    "diffattack": (DIFFATTACK,),
}


@final
@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A classifier, alone or behind a purifier; *_like: the official checkpoint that a file is read as."""

    classifier: str
    classifier_like: str | None = None
    score: str | None = None
    score_like: str | None = None
    sampler: Table = field(default_factory=lambda: {"kind": "sde"})
    gradient: str = "exact"
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.gradient not in GRADIENT_MODES:
            raise unknown("gradient mode", self.gradient, GRADIENT_MODES)
        self.make_sampler()

    def make_sampler(self) -> Sampler:
        """The sampler that the table describes."""
        arguments = {key: _number(value) for key, value in self.sampler.items() if key != "kind"}
        kind = self.sampler.get("kind", "sde")
        if kind not in SAMPLERS:
            raise unknown("sampler", kind, SAMPLERS)
        return _construct(SAMPLERS[kind], arguments, f"argument of the sampler {kind!r}")


@final
@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where the images come from, and which of them: their indices in the source."""

    source: str = "cifar10-samples"
    path: str | None = None
    images: tuple[int, ...] = tuple(range(64))

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", _indices(self.images))


@final
@dataclass(frozen=True, kw_only=True)
class ThreatSpec:
    """What the attacker may do."""

    kind: str = "linf"
    eps: float = 8 / 255

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", _number(self.eps))
        self.make()

    def make(self) -> ThreatModel:
        """The threat itself."""
        if self.kind not in THREATS:
            raise unknown("threat", self.kind, THREATS)
        return threat(self.kind, self.eps)


@final
@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """A model, images, a threat, attacks, decision rules and seeds: everything that fixes the rows of a run.

    batch: how many images are attacked together; part of the spec because it decides how sums round.
    probe: on how many images the checks attack again with more samples, more moves and no budget, at about eight times
    the cost an image.
    """

    model: ModelSpec
    data: DataSpec = field(default_factory=DataSpec)
    threat: ThreatSpec = field(default_factory=ThreatSpec)
    attacks: tuple[Table, ...] = ()
    rules: tuple[str, ...] = tuple(map(str, DEFAULT_RULES))
    seeds: tuple[int, ...] = (0,)
    batch: int = 16
    probe: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(str(Rule.parse(rule)) for rule in self.rules))
        if not self.rules or not self.seeds or self.batch < 1 or self.probe < 0:
            raise InputError("A spec needs one rule, one seed and a batch of at least 1, and a probe of 0 or more.")
        for name, attack in self.make_attacks().items():
            if isinstance(attack, Transfer) and self.model.score is None:
                raise InputError(f"The attack {name!r} is on a part of a defence, so [model] needs a score.")

    def make_attacks(self) -> dict[str, Attack]:
        """The attacks by name, as the rows will call them."""
        return named([attack for table in self.attacks for attack in attacks_of(table)])

    @property
    def hash(self) -> str:
        """A hash of everything but the name: what names the run."""
        content = {key: value for key, value in self.plain().items() if key != "name"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def plain(self) -> dict[str, Any]:
        """The spec as plain data, every default filled in."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data

    @classmethod
    def of(cls, table: Table) -> Self:
        """The spec in a table as TOML gives it, or `plain` did."""
        parts = {"model": ModelSpec, "data": DataSpec, "threat": ThreatSpec}
        values = {key: _construct(parts[key], value, f"key of [{key}]") if key in parts else value
                  for key, value in table.items()}  # fmt: skip
        for key in ("attacks", "rules", "seeds"):
            if key in values:
                if not isinstance(values[key], Sequence) or isinstance(values[key], str):
                    raise InputError(f"The key {key!r} of a spec is a list, got {values[key]!r}.")
                values[key] = tuple(values[key])
        return _construct(cls, values, "key of a spec")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The spec in a TOML file."""
        try:
            return cls.of(tomllib.loads(Path(path).read_text("utf-8")))
        except OSError as error:
            raise InputError(f"The spec {path} cannot be read ({error.strerror}).") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"The spec {path} is no TOML file ({error}).") from error

    def tiny(self) -> Self:
        """The same evaluation so small that a test can run it: two images, a few samples and steps of everything."""
        model = self.model
        sampler = {**model.sampler, "dt": None, "steps": 2}
        if model.sampler.get("kind") == "one-shot":
            sampler = dict(model.sampler)
        sampler = {key: value for key, value in sampler.items() if value is not None}
        rules = [Rule.parse(rule) for rule in self.rules]
        return replace(
            self,
            model=replace(model, sampler=sampler),
            data=replace(self.data, images=self.data.images[:2]),
            attacks=tuple(_tiny(table) for table in self.attacks),
            rules=tuple(str(replace(rule, n=min(rule.n, 3))) for rule in rules),
            seeds=self.seeds[:1],
            probe=0,
        )


def attacks_of(table: Table) -> tuple[Attack, ...]:
    """The attacks of one table: those of its kind, with every other key as an argument of all that have it."""
    if not isinstance(table, Mapping) or "kind" not in table:
        raise InputError(f"An attack is a table with a kind, one of {', '.join(ATTACKS)}; got {table!r}.")
    if table["kind"] not in ATTACKS:
        raise unknown("attack", table["kind"], ATTACKS)
    attacks = ATTACKS[table["kind"]]
    arguments = {key: _number(value) for key, value in table.items() if key != "kind"}
    known = sorted({key for attack in attacks for key in _keys(attack)})
    for key in arguments:
        if key not in known:
            raise unknown(f"argument of the attack {table['kind']!r}", key, known)
    try:
        return tuple(_changed(attack, arguments) for attack in attacks)
    except TypeError as error:
        raise InputError(f"The attack {dict(table)} has an argument of the wrong type ({error}).") from error


def named(attacks: Sequence[Attack]) -> dict[str, Attack]:
    """Attacks by their names; the second of a name becomes name-2, and so on."""
    out: dict[str, Attack] = {}
    for attack in attacks:
        name, n = attack.name, 1
        while name in out:
            n += 1
            name = f"{attack.name}-{n}"
        out[name] = attack
    return out


def _changed(attack: Attack, arguments: Table) -> Attack:
    """The attack, and the attacks it is made of, with the arguments that each of them has."""
    own = {f.name: getattr(attack, f.name) for f in fields(attack)}
    for key, value in own.items():
        if isinstance(value, Attack):
            own[key] = _changed(value, arguments)
        elif isinstance(value, tuple) and value and isinstance(value[0], Attack):
            own[key] = tuple(_changed(inner, arguments) for inner in value)
        elif key in arguments:
            own[key] = _eot(value, arguments[key]) if isinstance(value, EOT) else arguments[key]
    return replace(attack, **own)


def _keys(attack: Attack) -> set[str]:
    found: set[str] = set()
    for f in fields(attack):
        value = getattr(attack, f.name)
        inner = value if isinstance(value, tuple) else (value,)
        nested = [v for v in inner if isinstance(v, Attack)]
        found |= set().union(*map(_keys, nested)) if nested else {f.name}
    return found


def _eot(old: EOT, value: Any) -> EOT:
    """EOT from a number of samples, or a table of its fields."""
    if isinstance(value, int):
        return replace(old, samples=value)
    if not isinstance(value, Mapping):
        raise InputError(
            f"eot is a number of samples or a table such as {{samples = 20, average = 'logits'}}, got {value!r}."
        )
    return _construct(EOT, {**asdict(old), **value}, "key of eot")


def _tiny(table: Table) -> dict[str, Any]:
    sizes = {"iterations": 2, "restarts": 1, "targets": 1, "queries": 4, "eot": 2, "defence_samples": 3}
    known = set().union(*map(_keys, attacks_of(table)))
    return {**table, **{key: value for key, value in sizes.items() if key in known}}


def _construct(cls: type[T], arguments: Any, what: str) -> T:
    """A dataclass from a table; a key that it has not is an error that names the nearest."""
    if not isinstance(arguments, Mapping):
        raise InputError(f"A table of keys is expected for {what}, got {arguments!r}.")
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in arguments:
        if key not in known:
            raise unknown(what, key, known)
    try:
        return cls(**arguments)
    except TypeError as error:
        raise InputError(f"The {what.split(' of ')[-1]} is incomplete or of the wrong type ({error}).") from error


def _number(value: Any) -> Any:
    """A fraction such as "8/255" as a number; anything else as it is."""
    if isinstance(value, str) and re.fullmatch(r"\s*[\d.]+\s*/\s*[\d.]+\s*", value):
        top, bottom = (Fraction(part.strip()) for part in value.split("/"))
        if bottom:
            return float(top / bottom)
    return value


def _indices(images: Any) -> tuple[int, ...]:
    """Places of images: a list, or ranges such as "0-63, 100-109"."""
    if isinstance(images, str):
        parts = [re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part) for part in images.split(",")]
        if not all(parts):
            raise InputError(f'Images are a list of indices or ranges such as "0-63", got {images!r}.')
        images = [i for m in parts if m for i in range(int(m[1]), int(m[2] or m[1]) + 1)]
    if not isinstance(images, Sequence) or not images or not all(type(i) is int and i >= 0 for i in images):
        raise InputError(f'Images are a list of indices or ranges such as "0-63", got {images!r}.')
    if len(set(images)) < len(images):
        raise InputError("The list of images names one of them twice.")
    return tuple(images)

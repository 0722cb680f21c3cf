"""`EvaluationSpec`: one row of a table, written by people as a small TOML file; its hash names the run.

    name = "Purified CIFAR-10"

    [model]
    classifier = "cifar10-resnet"       # a name, a file, or {name = "python:mine.py:make", arguments = {…}}
    score = "cifar10-small"             # without a score or purifier the undefended classifier is evaluated
    sampler = {kind = "sde", t_star = 0.1}

    [data]
    source = "cifar10-samples"
    images = "0-63"                     # or [0, 5, 9], "0-9, 20-29", "all"

    [threat]
    kind = "linf"
    eps = "8/255"

    [[attacks]]
    kind = "pgd"                        # any further key is an argument of the attack
    iterations = 20
    eot = 10
    gradient = "exact"                  # the attacker's choice; without it the defence's own

Further keys: rules, seeds, batch, probe. A key that is not known is an error that names the nearest one that is.
The hash is that of the values that are not at their defaults, so a new field with a default changes no hash.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self, final

from diffpure.attacks import Attack, attacks_of, by_name, kind_of
from diffpure.attacks.presets import ATTACKS, own_keys
from diffpure.data.sources import DataSpec
from diffpure.diffusion.gradients import gradient_mode
from diffpure.diffusion.samplers import sampler_of
from diffpure.errors import Diverging, InputError, unknown
from diffpure.models.cards import defense_card
from diffpure.models.code import is_code
from diffpure.named import changed, construct, lookup, too_deep
from diffpure.purifiers import PURIFIERS
from diffpure.results.rows import DEFAULT_RULES, Rule
from diffpure.threats import Linf, ThreatModel, threat_of
from diffpure.vote import Vote, VoteRule

Table = Mapping[str, Any]

FORMAT: Final = 2  # of the hash: a change of what a value means is a new format


@final
@dataclass(frozen=True, kw_only=True)
class Reference:
    """A model by name: inside the package, official, a file, `timm:…`, `python:FILE.py:FUNCTION`.

    name: such as "cifar10-resnet".   like: the official checkpoint that a file is read as.
    arguments: of a `python:` function.
    """

    name: str
    like: str | None = None
    arguments: Table = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any, what: str) -> Reference:
        """A reference from a name or a table."""
        if isinstance(value, Reference):
            return value
        made: Reference = construct(cls, {"name": value} if isinstance(value, str) else value, f"key of {what}")
        return made

    def plain(self) -> Any:
        """The name alone where that is all."""
        return self.name if not self.like and not self.arguments else changed(self)


@final
@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A classifier, alone or behind a purifier.

    classifier: a name, a file or a table, see below.   score: the score model of the diffusion purifier, named alike;
    without it and without `purifier` the undefended classifier is evaluated.   sampler: of the diffusion purifier.
    purifier: another purifier, a table such as {kind = "blur", sigma = 1.0} or a reference to a user's own.
    gradient: the mode for attacks that name none.   rounds: purify that many times in a row.
    draws: purify each image so often, each time with noise of its own, and let the draws decide together.
    rule: the "average" of the probabilities of the draws, or the "majority" of their classes.
    flip: whether the classifier sees each image also flipped horizontally, and averages the probabilities.
    """

    classifier: str | Table | Reference
    score: str | Table | Reference | None = None
    sampler: str | Table = "sde"
    purifier: str | Table | None = None
    gradient: str | Table = "exact"
    rounds: int = 1
    draws: int = 1
    rule: VoteRule = "average"
    flip: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "classifier", Reference.of(self.classifier, "classifier"))
        if self.score is not None:
            object.__setattr__(self, "score", Reference.of(self.score, "score"))
        if self.score is not None and self.purifier is not None:
            raise InputError("A [model] has a score for the diffusion purifier or another purifier, not both.")
        if isinstance(self.purifier, str):
            object.__setattr__(self, "purifier", {"kind": self.purifier})
        if self.purifier is not None:
            _check_purifier(self.purifier)
        if self.rounds < 1:
            raise InputError(f"rounds is a whole number of at least 1, got {self.rounds}.")
        if Vote(self.draws, self.rule).draws > 1 and not self.defended:
            raise InputError(f"{self.draws} draws need a purifier to draw from, so [model] needs a score or purifier.")
        gradient_mode(self.gradient)
        sampler_of(self.sampler)

    @classmethod
    def of(cls, table: Table) -> ModelSpec:
        """The [model] in a table; `defense` names one that has a card, and other keys change it."""
        known, what, own = {f.name for f in fields(cls)} | {"defense"}, "key of [model]", dict(table)
        for key in own:
            if key not in known:
                raise unknown(what, key, known)
        whole = defense_card(own.pop("defense")).model if "defense" in own else {}
        made: ModelSpec = construct(cls, {**whole, **own}, what)
        return made

    @property
    def defended(self) -> bool:
        """Whether there is a purifier at all."""
        return self.score is not None or self.purifier is not None


@final
@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """A model, images, a threat, attacks, decision rules and seeds: everything that fixes the rows of a run.

    model: the classifier and what purifies before it.   data: the images.   threat: what an attacker may do.
    attacks: a list of tables, each with a kind.   rules: when an image counts as correctly classified.
    seeds: one repetition of the whole evaluation per seed.   name: what the result is called; no part of the hash.
    batch: how many images are attacked together; part of the spec because it decides how sums round.
    probe: on how many images the checks attack again with more EOT samples, more steps and no budget, at about eight
    times the cost per image.
    """

    model: ModelSpec
    data: DataSpec = field(default_factory=DataSpec)
    threat: ThreatModel = field(default_factory=lambda: Linf(8 / 255))
    attacks: tuple[str | Table, ...] = ()
    rules: tuple[str, ...] = tuple(map(str, DEFAULT_RULES))
    seeds: tuple[int, ...] = (0,)
    batch: int = 16
    probe: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(str(Rule.parse(rule)) for rule in self.rules))
        object.__setattr__(self, "attacks", tuple(map(_without_defaults, self.attacks)))
        if not self.rules or not self.seeds or self.batch < 1 or self.probe < 0:
            raise InputError("A spec needs one rule, one seed and a batch of at least 1, and a probe of 0 or more.")
        if len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"Each of the seeds of a spec is given once, got {list(self.seeds)}.")
        for name, attack in self.make_attacks().items():
            if any(hasattr(part, "part") for part in attack.walk()) and not self.model.defended:
                raise InputError(
                    f"The attack {name!r} is on a part of a defence, so [model] needs a score or purifier."
                )

    def make_attacks(self) -> dict[str, Attack]:
        """The attacks by name, as the rows will call them."""
        return by_name(self.attacks)

    @property
    def hash(self) -> str:
        """A hash of everything but the name: what names the run."""
        content = {"format": FORMAT, **self.plain()}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder_name(self) -> str:
        """The name of the run's folder: readable, and its own."""
        return named_folder(self.name, self.hash)

    def plain(self) -> dict[str, Any]:
        """The spec as plain data, without its name and without what is at its default; `of` reads it."""
        found = {key: value for key, value in changed(self).items() if key not in ("name", "model", "threat")}
        model = changed(self.model)
        for key in ("classifier", "score"):
            reference = getattr(self.model, key)
            if isinstance(reference, Reference):
                model[key] = reference.plain()
        if "data" in found:
            found["data"] = changed(self.data)
        if self.threat != Linf(8 / 255):
            found["threat"] = {"kind": type(self.threat).__name__.lower(), **changed(self.threat)}
        plain: dict[str, Any] = json.loads(json.dumps({"model": model, **found}))
        return plain

    @classmethod
    def of(cls, table: Any) -> Self:
        """The spec in a table as TOML gives it, or `plain` did."""
        if not isinstance(table, Mapping):
            raise InputError(f"A spec is a table with [model], [data], [threat] and [[attacks]], got {table!r}.")
        if too_deep(table):
            raise InputError("A spec is a table of tables and values, not nested beyond all measure.")
        values = dict(table)
        if not isinstance(values.get("model"), Mapping):
            raise InputError("A spec needs a table [model] with a classifier.")
        values["model"] = ModelSpec.of(values["model"])
        if "data" in values:
            values["data"] = construct(DataSpec, values["data"], "key of [data]")
        if "threat" in values:
            given = values["threat"]
            values["threat"] = threat_of({"kind": "linf", **given} if isinstance(given, Mapping) else given)
        for key in ("attacks", "rules"):
            if isinstance(values.get(key), str | Mapping):
                values[key] = [values[key]]
        if isinstance(values.get("seeds"), int):
            values["seeds"] = [values["seeds"]]
        made: Self = construct(cls, values, "key of a spec")
        return made

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The spec in a TOML file."""
        return cls.of(read_toml(path))

    def tiny(self) -> Self:
        """The same evaluation so small that a test can run it: two images, a few samples and steps of everything."""
        rules = [Rule.parse(rule) for rule in self.rules]
        return replace(
            self,
            model=replace(self.model, sampler=_tiny_sampler(self.model.sampler), draws=min(self.model.draws, 2)),
            data=replace(self.data, images="0-1"),
            attacks=tuple(_tiny(table) for table in self.attacks),
            rules=tuple(str(replace(rule, n=min(rule.n, 3))) for rule in rules),
            seeds=self.seeds[:1],
            probe=0,
        )


def named_folder(name: str, key: str) -> str:
    """The name of a folder: readable, and its own by its key."""
    words = name.lower().replace("ℓ∞", "linf").replace("ℓ2", "l2")
    readable = re.sub(r"[^a-z0-9.]+", "-", words)[:48].strip("-.")
    return f"{readable}-{key}" if readable else key


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise InputError(f"The file {path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"The file {path} is no TOML file ({error}).") from error


def _without_defaults(table: Any) -> Table:
    """An attack's table without arguments that say what the attack has anyway."""
    attacks_of(table)
    table = {"kind": table} if isinstance(table, str) else dict(table)
    kind = kind_of(table.pop("kind"))
    plain = attacks_of(kind)
    return {"kind": kind, **{k: v for k, v in table.items() if attacks_of({"kind": kind, k: v}) != plain}}


def _check_purifier(table: str | Table) -> None:
    """Refuse a purifier without a kind, or of one that is neither known nor a user's own."""
    kind = table if isinstance(table, str) else table.get("kind")
    if not isinstance(kind, str):
        raise InputError(f"A purifier is a table with a kind, one of {', '.join(PURIFIERS)}; got {table!r}.")
    if not is_code(kind):
        lookup(kind, PURIFIERS, "purifier")


def _tiny(table: Any) -> dict[str, Any]:
    sizes = {"iterations": 2, "restarts": 1, "targets": 1, "queries": 4, "eot": 2, "defence_samples": 3}
    known = {key for attack in attacks_of(table) for part in attack.walk() for key in own_keys(part)}
    return {**table, **{key: value for key, value in sizes.items() if key in known}}


def _tiny_sampler(sampler: str | Table) -> dict[str, Any]:
    """The sampler in two steps, where it has steps to choose and can do with two."""
    table = {"kind": sampler} if isinstance(sampler, str) else {k: v for k, v in sampler.items() if k != "dt"}
    short = {**table, "steps": 2} if hasattr(sampler_of(table), "steps") else table
    try:
        sampler_of(short)
    except Diverging:
        return table
    return short


__all__ = ["ATTACKS", "FORMAT", "DataSpec", "EvaluationSpec", "ModelSpec", "Reference", "named_folder", "read_toml"]

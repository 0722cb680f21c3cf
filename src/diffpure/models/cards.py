"""Cards: what is known about each model that has a name, and where its weights are.

A card is a table of `embedded.toml` (weights inside the package), `scores.toml` or `classifiers.toml` (official
checkpoints, kept in the user's cache in models/NAME/): what the model is (kind, architecture, and the arguments or the
official configuration of its network), its file, layout, SHA-256 (or its first digits, or "unknown"), licence and
source, and for official ones a link, the paper's tables that use it and its t*. Whatever else a table says is kept: its
values as how the model was made, its tables as what was measured.

Adding a model means adding its table here and, where its network is new, one line to `ARCHITECTURES` of
`scores.load` or `classifiers.load`. A whole defence is a table of `defenses.toml`: its `model` is the [model] of a
spec, which names score, sampler and classifier, and the rest is as above.
"""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, final

from diffpure.disk import home, write_whole
from diffpure.errors import InputError, unknown
from diffpure.models.checkpoints import check_hash, sha256

Kind = Literal["score", "classifier"]

UNKNOWN: Final = "unknown"
EMBEDDED: Final = "embedded.toml"
FILES: Final = (EMBEDDED, "scores.toml", "classifiers.toml")
DEFENSES: Final = "defenses.toml"


@final
@dataclass(frozen=True, kw_only=True)
class Card:
    """One model: what it is, where its weights are, where they come from, and what was measured."""

    name: str
    kind: Kind
    architecture: str  # its constructor in the ARCHITECTURES of its kind
    file: str  # the name of its file, as it was published
    licence: str
    embedded: bool = False  # inside the package, not in the cache
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the constructor
    config: Mapping[str, Any] = field(default_factory=dict)  # or the official configuration of the network
    layout: str = "plain"
    sha256: str = UNKNOWN  # in full, or the first digits where only those are published
    source: str = ""  # where it is described or found by hand
    url: str = ""  # a direct link, if there is one
    tables: tuple[str, ...] = ()  # of the paper
    t_star: float | None = None
    made: Mapping[str, Any] = field(default_factory=dict)  # how: data, command, seed, hours, …
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where the file is kept on this machine."""
        if self.embedded:
            return Path(str(resources.files("diffpure.models.weights").joinpath(self.file)))
        return home() / "models" / self.name / self.file

    @property
    def present(self) -> bool:
        """Whether the file is on this machine."""
        try:
            return self.path.is_file()
        except InputError:  # there is no cache
            return False

    @property
    def where(self) -> str:
        """Where the weights are, for people."""
        return "in the package" if self.embedded else str(self.path) if self.present else "not fetched"

    @property
    def keywords(self) -> dict[str, Any]:
        """What the constructor of its network is called with."""
        return {"config": self.config} if self.config else dict(self.arguments)

    def plain(self) -> dict[str, Any]:
        """The card as a flat table, with where its weights are."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("made", "measured")}
        return {"where": self.where, "present": self.present, **known, **self.made, **self.measured}


@final
@dataclass(frozen=True, kw_only=True)
class DefenseCard:
    """A whole defence: the [model] of a spec, and what was measured of it."""

    name: str
    model: Mapping[str, Any]
    made: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar = "defense"

    @property
    def architecture(self) -> str:
        """What it is made of, for people."""
        return " behind ".join(self._names)

    @property
    def present(self) -> bool:
        """Whether all of it is on this machine."""
        return all(find_spec(_package(name)) is not None if _package(name) else card(name).present
                   for name in self._names)  # fmt: skip

    @property
    def where(self) -> str:
        """Where its weights are, for people."""
        places = (f"the package {_package(name)}" if _package(name) else card(name).where for name in self._names)
        return ", ".join(dict.fromkeys(places))

    @property
    def _names(self) -> list[str]:
        return [self.model[key] for key in ("classifier", "score") if key in self.model]

    def plain(self) -> dict[str, Any]:
        """The card as a flat table, with where its weights are."""
        about = {"where": self.where, "present": self.present, "name": self.name, "kind": self.kind}
        return {**about, "model": self.model, **self.made, **self.measured}


def _package(name: str) -> str:
    """The package of a classifier from elsewhere, PACKAGE:NAME; nothing for a model that has a card."""
    package, colon, _ = name.partition(":")
    return package if colon else ""


def defenses() -> dict[str, DefenseCard]:
    """The cards of all whole defences by name."""
    return {name: DefenseCard(name=name, **_sorted(table, DefenseCard)) for name, table in _tables(DEFENSES).items()}


def defense_card(name: str) -> DefenseCard:
    """The card of the defence of that name."""
    known = defenses()
    if not isinstance(name, str) or name not in known:
        raise unknown("defense", name, known)
    return known[name]


AnyCard = Card | DefenseCard


def cards(kind: Kind | None = None) -> dict[str, Card]:
    """All cards by name, or those of one kind."""
    return {name: card for name, card in _all().items() if kind in (None, card.kind)}


def card(name: str, kind: Kind | None = None) -> Card:
    """The card of that name."""
    known = cards(kind)
    if name in defenses():
        raise InputError(f"{name} is a whole defence, {defenses()[name].architecture}; name one of the two.")
    if name not in known:
        raise unknown("model", name, known)
    return known[name]


@cache
def _all() -> dict[str, Card]:
    found: dict[str, Card] = {}
    for file in FILES:
        for name, table in _tables(file).items():
            given = _sorted({**table, "embedded": file == EMBEDDED}, Card)
            found[name] = Card(name=name, **{**given, "tables": tuple(given.get("tables", ()))})
    return found


@cache
def _tables(file: str) -> dict[str, Any]:
    """The tables of one of the files with cards."""
    return tomllib.loads(resources.files("diffpure.models").joinpath(file).read_text("utf-8"))


def _sorted(table: dict[str, Any], cls: type[Card | DefenseCard]) -> dict[str, Any]:
    """The fields of a card; what is none of them is how the model was made, or a table of what was measured."""
    known = {f.name for f in fields(cls)}
    given = {key: value for key, value in table.items() if key in known}
    made = {key: value for key, value in table.items() if key not in known and not isinstance(value, dict)}
    measured = {key: value for key, value in table.items() if key not in known and isinstance(value, dict)}
    return {**given, "made": made, "measured": measured}


def card_of_file(path: Path, kind: Kind, like: str | None) -> Card:
    """The card a user's own file is read by: the named one, else the one that publishes this very file."""
    if like is not None:
        return card(like, kind)
    fitting = [each for each in cards(kind).values() if each.file == path.name and not each.embedded]
    if len(fitting) != 1:
        raise InputError(
            f"What {path.name} is for cannot be told from its name; say like=NAME, one of {', '.join(cards(kind))}."
        )
    verify(fitting[0], path)
    return fitting[0]


def local_file(card: Card) -> Path:
    """The verified file of a card on this machine."""
    if not card.present:
        raise InputError(f"{card.name} is not on this machine; run `diffpure models fetch {card.name}`.")
    verify(card, card.path)
    return card.path


def verify(card: Card, path: Path) -> None:
    """Check a file against its card, or against what was recorded when a file of unknown hash was first loaded."""
    if card.sha256 != UNKNOWN:
        check_hash(path, card.sha256)
        return
    recorded, actual = _recorded(), sha256(path)
    before = recorded.get(card.name)
    if before == actual:
        return
    if before is not None:
        change = f"SHA-256 was {before}, is {actual}"
        warnings.warn(f"{path.name} changed since it was first loaded: {change}.", stacklevel=2)
    try:
        _register().parent.mkdir(parents=True, exist_ok=True)
        write_whole(_register(), json.dumps({**recorded, card.name: actual}, indent=1).encode())
    except OSError as error:  # a cache that only others may write to still has good files
        warnings.warn(f"The hash of {path.name} cannot be recorded in {_register()} ({error}).", stacklevel=2)


def _register() -> Path:
    """Where the hashes of files are kept whose publishers give none."""
    return home() / "hashes.json"


def _recorded() -> dict[str, str]:
    try:
        content = json.loads(_register().read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        warnings.warn(f"{_register()} is damaged, so what was recorded before is not known.", stacklevel=3)
        return {}
    return content

"""Cards: what is known about each official checkpoint, and where its file is on this machine.

`scores/cards.toml` and `classifiers/cards.toml` hold a table a checkpoint: original file name and source, sha256 (or
its first digits, or "unknown"), licence, the paper's tables that use it, the default t*, and the network's full-size
configuration. Files live in the user's cache, in models/NAME/. A file of unknown hash is recorded
when it is first loaded, and a later change of it is warned about.
"""

from __future__ import annotations

import json
import shutil
import tomllib
import urllib.error
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, final

from diffpure.disk import Progress, download, home
from diffpure.errors import InputError, unknown
from diffpure.models.checkpoints import check_hash, read, sha256

Kind = Literal["score", "classifier"]

UNKNOWN: Final = "unknown"


@final
@dataclass(frozen=True, kw_only=True)
class Card:
    """One official checkpoint: where it comes from, what it is, and what the paper does with it."""

    name: str
    kind: Kind
    architecture: str
    layout: str
    file: str  # the name under which it was published
    source: str  # where it is described or found by hand
    licence: str
    url: str = ""  # a direct link, if there is one
    sha256: str = UNKNOWN  # in full, or the first digits where only those are published
    tables: tuple[str, ...] = ()
    t_star: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where the file is kept on this machine."""
        return home() / "models" / self.name / self.file

    @property
    def present(self) -> bool:
        """Whether the file is on this machine."""
        return self.path.is_file()


def cards(kind: Kind | None = None) -> dict[str, Card]:
    """All cards by name, or those of one kind."""
    kinds: tuple[Kind, ...] = ("score", "classifier") if kind is None else (kind,)
    return {name: card for each in kinds for name, card in _read_cards(each).items()}


def card(name: str, kind: Kind | None = None) -> Card:
    """The card of that name."""
    known = cards(kind)
    if name not in known:
        raise unknown("checkpoint", name, known)
    return known[name]


def card_of_file(path: Path, kind: Kind, like: str | None) -> Card:
    """The card a user's own file is read by: the named one, else the one that publishes this very file."""
    if like is not None:
        return card(like, kind)
    fitting = [each for each in cards(kind).values() if each.file == path.name]
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


def _read_cards(kind: Kind) -> dict[str, Card]:
    text = resources.files(f"diffpure.{kind}s").joinpath("cards.toml").read_text("utf-8")
    tables = tomllib.loads(text).items()
    return {name: Card(name=name, kind=kind, **{**t, "tables": tuple(t.get("tables", ()))}) for name, t in tables}


def verify(card: Card, path: Path) -> None:
    """Check a file against its card, or against what was recorded when a file of unknown hash was first loaded."""
    if card.sha256 != UNKNOWN:
        check_hash(path, card.sha256)
        return
    register = home() / "hashes.json"
    recorded: dict[str, str] = json.loads(register.read_text("utf-8")) if register.is_file() else {}
    actual = sha256(path)
    before = recorded.setdefault(card.name, actual)
    if before != actual:
        change = f"SHA-256 was {before}, is {actual}"
        warnings.warn(f"{path.name} changed since it was first loaded: {change}.", stacklevel=2)
        recorded[card.name] = actual
    register.parent.mkdir(parents=True, exist_ok=True)
    register.write_text(json.dumps(recorded, indent=1), "utf-8")


def import_file(card: Card, path: Path) -> Path:
    """Copy a file the user already has to its place, once it is verified and readable."""
    read(path)
    if card.sha256 != UNKNOWN:
        check_hash(path, card.sha256)
    card.path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, card.path)
    return card.path


def fetch(card: Card, progress: Progress | None = None) -> Path:
    """Download a checkpoint, going on from where an earlier attempt stopped, and verify it before it counts."""
    if card.present:
        verify(card, card.path)
        return card.path
    if not card.url:
        raise InputError(
            f"{card.name} has no direct link; get {card.file} from {card.source} and run "
            f"`diffpure models fetch {card.name} --from FILE`."
        )
    part = card.path.with_name(card.file + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        download(card.url, part, progress)
    except (urllib.error.URLError, OSError) as error:
        raise InputError(f"{card.url} could not be downloaded ({error}); run it again to resume.") from error
    try:
        if card.sha256 != UNKNOWN:
            check_hash(part, card.sha256)
        read(part)
    except InputError:
        part.unlink()  # a wrong file must not be resumed
        raise
    part.replace(card.path)
    return card.path

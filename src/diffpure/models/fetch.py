"""Getting the file of a card: downloaded from its link, or copied from where the user has it.

The file is written beside its place, checked (its hash where one is published, and that it fits the network it is for)
and only then renamed, so that it is there whole and right or not at all. A download goes on where an earlier one
stopped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from diffpure.disk import Progress, download, one_sentence
from diffpure.errors import InputError
from diffpure.models.cards import UNKNOWN, Card, verify
from diffpure.models.checkpoints import check_hash

Check = Callable[[Card, Path], None]  # raises an InputError unless the file fits the network of the card


def import_file(card: Card, path: Path, check: Check) -> Path:
    """Copy a file the user already has to its place, once it is right."""
    _outside_the_package(card)
    if not path.is_file():
        raise InputError(f"There is no checkpoint file {path}.")
    _check(card, path, check)
    copy = card.path.with_name(card.file + ".copy")
    with one_sentence(card.path.parent):
        try:
            card.path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
                target.flush()
                os.fsync(target.fileno())
            copy.replace(card.path)
        finally:
            copy.unlink(missing_ok=True)
    return card.path


def fetch(card: Card, check: Check, progress: Progress | None = None) -> Path:
    """Download a checkpoint, going on from where an earlier attempt stopped, and check it before it counts."""
    _outside_the_package(card)
    if card.present:
        verify(card, card.path)
        check(card, card.path)
        return card.path
    if not card.url:
        raise InputError(
            f"{card.name} has no direct link; get {card.file} from {card.source} and run "
            f"`diffpure models fetch {card.name} --from FILE`."
        )
    part = card.path.with_name(card.file + ".part")
    with one_sentence(part.parent):
        part.parent.mkdir(parents=True, exist_ok=True)
    try:
        download(card.url, part, progress)
    except OSError as error:
        raise InputError(f"{card.url} could not be downloaded ({error}); run it again to resume.") from error
    try:
        _check(card, part, check)
    except InputError:
        part.unlink()  # a wrong file must not be resumed
        raise
    part.replace(card.path)
    return card.path


def _check(card: Card, path: Path, check: Check) -> None:
    """Refuse a file of another hash, or one that does not fit its network."""
    if card.sha256 != UNKNOWN:
        check_hash(path, card.sha256)
    check(card, path)


def _outside_the_package(card: Card) -> None:
    if card.embedded:
        raise InputError(f"{card.name} is inside the package; there is nothing to fetch.")

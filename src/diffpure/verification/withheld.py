"""What a run that was published without its adversarial images says of them: `withheld.json`, maybe a stranger's.

    {"why": "ImageNet's images may not be passed on",
     "perturbations": {"pgd-ce-seed0-000000.safetensors": "SHA-256 of the perturbations z of that unit", …}}

Whoever has the data computes a unit anew, and compares the perturbations that it finds with the hash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from diffpure.disk import one_sentence
from diffpure.errors import InputError
from diffpure.evaluation.store import IMAGES
from diffpure.results.rows import WITHHELD, cut

LONGEST: Final = 200  # characters of a reason
_LARGEST: Final = 16 << 20  # bytes of the file: the hashes of more than 100,000 units


@final
@dataclass(frozen=True)
class Withheld:
    """Why a run holds no adversarial images, and the SHA-256 of the perturbations of each unit, by the unit's file."""

    why: str
    perturbations: Mapping[str, str]

    @property
    def remark(self) -> str:
        """What a check says of it."""
        return f"published without its adversarial images ({self.why.rstrip('.')})"

    def text(self) -> str:
        """The content of the file."""
        return json.dumps({"why": self.why, "perturbations": dict(self.perturbations)}, indent=1) + "\n"

    def problems(self, files: Set[str]) -> Iterator[str]:
        """In what the named files differ from those of the attacked units."""
        if missing := sorted(files - self.perturbations.keys()):
            yield f"{WITHHELD} lacks the hashes of {len(missing)} attacked units, that of {missing[0]} first."
        if extra := sorted(self.perturbations.keys() - files):
            yield f"{WITHHELD} names {cut(extra[0])}, which is the file of no attacked unit of this run."


def holds_images(folder: Path) -> bool:
    """Whether a run came with its adversarial images."""
    return (folder / IMAGES).is_dir()


def is_withheld(folder: Path) -> bool:
    """Whether a run says that it was published without its adversarial images."""
    return not holds_images(folder) and (folder / WITHHELD).is_file()


def read_withheld(folder: Path) -> Withheld | None:
    """What a run says of the adversarial images that it was published without; None if it has them, or says nothing."""
    return _read(folder / WITHHELD) if is_withheld(folder) else None


def check_withheld(folder: Path, files: Set[str]) -> tuple[Withheld | None, list[str]]:
    """The same, and what is wrong with it; files: those of the run's attacked units."""
    try:
        found = read_withheld(folder)
    except InputError as error:
        return None, [str(error)]
    return found, [] if found is None else list(found.problems(files))


def check_reason(why: str) -> str:
    """A reason without the spaces around it, if it is one line that anybody can read."""
    why = why.strip()
    if not why or len(why) > LONGEST or not why.isprintable():
        raise InputError(
            f"The reason why images are withheld is one line of 1 to {LONGEST} printable characters, got {cut(why)}."
        )
    return why


def _read(path: Path) -> Withheld:
    with one_sentence(path), path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise InputError(f"The file {path} is damaged: it is larger than {_LARGEST >> 20} MiB.")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"The file {path} is damaged: it is no JSON.") from error
    if not isinstance(content, dict) or content.keys() != {"why", "perturbations"}:
        raise InputError(f"The file {path} is damaged: it is no table of 'why' and 'perturbations'.")
    why, hashes = content["why"], content["perturbations"]
    if not isinstance(why, str):
        raise InputError(f"The file {path} is damaged: its 'why' is {cut(why)}.")
    if not isinstance(hashes, dict) or not hashes or not all(map(_is_hash, hashes.values())):
        raise InputError(f"The file {path} is damaged: its 'perturbations' are no SHA-256 of 64 digits for each file.")
    try:
        return Withheld(check_reason(why), hashes)
    except InputError as error:
        raise InputError(f"The file {path} is damaged: {error}") from error


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None

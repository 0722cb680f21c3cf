"""What a run's header says, as a reader of a report writes it.

    Linf(eps=8/255)     → ℓ∞ 8/255
    [0, 1, …, 99]       → 0–99
    2026-11-17T09:30…   → 2026-11-17 09:30 UTC

A header may come from anyone, so every text here is only ever printed, and made printable first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any, Final

NOT_MEASURED: Final = "not measured"
# What a spec leaves out where it is the default, as far as a report asks for it.
USUAL: Final[dict[str, Any]] = {"threat": {"kind": "linf", "eps": 8 / 255}, "data": {"source": "cifar10-samples"}}
_PARTS: Final = 10  # ranges that are written out before the rest is counted
_KEPT: Final = "\n\N{NO-BREAK SPACE}"

Header = Mapping[str, Any]


def printable(text: str) -> str:
    """A text without control characters, changes of its direction and halves of characters."""
    return "".join(c if c.isprintable() or c in _KEPT else "\N{REPLACEMENT CHARACTER}" for c in text)


def threat(header: Header) -> str:
    """The threat model: a norm and its budget."""
    said = str(header["threat"])
    known = re.fullmatch(r"(Linf|L2)\(eps=([^,()]+)\)", said)
    return f"{ {'Linf': 'ℓ∞', 'L2': 'ℓ2'}[known[1]] } {known[2]}" if known else said


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in their order with ranges for what follows one by one: 0–47, 60; the rest of a long list is counted."""
    parts = [str(a) if a == b else f"{a}–{b}" for a, b in _ranges(numbers)]
    more = f", … ({len(numbers):,} in all)" if len(parts) > _PARTS else ""
    return ", ".join(parts[:_PARTS]) + more


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def compact(value: Any) -> Any:
    """Plain data with ranges in place of long lists of whole numbers."""
    if isinstance(value, Mapping):
        return {key: compact(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return ranges(value) if len(value) > 4 and all(type(n) is int for n in value) else [compact(v) for v in value]
    return value


def spec(header: Header) -> dict[str, Any]:
    """The spec of a run with the threat and the source that it leaves out where they are the usual ones; or nothing."""
    found = header.get("spec")
    if not isinstance(found, Mapping):
        return {}
    data = found.get("data", {})
    return {**USUAL, **found, "data": {**USUAL["data"], **data} if isinstance(data, Mapping) else data}


def source(header: Header) -> str:
    """Where a run's images come from, if its spec says so; a file by its name alone."""
    data = spec(header).get("data")
    if not isinstance(data, Mapping):
        return ""
    return f"the file {PurePath(str(data.get('path'))).name}" if from_file(header) else str(data["source"])


def from_file(header: Header) -> bool:
    """Whether the images were read from a user's file, so that somebody may have attacked them before."""
    data = spec(header).get("data")
    return isinstance(data, Mapping) and data["source"] == "file"


def date(header: Header) -> str:
    """When a run was made, in UTC to the minute."""
    said = header.get("date")
    if not said:
        return "not recorded"
    try:
        when = datetime.fromisoformat(str(said))
        return f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if when.tzinfo else f"{when:%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError):
        return str(said)


def name(header: Header, otherwise: str) -> str:
    """The given name of a run, or what it is called otherwise, on one line."""
    return printable(str(header.get("name") or otherwise)).replace("\n", " ")


def class_name(header: Header, k: int) -> str:
    """What a class is called."""
    names = header["classes"]
    return str(names[k]) if 0 <= k < len(names) else f"class {k}"


def images(header: Header) -> str:
    """How many images, and which."""
    where = source(header)
    chosen = f"dataset indices {ranges(header['indices'])}" + (f" of {where}" if where else "")
    return f"{len(header['indices']):,} ({chosen})"


def defended(header: Header) -> bool:
    """Whether the model is a classifier behind a purifier."""
    return header["model"].get("purifier") is not None

"""Which images: `"all"`, ranges such as `"0-63, 100-109"`, or a list of indices.

A choice is kept as text and compared with the size of its source before it becomes a list of indices, so that
`"0-9999999999"` is refused at once. Equal choices have equal texts: [0, 1, 2, 7] is written "0-2, 7".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from diffpure.errors import InputError

ALL: Final = "all"
_RANGE: Final = re.compile(r"\s*(\d{1,15})(?:\s*-\s*(\d{1,15}))?\s*")


def normal(images: object) -> str:
    """The text of a choice that was given as text or as a list of indices, once it is one."""
    if isinstance(images, str):
        return ALL if images.strip().lower() == ALL else _text(_ranges(images))
    if not isinstance(images, Sequence) or not images or not all(type(i) is int and i >= 0 for i in images):
        raise _no_choice(images)
    return _text(_merged(range(i, i + 1) for i in images))


def expand(choice: str, size: int, source: str) -> tuple[int, ...]:
    """The indices of a choice among `size` images, none of them twice."""
    if choice == ALL:
        return tuple(range(size))
    chosen = _ranges(choice)
    last = max(part[-1] for part in chosen)
    if last >= size:
        raise InputError(f"{source} has {size} images, so there is no image {last}; the last one is {size - 1}.")
    ordered = sorted(chosen, key=lambda part: part.start)
    for before, after in pairwise(ordered):
        if after.start < before.stop:
            raise InputError(f"The choice of images {choice!r} names image {after.start} twice.")
    return tuple(i for part in chosen for i in part)


def first(choice: str, count: int) -> str:
    """The choice of the first `count` images of a choice, not expanded."""
    if choice == ALL:
        return f"0-{count - 1}"
    parts, left = list[range](), count
    for part in _ranges(choice):
        parts.append(part[:left])
        left -= len(parts[-1])
    if left:
        raise InputError(f"The choice of images {choice!r} has {count - left} images, fewer than {count}.")
    return _text(part for part in parts if part)


def _ranges(text: str) -> list[range]:
    """The ranges of a text, in its order and not expanded."""
    matches = [_RANGE.fullmatch(part) for part in text.split(",")]
    found = [range(int(m[1]), int(m[2] or m[1]) + 1) for m in matches if m]
    if len(found) < len(matches) or not all(found):
        raise _no_choice(text)
    return _merged(found)


def _merged(parts: Iterable[range]) -> list[range]:
    """Ranges of which each that goes on where the one before it ends is joined to it."""
    merged: list[range] = []
    for part in parts:
        if merged and part.start == merged[-1].stop:
            merged[-1] = range(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return merged


def _text(parts: Iterable[range]) -> str:
    return ", ".join(str(p.start) if len(p) == 1 else f"{p.start}-{p[-1]}" for p in parts)


def _no_choice(images: object) -> InputError:
    got = repr(images) if len(repr(images)) < 80 else repr(images)[:80] + " …"
    return InputError(f'Images are "all", ranges such as "0-63, 100-109", or a list of indices from 0, got {got}.')

"""One-sentence errors: what was wrong and what is accepted.

`InputError` is raised at the doors of the library (images, labels, arguments, files); the command line prints its
message and nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_LONGEST: Final = 2000  # characters of a message: a value out of a stranger's file may have any length


class InputError(ValueError):
    """What the caller gave cannot be used; the message is one sentence that says what is accepted."""

    def __init__(self, message: str = "") -> None:
        cut = message if len(message) <= _LONGEST else f"{message[: _LONGEST // 2]} … {message[-_LONGEST // 2 :]}"
        super().__init__(cut)


class Diverging(InputError):
    """A solver's steps are too long for its equation: its values would grow without bound."""


def unknown(kind: str, name: object, known: Iterable[str]) -> InputError:
    """The error for an unknown name, with the nearest known one."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"Unknown {kind} {name!r}; {hint}known: {', '.join(known)}.")

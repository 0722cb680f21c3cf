"""Purifiers by name; each is a member of the contract in `diffpure.purify`.

Adding a purifier means writing its file and adding one line to `PURIFIERS`; a spec then says
`purifier = {kind = "NAME", …}` with its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from diffpure.errors import InputError
from diffpure.named import lookup
from diffpure.purifiers.blur import Blur
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import PurifierBase

PURIFIERS: Final[dict[str, type[PurifierBase]]] = {
    "diffusion": Purifier,
    "blur": Blur,
}


def make_purifier(kind: str, arguments: Mapping[str, Any]) -> PurifierBase:
    """The purifier of that name."""
    member = lookup(kind, PURIFIERS, "purifier")
    try:
        made: PurifierBase = member(**arguments)
    except TypeError as error:
        raise InputError(f"The purifier {kind!r} does not take these arguments ({error}).") from error
    return made

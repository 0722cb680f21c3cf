"""Results as JSON that a program can read, alone on standard output."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from diffpure.cli.base import say


def show(what: object, as_json: bool) -> None:
    """Print a value in words, or as JSON."""
    if as_json:
        print_json(what)
    else:
        say(what)


def print_json(what: Any) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(plain(what), indent=2, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """A value as JSON holds it: dataclasses as tables, numbers as numbers, those that are not finite as null."""
    if hasattr(value, "as_dict"):
        return plain(value.as_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)

"""Overrides of a spec's tables by paths such as model.sampler.t_star or attacks.0.eot."""

from __future__ import annotations

import tomllib
from typing import Any

from diffpure.errors import InputError


def override(spec: dict[str, Any], path: str, value: Any) -> None:
    """Set a value in a spec's tables by its path, such as model.sampler.t_star or attacks.0.eot."""
    inner: Any = spec
    *parents, last = path.split(".")
    for key in parents:
        if isinstance(inner, list):
            inner = inner[_place(key, inner, path)]
            continue
        if isinstance(inner.get(key), str) and key in ("sampler", "gradient", "purifier"):
            inner[key] = {"kind": inner[key]}
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict | list):
            raise InputError(f"The path {path!r} leads through {key!r}, which is no table.")
    if isinstance(inner, list):
        inner[_place(last, inner, path)] = value
    else:
        inner[last] = value


def setting(text: str) -> tuple[str, list[Any]]:
    """The path and the values of a setting such as "model.sampler.t_star=0.05,0.1".

    Values are TOML's, several with commas between them; what is no TOML value, such as 8/255 or few-step, is a text.
    """
    path, sign, values = text.partition("=")
    if not sign or not path.strip() or not values.strip():
        raise InputError(f"A setting is KEY=VALUE or KEY=VALUE,VALUE, such as model.sampler.t_star=0.1, got {text!r}.")
    return path.strip(), _values(values)


def _values(text: str) -> list[Any]:
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except tomllib.TOMLDecodeError:
        pieces = [piece.strip() for piece in text.split(",")]
        return [text] if len(pieces) == 1 else [value for piece in pieces for value in _values(piece)]


def _place(key: str, items: list[Any], path: str) -> int:
    if not key.isdecimal() or int(key) >= len(items):
        raise InputError(f"The path {path!r} names the item {key!r} of a list of {len(items)}.")
    return int(key)

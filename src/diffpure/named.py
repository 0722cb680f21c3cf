"""Values by name: what a spec, the command line and Python write in the same words becomes the same dataclass.

    make("few-step", Sampler, SAMPLERS, "sampler")                       a name: all defaults
    make({"kind": "few-step", "steps": 5}, Sampler, SAMPLERS, "sampler")   a table
    make(FewStep(steps=5), Sampler, SAMPLERS, "sampler")                   the value itself

Every key and every type is checked against the dataclass, with one sentence for what is wrong. `canonical` goes the
other way: a value as plain data, its non-default fields only, so that a new field with a default changes nothing; and
`revive` makes the value again.
"""

from __future__ import annotations

import difflib
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Literal, Union

from diffpure.errors import InputError, unknown


def make(value: Any, cls: type[Any], registry: Mapping[str, Any], what: str) -> Any:
    """A member of a registry by name or table, or the value itself if it is one; class names are names, too."""
    if isinstance(value, Mapping):
        if "kind" not in value:
            raise InputError(f"A {what} is a table with a kind, one of {', '.join(registry)}; got {dict(value)!r}.")
        kind, arguments = value["kind"], {key: v for key, v in value.items() if key != "kind"}
    elif isinstance(value, str):
        kind, arguments = value, {}
    elif isinstance(value, type) or not isinstance(value, cls):
        raise InputError(f"A {what} is one of {', '.join(registry)} or a table with a kind, got {value!r}.")
    else:
        return value
    member = lookup(kind, registry, what)
    return construct(member, arguments, f"argument of the {what} {kind!r}")


def lookup(name: Any, registry: Mapping[str, Any], what: str) -> Any:
    """The member of that name, or of that class name."""
    by_class = {getattr(member, "__name__", key).lower(): key for key, member in registry.items()}
    key = name if isinstance(name, str) and name in registry else by_class.get(str(name).lower(), name)
    if not isinstance(name, str) or key not in registry:
        raise unknown(what, name, registry)
    return registry[key]


def construct(cls: Any, arguments: Any, what: str) -> Any:
    """A dataclass from a table; a key that it has not, and a value of the wrong type, is one sentence."""
    if not isinstance(arguments, Mapping):
        raise InputError(f"A table of keys is expected for {_owner(what)}, got {arguments!r}.")
    known = {f.name: f for f in fields(cls) if f.init}
    hints, values = _hints(cls), {}
    for key, value in arguments.items():
        if key not in known:
            raise unknown(what, key, known)
        values[key] = checked(number(value) if _wants_number(hints[key]) else value, hints[key], f"{key!r}, {what}")
    for key, f in known.items():
        if key not in values and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(f"The key {key!r} is missing in {_owner(what)}.")
    return cls(**values)


def checked(value: Any, hint: Any, what: str) -> Any:
    """The value, if it is of the annotated type; lists become tuples where those are wanted."""
    if isinstance(value, list) and _wants_tuple(hint):
        value = tuple(value)
    value = _scalar(value)
    if not _fits(value, hint):
        got = list(value) if isinstance(value, tuple) else value
        raise InputError(f"The value of {what}, is {_words(hint)}, got {got!r}{_nearest(value, hint)}")
    return float(value) if hint is float else value


def _nearest(value: Any, hint: Any) -> str:
    """The end of a sentence: the nearest of the texts that are accepted, where the type lists them."""
    known = [
        text for option in _union(hint) if typing.get_origin(option) is Literal for text in typing.get_args(option)
    ]
    near = difflib.get_close_matches(str(value), map(str, known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else "."


def check_fields(value: Any) -> None:
    """Check every field of a frozen dataclass in its constructor as `construct` does for a table, and set it anew."""
    cls: Any = type(value)
    hints = _hints(cls)
    for f in fields(value):
        given = getattr(value, f.name)
        plain = number(given) if _wants_number(hints[f.name]) else given
        good = checked(plain, hints[f.name], f"{f.name!r}, argument of {cls.__name__}")
        if good is not given:
            object.__setattr__(value, f.name, good)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _scalar(value: Any) -> Any:
    """A number out of an array or tensor without dimensions; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def number(value: Any) -> Any:
    """A fraction such as "8/255", or an array of one number, as a number; anything else as it is."""
    value = _scalar(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[\d.]+\s*/\s*[\d.]+\s*", value):
        try:
            top, bottom = (Fraction(part.strip()) for part in value.split("/"))
        except ValueError:
            return value
        if bottom:
            return float(top / bottom)
    return value


def canonical(value: Any) -> Any:
    """A value as plain data: of a dataclass its class and the fields that are not at their defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"class": type(value).__name__, **changed(value)}
    if isinstance(value, Mapping):
        return {str(key): canonical(v) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return [canonical(v) for v in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # without the addresses of this process


def revive(plain: Any, known: Mapping[str, Any]) -> Any:
    """The value that `canonical` wrote as plain data; known: dataclasses by name, and other objects by their repr."""
    if isinstance(plain, Mapping):
        name = plain.get("class")
        if name is None:
            return {key: revive(v, known) for key, v in plain.items()}
        if not isinstance(name, str) or name not in known:
            raise InputError(f"A value of the class {name!r} cannot be made again; known: {', '.join(known)}.")
        arguments = {key: revive(v, known) for key, v in plain.items() if key != "class"}
        return construct(known[name], arguments, f"field of {name}")
    if isinstance(plain, list):
        return tuple(revive(v, known) for v in plain)
    if isinstance(plain, str) and plain.startswith("<"):
        if plain not in known:
            raise InputError(f"A function or object of your own, {plain}, cannot be made again from its name.")
        return known[plain]
    return plain


def changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults, as plain data."""
    out = {}
    for f in fields(value):
        now = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if f.init and (default is MISSING or now != default):
            out[f.name] = canonical(now)
    return out


def brief(value: Any, always: Sequence[str] = ()) -> str:
    """A dataclass as people would write it: the fields that are not at their defaults, and those always shown."""
    if not is_dataclass(value) or isinstance(value, type):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    shown = changed(value) | {name: getattr(value, name) for name in always if hasattr(value, name)}
    words = (f"{f.name}={short(getattr(value, f.name))}" for f in fields(value) if f.name in shown)
    return f"{type(value).__name__}({', '.join(words)})"


def short(value: Any) -> str:
    """A number as people write it: 8/255 for what an 8-bit image counts in."""
    if isinstance(value, float) and len(repr(value)) > 8 and abs(255 * value - round(255 * value)) < 1e-9:
        return f"{round(255 * value)}/255"
    return f"{value:g}" if isinstance(value, float) else brief(value)


def too_deep(value: Any, levels: int = 32) -> bool:
    """Whether plain data is nested deeper than anybody writes it, so that whoever walks it might not come back."""
    level = [value]
    for _ in range(levels):
        inner = [v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, Mapping | list | tuple)]
        level = [v for items in inner for v in items]
    return bool(level)


def _owner(what: str) -> str:
    return what.partition(" of ")[2] or what


def _union(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _wants_number(hint: Any) -> bool:
    return float in _union(hint) and str not in _union(hint)  # what may be a text stays one


def _wants_tuple(hint: Any) -> bool:
    return any(typing.get_origin(h) is tuple or h is tuple for h in _union(hint))


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, as far as plain data can be."""
    options = _union(hint)
    if len(options) > 1:
        return any(_fits(value, option) for option in options)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in args
    if origin is tuple:
        inner = args[:1] if len(args) == 2 and args[1] is Ellipsis else args
        same = len(inner) == 1 or len(inner) == len(value) if isinstance(value, tuple) else False
        each = inner * len(value) if isinstance(value, tuple) and len(inner) == 1 else inner
        return same and all(_fits(v, h) for v, h in zip(value, each, strict=True))
    if isinstance(value, bool) and hint is not bool:
        return hint is object
    if hint is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
    plain = origin or hint
    return not isinstance(plain, type) or isinstance(value, plain)


def _words(hint: Any) -> str:
    """An annotated type in words."""
    options = [option for option in _union(hint) if option is not type(None)]
    # What a table can hold, or else the names of classes.
    plain = [option for option in options if (typing.get_origin(option) or option) in _PLAIN]
    return " or ".join(dict.fromkeys(map(_word, plain or options)))


_PLAIN = (int, float, str, bool, tuple, list, Mapping, dict, Sequence, Literal)


def _word(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if origin is tuple or hint is tuple:
        inner = [_words(each).removeprefix("a ").replace(" or a ", "s or ") for each in typing.get_args(hint)[:1]]
        return "a list" + "".join(f" of {words}s" for words in inner)
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Mapping: "a table"}
    plain = origin or hint
    if plain in (Mapping, dict) or plain is Sequence:
        return names.get(plain, "a list")
    return names.get(plain, getattr(plain, "__name__", str(plain)))

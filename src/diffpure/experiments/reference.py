"""The reference of a spec, written from the dataclasses and registries themselves, so that it cannot fall behind them.

Every table of a spec becomes a section in Markdown: its keys, their defaults, and what they mean. The meaning of a key
is what the class says of it, in one of two forms that this package uses everywhere:

    key: text.   other, another: text          in the docstring of the class or of one of its bases
    key: float = 1.0  # text                   behind the field
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Final

from diffpure.attacks import EOT, LOSSES, Attack, LogitLoss
from diffpure.attacks.presets import ATTACKS, kind_keys, own_keys
from diffpure.data.sources import SOURCES, DataSpec
from diffpure.diffusion.gradients import GRADIENT_MODES
from diffpure.diffusion.samplers import SAMPLERS
from diffpure.errors import unknown
from diffpure.experiments.spec import EvaluationSpec, ModelSpec, Reference
from diffpure.experiments.table import Claim, Figure, Reported, Rung, Table, TableRow
from diffpure.models.cards import defenses
from diffpure.named import brief, changed, short
from diffpure.purifiers import PURIFIERS
from diffpure.results import rows
from diffpure.threats import THREATS

Line = tuple[str, str, str]  # a key, its default, what it means


def reference(section: str | None = None) -> str:
    """The reference in Markdown: one section, or all of them."""
    if section is None:
        return "\n\n".join(write() for write in SECTIONS.values())
    if section not in SECTIONS:
        raise unknown("section of the reference", section, SECTIONS)
    return SECTIONS[section]()


def notes(cls: type[Any]) -> dict[str, str]:
    """What a class and its bases say of their keys, by key; the nearest class decides."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is object or not base.__module__.startswith("diffpure"):
            continue
        found |= _from_docstring(inspect.cleandoc(base.__doc__ or "")) | _from_comments(base)
    return found


def _from_docstring(text: str) -> dict[str, str]:
    """The sentences `key: text` or `key, key: text` that start a line or follow three spaces."""
    names = r"[a-z_]+(?:, [a-z_]+)*"
    pattern = rf"(?:^|\n|   )({names}): (.+?)(?=   {names}: |\n{names}: |\n\n|$)"
    pairs = [(keys, " ".join(said.split())) for keys, said in re.findall(pattern, text, flags=re.DOTALL)]
    return {key: said.rstrip(".") for keys, said in pairs for key in keys.split(", ")}


def _from_comments(cls: type[Any]) -> dict[str, str]:
    """The comments behind the fields of a class."""
    pattern = re.compile(r"^    ([a-z_]+): .*?  # (.+)$", flags=re.MULTILINE)
    return dict(pattern.findall(inspect.getsource(cls)))


def summary(member: Any) -> str:
    """The first sentence of a docstring, unless it speaks of a key."""
    first = " ".join(inspect.cleandoc(member.__doc__ or "").split("\n\n")[0].split())
    return "" if re.match(r"[a-z_]+: ", first) else first


# --------------------------------------------------------------------------------------------------------- Markdown


def _table(lines: Iterable[Line], heads: Line = ("key", "default", "meaning")) -> str:
    body = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in (heads, *lines)]
    return "\n".join([body[0], "|---|---|---|", *body[1:]])


def _default(field: Field[Any]) -> str:
    """The default of a field as a spec writes it."""
    if field.default_factory is not MISSING:
        return _written(field.default_factory())
    return "required" if field.default is MISSING else _written(field.default)


def _written(value: Any) -> str:
    """A value as TOML has it, near enough for people."""
    if value is None or value in ((), {}, ""):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return short(value)
    if isinstance(value, LogitLoss):
        return value.name
    if isinstance(value, EOT):
        table = changed(value)
        return str(value.samples) if table.keys() <= {"samples"} else _written(table)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_written(v)}' for key, v in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_written, value))}]"
    return f'"{value}"' if isinstance(value, str) else brief(value)


def _fields(cls: type[Any]) -> str:
    said = notes(cls)
    return _table((f"`{f.name}`", f"`{_default(f)}`", said.get(f.name, "")) for f in fields(cls) if f.init)


def _members(registry: Mapping[str, type[Any]]) -> str:
    """A registry of dataclasses: one heading and one table of arguments for each member."""
    return "\n\n".join(
        f'### `kind = "{kind}"`\n\n{summary(cls)} In Python: `{cls.__name__}`.\n\n{_fields(cls)}'
        if [f for f in fields(cls) if f.init]
        else f'### `kind = "{kind}"`\n\n{summary(cls)} In Python: `{cls.__name__}`; it takes no arguments.'
        for kind, cls in registry.items()
    )


# --------------------------------------------------------------------------------------------------------- sections


def _spec() -> str:
    return f"## A spec\n\n{summary(EvaluationSpec)}\n\n{_fields(EvaluationSpec)}"


def _model() -> str:
    reference_ = f"A classifier or score is a name, or a table:\n\n{_fields(Reference)}"
    whole = f'`defense = "NAME"` stands for all keys of a whole defence ({", ".join(defenses())}); others change it.'
    return f"## `[model]`\n\n{summary(ModelSpec)}\n\n{_fields(ModelSpec)}\n\n{whole}\n\n{reference_}"


def _data() -> str:
    takes = (
        (f"`{name}`", ", ".join(f"`{key}`" for key in inspect.signature(read).parameters) or "–", summary(read))
        for name, read in SOURCES.items()
    )
    sources = _table(takes, ("source", "keys beside `images` and `subset`", "what it is"))
    return f"## `[data]`\n\n{summary(DataSpec)}\n\n{_fields(DataSpec)}\n\n{sources}"


def _threat() -> str:
    lines = ((f"`{kind}`", f"`{cls.__name__}(eps)`", summary(cls)) for kind, cls in THREATS.items())
    table = _table(lines, ("kind", "in Python", "what an attacker may do"))
    text = 'A threat is a kind and a budget, `eps = "8/255"`; without a table it is ℓ∞ 8/255.'
    return f"## `[threat]`\n\n{text}\n\n{table}"


def _attacks() -> str:
    text = (
        "Every attack has a kind; each further key is an argument of it and of the attacks that it is made of. "
        "A kind that stands for several attacks gives each of them its own rows."
    )
    kinds = _table(
        (
            (f"`{kind}`", "; ".join(attack.title for attack in attacks), _arguments(kind, attacks))
            for kind, attacks in ATTACKS.items()
        ),
        ("kind", "what it does", "arguments and their defaults"),
    )
    said: dict[str, str] = {}
    for attack in _every_part():
        said |= {key: text for key, text in notes(type(attack)).items() if key in own_keys(attack)}
    meanings = _table((f"`{key}`", _of_kinds(key), said[key]) for key in sorted(said))
    losses = f"Losses: {', '.join(f'`{name}`' for name in LOSSES)}."
    return f"## `[[attacks]]`\n\n{text}\n\n{kinds}\n\n{meanings.replace('default', 'of the kinds', 1)}\n\n{losses}"


def _every_part() -> Iterable[Attack]:
    return (part for attacks in ATTACKS.values() for attack in attacks for part in attack.walk())


def _arguments(kind: str, attacks: Iterable[Attack]) -> str:
    """The arguments of a kind with the values that its parts have."""
    values: dict[str, dict[str, None]] = {}
    for part in (part for attack in attacks for part in attack.walk()):
        for key in own_keys(part) - _SHARED:
            values.setdefault(key, {})[_written(getattr(part, key))] = None
    return ", ".join(f"`{key} = {' or '.join(values[key])}`" for key in sorted(values))


def _of_kinds(key: str) -> str:
    have = [kind for kind in ATTACKS if key in kind_keys(kind)]
    if 2 * len(have) <= len(ATTACKS):
        return ", ".join(f"`{kind}`" for kind in have)
    rest = ", ".join(f"`{kind}`" for kind in ATTACKS if kind not in have)
    return f"all but {rest}" if rest else "all"


def _eot() -> str:
    return (
        "## `eot`\n\nA number of samples, or a table; expectation over transformation, for random defences.\n\n"
        f"{_fields(EOT)}"
    )


def _sampler() -> str:
    return f"## `sampler`\n\nHow the diffusion purifier goes to t* and back.\n\n{_members(SAMPLERS)}"


def _gradient() -> str:
    text = "The gradient through the purifier, a key of every attack; that of `[model]` is for attacks that name none."
    return f"## `gradient`\n\n{text}\n\n{_members(GRADIENT_MODES)}"


def _purifier() -> str:
    text = 'Every purifier that is registered; `purifier = "python:FILE.py:FUNCTION"` is one of your own.'
    return "\n\n".join(["## `purifier`", text, *map(_one_purifier, PURIFIERS)])


def _one_purifier(kind: str) -> str:
    cls = PURIFIERS[kind]
    said, parameters = notes(cls), inspect.signature(cls).parameters.values()
    lines = (
        (f"`{p.name}`", "`required`" if p.default is p.empty else f"`{_written(p.default)}`", said.get(p.name, ""))
        for p in parameters
    )
    return f'### `kind = "{kind}"`\n\n{summary(cls)} In Python: `{cls.__name__}`.\n\n{_table(lines)}'


def _rules() -> str:
    text = inspect.cleandoc(rows.__doc__ or "")
    lines = re.findall(r"^ {4}(\S.*?) {2,}(.+)$", text, flags=re.MULTILINE)
    return "## `rules`\n\n| rule | an image is right when |\n|---|---|\n" + "\n".join(
        f"| `{a}` | {b} |" for a, b in lines
    )


def _tables() -> str:
    parts = [f"## A table\n\n{summary(Table)}\n\n{_fields(Table)}"]
    named = {"[[rows]]": TableRow, "reported": Reported, "[figure]": Figure, "[[claims]]": Claim, "[[rungs]]": Rung}
    parts += [f"### `{name}`\n\n{summary(cls)}\n\n{_fields(cls)}" for name, cls in named.items()]
    return "\n\n".join(parts)


_SHARED: Final = frozenset({"gradient", "label", "skip_misclassified"})  # of all attacks

SECTIONS: Final[dict[str, Callable[[], str]]] = {
    "spec": _spec,
    "model": _model,
    "data": _data,
    "threat": _threat,
    "attacks": _attacks,
    "eot": _eot,
    "sampler": _sampler,
    "gradient": _gradient,
    "purifier": _purifier,
    "rules": _rules,
    "table": _tables,
}

"""Reading the files of runs, which may be a stranger's: the header is checked, each row is unsealed. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from diffpure.disk import one_sentence
from diffpure.errors import InputError
from diffpure.named import too_deep
from diffpure.results.rows import FORMAT, ROWS, Row, Rule, cut, finite, whole

# What every header has, and of which kind it is.
_HEADER: Final = {
    "model": "table", "attacks": "table", "indices": "numbers", "seeds": "numbers", "batch": "count",
    "per_call": "count", "threads": "count", "threat": "text", "data": "text",
}  # fmt: skip
CERTIFICATES: Final = "certificates"  # what the header of a run calls itself that has certificates in place of attacks
_MOST: Final = {"threads": 1024}  # more would take a machine down before they compute anything
Anything = TypeVar("Anything")


def read_rows(path: str | Path, on_bad: Callable[[str], None] | None = None) -> tuple[dict[str, Any], list[Row]]:
    """The header and rows in a run's folder or file; a row not as it was written raises, or is told to `on_bad`."""
    return read_lines(path, _checked, Row.of, on_bad)


def read_lines(
    path: str | Path,
    checked: Callable[[Any, Path], dict[str, Any]],
    row: Callable[[Mapping[str, Any]], Anything],
    on_bad: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], list[Anything]]:
    """The header in a run's folder or file, checked, and its rows, each made from its line."""
    path = Path(path) / ROWS if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise InputError(f"There is no run of an evaluation at {path}.")
    with one_sentence(path), path.open("rb") as file:
        header = checked(_header(file.readline(), path), path)
        rows = []
        for line in file:
            try:
                rows.append(row(_parsed(line, path)))
            except InputError as error:
                if on_bad is None:
                    raise
                on_bad(str(error))
    return header, rows


def _header(line: bytes, path: Path) -> Any:
    try:
        return _parsed(line, path)["header"]
    except (InputError, KeyError) as error:
        raise InputError(f"{path} does not begin with the header of an evaluation.") from error


def holds_certificates(path: str | Path) -> bool:
    """Whether the run in a folder or file says that it has certificates in place of attacks."""
    path = Path(path) / ROWS if Path(path).is_dir() else Path(path)
    if not path.is_file():
        return False
    with one_sentence(path), path.open("rb") as file:
        try:
            header = _header(file.readline(), path)
        except InputError:
            return False
    return isinstance(header, dict) and header.get("kind") == CERTIFICATES


def _checked(header: Any, path: Path) -> dict[str, Any]:
    """The header, if it is one of this format."""
    if isinstance(header, dict) and header.get("kind") == CERTIFICATES:
        raise InputError(f"{path} holds certificates (`diffpure certify`), not an evaluation under attacks.")
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise InputError(f"{path} is no run of format {FORMAT}, which this version of diffpure writes.")
    check_header(header, _HEADER, path)
    check_titles({"the model": header["model"], **header["attacks"]}, path)
    if not isinstance(header.get("rules"), list) or not header["rules"]:
        raise InputError(f"The header of {path} is damaged: its 'rules' are {cut(header.get('rules'))}.")
    for rule in header["rules"]:
        Rule.parse(rule)
    return header


def check_header(header: Mapping[str, Any], kinds: Mapping[str, str], path: Path) -> None:
    """Refuse a header whose values are not of their kinds."""
    for key, kind in kinds.items():
        value = header.get(key)
        numbers = isinstance(value, list) and all(type(v) is int for v in value) and len(set(value)) == len(value) > 0
        count = type(value) is int and 0 < value <= _MOST.get(key, math.inf)
        fits = {"numbers": numbers, "count": count, "table": isinstance(value, dict), "whole": whole(value)}
        fits["positive"] = finite(value) and value > 0  # type: ignore[operator]
        if not fits.get(kind, isinstance(value, str)):
            raise InputError(f"The header of {path} is damaged: its {key!r} is {cut(value)}.")
    parts = header["model"].get("parts")
    for key, table in (("parts", parts), ("machine", header.get("machine", {}))):
        if not isinstance(table, dict):
            raise InputError(f"The header of {path} is damaged: its {key!r} is {cut(table)}.")


def check_titles(described: Mapping[str, Any], path: Path) -> None:
    """Refuse a header that does not say of a model or an attack what it is."""
    for name, about in described.items():
        if not isinstance(about, dict) or not {"title", "gradient", "approximate"} <= about.keys():
            raise InputError(f"The header of {path} is damaged: it says {cut(about)} of {name}.")


def _parsed(line: bytes, path: Path) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} holds a line that is no JSON: {line.strip()[:40]!r}.") from error
    if not isinstance(data, dict) or too_deep(data):
        raise InputError(f"{path} holds a line that is no row: {line.strip()[:40]!r}.")
    return data

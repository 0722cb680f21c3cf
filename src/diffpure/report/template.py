"""The templates of the pages, in which whatever comes from a file of a run is text and nothing else.

It is made printable and escaped where it is printed, and a Content-Security-Policy admits only the page's own style
sheet (by its hash) and the pictures inside the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from diffpure.report import words


def render(name: str, **values: Any) -> str:
    """A page from its template."""
    style = _templates().get_template("page.css").render()
    style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return _templates().get_template(name).render(style=Markup(style), style_hash=style_hash, **values)


@cache
def _templates() -> Environment:
    """The templates of the package; they escape everything that they print."""
    found = Environment(
        loader=PackageLoader("diffpure.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"prose": _prose, "unbroken": _unbroken, "provenance": _provenance}
    return found


def _printed(value: object) -> object:
    """A value as the page prints it: texts without what is not printable."""
    return words.printable(value) if type(value) is str else value


def _prose(text: str) -> Markup:
    """A sentence with what stands in backticks set as code."""
    parts = re.split(r"`([^`]*)`", words.printable(text).replace("\n", " "))
    said = (
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part.replace("`", "'"))
        for i, part in enumerate(parts)
    )
    return Markup().join(said)


def _unbroken(text: str) -> str:
    """A text that no line break parts from its numbers: a rate may break before its interval only."""
    space = "\N{NO-BREAK SPACE}"
    return re.sub(r" (?=%)|(?<=\[\d\.\d,) |(?<=\[\d\d\.\d,) |(?<=EOT|tep) (?=\d)|(?<=ℓ[∞2]) (?=\d)", space, text)


def _provenance(header: Mapping[str, Any]) -> str:
    """The header of a run, with ranges in place of long lists."""
    return json.dumps(words.compact(header), indent=1, ensure_ascii=False)

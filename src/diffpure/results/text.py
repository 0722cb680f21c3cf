"""Tables of texts as a terminal and a notebook show them."""

from __future__ import annotations

import html
from collections.abc import Sequence


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines of text, column below column."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]


def as_html(heading: str, table: Sequence[Sequence[str]], footing: Sequence[str]) -> str:
    """A heading, a table and the lines below it, escaped."""
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in line)}</tr>" for line in table)
    return f"<p>{html.escape(heading)}</p><table>{body}</table><p>{'<br>'.join(map(html.escape, footing))}</p>"

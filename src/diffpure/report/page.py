"""One self-contained page about one or more runs: no network, light and dark, from a phone to a desk."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from diffpure.disk import one_sentence, write_whole
from diffpure.errors import unknown
from diffpure.evaluation.rows import CLEAN, MINIMUM, WORST
from diffpure.report import plots
from diffpure.report.cards import STYLE as CARDS
from diffpure.report.cards import cards, data_url
from diffpure.report.runs import COLUMNS, Run, attacked, flat, sweeps

TITLES: Final = {CLEAN: "no attack", WORST: "worst case per image", MINIMUM: "minimum of attacks (as the paper counts)"}
STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #f3f4f6; --line: #d5d9de; --warn: #fff4d6;
  --right: #1a7f37; --wrong: #c62828; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --paper: #14171a; --soft: #1f2429; --line: #39414a; --warn: #4a3a0c;
    --right: #57c278; --wrong: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
.warnings { background: var(--warn); border-radius: .5rem; padding: .75rem 1rem; margin: 1rem 0; }
.warnings ul { margin: .25rem 0; padding-left: 1.2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; min-width: 100%; }
th, td { text-align: left; padding: .4rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td:first-child, th:first-child { white-space: normal; min-width: 7rem; }
@media (max-width: 600px) {
  th, td { padding: .3rem .35rem; font-size: .8rem; white-space: normal; overflow-wrap: normal; }
  td:first-child, th:first-child { min-width: 5.5rem; overflow-wrap: anywhere; } }
th { background: var(--soft); } tr.total td { font-weight: 600; } .small { font-size: .85rem; opacity: .85; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: #fff; border-radius: .4rem; }
@media (prefers-color-scheme: dark) { .plot { filter: invert(.92) hue-rotate(180deg); } }
details pre { background: var(--soft); padding: .75rem; border-radius: .4rem; white-space: pre-wrap; font-size: .8rem; }
"""

HEAD: Final = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>diffpure report</title><style>{STYLE}{CARDS}</style></head>
"""


def html(runs: Sequence[Run], remark: str = "") -> str:
    """The page; remark: what has to be said of all runs before anything else."""
    parts = [f"<p>{escape(remark)}</p>" if remark else "", _warnings(runs)]
    if len(runs) > 1:
        parts.append(_glance(runs))
    for run in runs:
        parts += [f"<h2>{escape(run.name)}</h2><p>{escape(_about(run))}</p>", _rates(run), cards(run), _cost(run)]
    if figures := _figures(runs):
        parts += ["<h2>The runs compared</h2>", *figures]
    parts += ["<h2>Provenance</h2>", *(_provenance(run) for run in runs)]
    body = "\n".join(parts)
    return f"{HEAD}<body><h1>How robust is it?</h1>\n{body}\n</body></html>\n"


def _figures(runs: Sequence[Run]) -> list[str]:
    """A plot along everything that varies alone, and one of standard against robust accuracy."""
    found = [(plots.along(axis, points), f"Accuracy against {axis}") for axis, points in sweeps(runs)]
    if len(attacked(runs)) > 1:
        found.append((plots.trade_off(attacked(runs)), "Standard against robust accuracy (worst case per image)"))
    return [_figure(plots.encoded(plot), f"{words}, 95 % intervals.") for plot, words in found]


def _glance(runs: Sequence[Run]) -> str:
    """All runs in one table, under the first rule of each."""
    lines = []
    for run in runs:
        result = run.result
        robust = _shown(result.cell(WORST)) if result.attacks else "not measured"
        cells = (escape(run.name), str(len(result.header["images"])), _shown(result.cell(CLEAN)), robust)
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>run</th><th>images</th><th>as given</th><th>worst case per image</th></tr>"
    return f'<h2>At a glance</h2><div class="scroll"><table>{head}{"".join(lines)}</table></div>'


def _title(run: Run, attack: str) -> str:
    """What a line of rates is called; images of a run without attacks may have been attacked before."""
    return TITLES.get(attack, attack) if run.result.attacks else "the images as given"


def _shown(rate: str) -> str:
    """A rate that may break before its interval only."""
    return rate.replace(" %", "&nbsp;%").replace(", ", ",&nbsp;")


def _warnings(runs: Sequence[Run]) -> str:
    several = len(runs) > 1
    lines = [f"{run.name}: {text}" if several else text for run in runs for text in run.result.warnings]
    if not lines:
        return '<p class="small">No check raised a warning.</p>'
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="warnings"><strong>Read this first</strong><ul>{items}</ul></div>'


def _about(run: Run) -> str:
    """What was evaluated, in a line; a threat and a gradient belong to attacks."""
    header, seeds = run.result.header, run.result.seeds
    model = header["model"]
    words = [model["title"], f"{len(header['images'])} images"]
    if run.result.attacks:
        words += [
            header["threat"],
            f"{model['gradient']} gradient" + (" (approximate)" if model["approximate"] else ""),
        ]
    words.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
    return "; ".join(words)


def _rates(run: Run) -> str:
    rules = run.result.rules
    head = "".join(f"<th>{escape(str(rule))}</th>" for rule in rules)
    lines = []
    for attack in run.lines:
        cells = "".join(f"<td>{_shown(run.result.cell(attack, rule))}</td>" for rule in rules)
        kind = ' class="total"' if attack in (WORST, MINIMUM) else ""
        lines.append(f"<tr{kind}><td>{escape(_title(run, attack))}</td>{cells}</tr>")
    below = "; the first line is the clean accuracy under the same rule" if run.result.attacks else ""
    spread = ", mean ± deviation over the seeds" if len(run.result.seeds) > 1 else ""
    note = f'<p class="small">Accuracy with 95 % intervals{spread}{below}.</p>'
    return f'<div class="scroll"><table><tr><th>attack</th>{head}</tr>{"".join(lines)}</table></div>{note}'


def _cost(run: Run) -> str:
    spent = run.result.spent()
    counts = [
        f"{spent[key]:,.0f} {key.replace('_', ' ')}" for key in ("score_calls", "gradients", "queries") if spent[key]
    ]
    shown = [*counts, f"{spent['seconds']:,.1f} seconds"]
    return f'<p class="small">Cost: {escape(", ".join(shown))}.</p>'


def _figure(data: bytes, caption: str) -> str:
    text = escape(caption)
    image = f'<img class="plot" alt="{text}" src="{data_url(data)}">'
    return f'<figure>{image}<figcaption class="small">{text}</figcaption></figure>'


def _provenance(run: Run) -> str:
    text = escape(json.dumps(run.result.header, indent=1, ensure_ascii=False))
    return f"<details><summary>{escape(run.name)}</summary><pre>{text}</pre></details>"


# ------------------------------------------------------------------------------------------------- other formats


def markdown(runs: Sequence[Run]) -> str:
    """A table a run, after what was evaluated and the warnings."""
    parts = []
    for run in runs:
        rules = run.result.rules
        lines = [f"## {run.name}", "", _about(run), ""]
        lines += [*(f"> - {text}" for text in run.result.warnings), ""] if run.result.warnings else []
        lines += ["| attack | " + " | ".join(map(str, rules)) + " |", "|---" * (len(rules) + 1) + "|"]
        for attack in run.lines:
            cells = " | ".join(run.result.cell(attack, rule) for rule in rules)
            lines.append(f"| {_title(run, attack)} | {cells} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def comma_separated(runs: Sequence[Run]) -> str:
    """Every rate as a line of CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat(runs))
    return out.getvalue()


def as_json(runs: Sequence[Run]) -> str:
    """Every rate, cost and warning as JSON."""
    return json.dumps([{"name": run.name, **run.result.summary()} for run in runs], indent=1) + "\n"


FORMATS: Final[dict[str, Callable[[Sequence[Run]], str]]] = {
    "html": html,
    "md": markdown,
    "csv": comma_separated,
    "json": as_json,
}
KINDS: Final = (*FORMATS, "png", "pdf")


def write(runs: Sequence[Run], out: Path, kind: str, remark: str = "") -> None:
    """Write a report, whole or not at all; PNG and PDF hold the plot of standard against robust accuracy alone."""
    if kind not in KINDS:
        raise unknown("report format", kind, KINDS)
    if kind in FORMATS:
        data = (html(runs, remark) if kind == "html" else FORMATS[kind](runs)).encode()
    else:
        data = plots.encoded(plots.trade_off(attacked(runs)), kind)
    with one_sentence(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, data)

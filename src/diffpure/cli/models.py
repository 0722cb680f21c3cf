"""`diffpure models`: what there is, what is on this machine, and how to get the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table

from diffpure.cli.base import AsJson, Bars, app, console, grid
from diffpure.errors import InputError, unknown

models_app = typer.Typer(help="List, inspect, verify and fetch score models and classifiers.", no_args_is_help=True)
app.add_typer(models_app, name="models")
EMPTY: Final[tuple[object, ...]] = (None, "", {}, [], ())  # what a card does not know
Name = Annotated[str, typer.Argument(help="A name from `diffpure models list`.")]


def _all() -> dict[str, dict[str, Any]]:
    """Every model, embedded or official, as plain data."""
    from dataclasses import asdict

    from diffpure.models import weights
    from diffpure.models.cards import cards

    found: dict[str, dict[str, Any]] = {
        name: {"where": "in the package", "present": True, **card} for name, card in weights.cards().items()
    }
    for name, card in cards().items():
        where = str(card.path) if card.present else "not fetched"
        found[name] = {"where": where, "present": card.present, **asdict(card)}
    return found


@models_app.command("list", epilog="Example: diffpure models list")
def list_(as_json: AsJson = False) -> None:
    """List all models, with what is on this machine."""
    found = _all()
    if as_json:
        console.print_json(json.dumps(found))
        return
    table = Table(Column("name", no_wrap=True), "kind", "architecture", Column("where", overflow="fold"))
    for name, card in sorted(found.items(), key=lambda item: (not item[1]["present"], item[1]["kind"], item[0])):
        table.add_row(name, card["kind"], card["architecture"], card["where"])
    console.print(table)


@models_app.command(epilog="Example: diffpure models show cifar10-small")
def show(name: Name, as_json: AsJson = False) -> None:
    """Show the card of a model: source, licence, hash, training, what was measured."""
    card = _card(name)
    if as_json:
        console.print_json(json.dumps(card))
        return
    console.print(grid(_readable(card)))


def _readable(card: Mapping[str, Any]) -> dict[str, RenderableType]:
    """What a card holds, as a person reads it; what is empty, and `present`, which `where` says, is left out."""
    return {key: _words(value) for key, value in card.items() if key != "present" and value not in EMPTY}


def _words(value: Any) -> RenderableType:
    """A measured rate as one line, any other table as a grid below what it is about, other values as text."""
    if isinstance(value, Mapping):
        if "correct" in value:
            return _rate(value)
        rest = grid(_readable({k: v for k, v in value.items() if k != "about"}), style="")
        return Group(escape(value["about"]), rest) if "about" in value else rest
    if isinstance(value, list | tuple):
        return escape(", ".join(map(str, value)))
    return f"{value:,}" if type(value) is int else escape(str(value))


def _rate(measured: Mapping[str, Any]) -> str:
    from diffpure.evaluation.rows import Rate

    rate = Rate(measured["correct"], measured["total"])
    about = "; ".join(measured[key] for key in ("attack", "test_set") if key in measured)
    return escape(f"{rate}, {rate.correct:,} of {rate.total:,}" + (f": {about}" if about else ""))


@models_app.command(epilog="Example: diffpure models verify")
def verify(
    name: Annotated[str | None, typer.Argument(help="One model; all that are present by default.")] = None,
) -> None:
    """Check the files of models against the hashes of their cards."""
    from diffpure.models import weights
    from diffpure.models.cards import card, local_file

    wanted = [name] if name is not None else [each for each, found in _all().items() if found["present"]]
    wrong = []
    for each in wanted:
        _card(each)
        try:
            if each in weights.cards():
                weights.embedded(each)
            else:
                local_file(card(each))
            console.print(f"[green]good[/green]  {each}")
        except InputError as error:
            wrong.append(each)
            console.print(f"[red]bad[/red]   {each}: {error}", soft_wrap=True)
    if wrong:
        raise typer.Exit(1)


@models_app.command(epilog="Example: diffpure models fetch imagenet-guided")
def fetch(
    name: Name,
    source: Annotated[
        Path | None, typer.Option("--from", help="A file that you already have, instead of the network.")
    ] = None,
) -> None:
    """Download an official checkpoint (continuing an interrupted download) and verify it, or import your file of it."""
    from diffpure.models import weights
    from diffpure.models.cards import card, import_file
    from diffpure.models.cards import fetch as download

    if name in weights.cards():
        raise InputError(f"{name} is inside the package; there is nothing to fetch.")
    if source is not None:
        path = import_file(card(name), source)
    else:
        with Bars() as bars:
            path = download(card(name), lambda done, total: bars(name, done, total))
    console.print(f"{name}: {path}", soft_wrap=True)


def _card(name: str) -> dict[str, Any]:
    found = _all()
    if name not in found:
        raise unknown("model", name, found)
    return found[name]

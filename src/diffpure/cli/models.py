"""`diffpure models`: what there is, what is on this machine, and how to get the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table

from diffpure.cli.base import AsJson, Bars, app, console, grid
from diffpure.errors import InputError

if TYPE_CHECKING:
    from diffpure.models.cards import AnyCard, Card

models_app = typer.Typer(help="List, inspect, verify and fetch score models and classifiers.", no_args_is_help=True)
app.add_typer(models_app, name="models")
EMPTY: Final[tuple[object, ...]] = (None, "", {}, [], ())  # what a card does not know
SAID: Final = ("present", "embedded")  # by `where`
Name = Annotated[str, typer.Argument(help="A name from `diffpure models list`.")]


@models_app.command("list", epilog="Example: diffpure models list")
def list_(as_json: AsJson = False) -> None:
    """List all models and whole defences, with what is on this machine."""
    from diffpure.models.cards import cards, defenses

    known: dict[str, AnyCard] = {**cards(), **defenses()}
    if as_json:
        console.print_json(json.dumps({name: card.plain() for name, card in known.items()}))
        return
    table = Table(Column("name", no_wrap=True), "kind", "architecture", Column("where", overflow="fold"))
    for card in sorted(known.values(), key=lambda card: (not card.present, card.kind, card.name)):
        table.add_row(card.name, card.kind, card.architecture, escape(card.where))
    console.print(table)


@models_app.command(epilog="Example: diffpure models show cifar10-small")
def show(name: Name, as_json: AsJson = False) -> None:
    """Show the card of a model or a whole defence: source, licence, hash, training, what was measured."""
    from diffpure.models.cards import cards, defenses
    from diffpure.named import lookup

    about = lookup(name, {**cards(), **defenses()}, "model").plain()
    if as_json:
        console.print_json(json.dumps(about))
        return
    console.print(grid(_readable(about)))


def _readable(card: Mapping[str, Any]) -> dict[str, RenderableType]:
    """What a card holds, as a person reads it; what is empty, or said by `where`, is left out."""
    return {key: _words(value) for key, value in card.items() if key not in SAID and value not in EMPTY}


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
    from diffpure.results.rows import Rate

    rate = Rate(measured["correct"], measured["total"])
    about = "; ".join(measured[key] for key in ("attack", "test_set") if key in measured)
    return escape(f"{rate}, {rate.correct:,} of {rate.total:,}" + (f": {about}" if about else ""))


@models_app.command(epilog="Example: diffpure models verify")
def verify(
    name: Annotated[str | None, typer.Argument(help="One model; all that are present by default.")] = None,
) -> None:
    """Check the files of models: the hashes of their cards, and that they fit their networks."""
    from diffpure.models.cards import card, cards, local_file

    wanted = [card(name)] if name is not None else [each for each in cards().values() if each.present]
    wrong = []
    for each in wanted:
        try:
            _check(each, local_file(each))
            console.print(f"[green]good[/green]  {each.name}")
        except InputError as error:
            wrong.append(each)
            console.print(f"[red]bad[/red]   {each.name}: {escape(str(error))}", soft_wrap=True)
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
    from diffpure.models import fetch as fetching
    from diffpure.models.cards import card

    if source is not None:
        path = fetching.import_file(card(name), source, _check)
    else:
        with Bars() as bars:
            path = fetching.fetch(card(name), _check, lambda done, total: bars(name, done, total))
    console.print(f"{name}: {escape(str(path))}", soft_wrap=True)


def _check(card: Card, path: Path) -> None:
    """Refuse a file that does not fit the network of its card."""
    from diffpure.classifiers.load import CLASSIFIERS
    from diffpure.scores.load import SCORES

    (SCORES if card.kind == "score" else CLASSIFIERS).check(card, path)

"""`resolve`: a model by its name, of whatever scheme, as a frozen module.

    cifar10-small                      inside the package
    imagenet-guided                    an official checkpoint, in the cache
    SCHEME:NAME                        a model of another package: timm, torchvision, robustbench
    python:PLACE:FUNCTION              a user's own, made by a function; runs code
    path/to/file                       weights of a model above (`like` says which), or a file that holds code
    path/to/folder                     a diffusers folder
    owner/name                         a repository of the Hugging Face hub

A `Family` is one kind of model: its architectures and the ways to load it that it has beside its cards. Scores and
classifiers are the two there are. Relative paths start from `base`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn

from diffpure.errors import InputError, unknown
from diffpure.models.cards import Card, Kind, card_of_file, cards, local_file
from diffpure.models.checkpoints import LAYOUTS, check_state, frozen, load_state, read
from diffpure.models.code import checked_arguments, is_code, load_object, require_code_allowed

Load = Callable[[Path], nn.Module]
WEIGHTS: Final = frozenset({".pt", ".pth", ".ckpt", ".onnx", ".xml", ".safetensors", ".bin", ".py"})  # how a file ends


@final
@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model, and how each scheme of names loads it."""

    kind: Kind
    architectures: Mapping[str, Callable[..., nn.Module]]
    adopt: Callable[[Any, str], nn.Module]  # what a user's own function returned, and its name, as such a model
    zoos: Mapping[str, Callable[..., nn.Module]] = field(default_factory=dict)  # SCHEME:NAME
    programs: Mapping[str, tuple[Callable[[Path], bool], Load]] = field(default_factory=dict)  # files that hold code
    folder: Load | None = None
    hub: Callable[[str], nn.Module] | None = None

    def build(self, card: Card) -> nn.Module:
        """The network of a card, with weights of no meaning."""
        return self.architectures[card.architecture](**card.keywords)

    def read(self, card: Card, path: Path) -> nn.Module:
        """The network of a card with the weights in a file."""
        model = self.build(card)
        network = _network(model)
        load_state(network, LAYOUTS[card.layout](read(path), network), path.name)
        return model

    def check(self, card: Card, path: Path) -> None:
        """Refuse a file whose weights do not fit the network of a card; nothing is kept of either."""
        with torch.device("meta"):
            network = _network(self.build(card))
        check_state(network, LAYOUTS[card.layout](read(path), network), path.name)


def resolve(
    name: str | Path,
    family: Family,
    *,
    like: str | None = None,
    allow_code: bool = False,
    arguments: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> nn.Module:
    """A frozen model by name, path, scheme or hub repository.

    like: the card of the model whose weights a file holds, where its name does not say.   arguments: for what a
    package or a user's own function makes.
    """
    text, path = str(name), (base or Path()) / name
    known = cards(family.kind)
    zoo, _, model = text.partition(":")
    if arguments and zoo not in family.zoos and not is_code(text):
        raise InputError(f"{text} takes no arguments; models of the scheme python: do.")
    if text in known:
        return frozen(family.read(known[text], local_file(known[text])))
    if is_code(text):
        return frozen(family.adopt(load_object(text, arguments, allow_code, base), text))
    if model and zoo in family.zoos:
        if not set(model).isdisjoint(":/\\"):  # timm's hf-hub: and local-dir: may unpickle what they find there
            require_code_allowed(text, allow_code)
        make = family.zoos[zoo]
        return frozen(make(model, **checked_arguments(text, make, arguments, model)))
    if os.path.isfile(path):  # which no name, however odd, makes raise
        return frozen(_from_file(path, family, like, allow_code))
    if os.path.isdir(path) and family.folder is not None:
        return frozen(family.folder(path))
    if path.suffix.lower() in WEIGHTS or text.startswith((".", "/")):
        raise InputError(f"There is no file {path}.")
    if family.hub is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return frozen(family.hub(text))
    raise unknown(family.kind, text, [*known, *_schemes(family)])


def _from_file(path: Path, family: Family, like: str | None, allow_code: bool) -> nn.Module:
    """The model in a file: weights that a card describes, or a program."""
    for format_, (fits, load) in family.programs.items():
        if fits(path):
            require_code_allowed(f"{path.name}, a file of {format_},", allow_code)
            return load(path)
    return family.read(card_of_file(path, family.kind, like), path)


def _schemes(family: Family) -> list[str]:
    """What a name may be beside those of cards."""
    paths = ["a file"] if family.folder is None else ["a file or folder"]
    hub = [] if family.hub is None else ["a hub repository owner/name"]
    return [*(f"{zoo}:NAME" for zoo in family.zoos), "python:PLACE:FUNCTION", *paths, *hub]


def _network(model: nn.Module) -> nn.Module:
    """The part of a model whose state dict its checkpoints hold: the network that it wraps, or itself."""
    inner = getattr(model, "network", None)
    return inner if isinstance(inner, nn.Module) else model

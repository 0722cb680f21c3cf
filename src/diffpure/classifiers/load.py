"""`load_classifier`: a classifier by name, file or package, ready to use: images in [0, 1] to logits.

A name is a model inside the package, an official checkpoint described in cards.toml, or `robustbench:NAME`,
`torchvision:NAME`, `timm:NAME`; a path is a user's own file of an official checkpoint, a TorchScript or an ONNX file;
anything else that can be called is taken as it is.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from diffpure.classifiers import small
from diffpure.classifiers.attributes import AttributeClassifier, AttributeNet
from diffpure.classifiers.foreign import ZOOS, from_callable, from_onnx, from_torchscript
from diffpure.classifiers.resnet import CifarResNet, ImageNetResNet
from diffpure.classifiers.vit import VisionTransformer
from diffpure.classifiers.wrn import DMWideResNet, WideResNet
from diffpure.errors import unknown
from diffpure.models import weights
from diffpure.models.cards import Card, card_of_file, cards, local_file
from diffpure.models.checkpoints import LAYOUTS, frozen, load_state, read


def load_classifier(name: str | Path | Callable[[Tensor], Any], *, like: str | None = None) -> nn.Module:
    """A frozen classifier by name, path or callable; `like` names the card of the model a file is read as."""
    return frozen(from_callable(name) if callable(name) else _find(name, like))


def _find(name: str | Path, like: str | None) -> nn.Module:
    path = Path(name)
    zoo, _, model = str(name).partition(":")
    ours = [key for key, card in weights.cards().items() if card["kind"] == "classifier"]
    official = cards("classifier")
    if name in ours:
        return _embedded(str(name))
    if name in official:
        return _from_card(official[str(name)], local_file(official[str(name)]))
    if model and zoo in ZOOS:
        return ZOOS[zoo](model)
    if path.is_file():
        return _embedded(like, path) if like in ours else _from_file(path, like)
    zoos = [f"{zoo}:NAME" for zoo in ZOOS]
    raise unknown("classifier", str(name), [*ours, *official, *zoos, "a file"])


def _from_file(path: Path, like: str | None) -> nn.Module:
    if path.suffix == ".onnx":
        return from_onnx(path)
    if zipfile.is_zipfile(path) and any("/code/" in entry for entry in zipfile.ZipFile(path).namelist()):
        return from_torchscript(path)
    return _from_card(card_of_file(path, "classifier", like), path)


def _embedded(name: str, path: Path | None = None) -> nn.Module:
    """A model of the package, or the same network with the weights of a user's own file."""
    card, state = (weights.cards()[name], read(path)) if path else weights.embedded(name)
    network = small.ARCHITECTURES[card["architecture"]](**card["arguments"])
    load_state(network, state, path.name if path else name)
    return network


def _from_card(card: Card, path: Path) -> nn.Module:
    network = ARCHITECTURES[card.architecture](card.config)
    load_state(network, LAYOUTS[card.layout](read(path), network), path.name)
    return AttributeClassifier(network) if isinstance(network, AttributeNet) else network


ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], nn.Module]] = {
    "wrn": WideResNet.from_config,
    "dm_wrn": DMWideResNet.from_config,
    "cifar_resnet": CifarResNet.from_config,
    "tv_resnet": ImageNetResNet.from_config,
    "deit": VisionTransformer.from_config,
    "attribute": AttributeNet.from_config,
}

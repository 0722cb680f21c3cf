"""`load_classifier`: a classifier by name, file, package or function, ready to use: images in [0, 1] to logits.

The schemes of names are those of `models.resolve`, with `robustbench:NAME`, `torchvision:NAME`, `timm:NAME` and
`efficientnet_lite_pytorch:NAME`; a file holds weights of a model that has a card, or is one of TorchScript or ONNX;
anything that can be called is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from diffpure.classifiers import small
from diffpure.classifiers.attributes import AttributeClassifier, AttributeNet
from diffpure.classifiers.foreign import PROGRAMS, ZOOS, from_callable
from diffpure.classifiers.resnet import CifarResNet, ImageNetResNet
from diffpure.classifiers.vit import VisionTransformer
from diffpure.classifiers.wrn import DMWideResNet, WideResNet
from diffpure.errors import InputError
from diffpure.models.checkpoints import frozen
from diffpure.models.resolve import Family, resolve


def load_classifier(
    name: str | Path | Callable[[Tensor], Any],
    *,
    like: str | None = None,
    allow_code: bool = False,
    arguments: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> nn.Module:
    """A frozen classifier by name, path, scheme or callable.

    like: the card of the model a file is read as, where its name does not say.   allow_code: load what runs code of
    its own.   arguments: for what a package or a `python:` function makes.   base: the folder that relative paths
    start from.
    """
    if callable(name):
        return frozen(from_callable(name))
    return resolve(name, CLASSIFIERS, like=like, allow_code=allow_code, arguments=arguments, base=base)


def _adopt(made: Any, name: str) -> nn.Module:
    """What a user's function returned, if it can be called."""
    if not callable(made):
        raise InputError(f"{name} returned {type(made).__name__}, but a classifier from images to logits is wanted.")
    return from_callable(made, name)


def _attribute(config: Mapping[str, Any]) -> AttributeClassifier:
    return AttributeClassifier(AttributeNet.from_config(config))


# Architectures by the name that a card calls them; a card's arguments or configuration are their keywords.
ARCHITECTURES: Final[dict[str, Callable[..., nn.Module]]] = {
    **small.ARCHITECTURES,
    "wrn": WideResNet.from_config,
    "dm_wrn": DMWideResNet.from_config,
    "cifar_resnet": CifarResNet.from_config,
    "tv_resnet": ImageNetResNet.from_config,
    "deit": VisionTransformer.from_config,
    "attribute": _attribute,
}
CLASSIFIERS: Final = Family(kind="classifier", architectures=ARCHITECTURES, adopt=_adopt, zoos=ZOOS, programs=PROGRAMS)

"""Classifiers from elsewhere: RobustBench, torchvision and timm by name, any callable, TorchScript and ONNX files.

Each becomes one module: images in [0, 1] to logits, with the normalisation its own package asks for inside. The
packages are imported only when they are asked for. What gives no gradient (an ONNX file, a callable outside autograd)
says so when one is asked of it, so that only black-box attacks are run on it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.classifiers.normalize import Normalize
from diffpure.errors import InputError
from diffpure.models.checkpoints import sha256
from diffpure.models.code import SOURCE
from diffpure.models.runtime import no_gradient


@final
class Classifier(nn.Module):
    """Any callable from images (B, C, H, W) in [0, 1] to logits (B, K) as a module whose output is checked."""

    def __init__(self, logits: Callable[[Tensor], Any], name: str, normalize: Normalize | None = None) -> None:
        super().__init__()
        self.logits = logits  # an nn.Module becomes a submodule
        self.name = name
        self.normalize = normalize or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(self.normalize(x))
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(x):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(f"{self.name} returned {got} for {len(x)} images, but logits (B, K) are expected.")
        return logits if logits.requires_grad else no_gradient(x, logits, self.name)


def from_callable(logits: Callable[[Tensor], Any], name: str = "The classifier") -> Classifier:
    """Any callable as a classifier."""
    return Classifier(logits, name)


def from_robustbench(name: str, dataset: str = "cifar10", threat: str = "Linf") -> Classifier:
    """A model of RobustBench's zoo, for example Standard."""
    load_model = _package("robustbench.utils", "robustbench").load_model
    return Classifier(load_model(model_name=name, dataset=dataset, threat_model=threat), name)


def from_torchvision(name: str) -> Classifier:
    """A torchvision classifier with its default weights and their normalisation, for example resnet50."""
    models = _package("torchvision.models", "torchvision")
    weights = models.get_model_weights(name).DEFAULT
    transform = weights.transforms()
    return Classifier(models.get_model(name, weights=weights), name, Normalize((transform.mean, transform.std)))


def from_timm(model: str | nn.Module, size: int | None = None) -> Classifier:
    """A timm classifier, or the pretrained one of a name such as deit_small_patch16_224, with its normalisation.

    size: the side to which images are resized; that of the model's `pretrained_cfg` unless given.
    """
    name = model if isinstance(model, str) else type(model).__name__
    network = _package("timm", "timm").create_model(model, pretrained=True) if isinstance(model, str) else model
    config = getattr(network, "pretrained_cfg", None)
    if not isinstance(config, Mapping) or not {"mean", "std"} <= config.keys():
        raise InputError(f"A timm model has a pretrained_cfg with mean and std, which {name} has not.")
    wanted = size or config.get("input_size", (None,))[-1]
    return Classifier(Resized(network, wanted), name, Normalize((config["mean"], config["std"])))


def from_torchscript(path: Path) -> Classifier:
    """A TorchScript file; it carries its own code, which runs in torch's interpreter, and gives gradients."""
    load: Callable[..., nn.Module] = torch.jit.load
    try:
        module = load(path, map_location="cpu")
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{path.name} is not a readable TorchScript file.") from error
    classifier = Classifier(module, path.name)
    setattr(classifier, SOURCE, sha256(path))
    return classifier


def from_onnx(path: Path) -> Classifier:
    """An ONNX file with one input and logits as its first output, run on the CPU, without gradients."""
    runtime = _package("onnxruntime", "onnxruntime")
    try:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime raises a family of its own
        raise InputError(f"{path.name} is not a readable ONNX file.") from error
    entry = session.get_inputs()[0].name

    def logits(x: Tensor) -> Tensor:
        (out, *_) = session.run(None, {entry: x.detach().float().cpu().numpy()})
        return torch.from_numpy(out).to(device=x.device, dtype=x.dtype)

    setattr(logits, SOURCE, sha256(path))  # nobody can look into a session
    return Classifier(logits, path.name)


def is_torchscript(path: Path) -> bool:
    """Whether a file is an archive with code in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in entry for entry in archive.namelist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return False  # whatever it is, it is not run


def is_onnx(path: Path) -> bool:
    """Whether a file calls itself one of ONNX."""
    return path.suffix.lower() == ".onnx"


@final
class Resized(nn.Module):
    """A network that sees images resized to the side that it wants, bilinear and antialiased; None: as they come."""

    def __init__(self, network: nn.Module, size: int | None) -> None:
        super().__init__()
        self.network, self.size = network, size

    def forward(self, x: Tensor) -> Any:
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=True)
        return self.network(x)


def _package(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except Exception as error:  # a torchvision built for another torch raises a RuntimeError
        raise InputError(f"This needs a working {package}, which could not be imported ({error}).") from error


# Models by name in packages of others: load_classifier("timm:deit_small_patch16_224").
ZOOS: dict[str, Callable[[str], Classifier]] = {
    "robustbench": from_robustbench,
    "torchvision": from_torchvision,
    "timm": from_timm,
}

# Files that hold a program, which loading or calling them runs: how to know one, and how to load it.
PROGRAMS: dict[str, tuple[Callable[[Path], bool], Callable[[Path], Classifier]]] = {
    "ONNX": (is_onnx, from_onnx),
    "TorchScript": (is_torchscript, from_torchscript),
}

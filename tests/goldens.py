"""The golden files: facts about the reference networks and the paper's schedule, as numbers, read from one folder.

The folder is $DIFFPURE_GOLDEN, else the reduced set in tests/golden. Every network is built from the `config` in its
file and every schedule has the file's own β_min, β_max and N, so files with other values can be tried.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from diffpure.classifiers.attributes import AttributeNet
from diffpure.classifiers.resnet import CifarResNet, ImageNetResNet
from diffpure.classifiers.vit import VisionTransformer
from diffpure.classifiers.wrn import DMWideResNet, WideResNet
from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import VPSDE
from diffpure.models.checkpoints import frozen, load_state
from diffpure.scores.ddpm import DDPMScore, DDPMUNet
from diffpure.scores.ddpmpp import DDPMpp, DDPMppScore
from diffpure.scores.guided import GuidedScore, GuidedUNet
from diffpure.scores.hf import HFScore, unet2d

Config = Mapping[str, Any]

REDUCED = Path(__file__).parent / "golden"
FOLDER = Path(os.environ.get("DIFFPURE_GOLDEN") or REDUCED).resolve()
_CONTINUOUS = "alpha_continuous_at_n_over_"  # the key that ends in N


@dataclass(frozen=True)
class Paper:
    """What `vpsde_paper.json` says about a schedule, in 50 digits rounded to float64."""

    numbers: Mapping[str, Any]

    @property
    def sde(self) -> VPSDE:
        return VPSDE(self.numbers["beta_min"], self.numbers["beta_max"])

    @property
    def steps(self) -> int:
        """N of the discrete chain."""
        (key,) = {key for row in self.numbers["discrete_forward"] for key in row if key.startswith(_CONTINUOUS)}
        return int(key.removeprefix(_CONTINUOUS))


@dataclass(frozen=True)
class Run:
    """One purification by torchsde: what is written about it, its tensors, and the small network that it called."""

    name: str
    about: Mapping[str, Any]

    @property
    def network(self) -> str:
        return str(self.about["network"]).removesuffix(".small.safetensors")

    @property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(FOLDER / f"{self.name}.safetensors")


def runs() -> list[Run]:
    """The purifications in the folder whose network is there, too."""
    files = sorted(FOLDER.glob("torchsde_em*.json"))
    found = [Run(file.stem, json.loads(file.read_text())) for file in files]
    return [run for run in found if run.network in names("small")]


def hf_score(config: Config) -> HFScore:
    return HFScore(unet2d(config), size=config["sample_size"], channels=config["in_channels"])


# A key that only this network has, and how it is built: the raw network, and the score model around it.
NETWORKS: dict[str, Callable[[Config], nn.Module]] = {
    "all_modules.0.weight": DDPMpp.from_config,
    "input_blocks.0.0.weight": GuidedUNet.from_config,
    "temb.dense.0.weight": DDPMUNet.from_config,
    "time_embedding.linear_1.weight": unet2d,
    "block1.layer.0.conv1.weight": WideResNet.from_config,
    "init_conv.weight": DMWideResNet.from_config,
    "linear.weight": CifarResNet.from_config,
    "layer1.0.downsample.0.weight": ImageNetResNet.from_config,
    "cls_token": VisionTransformer.from_config,
    "lod_in": AttributeNet.from_config,
}
SCORES: dict[str, Callable[[Config], EpsilonScore]] = {
    "all_modules.0.weight": DDPMppScore.from_config,
    "input_blocks.0.0.weight": GuidedScore.from_config,
    "temb.dense.0.weight": DDPMScore.from_config,
    "time_embedding.linear_1.weight": hf_score,
}


def record(name: str, kind: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.{kind}.json").read_text())
    return content


def names(kind: str) -> list[str]:
    """The files of a kind that describe a network by its state dict."""
    found = (path.name.removesuffix(f".{kind}.json") for path in sorted(FOLDER.glob(f"*.{kind}.json")))
    return [name for name in found if "state_dict" in record(name, kind)]


def family(name: str, kind: str) -> str:
    """The network a file is for, told by its keys."""
    keys = {key for key, _, _ in record(name, kind)["state_dict"]}
    return next(marker for marker in NETWORKS if marker in keys)


def giving(tensor: str) -> list[str]:
    """The small diffusion networks whose file holds a tensor."""
    scores = [name for name in names("small") if family(name, "small") in SCORES]
    return [name for name in scores if tensor in record(name, "small")["tensors"]]


def small(name: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """What is written about a small network, its tensors, and its state in the dtypes of the original."""
    about, tensors = record(name, "small"), load_file(FOLDER / f"{name}.small.safetensors")
    dtypes = {key: getattr(torch, dtype) for key, _, dtype in about["state_dict"]}
    return about, tensors, {key: tensors[f"state/{key}"].to(dtype) for key, dtype in dtypes.items()}


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The raw network of a golden file in channels-last, as users run it, and the file's tensors."""
    about, tensors, state = small(name)
    network = build(NETWORKS[family(name, "small")], about["config"])
    load_state(network, state, name)
    return frozen(network), tensors


def build(make: Callable[[Config], Any], config: Config) -> Any:
    if make in (unet2d, hf_score):
        pytest.importorskip("diffusers")
    return make(config)


def score_of(name: str) -> tuple[EpsilonScore, dict[str, Tensor]]:
    """The score model of a golden file, with the file's weights, and the file's tensors."""
    network, tensors = built(name)
    score = build(SCORES[family(name, "small")], record(name, "small")["config"])
    score.network = network
    return score, tensors

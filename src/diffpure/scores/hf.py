"""Any `UNet2DModel` of diffusers as a score model, loaded by you, from a local folder or from the hub.

The folder's own files say everything: `config.json` the network, `scheduler_config.json` the chain β_0 … β_{N-1} and
what the network predicts. With x = √ᾱ x0 + √(1-ᾱ) ε and the prediction p, ε is p, (x - √ᾱ p)/√(1-ᾱ) for x0, and
√ᾱ p + √(1-ᾱ) x for v. Needs the extra `hf`, imported only when it is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import STEPS, VPSDE, DiscreteVP, Schedule, over
from diffpure.errors import InputError, unknown
from diffpure.models.checkpoints import LAYOUTS, load_state, read

WEIGHTS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")


def unet2d(config: Mapping[str, Any]) -> nn.Module:
    """The raw diffusers network of a configuration, with random weights."""
    try:
        from diffusers import UNet2DModel
    except ImportError as error:
        raise InputError("Diffusers networks need the package diffusers: pip install 'diffpure[hf]'.") from error
    build: Callable[..., nn.Module] = UNet2DModel.from_config
    return build({**config, "_class_name": "UNet2DModel"})


@final
class HFScore(EpsilonScore):
    """A diffusers UNet as a score model: step i for the marginal at t = (i+1)/N, a real number of steps in between."""

    def __init__(
        self, network: nn.Module, sde: Schedule = VPSDE(), size: int | None = None, channels: int | None = 3,
        *, steps: int = STEPS, prediction: str = "epsilon",
    ) -> None:  # fmt: skip
        super().__init__(sde, size, channels)
        if prediction not in PREDICTIONS:
            raise unknown("prediction type", prediction, PREDICTIONS)
        self.network = network
        self.steps = steps
        self.prediction = prediction

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        return self._epsilon(x, (t * self.steps - 1).clamp(0, self.steps - 1), t)

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        return self._epsilon(x, i, (i.to(torch.float64) + 1) / self.steps)

    def _epsilon(self, x: Tensor, i: Tensor, t: Tensor) -> Tensor:
        predicted = self.network(x, i.to(device=x.device, dtype=torch.float32).expand(x.shape[0]), return_dict=False)[0]
        if predicted.shape != x.shape:
            raise InputError(
                f"The network returned {tuple(predicted.shape)} for images {tuple(x.shape)}; one that also predicts a "
                "variance is not accepted."
            )
        return PREDICTIONS[self.prediction](predicted, x, over(self.sde.alpha(t).sqrt(), x), over(self.sde.std(t), x))


def load_folder(folder: Path) -> HFScore:
    """The score model in a diffusers folder: a bare UNet, or a pipeline with its UNet at the root or in `unet/`."""
    root = folder / "unet" if (folder / "unet" / "config.json").is_file() else folder
    config = _json(root / "config.json")
    found = [root / name for name in WEIGHTS if (root / name).is_file()]
    if not found:
        raise InputError(f"{root} holds no weights; accepted are {' and '.join(WEIGHTS)}.")
    network = unet2d(config)
    load_state(network, LAYOUTS["diffusers"](read(found[0]), network), found[0].name)

    schedulers = [folder / "scheduler" / "scheduler_config.json", folder / "scheduler_config.json"]
    scheduler = next((_json(path) for path in schedulers if path.is_file()), {})
    return _score(network, config, scheduler)


def from_diffusers(unet: nn.Module, scheduler: Any) -> HFScore:
    """A loaded `UNet2DModel` as a score model, with the scheduler of its training or the configuration of that."""
    config, settings = getattr(unet, "config", None), getattr(scheduler, "config", scheduler)
    if not isinstance(config, Mapping) or "cross_attention_dim" in config:
        raise InputError(f"A UNet2DModel of diffusers is accepted, which sees the image alone, got {_kind(unet)}.")
    if not isinstance(settings, Mapping):
        raise InputError(f"A scheduler of diffusers or its configuration is accepted, got {_kind(scheduler)}.")
    return _score(unet, config, settings)


def _score(network: nn.Module, config: Mapping[str, Any], scheduler: Mapping[str, Any]) -> HFScore:
    size = config.get("sample_size")
    if isinstance(size, Sequence):
        if len(set(size)) != 1:
            raise InputError(f"A network for square images is accepted, got sample_size {tuple(size)}.")
        size = size[0]
    return HFScore(
        network,
        schedule(scheduler),
        size,
        config.get("in_channels", 3),
        steps=scheduler.get("num_train_timesteps", STEPS),
        prediction=scheduler.get("prediction_type", "epsilon"),
    )


def _kind(value: object) -> str:
    return type(value).__name__


def load_hub(name: str, revision: str | None = None) -> HFScore:
    """The score model of a hub repository, for example google/ddpm-cifar10-32, kept in the hub's own cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError("The hub needs the package huggingface_hub: pip install 'diffpure[hf]'.") from error
    patterns = [f"{folder}{name}" for folder in ("", "unet/", "scheduler/") for name in ("*.json", *WEIGHTS)]
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=patterns)
    except Exception as error:  # the hub's client raises a family of its own, of requests and of the system
        reason = type(error).__name__
        raise InputError(f"{name} could not be fetched from the hub ({reason}); give a local folder.") from error
    return load_folder(Path(folder))


def schedule(scheduler: Mapping[str, Any]) -> Schedule:
    """The noise schedule of a diffusers scheduler configuration; linear from 1e-4 to 0.02 where nothing is said."""
    steps = scheduler.get("num_train_timesteps", STEPS)
    low, high = scheduler.get("beta_start", 1e-4), scheduler.get("beta_end", 0.02)
    kind = scheduler.get("beta_schedule", "linear")
    if scheduler.get("trained_betas") is not None:
        return DiscreteVP(tuple(float(beta) for beta in scheduler["trained_betas"]))
    if scheduler.get("rescale_betas_zero_snr"):
        raise InputError("A scheduler with rescale_betas_zero_snr is not accepted: at its end no image is left.")
    if kind not in SCHEDULES:
        raise unknown("beta_schedule", kind, SCHEDULES)
    return SCHEDULES[kind](low, high, steps)


def _linear(low: float, high: float, steps: int) -> Schedule:
    return VPSDE(low * steps, high * steps)


def _scaled_linear(low: float, high: float, steps: int) -> Schedule:
    return DiscreteVP(tuple((torch.linspace(low**0.5, high**0.5, steps, dtype=torch.float64) ** 2).tolist()))


def _cosine(low: float, high: float, steps: int) -> Schedule:
    def signal(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    return DiscreteVP(tuple(min(1 - signal((i + 1) / steps) / signal(i / steps), 0.999) for i in range(steps)))


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable JSON file; a diffusers folder has one there.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} does not hold a JSON object.")
    return content


# ε from the prediction p, x, √ᾱ and √(1-ᾱ).
PREDICTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "epsilon": lambda p, x, signal, std: p,
    "sample": lambda p, x, signal, std: (x - signal * p) / std,
    "v_prediction": lambda p, x, signal, std: signal * p + std * x,
}

SCHEDULES: dict[str, Callable[[float, float, int], Schedule]] = {
    "linear": _linear,
    "scaled_linear": _scaled_linear,
    "squaredcos_cap_v2": _cosine,
}

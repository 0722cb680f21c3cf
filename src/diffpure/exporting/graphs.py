"""From torch to ONNX: a score, or a purifier with its noise as an input, as the bytes of one file.

    score       x (B, C, H, W) in [-1, 1], t or log_snr (B,)   →   epsilon, the predicted noise
    purifier    images (B, C, H, W) in [0, 1], noise (B, K, C, H, W)   →   purified

The schedule stays outside a score's graph: the noise levels come as log_snr λ in float32, out of which the graph needs
only σ = e^{-λ}. (In the graph they would be float64, which OpenVINO computes in float32: that moved ε̂ by up to 4e-4.)
In a purifier's graph all times are constants, and step k of its noise is noise[:, k], in the order in which the sampler
asks.

Batches have any size. Images have the network's size, or, for networks that take any, any multiple of its stride.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from diffpure.diffusion.gradients import walk
from diffpure.diffusion.score import EpsilonScore, ScoreModel
from diffpure.diffusion.sde import Schedule, Time
from diffpure.errors import InputError
from diffpure.models.runtime import KEY, package
from diffpure.noise import Noise
from diffpure.purifiers.diffusion import Purifier
from diffpure.scores.exported import schedule_table

OPSET: Final = 18  # OpenVINO 2026.4 crashes on GroupNormalization of later ones
LARGEST: Final = 4096  # side of an image, in strides


def score_graph(score: ScoreModel) -> bytes:
    """A score model as ONNX."""
    if not isinstance(score, EpsilonScore):
        raise InputError(f"Exported are networks that predict the noise (EpsilonScore), not {type(score).__name__}.")
    x, t = example(score), torch.tensor([0.1, 0.3], dtype=torch.float64)
    with torch.no_grad():
        score.epsilon(x, t)  # what a network does on its first call only is not part of it
    inputs = {"x": x, "t": t, "log_snr": score.sde.log_snr(t).float()}
    batch = {0: torch.export.Dim.DYNAMIC}
    shapes = {"x": _free(score, 2), "t": batch, "log_snr": batch}
    about = {"what": "score", "schedule": schedule_table(score.sde)}
    return _onnx(_Epsilon(score), inputs, shapes, "epsilon", {**about, **_about(score)})


def purifier_graph(purifier: Purifier) -> bytes:
    """One round of a purifier as ONNX."""
    if purifier.fit != "resize" or purifier.autocast is not None:
        raise InputError("Exported are purifiers of whole images in float32, without tiles and autocast.")
    if getattr(purifier.sampler, "jitter", 0):
        raise InputError("A random t* cannot be exported, because times are constants of the file; leave jitter out.")
    images = (example(purifier.score) / 4 + 0.5).clamp(0, 1)
    draws = _Draws()
    with torch.no_grad():
        _purified(purifier, images, draws)
    noise = torch.stack(draws.given, 1) if draws.given else images.new_zeros(2, 0, *images.shape[1:])
    shapes = {"images": _free(purifier.score, 2), "noise": _free(purifier.score, 3)}
    about = {"what": "purifier", "title": purifier.title, "rounds": purifier.rounds, "draws": draws.steps}
    inputs = {"images": images, "noise": noise}
    return _onnx(_Purified(purifier), inputs, shapes, "purified", {**about, **_about(purifier.score)})


def example(score: ScoreModel, batch: int = 2, strides: tuple[int, int] = (5, 6)) -> Tensor:
    """Random numbers (B, C, H, W) of a size that the score takes, always the same."""
    stride = getattr(score, "stride", 1)
    side = (score.size, score.size) if score.size is not None else tuple(stride * k for k in strides)
    return torch.randn(batch, score.channels or 3, *side, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------------- what is traced


@final
class _Level(Schedule):
    """The schedule of one call, known by its λ alone: σ = e^{-λ}, α = 1/(1 + σ²)."""

    given: Tensor  # λ (B,) of the call

    def log_snr(self, t: Time) -> Tensor:
        return self.given

    def sigma(self, t: Time) -> Tensor:
        return torch.exp(-self.given)

    def integral(self, t: Time) -> Tensor:
        return torch.log1p(self.sigma(t) ** 2)

    def std(self, t: Time) -> Tensor:
        return torch.rsqrt(1 + torch.exp(2 * self.given))

    def beta(self, t: Time) -> Tensor:
        raise InputError("A network that reads β(t) cannot be exported; one that reads t or the noise level can.")

    def time_of_integral(self, B: Tensor) -> Tensor:
        raise InputError("A network that computes times cannot be exported; one that reads t or the noise level can.")


@final
class _Epsilon(nn.Module):
    """ε̂ of a score whose schedule is given from outside."""

    def __init__(self, score: EpsilonScore) -> None:
        super().__init__()
        self.score, self.level = copy.copy(score), _Level()
        self.score.sde = self.level

    def forward(self, x: Tensor, t: Tensor, log_snr: Tensor) -> Tensor:
        self.level.given = log_snr
        return self.score.epsilon(x, t)


@final
class _Purified(nn.Module):
    """One round of a purifier whose noise is given from outside."""

    def __init__(self, purifier: Purifier) -> None:
        super().__init__()
        self.purifier = purifier

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        return _purified(self.purifier, images, _Draws(noise))


@final
class _Draws:
    """The noise of a path: row after row of a given tensor (B, K, ...), or new noise of which a record is kept."""

    def __init__(self, noise: Tensor | None = None) -> None:
        self.noise = noise
        self.steps: list[int] = []
        self.given: list[Tensor] = []

    def __call__(self, step: int, like: Tensor) -> Tensor:
        k = len(self.steps)
        self.steps.append(step)
        if self.noise is None:
            self.given.append(Noise.of(0, len(like))(step, like))
            return self.given[-1]
        return self.noise[:, k]


def _purified(purifier: Purifier, images: Tensor, draws: Any) -> Tensor:
    state, path = purifier.begin(images, draws)
    return purifier.finish(walk(path, state), images)


# ---------------------------------------------------------------------------------------------------- the exporter


def _onnx(module: nn.Module, inputs: dict[str, Tensor], shapes: Any, output: str, about: dict[str, Any]) -> bytes:
    for name in ("onnx", "onnxscript"):
        package(name, "onnx")
    with warnings.catch_warnings(action="ignore"), _silence(), torch.no_grad():
        try:
            traced = torch.export.export(module.eval(), (), inputs, dynamic_shapes=shapes, strict=False)
            program = torch.onnx.export(
                traced,
                dynamo=True,
                input_names=list(inputs),
                output_names=[output],
                custom_translation_table=_translations(),
                opset_version=OPSET,
                verbose=False,
            )
            assert program is not None
        except InputError:
            raise
        except Exception as error:  # the exporter raises whatever the network makes it raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            name = type(getattr(module, "score", getattr(module, "purifier", module))).__name__
            raise InputError(f"torch's exporter cannot write {name} as ONNX ({reason}).") from error
    return _bytes(program.model, about)


def _bytes(model: Any, about: dict[str, Any]) -> bytes:
    """The file: without inputs that nothing reads, and without the paths of this machine that the exporter notes."""
    for entry in [entry for entry in model.graph.inputs if not entry.uses()]:
        model.graph.inputs.remove(entry)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    model.metadata_props[KEY] = json.dumps({"version": 1, **about})
    data: bytes = package("onnx_ir", "onnx").to_proto(model).SerializeToString(deterministic=True)
    return data


def _about(score: ScoreModel) -> dict[str, Any]:
    stride, reach = getattr(score, "stride", 1), getattr(score, "receptive_field", None)
    return {"size": score.size, "channels": score.channels, "stride": stride, "receptive_field": reach}


def _free(score: ScoreModel, first: int) -> dict[int, Any]:
    """The axes of a tensor that may have any length: the batch, and, from `first` on, two sides in strides."""
    free: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    if score.size is None:
        stride = getattr(score, "stride", 1)
        for axis, name in enumerate(("height", "width"), start=first):
            side = torch.export.Dim(name, min=2, max=LARGEST)
            free[axis] = side if stride == 1 else stride * side
    return free


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """No word from the exporter below an error."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in ("torch.onnx", "onnxscript")}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operators that ONNX has not, or that the runtimes are slow at, in operators that they are good at."""
    op = package("onnxscript", "onnx").opset18

    def expm1(x: Any) -> Any:
        """e^x - 1 = 2h/(1 - h), h = tanh(x/2): ONNX has no such operator, and e^x - 1 loses all digits near 0."""
        half = op.Tanh(op.Div(x, op.CastLike(2.0, x)))
        return op.Div(op.Add(half, half), op.Sub(op.CastLike(1.0, x), half))

    def group_norm(
        x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
    ) -> Any:
        """One product and one sum per pixel; the means, of x and of x², are taken over pixels, then over a group.

        The usual form reshapes the image to its groups, for which OpenVINO reorders the memory twice per layer.
        """
        channels = x.shape[1]

        def mean(values: Any) -> Any:
            """Over the pixels and channels of each group: (B, groups, 1)."""
            pixels = op.ReduceMean(values, op.Constant(value_ints=[2, 3]), keepdims=0)
            split = op.Reshape(pixels, op.Constant(value_ints=[0, groups, channels // groups]))
            return op.ReduceMean(split, op.Constant(value_ints=[2]), keepdims=1)

        def spread(values: Any) -> Any:
            """One number per group as one per channel: (B, C, 1, 1)."""
            wide = op.Expand(values, op.Constant(value_ints=[1, 1, channels // groups]))
            return op.Reshape(wide, op.Constant(value_ints=[-1, channels, 1, 1]))

        one = op.Constant(value_ints=[1, channels, 1, 1])
        centre = mean(x)
        variance = op.Relu(op.Sub(mean(op.Mul(x, x)), op.Mul(centre, centre)))  # rounding may leave it below 0
        inverse = op.Reciprocal(op.Sqrt(op.Add(variance, op.Constant(value_float=eps))))
        scale, shift = spread(inverse), spread(op.Neg(op.Mul(centre, inverse)))
        if weight is not None:
            factor = op.Reshape(weight, one)
            scale, shift = op.Mul(scale, factor), op.Mul(shift, factor)
        if bias is not None:
            shift = op.Add(shift, op.Reshape(bias, one))
        return op.Add(op.Mul(x, scale), shift)

    return {torch.ops.aten.expm1.default: expm1, torch.ops.aten.group_norm.default: group_norm}

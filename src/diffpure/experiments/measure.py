"""Measurements of the paper that are no evaluations: time, gradient error and pictures.

    timing           seconds per image of the defence over those of the undefended classifier, interleaved
    gradient-error   |φ - φ_numeric| / |φ| for φ = ∂x(0)/∂x(t*) of data N(0, σ0²), in closed form
    pictures         attacked → states of the way back → purified → clean

Each reads its settings from the [base] of a table and leaves `measured.json` (pictures also `stages.safetensors`) in a
folder that the hash of the settings names. Adding a measurement means its dataclass and one line of `MEASUREMENTS`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor, nn

from diffpure.attacks.pgd import PGD
from diffpure.data.sources import DataSpec
from diffpure.data.sources import load as load_data
from diffpure.diffusion.gradients import gradient_mode
from diffpure.diffusion.samplers import ReverseSDE
from diffpure.diffusion.score import GaussianScore
from diffpure.disk import write_whole
from diffpure.errors import InputError
from diffpure.experiments.load import PLAIN, Loader
from diffpure.experiments.needs import missing_data, missing_models
from diffpure.experiments.spec import ModelSpec
from diffpure.experiments.table import SMALL, Table
from diffpure.named import brief, construct
from diffpure.noise import Noise
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from diffpure.threats import Linf
from diffpure.verification.verify import Verification

FILE: Final = "measured.json"
PICTURES: Final = "stages.safetensors"

Lines = list[list[str]]
Array = np.ndarray[Any, Any]


@final
@dataclass(frozen=True)
class Measured:
    """What a measurement found: headings and lines of text, numbers for a figure, and arrays for pictures."""

    headings: tuple[str, ...]
    lines: Lines
    values: Mapping[str, Any]
    arrays: Mapping[str, Array]


class Measurement(Protocol):
    """Settings of a measurement, which know how to take it."""

    repeatable: ClassVar[bool]  # whether it finds the same a second time, which seconds do not

    def run(self, loader: Loader) -> Measured:
        """Take the measurement."""

    def tiny(self) -> Self:
        """The same so small that a test can take it."""

    def missing(self, base: Path | None) -> list[str]:
        """What it needs that is not on this machine."""


@final
@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per image of a purifier before a classifier, for samplers and t*, as ratios to the classifier alone."""

    repeatable: ClassVar[bool] = False
    classifier: str
    score: str
    t_star: tuple[float, ...]
    samplers: tuple[Mapping[str, Any], ...]
    images: int = 8
    repeats: int = 5

    def run(self, loader: Loader) -> Measured:
        models: dict[tuple[str, float], nn.Module] = {
            ("undefended classifier", 0.0): loader.model(ModelSpec(classifier=self.classifier))
        }
        for sampler in self.samplers:
            for t in self.t_star:
                spec = ModelSpec(classifier=self.classifier, score=self.score, sampler={**sampler, "t_star": t})
                models[_words(sampler), t] = loader.model(spec)
        images, _ = _load(DataSpec(images=f"0-{self.images - 1}"), loader)
        taken: dict[tuple[str, float], list[float]] = {key: [] for key in models}
        for repeat in range(1 + self.repeats):  # interleaved, so that a busy machine is busy for all
            for key, model in models.items():
                seconds = _seconds(model, images) / self.images
                taken[key] += [seconds] if repeat else []  # the first call prepares kernels
        plain = taken[next(iter(models))]
        lines, values = [], {}
        for (name, t), each in taken.items():
            ratios = sorted(a / b for a, b in zip(each, plain, strict=True))
            middle = statistics.median(ratios)
            lines.append([name, f"{t:g}", f"{statistics.median(each):.4f}", f"{middle:.1f}", _range(ratios)])
            values[f"{name}, t* = {t:g}"] = {"seconds": each, "ratio": middle}
        return Measured(("sampler", "t*", "seconds per image", "ratio", "smallest to largest"), lines, values, {})

    def tiny(self) -> Timing:
        samplers = tuple(_tiny_sampler(sampler) for sampler in self.samplers)
        return replace(self, images=2, repeats=2, t_star=self.t_star[:1], samplers=samplers)

    def missing(self, base: Path | None) -> list[str]:
        return missing_models((self.score, self.classifier))


@final
@dataclass(frozen=True, kw_only=True)
class GradientError:
    """The relative error of ∂x(0)/∂x(t*) for data N(0, σ0²) through Euler–Maruyama, by gradient mode and step size."""

    repeatable: ClassVar[bool] = True
    t_star: float
    variances: tuple[float, ...]
    step_sizes: tuple[float, ...]
    gradients: tuple[str | Mapping[str, Any], ...]

    def run(self, loader: Loader) -> Measured:
        lines, values = [], dict[str, Any]()
        for mode in self.gradients:
            for variance in self.variances:
                errors = [self.error(variance, dt, mode) for dt in self.step_sizes]
                name = brief(gradient_mode(mode))
                lines.append([name, f"{variance:g}", *(f"{error:.2e}" for error in errors)])
                values[f"{name}, σ0² = {variance:g}"] = {"step sizes": self.step_sizes, "errors": errors}
        headings = ("gradient", "σ0²", *(f"dt = {dt:g}" for dt in self.step_sizes))
        return Measured(headings, lines, values, {})

    def error(self, variance: float, dt: float, mode: str | Mapping[str, Any]) -> float:
        """|φ - φ_numeric| / |φ|, in double precision."""
        x = torch.ones(1, 1, 1, 1, dtype=torch.float64, requires_grad=True)
        score = GaussianScore(0.0, variance)
        _, path = ReverseSDE(t_star=self.t_star, dt=dt, end=1e-12)(score, x, Noise((0,)))
        (numeric,) = torch.autograd.grad(gradient_mode(mode)(path, x).sum(), x)
        alpha = score.sde.alpha(self.t_star)
        known = variance * alpha.sqrt() / (1 - alpha + variance * alpha)
        return float(((known - numeric) / known).abs())

    def tiny(self) -> GradientError:
        return replace(self, variances=self.variances[:2], step_sizes=self.step_sizes[:2])

    def missing(self, base: Path | None) -> list[str]:
        return []


@final
@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Images attacked through a classifier alone, then diffused and purified, in stages."""

    repeatable: ClassVar[bool] = True
    score: str
    sampler: Mapping[str, Any]
    subjects: tuple[Mapping[str, Any], ...]  # name, classifier and data of each
    eps: float = 16 / 255
    iterations: int = 20

    def run(self, loader: Loader) -> Measured:
        lines, arrays = [], dict[str, Array]()
        for number, subject in enumerate(self.subjects):
            model = loader.model(
                ModelSpec(classifier=subject["classifier"], score=self.score, sampler=dict(self.sampler))
            )
            assert isinstance(model, Defense)
            stages, right = self._stages(model, *_load(_data(subject), loader))
            for stage, images in stages.items():
                arrays[f"{number}/{stage}"] = (images.clamp(0, 1) * 255).round().byte().cpu().numpy()
                said = f"{sum(right[stage])} of {len(images)}" if stage in right else ""
                lines.append([subject["name"], stage, said])
        return Measured(("subject", "stage", "classified correctly"), lines, {}, arrays)

    def _stages(self, model: Defense, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], dict[str, list[bool]]]:
        seeds = list(range(len(x)))
        threat = Linf(self.eps)
        z = PGD(iterations=self.iterations)(model.classifier, x, y, threat, seeds=seeds)
        attacked = threat.apply(x, z)
        assert isinstance(model.purifier, Purifier)
        t = float(self.sampler.get("t_star", 0.1))
        states = model.purifier.trajectory(attacked, [t, t / 2, 0.0], seeds=seeds)
        names = (f"t = {t:g}", f"t = {t / 2:g}", "purified")
        stages = {"attacked": attacked, **dict(zip(names, states, strict=True)), "clean": x}
        with torch.no_grad():
            said = {key: model.classifier(stages[key]).argmax(1) == y for key in ("attacked", "purified", "clean")}
        return stages, {key: found.tolist() for key, found in said.items()}

    def tiny(self) -> Pictures:
        subjects = tuple({**s, "data": {**s.get("data", {}), "images": "0-1"}} for s in self.subjects[:1])
        return replace(self, iterations=2, subjects=subjects, sampler=_tiny_sampler(self.sampler))

    def missing(self, base: Path | None) -> list[str]:
        found = missing_models([self.score, *(subject["classifier"] for subject in self.subjects)])
        return [*found, *(name for subject in self.subjects for name in missing_data(_data(subject), base))]


MEASUREMENTS: Final[dict[str, type[Measurement]]] = {
    "timing": Timing,
    "gradient-error": GradientError,
    "pictures": Pictures,
}


def measurement(table: Table, scale: str = SMALL, *, tiny: bool = False) -> Measurement:
    """The measurement of a table at a scale."""
    if table.kind not in MEASUREMENTS:
        raise InputError(f"A table of the kind {table.kind!r} is no measurement; {', '.join(MEASUREMENTS)} are.")
    made: Measurement = construct(MEASUREMENTS[table.kind], table.settings(scale), "key of [base]")
    return made.tiny() if tiny else made


def folder_of(kind: str, made: Measurement, parent: str | Path) -> Path:
    """The folder of a measurement: its kind and the hash of its settings."""
    content = json.dumps([kind, vars(made)], sort_keys=True, default=list)
    return Path(parent) / f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def measure(
    table: Table, parent: str | Path, scale: str = SMALL, loader: Loader = PLAIN, *, tiny: bool = False
) -> Path:
    """Take the measurement of a table, if it is not there yet; its folder."""
    made = measurement(table, scale, tiny=tiny)
    folder = folder_of(table.kind, made, parent)
    if (folder / FILE).is_file():
        return folder
    found = made.run(loader)
    folder.mkdir(parents=True, exist_ok=True)
    if found.arrays:
        write_whole(folder / PICTURES, save(dict(found.arrays)))
    about = {"threads": torch.get_num_threads(), "machine": platform.machine(), "torch": torch.__version__}
    content: dict[str, Any] = {"kind": table.kind, "settings": vars(made), "headings": found.headings}
    content |= {"lines": found.lines, "values": found.values, "arrays": list(found.arrays), "about": about}
    text = json.dumps(content, default=list, ensure_ascii=False, indent=1)
    write_whole(folder / FILE, text.encode())
    return folder


def read(folder: Path) -> Measured | None:
    """The measurement in a folder, if it was taken."""
    return _read(folder)[2] if (folder / FILE).is_file() else None


def _read(folder: Path) -> tuple[str, Measurement, Measured]:
    """The kind, the settings and the findings of a measurement."""
    try:
        content = json.loads((folder / FILE).read_text("utf-8"))
        made: Measurement = construct(MEASUREMENTS[content["kind"]], content["settings"], "setting")
        found = Measured(tuple(content["headings"]), content["lines"], content["values"], {})
        if (folder / PICTURES).is_file():
            arrays = load_file(folder / PICTURES)  # which has its own order
            found = replace(found, arrays={key: arrays[key] for key in content["arrays"]})
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, InputError) as error:
        raise InputError(f"The measurement in {folder} is damaged; delete it and measure again.") from error
    return content["kind"], made, found


def verify_measurement(folder: Path, loader: Loader | None) -> Verification:
    """Check a measurement by taking it again, where it can be repeated; without a loader, its settings alone."""
    kind, made, found = _read(folder)
    problems = []
    if folder_of(kind, made, folder.parent).name != folder.resolve().name:
        problems.append("The folder has the name of other settings.")
    proven, claimed = ["the settings are those that name the folder"], ["versions and the machine"]
    if loader is None or not made.repeatable:
        claimed.insert(0, "what was measured" if made.repeatable else "seconds, and their ratios")
        return Verification(len(found.lines), 0, tuple(problems), tuple(proven), tuple(claimed))
    again = made.run(loader)
    if (again.headings, again.lines) != (found.headings, found.lines):
        problems.append("Measured again, the lines are others.")
    far = [key for key in {*found.arrays, *again.arrays} if not _alike(found.arrays.get(key), again.arrays.get(key))]
    problems += [f"Made again, the pictures {key!r} are others." for key in sorted(far)]
    proven.append("measured again, every line and picture is the same")
    return Verification(len(found.lines), 0, tuple(problems), tuple(proven), tuple(claimed))


def _alike(a: Array | None, b: Array | None) -> bool:
    """Whether pictures differ by one level at most, which another processor's rounding may cost."""
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool((np.abs(a.astype(int) - b.astype(int)) <= 1).all())


def _data(subject: Mapping[str, Any]) -> DataSpec:
    made: DataSpec = construct(DataSpec, subject.get("data", {}), "key of data")
    return made


def _load(data: DataSpec, loader: Loader) -> tuple[Tensor, Tensor]:
    """Images and labels, where the models are."""
    found = load_data(data, loader.base)
    return found.images.to(loader.device), found.labels.to(loader.device)


def _words(sampler: Mapping[str, Any]) -> str:
    size = f"dt = {sampler['dt']:g}" if "dt" in sampler else f"{sampler['steps']} steps"
    return f"{sampler['kind']}, {size}"


def _tiny_sampler(sampler: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in sampler.items() if key != "dt"}, "steps": 2}


def _range(ratios: list[float]) -> str:
    return f"{ratios[0]:.1f} to {ratios[-1]:.1f}"


def _seconds(model: nn.Module, images: Tensor) -> float:
    """The seconds of one call without gradients."""
    began = time.perf_counter()
    with torch.no_grad():
        model(images).flatten()[0].item()  # wait for the device
    return time.perf_counter() - began

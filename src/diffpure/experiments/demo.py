"""The demonstration: what an attack does to a classifier, what purification brings back, and what an adaptive
white-box attack on the defence still finds. Everything is inside the package: 500 test images, a small classifier and
a small score.

It is four evaluations, each a spec with a run on the disk, so that it can be verified, reported and continued:

    undefended the classifier, and PGD on it
    purified   the defence on the same images
    brought    the defence on the images that PGD made against the undefended classifier
    adaptive   the defence under the strong attack, which goes through it with its exact gradient, on few images

The last shows the effect honestly, and is no substitute for an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from diffpure.attacks import strong
from diffpure.evaluation.evaluate import Tick
from diffpure.evaluation.store import IMAGES
from diffpure.evaluation.units import Unit
from diffpure.experiments.load import gallery_of, run_folder, run_spec
from diffpure.experiments.spec import EvaluationSpec
from diffpure.pictures.gallery import Gallery
from diffpure.results.result import Result
from diffpure.results.rows import Rate

Progress = Callable[[str, int, int], None]  # (what, done, of)


@final
@dataclass(frozen=True)
class DemoRow:
    """One line of the table: how many images were classified correctly, and under what."""

    model: str
    attack: str
    rate: Rate


@final
@dataclass(frozen=True)
class Demo:
    """The table, the folders of the runs it was read from, and the pictures: clean, attacked, diffused, purified."""

    rows: tuple[DemoRow, ...]
    folders: tuple[Path, ...]
    galleries: tuple[Gallery, ...]
    notes: str


@final
@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """How much to do; the defaults take about a minute on two cores."""

    images: int = 100
    adaptive_images: int = 32
    gradients: int = 40
    t_star: float = 0.1
    steps: int = 5
    seed: int = 0
    shown: int = 8


def run_demo(config: DemoConfig, home: Path, progress: Progress = lambda *_: None) -> Demo:
    """Classify, attack the undefended classifier, purify, attack the defence; the runs go to folders in `home`.

    What an earlier call with the same configuration has finished there is read, not computed again.
    """
    found: list[tuple[Path, Result]] = []

    def measure(spec: EvaluationSpec) -> Result:
        folder = run_folder(spec, home)
        found.append((folder, run_spec(spec, folder, progress=_tell(progress, spec.name))))
        return found[-1][1]

    pgd, adapted = "PGD-20", f"{strong(config.gradients).title}, exact gradient"
    name = f"Undefended classifier, and {pgd} on it"
    undefended = measure(_spec(config, name, config.images, attack={"kind": "pgd", "iterations": 20}))
    purified = measure(_spec(config, "Purified", config.images, defended=True))
    name = f"Purified, on the images that {pgd} made against the undefended classifier"
    brought = measure(_spec(config, name, config.images, defended=True, source=_attacked(found[0])))
    attack = {"kind": "strong", "iterations": config.gradients}
    name = f"Purified, under an adaptive white-box attack ({adapted})"
    adaptive = measure(_spec(config, name, config.adaptive_images, defended=True, attack=attack))
    rows = (
        DemoRow("classifier", "none", undefended.clean()),
        DemoRow("classifier", pgd, undefended.minimum()),
        DemoRow("purified", "none", purified.clean()),
        DemoRow("purified", f"{pgd} on the classifier", brought.clean()),
        DemoRow("purified", adapted, adaptive.minimum()),
    )
    folders = tuple(folder for folder, _ in found)
    sampler = f"ancestral sampler in {config.steps} steps"
    notes = f"ℓ∞ 8/255, t* = {config.t_star:g}, {sampler}, seed {config.seed}"
    return Demo(rows, folders, tuple(gallery_of(folder, config.shown) for folder in folders), notes)


def _spec(
    config: DemoConfig,
    name: str,
    images: int,
    *,
    defended: bool = False,
    attack: dict[str, Any] | None = None,
    source: dict[str, str] | None = None,
) -> EvaluationSpec:
    model: dict[str, Any] = {"classifier": "cifar10-resnet"}
    if defended:
        sampler = {"kind": "ancestral", "t_star": config.t_star, "steps": config.steps}
        model |= {"score": "cifar10-small", "sampler": sampler}
    return EvaluationSpec.of(
        {
            "name": name,
            "model": model,
            "data": {"images": f"0-{images - 1}", **(source or {})},
            "attacks": [] if attack is None else [attack],
            "rules": ["one-shot"],
            "seeds": [config.seed],
            "batch": images,
        }
    )


def _attacked(undefended: tuple[Path, Result]) -> dict[str, str]:
    """The adversarial images of a run of one batch, as a source of images that is found from any folder."""
    folder, result = undefended
    unit = Unit(result.seeds[0], result.attacks[0], 0, result.header["batch"])
    return {"source": "file", "path": str((folder / IMAGES / unit.file).resolve())}


def _tell(progress: Progress, what: str) -> Callable[[Tick], None]:
    return lambda tick: progress(what, round(100 * tick.share), 100)

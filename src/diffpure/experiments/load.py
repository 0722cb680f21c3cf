"""From a spec to its evaluation: load what it names, then estimate, run or verify.

spec, base = EvaluationSpec.read("specs/mine.toml"), Path("specs")
result = run_spec(spec, run_folder(spec), Loader(base=base))      # killed at any moment, the same call goes on
print(result, verify_run(run_folder(spec)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Protocol, final

import torch
from torch import nn

from diffpure.classifiers.load import load_classifier
from diffpure.data.sources import Dataset
from diffpure.data.sources import load as load_data
from diffpure.errors import InputError
from diffpure.evaluation.cost import Estimate
from diffpure.evaluation.engine import Engine
from diffpure.evaluation.evaluate import Choice, Progress, run
from diffpure.evaluation.setup import Evaluation, Settings, set_up
from diffpure.experiments.spec import EvaluationSpec, ModelSpec, Reference
from diffpure.models.code import is_code, load_object
from diffpure.pictures.gallery import Gallery, kept_gallery
from diffpure.pictures.make import make_gallery
from diffpure.purifiers import make_purifier
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense, PurifierBase, as_purifier
from diffpure.results.read import read_rows
from diffpure.results.result import Result
from diffpure.scores.load import load_score
from diffpure.verification.verify import Verification, verify
from diffpure.verification.withheld import read_withheld
from diffpure.views import FlipAverage


@final
@dataclass(frozen=True)
class Loader:
    """How a spec's names become a model and images.

    base: the folder that relative paths start from, which is that of the spec's file.   device: where the model goes.
    allow_code: whether names that run code (`python:`, TorchScript, ONNX) may be loaded in this call.
    """

    base: Path | None = None
    device: str | torch.device = "cpu"
    allow_code: bool = False

    def model(self, spec: ModelSpec) -> nn.Module:
        """The undefended classifier, or the defence that purifies before it."""
        classifier = load_classifier(**self._arguments(spec.classifier))
        if spec.flip:
            classifier = FlipAverage(classifier)
        if not spec.defended:
            return classifier.to(self.device)
        return Defense(self._purifier(spec), classifier, draws=spec.draws, rule=spec.rule).to(self.device)

    def data(self, spec: EvaluationSpec) -> Dataset:
        """The images of a spec."""
        return load_data(spec.data, self.base)

    def evaluation(self, spec: EvaluationSpec, *, memory: int | None = None, per_call: int | None = None) -> Evaluation:
        """The checked evaluation of a spec."""
        model, data = self.model(spec.model), self.data(spec)
        settings = Settings(
            rules=spec.rules,
            seeds=spec.seeds,
            batch=spec.batch,
            per_call=per_call,
            memory=memory,
            indices=data.indices,
            name=spec.name,
            class_names=data.class_names,
            spec=spec.plain(),
        )
        return set_up(model, data.images, data.labels, spec.threat, spec.make_attacks(), settings)

    def _purifier(self, spec: ModelSpec) -> PurifierBase:
        if spec.purifier is None:
            score = load_score(**self._arguments(spec.score))
            return Purifier(score, spec.sampler, spec.gradient, rounds=spec.rounds)
        arguments = dict(spec.purifier) if isinstance(spec.purifier, Mapping) else {}
        kind = str(arguments.pop("kind", ""))
        if not is_code(kind):
            return make_purifier(kind, {"gradient": spec.gradient, "rounds": spec.rounds, **arguments})
        made = as_purifier(load_object(kind, arguments, self.allow_code, self.base)).with_gradient(spec.gradient)
        made.rounds = spec.rounds
        return made

    def _arguments(self, reference: Any) -> dict[str, Any]:
        assert isinstance(reference, Reference)
        options = {"allow_code": self.allow_code, "base": self.base, "arguments": reference.arguments}
        return {"name": reference.name, "like": reference.like, **{k: v for k, v in options.items() if v}}


PLAIN: Final = Loader()


def load_defense(name: str) -> Defense:
    """A whole defence by name, ready to use, with its score, sampler, t*, classifier and vote.

    `diffpure models list` has the names, and `diffpure models show NAME` what was measured.
    """
    model = PLAIN.model(ModelSpec.of({"defense": name}))
    assert isinstance(model, Defense)
    return model


class Named(Protocol):
    """What a run is made from: its hash names it."""

    @property
    def hash(self) -> str:
        """A hash of everything that fixes the rows."""

    @property
    def folder_name(self) -> str:
        """The name of the run's folder."""


def run_folder(spec: Named, parent: str | Path = "runs") -> Path:
    """The folder of a run: its name and hash; one of an earlier name but the same hash is gone on with."""
    parent = Path(parent)
    there = sorted(parent.glob(f"*{spec.hash}")) if parent.is_dir() else []
    return there[0] if there else parent / spec.folder_name


def run_spec(
    spec: EvaluationSpec,
    folder: str | Path,
    loader: Loader = PLAIN,
    *,
    engine: Engine | None = None,
    memory: int | None = None,
    only: Choice | None = None,
    progress: Progress | None = None,
    on_estimate: Callable[[Estimate], None] | None = None,
) -> Result:
    """Evaluate a spec into a folder; called again after a kill, it goes on and ends with the same rows."""
    evaluation = loader.evaluation(spec, memory=memory, per_call=_begun(folder))
    return run(evaluation, folder, spec.probe, engine, progress, only, on_estimate)


def _begun(folder: str | Path) -> int | None:
    """The images per call of a run that was begun in a folder: it goes on with them."""
    try:
        header, _ = read_rows(folder, on_bad=lambda _: None)
    except InputError:
        return None
    return int(header["per_call"])


def verify_run(
    folder: str | Path,
    loader: Loader = PLAIN,
    *,
    again: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check a run of a spec: its files, and the model and images that it names where they are at hand here."""
    header, _ = read_rows(folder, on_bad=lambda _: None)
    if header.get("spec") is None:
        raise InputError(f"{folder} was made without a spec; check it with `dp.verify` and the model itself.")
    try:
        evaluation = loader.evaluation(EvaluationSpec.of(header["spec"]), per_call=header["per_call"])
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}; `--rows-only` checks what the files alone can show.") from error
    return verify(folder, evaluation, again=again, progress=progress)


def shipped_specs() -> dict[str, Path]:
    """The specs inside the package, by name."""
    folder = Path(str(resources.files("diffpure.experiments").joinpath("specs")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def gallery_of(folder: str | Path, count: int = 8, loader: Loader = PLAIN) -> Gallery:
    """The pictures of a finished run of a spec: those that were kept, or new ones made with its model."""
    result = Result.load(folder)
    if kept := kept_gallery(Path(folder), result, count):
        return kept
    if withheld := read_withheld(Path(folder)):
        raise InputError(f"The run was {withheld.remark}.")
    if result.header.get("spec") is None:
        raise InputError("The run was made without a spec, so its model cannot be loaded.")
    spec = EvaluationSpec.of(result.header["spec"])
    return make_gallery(folder, loader.evaluation(spec, per_call=result.header["per_call"]), count)

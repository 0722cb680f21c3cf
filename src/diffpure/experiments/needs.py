"""What a spec needs that is not on this machine: checkpoints, packages, data sets; told before anything is run."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diffpure.classifiers.foreign import ZOOS
from diffpure.data.cifar10 import FOLDER
from diffpure.data.sources import DataSpec
from diffpure.disk import home
from diffpure.errors import InputError
from diffpure.experiments.spec import EvaluationSpec, Reference
from diffpure.models.cards import cards


def missing(spec: EvaluationSpec, base: Path | None = None) -> list[str]:
    """What is not there for a spec, in words."""
    references = [reference for reference in (spec.model.score, spec.model.classifier) if reference is not None]
    return [*missing_models(references), *missing_data(spec.data, base)]


def missing_models(references: Iterable[Any]) -> list[str]:
    """The official checkpoints and the packages among references to models that are not there."""
    known, found = cards(), []
    for reference in references:
        name = reference.name if isinstance(reference, Reference) else str(reference)
        zoo = name.partition(":")[0]
        if name in known and not known[name].present:
            found.append(f"the checkpoint {name}")
        elif zoo in ZOOS and ":" in name and find_spec(zoo) is None:
            found.append(f"the package {zoo}")
    return found


def missing_data(data: DataSpec, base: Path | None = None) -> list[str]:
    """The data set of a spec, if it is not there."""
    if data.path is not None:
        return [] if ((base or Path()) / data.path).exists() else [f"the {data.source} images in {data.path}"]
    if data.source != "cifar10":
        return []
    try:
        return [] if (home() / "cifar10" / FOLDER).is_dir() else ["CIFAR-10"]
    except InputError:  # there is no cache
        return ["CIFAR-10"]


def sentence(lacking: Iterable[str], what: str) -> str:
    """One sentence on everything that is lacking."""
    names = sorted(dict.fromkeys(lacking))
    prefix = "the checkpoint "
    checkpoints = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    several = "s" * (len(checkpoints) > 1)
    parts = [f"the checkpoint{several} {', '.join(checkpoints)} (`diffpure models fetch NAME`)"] if checkpoints else []
    parts += [name for name in names if not name.startswith(prefix)]
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
    return f"{what} needs {listed}, which this machine lacks." if parts else ""

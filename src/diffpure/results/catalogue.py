"""Runs on the disk: which there are, how far each has come, and what it found. No torch here."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from diffpure.disk import hold, one_sentence
from diffpure.errors import InputError
from diffpure.results.certificates import Certification
from diffpure.results.read import holds_certificates
from diffpure.results.result import NOT_MEASURED, Result
from diffpure.results.rows import ROWS, SUMMARY, WITHHELD

# Everything that a run's folder may hold; what ends in .part is the leftover of a kill.
FILES: Final = (ROWS, SUMMARY, WITHHELD, "adversarial", "state.safetensors", "pictures.safetensors")


class RunInfo(ABC):
    """One run: how many of its rows it has, and its headline once it has all of them."""

    folder: Path
    result: Result | Certification

    @property
    def name(self) -> str:
        """Its given name, or what was evaluated."""
        return str(self.result.header.get("name") or self.result.header["model"].get("title", ""))

    @property
    @abstractmethod
    def total(self) -> int:
        """How many rows it has when it is finished."""

    @property
    @abstractmethod
    def about(self) -> str:
        """What was done to how many images, in a few words."""

    @property
    @abstractmethod
    def headline(self) -> str:
        """What a finished run found, in one line."""

    @property
    def state(self) -> str:
        """Finished, or how far it has come."""
        return "finished" if self.result.complete else f"unfinished, {len(self.result.rows)} of {self.total} rows"

    def as_dict(self) -> dict[str, Any]:
        """The run as plain data."""
        result, header = self.result, self.result.header
        return {
            "folder": str(self.folder),
            "name": self.name,
            "finished": result.complete,
            "rows": len(result.rows),
            "total": self.total,
            "images": len(header["indices"]),
            "date": header.get("date"),
        }


@final
@dataclass(frozen=True)
class EvaluationInfo(RunInfo):
    """A run of an evaluation: clean and robust accuracy under the first rule."""

    folder: Path
    result: Result

    @property
    def total(self) -> int:
        result = self.result
        return len(result.seeds) * len(result.indices) * (1 + len(result.attacks))

    @property
    def about(self) -> str:
        attacks = ", ".join(self.result.attacks) or "no attack"
        return f"{self.result.header['threat']}, {attacks}, {len(self.result.indices)} images"

    @property
    def headline(self) -> str:
        if not self.result.complete:
            return ""
        robust = str(self.result.robust()) if self.result.attacks else NOT_MEASURED.partition(":")[0]
        return f"clean {self.result.clean()}, robust {robust}"

    def as_dict(self) -> dict[str, Any]:
        """The run as plain data."""
        result = self.result
        return {
            **super().as_dict(),
            "threat": result.header["threat"],
            "attacks": {name: result.title(name) for name in result.attacks},
            "clean": result.clean().value if result.complete else None,
            "robust": result.robust().value if result.complete and result.attacks else None,
        }


@final
@dataclass(frozen=True)
class CertificateInfo(RunInfo):
    """A run of certificates: certified accuracy at the first radii."""

    folder: Path
    result: Certification

    @property
    def total(self) -> int:
        return len(self.result.header["indices"])

    @property
    def about(self) -> str:
        header = self.result.header
        return f"certificates, σ = {self.result.sigma:g}, {header['n']:,} draws, {self.total} images"

    @property
    def headline(self) -> str:
        if not self.result.complete:
            return ""
        rates = (f"{self.result.certified(radius)} at {radius:g}" for radius in self.result.radii[:3])
        return f"certified at ℓ2 radii: {', '.join(rates)}"

    def as_dict(self) -> dict[str, Any]:
        """The run as plain data."""
        rates = self.result.summary()["certified"] if self.result.complete else None
        return {**super().as_dict(), "sigma": self.result.sigma, "certified": rates}


def find_runs(paths: Iterable[Path], files: Sequence[str] = (ROWS,)) -> list[Path]:
    """The runs that paths name: each itself, or those in the folder that it is; files: what makes a folder a run."""
    found: list[Path] = []
    for path in paths:
        if any((path / file).exists() for file in files) or not path.is_dir():
            found.append(path)
        else:
            found += sorted(p.parent for file in files for p in path.rglob(file)) or [path]
    return list(dict.fromkeys(found))


def describe(folder: Path) -> RunInfo:
    """What is to say of the run in a folder."""
    if folder.is_dir() and holds_certificates(folder):
        return CertificateInfo(folder, Certification.load(folder))
    return describe_evaluation(folder)


def describe_evaluation(folder: Path) -> EvaluationInfo:
    """What is to say of the evaluation in a folder."""
    if not folder.is_dir():
        raise InputError(f"A run is a folder with {ROWS}, got {str(folder)!r}.")
    return EvaluationInfo(folder, Result.load(folder))


def remove_run(folder: Path) -> None:
    """Delete the folder of a run; one that holds anything else, or is being written to, is refused."""
    describe(folder)
    others = [entry.name for entry in folder.iterdir() if entry.name not in FILES and not entry.name.endswith(".part")]
    if others or folder.is_symlink():
        what = f"other files ({others[0]}, …) beside its run" if others else "its run behind a link"
        raise InputError(f"{folder} holds {what}; delete it yourself if you mean it.")
    with one_sentence(folder):
        lock = hold(folder)
        try:
            shutil.rmtree(folder)
        finally:
            os.close(lock)

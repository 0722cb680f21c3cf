"""A run on the disk: a folder that a kill at any moment leaves whole.

    rows.jsonl       the header, then one line per row; appended, flushed, fsynced
    adversarial/     a safetensors file per batch and attack: z, images, labels and the images' dataset indices
    summary.json     the rates, once the run is complete
    withheld.json    only where a run was published without adversarial/: why, and the hashes of the perturbations

A run of certificates has no adversarial images, and is otherwise kept alike.

A row is written only after the file with its adversarial image. A line that a kill cut short is removed on opening;
every other file appears whole (written under another name, then renamed) or not at all. One process at a time writes.
"""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from diffpure.attacks import AttackRun
from diffpure.disk import hold, one_sentence, write_whole
from diffpure.errors import InputError
from diffpure.evaluation.setup import IDENTITY
from diffpure.evaluation.units import Unit
from diffpure.models.checkpoints import digest
from diffpure.results.read import read_rows
from diffpure.results.rows import ROWS, SUMMARY, Row

IMAGES: Final = "adversarial"
STATE: Final = "state.safetensors"


class Line(Protocol):
    """A row of any kind of run."""

    def line(self) -> str:
        """The row as one line of JSON."""


AnyRow = TypeVar("AnyRow", bound=Line)


class Log(ABC, Generic[AnyRow]):
    """An open run: its header, the rows it has, and the only way to add some."""

    kind: ClassVar[str]  # what the run is, in a word
    identity: ClassVar[Sequence[str]]  # the keys of the header that fix its rows

    def __init__(self, folder: Path, header: Mapping[str, Any], rows: Sequence[AnyRow], lock: int) -> None:
        self.folder, self.header, self.rows = folder, header, list(rows)
        self._lock = lock

    @staticmethod
    @abstractmethod
    def read(folder: Path) -> tuple[dict[str, Any], list[AnyRow]]:
        """The header and the rows in a folder."""

    @classmethod
    def open(cls, folder: str | Path, header: Mapping[str, Any]) -> Self:
        """Begin a run in a new folder, or go on with the one that has the same identity.

        The header of the older run is kept: its batch plan is part of what makes the rows equal.
        """
        folder = Path(folder)
        if unnamed := [part for part, name in header["model"]["parts"].items() if name is None]:
            raise InputError(
                f"The {unnamed[0]} of the model cannot be told from another one, so a run into {folder} could mix two; "
                "give a module, or a function of tensors and numbers, or leave `out` away."
            )
        with one_sentence(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = hold(folder)
            try:
                if not (folder / ROWS).exists():
                    _refuse_foreign(folder)
                    write_whole(folder / ROWS, (json.dumps({"header": header}) + "\n").encode())
                _repair(folder / ROWS)
                old, rows = cls.read(folder)
                if differing := [key for key in cls.identity if old.get(key) != header[key]]:
                    raise InputError(
                        f"{folder} holds another {cls.kind} (with other {differing[0]}); give a new folder."
                    )
                here, there = (_device(about) for about in (header, old))
                if here != there:
                    raise InputError(f"{folder} was begun on the device {there} and goes on only there, not on {here}.")
                return cls(folder, old, rows, lock)
            except BaseException:
                os.close(lock)
                raise

    def append(self, rows: Sequence[AnyRow]) -> None:
        """Add rows; they are on the disk when this returns, or (a full disk) none of them is."""
        path = self.folder / ROWS
        data = "".join(row.line() + "\n" for row in rows).encode()
        with one_sentence(self.folder), path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                while data:
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(path, before)
                raise
        self.rows += rows

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the rates beside the rows."""
        with one_sentence(self.folder):
            write_whole(self.folder / SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())

    def close(self) -> None:
        """Let another process write."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class Store(Log[Row]):
    """An open run of an evaluation, with its adversarial images and the attack under way."""

    kind, identity = "evaluation", IDENTITY

    @staticmethod
    def read(folder: Path) -> tuple[dict[str, Any], list[Row]]:
        return read_rows(folder)

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
        """Write tensors to a safetensors file of the run, whole or not at all."""
        with one_sentence(self.folder):
            (self.folder / name).parent.mkdir(exist_ok=True)
            # Copies: the tensors of an attack's state may share their memory, which the format refuses.
            plain = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
            write_whole(self.folder / name, save(plain, dict(about or {})))

    def save_run(self, unit: Unit, run: AttackRun) -> None:
        """Keep an attack under way."""
        tensors = run.tensors()
        self.save_tensors(STATE, tensors, {"unit": repr(unit), "sum": _sum(tensors)})

    def saved_run(self, unit: Unit) -> AttackRun | None:
        """The attack that was under way in a unit, if it was kept; what is damaged is begun again."""
        path = self.folder / STATE
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
            tensors = load_file(path)
            return AttackRun.of(tensors) if about == {"unit": repr(unit), "sum": _sum(tensors)} else None
        except (OSError, SafetensorError, ValueError):
            return None

    def forget_run(self) -> None:
        """Remove what was kept of an attack under way."""
        (self.folder / STATE).unlink(missing_ok=True)


def _device(header: Mapping[str, Any]) -> str:
    """What kind of device a run computes on: another kind rounds differently."""
    return str(header.get("machine", {}).get("device")).partition(":")[0]


def _sum(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of named tensors, whatever their order."""
    return digest(*(tensors[name] for name in sorted(tensors)))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of a run."""
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise InputError(f"The file {path} is missing.") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"The file {path} is damaged.") from error


def _repair(path: Path) -> None:
    """Remove what follows the last newline: the part of a line that a kill left."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        size = 0
        for start in reversed(range(0, end, 1 << 16)):
            file.seek(start)
            if (at := file.read(1 << 16).rfind(b"\n", 0, end - start)) >= 0:
                size = start + at + 1
                break
        if size < end:
            file.truncate(size)
            os.fsync(file.fileno())


def _refuse_foreign(folder: Path) -> None:
    """A run begins in a folder that is empty but for the leftovers of a start that was killed."""
    others = [entry.name for entry in folder.iterdir() if not entry.name.endswith(".part")]
    if others:
        raise InputError(f"{folder} holds other files ({others[0]}, …) and no run; give a new or empty folder.")

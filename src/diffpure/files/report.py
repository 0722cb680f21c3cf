"""What became of every file, and how images of another size than the model's were purified."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import final


@final
@dataclass
class Report:
    """What became of every file: names, and for failures and notes the reason.

    ways counts purified images by "whole" (the model's own size), "resize" and "tiles"; tiles counts the tiles.
    """

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    ways: Counter[str] = field(default_factory=Counter)
    tiles: int = 0

    @property
    def count(self) -> int:
        """How many files were dealt with."""
        return len(self.done) + len(self.skipped) + len(self.failed)

    def add(self, part: Report) -> None:
        """Take in what became of some of the files."""
        self.done += part.done
        self.skipped += part.skipped
        self.failed += part.failed
        self.notes += part.notes
        self.ways += part.ways
        self.tiles += part.tiles

    def fitted(self, size: int | None) -> str | None:
        """One line that says how images of another size than the model's were purified; None without such."""
        square = f"{size}×{size}"
        said = []
        if count := self.ways["tiles"]:
            said.append(f"{_images(count)} purified in {self.tiles:,} overlapping tiles of {square}")
        if count := self.ways["resize"]:
            said.append(f"{_images(count)} resized to {square} and back, which loses detail")
        if said and (count := self.ways["whole"]):
            said.append(f"{_images(count)} of the model's size {square}")
        return "; ".join(said) + "." if said else None


def _images(count: int) -> str:
    return f"{count:,} image{'s' if count != 1 else ''}"

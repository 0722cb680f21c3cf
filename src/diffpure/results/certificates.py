"""Certificates of a smoothed classifier: one row per image, and every number as a view of the rows. No torch here.

A row holds what the draws decided, by class; its class, bound and radius follow from that (`diffpure.smoothing`). With
r the radius of an image,

    certified accuracy at ρ    the share of images that are right, not abstained from, and have r ≥ ρ
    mean radius (ACR)          the mean of r over all images, with 0 where the class is wrong or there is none

Intervals are Wilson's at 95 %, over the images.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, final

from diffpure.errors import InputError
from diffpure.results.read import CERTIFICATES, check_header, check_titles, read_lines
from diffpure.results.rows import Rate, finite, sealed, unsealed, whole
from diffpure.results.text import aligned, as_html
from diffpure.smoothing import MOST, certify_counts, largest_radius

FORMAT: Final = 1  # of the header and the rows
STEP, LONGEST = 0.25, 16  # between the radii of a table, and how many steps it may have
_HEADER: Final = {
    "model": "table", "indices": "numbers", "sigma": "positive", "n0": "count", "n": "count", "alpha": "positive",
    "votes": "count", "seed": "whole", "per_call": "count", "threads": "count", "data": "text",
}  # fmt: skip
# More than any run has: a bound from a stranger's header must not take for ever.
_MOST: Final = {"alpha": math.nextafter(0.5, 0), "sigma": 1e3, "n0": MOST, "n": MOST}


@final
@dataclass(frozen=True, kw_only=True)
class CertificateRow:
    """What the draws said of one image, by its dataset index.

    selection, counts: how many of the n0 draws that choose, and of the n that count, decided for each class, in the
    order in which the classes first came; draws without a majority are in neither.   selected: the class that is
    certified or abstained from, if there is one.   count: its draws of n.   p: the lower bound of its probability.
    radius: ℓ2, in units of images in [0, 1].   prediction: the class, None for an abstention.
    network, classifier: calls that were counted.
    """

    image: int
    label: int
    selection: Mapping[int, int]
    counts: Mapping[int, int]
    n: int
    sigma: float
    selected: int | None
    count: int
    p: float
    radius: float
    prediction: int | None
    network: int = 0
    classifier: int = 0
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether the class is predicted, and is the label."""
        return self.prediction == self.label

    def certified(self, radius: float) -> bool:
        """Whether the image is right, and stays so within this radius."""
        return self.right and self.radius >= radius

    def line(self) -> str:
        """The row as one line of JSON with a checksum of everything but the time."""
        return sealed(asdict(self))

    @classmethod
    def of_draws(
        cls, image: int, label: int, selection: Mapping[int, int], counts: Mapping[int, int], about: Mapping[str, Any]
    ) -> CertificateRow:
        """The row that draws make, by class; about: the header of the run."""
        sigma, n = about["sigma"], about["n"]
        vote = certify_counts(selection, counts, n, sigma, about["alpha"])
        return cls(
            image=image, label=label, selection=dict(selection), counts=dict(counts), n=n, sigma=sigma, **asdict(vote)
        )

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> CertificateRow:
        """The row that a line of JSON held, if its checksum is right."""
        values = unsealed(data, _KINDS, "certificates")
        return cls(**{**values, **{key: _numbered(values[key]) for key in ("selection", "counts")}})


def _numbered(counts: Mapping[str, int]) -> dict[int, int]:
    return {int(k): count for k, count in counts.items()}


def _by_class(value: Any) -> bool:
    return isinstance(value, dict) and all(re.fullmatch(r"\d{1,9}", k) and whole(n) and n > 0 for k, n in value.items())


# What the fields of a row are, where a file holds them.
_KINDS: Final[dict[str, Callable[[Any], bool]]] = {
    **dict.fromkeys((f.name for f in fields(CertificateRow) if f.type == "int"), whole),
    **dict.fromkeys((f.name for f in fields(CertificateRow) if f.type == "float"), finite),
    **dict.fromkeys(("selected", "prediction"), lambda value: value is None or whole(value)),
    **dict.fromkeys(("selection", "counts"), _by_class),
}


def read_certificates(
    path: str | Path, on_bad: Callable[[str], None] | None = None
) -> tuple[dict[str, Any], list[CertificateRow]]:
    """The header and rows in a run's folder or file; a row not as it was written raises, or is told to `on_bad`."""
    return read_lines(path, _checked, CertificateRow.of, on_bad)


def _checked(header: Any, path: Path) -> dict[str, Any]:
    """The header, if it is one of this format."""
    if not isinstance(header, dict) or (header.get("kind"), header.get("format")) != (CERTIFICATES, FORMAT):
        raise InputError(f"{path} holds no certificates of format {FORMAT}, which `diffpure certify` writes.")
    check_header(header, _HEADER, path)
    check_titles({"the model": header["model"]}, path)
    if not isinstance(header.get("classes"), list) or not isinstance(header["model"]["title"], str):
        raise InputError(f"The header of {path} is damaged: it has no title of the model or no list of classes.")
    for key, most in _MOST.items():
        if not header[key] <= most:
            raise InputError(f"The header of {path} is damaged: its {key!r} is {header[key]}.")
    return header


@final
@dataclass(frozen=True)
class Certification:
    """What was certified: the header and rows of a run; every number is computed from the rows."""

    header: Mapping[str, Any]
    rows: tuple[CertificateRow, ...]
    folder: Path | None = None  # where the run lies, if it was kept

    @classmethod
    def of(cls, header: Mapping[str, Any], rows: Sequence[CertificateRow], folder: Path | None = None) -> Certification:
        """The certificates in the order of the header; a row that is no part of the run is refused."""
        place = {index: i for i, index in enumerate(header["indices"])}
        found = {row.image: row for row in rows}
        if len(found) < len(rows) or found.keys() - place.keys():
            raise InputError("There is a row that stands there twice or is no part of this run.")
        return cls(header, tuple(sorted(rows, key=lambda row: place[row.image])), folder)

    @classmethod
    def load(cls, path: str | Path) -> Certification:
        """The certificates in a run's folder or rows.jsonl."""
        header, rows = read_certificates(path)
        return cls.of(header, rows, Path(path) if Path(path).is_dir() else None)

    @property
    def complete(self) -> bool:
        """Whether every image has its row."""
        return len(self.rows) == len(self.header["indices"])

    @property
    def sigma(self) -> float:
        """The standard deviation of the smoothing noise, in units of images in [0, 1]."""
        return float(self.header["sigma"])

    @property
    def largest_radius(self) -> float:
        """The radius of an image on which all draws agree: no row can have more."""
        return largest_radius(self.sigma, self.header["n"], self.header["alpha"])

    @property
    def radii(self) -> tuple[float, ...]:
        """The radii of the table: in steps of 0.25 (wider for a large σ), to 0.75 or the largest that is possible."""
        step = STEP
        while self.largest_radius > LONGEST * step:
            step *= 2
        return tuple(step * i for i in range(max(3, math.floor(self.largest_radius / step)) + 1))

    def certified(self, radius: float = 0.0) -> Rate:
        """Certified accuracy at an ℓ2 radius; at 0 it is the accuracy of the smoothed classifier."""
        if not radius >= 0:
            raise InputError(f"A radius is 0 or more, got {radius}.")
        self._require()
        return Rate(sum(row.certified(radius) for row in self.rows), len(self.rows))

    @property
    def abstained(self) -> Rate:
        """The share of images without a prediction."""
        self._require()
        return Rate(sum(row.prediction is None for row in self.rows), len(self.rows))

    @property
    def mean_radius(self) -> float:
        """The average certified radius (ACR): wrong and abstained images count with 0."""
        self._require()
        return math.fsum(row.radius for row in self.rows if row.right) / len(self.rows)

    def _require(self) -> None:
        if not self.complete:
            done, total = len(self.rows), len(self.header["indices"])
            raise InputError(f"These certificates are unfinished: {done} of {total} images have one; resume the run.")

    def spent(self) -> dict[str, float]:
        """Counted calls and seconds of all rows together."""
        return {name: sum(getattr(row, name) for row in self.rows) for name in ("network", "classifier", "seconds")}

    def summary(self) -> dict[str, Any]:
        """Every number as plain data: what a run keeps beside its rows."""
        rates = {f"{radius:g}": self.certified(radius) for radius in self.radii}
        return {
            "certified": {key: {"value": rate.value, "interval": list(rate.interval)} for key, rate in rates.items()},
            "abstained": {"value": self.abstained.value, "interval": list(self.abstained.interval)},
            "mean radius": self.mean_radius,
            "largest radius": self.largest_radius,
            "spent": self.spent(),
        }

    def cell(self, radius: float) -> str:
        """Certified accuracy at a radius with its interval, or that the draws can certify no such radius."""
        return str(self.certified(radius)) if radius <= self.largest_radius else "0 % (needs more draws)"

    def table(self) -> list[list[str]]:
        """Certified accuracy by radius as rows of text, the first one the heading."""
        head = ["ℓ2 radius", "certified accuracy [95 % interval]", "images"]
        return [head, *([f"{r:.2f}", self.cell(r), f"{self.certified(r).correct:g}"] for r in self.radii)]

    @property
    def name(self) -> str:
        """Its given name, or what was certified."""
        return str(self.header.get("name") or self.header["model"]["title"])

    @property
    def heading(self) -> str:
        """What was certified, with which noise, on how many images."""
        about = self.header
        votes = f", majority of {about['votes']} reverse chains" if about["votes"] > 1 else ""
        draws = f"{about['n0']} + {about['n']:,} draws per image"
        return (
            f"{self.name}, smoothed with σ = {self.sigma:g}: certified on {len(self.rows)} images, "
            f"{draws}{votes}, α = {about['alpha']:g}, seed {about['seed']}"
        )

    def notes(self) -> list[str]:
        """The numbers beside the table, in sentences."""
        spent = self.spent()
        cost = f"{spent['network']:,} network calls, {spent['classifier']:,} classifier calls, {spent['seconds']:.0f} s"
        return [
            f"abstained: {self.abstained}; mean radius {self.mean_radius:.3f} (0 where wrong or abstained)",
            f"largest radius that {self.header['n']:,} draws can certify: {self.largest_radius:.3f}",
            f"spent: {cost}",
        ]

    def __str__(self) -> str:
        if not self.complete:
            return f"Unfinished certificates: {len(self.rows)} of {len(self.header['indices'])} images."
        return "\n".join([self.heading, "", *aligned(self.table()), "", *self.notes()])

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return as_html(self.heading, self.table(), self.notes()) if self.complete else html.escape(str(self))

    def report(self, out: str | Path, kind: str | None = None) -> None:
        """Write the page about them: html, md, csv, json, png or pdf, by the file's ending unless named."""
        # By the package's own door, as pages know results, but results know no pages.
        from diffpure import write_report

        write_report([self], out, kind)

"""Check a run of certificates, trusting nothing that can be computed again.

proven      rows: one for each image, as they were written; class, bound, radius and abstention follow from the counts,
            and the summary from the rows
            with the model and the images at hand: both are those that the header names, and the labels are theirs
with again  images chosen at random and certified anew have the same counts
claimed     that the model's draws gave these counts (without again), times, dates, versions, machine
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from diffpure.certificates.certify import IDENTITY, Certifying
from diffpure.evaluation.units import threads
from diffpure.results.certificates import CertificateRow, Certification, read_certificates
from diffpure.results.rows import SUMMARY
from diffpure.smoothing import certify_counts
from diffpure.verification.verify import CLAIMED, Verification, header_problems, remarks

PROVEN: Final = (
    "every image has one row, unedited, with as many draws as the header says",
    "class, bound, radius and abstention of every row follow from its counts",
    "certified accuracies, abstentions and the mean radius are those of the rows",
)
AT_HAND: Final = "the model, the images and the labels at hand are those that the header names"
NOT_AT_HAND: Final = "that the model, the images and the labels are those that the header names (not compared)"
AGAIN: Final = "{n} of {total} images, chosen at random and certified again, gave the same counts"
CLAIMED_DRAWS: Final = "that the model's draws gave these counts (`--again N` certifies N images again)"


def verify_certificates(
    folder: str | Path,
    work: Certifying | None = None,
    *,
    again: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check the certificates in a folder, against the model and images that they are of where those are at hand.

    again: how many images, chosen at random, to certify anew.
    """
    folder, problems = Path(folder), list[str]()
    header, rows = read_certificates(folder, on_bad=problems.append)
    problems += _row_problems(header, rows)
    problems += _summary_problems(folder, header, rows)
    if work is None:
        return Verification(len(rows), 0, tuple(problems), PROVEN, (NOT_AT_HAND, CLAIMED_DRAWS, *CLAIMED))
    if wrong := list(header_problems(header, work.header, IDENTITY)):
        return Verification(len(rows), 0, (*problems, *wrong))
    labels = dict(zip(header["indices"], work.labels.tolist(), strict=True))
    for row in rows:
        if row.image in labels and row.label != labels[row.image]:
            problems.append(f"The row of image {row.image} says label {row.label}, the data say {labels[row.image]}.")
    here, work = work.header, replace(work, header=header)
    chosen = random.SystemRandom().sample(range(len(labels)), min(again, len(labels)))
    by_image = {row.image: row for row in rows}
    for done, i in enumerate(chosen):
        with threads(header["threads"]):
            found = work.row(i)
        said = by_image.get(found.image)
        if said is None or replace(said, seconds=0.0) != replace(found, seconds=0.0):
            problems.append(f"Certified again, the row of image {found.image} is another one.")
        if progress is not None:
            progress(done + 1, len(chosen))
    extra = (AGAIN.format(n=len(chosen), total=len(labels)),) if chosen else ()
    claimed = CLAIMED if len(chosen) == len(labels) else (CLAIMED_DRAWS, *CLAIMED)
    said_of = tuple(remarks(header, here))
    return Verification(len(rows), 0, tuple(problems), (*PROVEN, AT_HAND, *extra), claimed, said_of)


def _row_problems(header: Mapping[str, Any], rows: Sequence[CertificateRow]) -> Iterator[str]:
    """Rows that are missing, double or foreign, and rows that do not follow from their counts."""
    counted, wanted = Counter(row.image for row in rows), set(header["indices"])
    for image, count in counted.items():
        if count > 1:
            yield f"There are {count} rows of image {image}."
        if image not in wanted:
            yield f"There is a row of image {image}, which is no part of this run."
    if missing := sorted(wanted - counted.keys()):
        yield f"{len(missing)} rows are missing, that of image {missing[0]} first."
    for row in rows:
        yield from _count_problems(header, row)


def _count_problems(header: Mapping[str, Any], row: CertificateRow) -> Iterator[str]:
    if row.n != header["n"] or row.sigma != header["sigma"]:
        yield f"The row of image {row.image} says n {row.n} and sigma {row.sigma}, which are not those of the header."
        return
    for what, draws, wanted in (("selection", row.selection, header["n0"]), ("counts", row.counts, header["n"])):
        drawn = sum(draws.values())
        if drawn > wanted or (drawn < wanted and header["votes"] == 1):  # chains without a majority decide for none
            yield f"The {what} in the row of image {row.image} are {drawn} draws, but the header says {wanted}."
            return
    for name, value in asdict(certify_counts(row.selection, row.counts, row.n, row.sigma, header["alpha"])).items():
        said = getattr(row, name)
        # Another machine's logarithm may differ in the last digits.
        same = math.isclose(said, value, rel_tol=1e-9, abs_tol=1e-9) if isinstance(value, float) else said == value
        if not same:
            yield f"The {name} in the row of image {row.image} is {said}, but its counts give {value}."


def _summary_problems(folder: Path, header: Mapping[str, Any], rows: Sequence[CertificateRow]) -> Iterator[str]:
    path = folder / SUMMARY
    if not path.is_file():
        yield f"The run has no {SUMMARY}: it was not finished."
        return
    try:
        said, true = json.loads(path.read_text("utf-8")), Certification.of(header, rows).summary()
        for key in ("certified", "abstained", "mean radius", "spent"):
            if said[key] != true[key]:
                yield f"What {SUMMARY} says under {key!r} does not follow from the rows."
    except (ValueError, KeyError, TypeError) as error:
        yield f"The numbers in {SUMMARY} cannot be compared with the rows ({error})."

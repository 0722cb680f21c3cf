"""Publish a run whose images may not be passed on: its rows and rates, and hashes in place of its images.

Only the files that hold no image are copied, by name: adversarial images, pictures and whatever else lies in the folder
stay behind. The rows are written last, so that what a kill leaves is no run; the same call then goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from diffpure.disk import locked, one_sentence, write_whole
from diffpure.errors import InputError
from diffpure.evaluation.store import IMAGES, read_tensors
from diffpure.models.checkpoints import digest
from diffpure.results.catalogue import describe_evaluation
from diffpure.results.read import holds_certificates
from diffpure.results.rows import ROWS, SUMMARY, WITHHELD
from diffpure.verification.files import attacked_units, verify_files
from diffpure.verification.withheld import Withheld, check_reason, holds_images, read_withheld

_LEFT: Final = (WITHHELD, SUMMARY)  # what a publication that was killed may leave


def publish(run: str | Path, out: str | Path, why: str) -> Path:
    """Copy a finished run without its images into a folder of the same name in `out`; why: a line that says the reason.

    Returns the new folder, which `verify` accepts as it accepts no other run without its adversarial images.
    """
    run, why = Path(run), check_reason(why)
    if holds_certificates(run):
        raise InputError(f"{run} holds certificates, which have no adversarial images; pass the folder on as it is.")
    found = describe_evaluation(run)
    if not found.result.complete or not (run / SUMMARY).is_file():
        raise InputError(f"{run} is not finished ({len(found.result.rows)} of {found.total} rows); evaluate it first.")
    if not holds_images(run) or not found.result.attacks:
        raise InputError(f"{run} holds no adversarial images that could be withheld.")
    target = Path(out) / run.resolve().name
    _refuse_taken(target)
    checked = verify_files(run)
    if not checked.passed:
        raise InputError(f"{run} does not verify, so that it is not published: {checked.problems[0]}")
    units = attacked_units(found.result.header, {row.key: row for row in found.result.rows})
    hashes = {unit.file: digest(read_tensors(run / IMAGES / unit.file)["z"]) for unit in units}
    with locked(target), one_sentence(target):
        _refuse_taken(target)  # by another process meanwhile
        write_whole(target / WITHHELD, Withheld(why, hashes).text().encode())
        read_withheld(target)  # whoever verifies can read it, or there will be no rows
        for name in (SUMMARY, ROWS):
            write_whole(target / name, (run / name).read_bytes())
    return target


def _refuse_taken(target: Path) -> None:
    """Refuse a folder that holds more than the leftovers of a publication that was killed."""
    with one_sentence(target):
        names = [entry.name for entry in target.iterdir()] if target.is_dir() else []
        taken = target.is_symlink() or (target.exists() and not target.is_dir())
    if taken or any(name not in _LEFT and not name.endswith(".part") for name in names):
        raise InputError(f"{target} is there already; publish into another folder.")

"""The settings of an output folder: written into it, so that images purified in two ways never share a folder unseen.

`.diffpure.json` holds the settings and, while an overwriting run is under way, that it is: until it has finished, the
folder holds results of both, and only another overwriting run may go on. A seed is recorded if the user gave it; one
that was drawn is not, since whoever knows it can predict the defence.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffpure.disk import one_sentence, write_whole
from diffpure.errors import InputError
from diffpure.files.names import RECORD, RESERVED, WORK


def claim(out: Path, settings: Mapping[str, Any], overwrite: bool) -> bool:
    """Record the settings in a folder; whether what is there was written with the same settings.

    Raises if the folder records others, unless they are to be overwritten.
    """
    wanted = json.loads(json.dumps(dict(settings)))
    there = _read(out / RECORD) if _holds_images(out) else None
    if overwrite:
        with one_sentence(out):
            shutil.rmtree(out / WORK, ignore_errors=True)
        _write(out, wanted, overwriting=True)
        return False
    if there is None:
        _write(out, wanted, overwriting=False)
        return False
    if there["overwriting"]:
        raise InputError(f"A run that was to overwrite {out} did not finish; finish it with --overwrite.")
    if changed := [key for key in {**there["settings"], **wanted} if there["settings"].get(key) != wanted.get(key)]:
        was, now = (_said(each.get(changed[0])) for each in (there["settings"], wanted))
        raise InputError(
            f"{out} holds images purified with {changed[0]} {was}, and this call has {now}; "
            "give another folder, or --overwrite to replace them."
        )
    return True


def finish(out: Path, settings: Mapping[str, Any], overwrite: bool) -> None:
    """Note that every image of a folder was written with its settings, and drop unfinished work."""
    if overwrite:
        _write(out, json.loads(json.dumps(dict(settings))), overwriting=False)
    shutil.rmtree(out / WORK, ignore_errors=True)


def _holds_images(out: Path) -> bool:
    """Whether anything but the record lies in a folder."""
    with one_sentence(out):
        return out.is_dir() and any(file.name not in RESERVED for file in out.iterdir())


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("settings"), dict) or "overwriting" not in found:
        raise InputError(
            f"{file} is damaged, so that nothing tells how the images there were made; give another folder."
        )
    return found


def _write(out: Path, settings: Mapping[str, Any], *, overwriting: bool) -> None:
    with one_sentence(out):
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"overwriting": overwriting, "settings": settings}, indent=1)
        write_whole(out / RECORD, text.encode() + b"\n")


def _said(value: object) -> str:
    return "not given" if value is None else str(value)

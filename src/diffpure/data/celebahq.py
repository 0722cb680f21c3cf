"""CelebA-HQ with attributes (Karras et al. 2018; Liu et al. 2015): 256 × 256 faces, label 1 where it is present.

A folder holds `images/` (or the images themselves), CelebA's list of attributes (`list_attr_celeba.txt`, or the
`CelebAMask-HQ-attribute-anno.txt` of the same form) and, for its official parts, `list_eval_partition.txt`.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from diffpure.data.folder import Files, existing, images_in
from diffpure.data.images import resize
from diffpure.errors import InputError, unknown

LISTS = ("list_attr_celeba.txt", "CelebAMask-HQ-attribute-anno.txt")
PARTS = {"train": "0", "val": "1", "test": "2"}


def read(root: str | Path, attribute: str, part: str | None = "val", *, attributes: str | Path | None = None) -> Files:
    """The faces of one official part (or all, for None) with one attribute, such as Eyeglasses, as the label."""
    root = existing(root)
    found = [root / name for name in LISTS if (root / name).is_file()]
    if attributes is None and not found:
        raise InputError(f"{root} has no list of attributes; {' or '.join(LISTS)} is accepted.")
    present = _attribute(Path(attributes) if attributes is not None else found[0], attribute)
    paths = images_in(root / "images" if (root / "images").is_dir() else root)
    if part is not None:
        paths = _part(paths, root / "list_eval_partition.txt", part)
    missing = [path.name for path in paths if path.stem not in present]
    if missing or not paths:
        raise InputError(f"{len(missing)} of the {len(paths)} images of {root} are not in the list of attributes.")
    return Files(tuple(paths), tuple(present[path.stem] for path in paths), ("absent", attribute), prepare)


def source(*, path: Path, attribute: str, part: str = "val") -> Files:
    """The source `celebahq` of a spec; the part "all" takes every image."""
    return read(path, attribute, None if part == "all" else part)


def prepare(image: Image.Image) -> Image.Image:
    """The paper's preparation: 256 × 256."""
    return resize(image, 256)


def _attribute(path: Path, attribute: str) -> dict[str, int]:
    """0 or 1 for each image, by its name without suffix (the lists say jpg where the files are png)."""
    try:
        _, header, *rows = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a list of attributes: a count, the names, then a row an image.") from error
    names = header.split()
    if attribute not in names:
        raise unknown("attribute", attribute, names)
    column = 1 + names.index(attribute)
    cells = [row.split() for row in rows if row.strip()]
    if any(len(row) != len(names) + 1 or row[column] not in ("-1", "0", "1") for row in cells):
        raise InputError(f"Every row of {path.name} is an image and {len(names)} values, -1 or 1.")
    return {Path(row[0]).stem: int(row[column] == "1") for row in cells}


def _part(paths: list[Path], path: Path, part: str) -> list[Path]:
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    if not path.is_file():
        raise InputError(f"The part {part!r} needs {path.name} beside the images; part=None takes all of them.")
    try:
        rows = [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
        numbers = {Path(name).stem: number for name, number in rows}
    except (OSError, ValueError) as error:
        raise InputError(f"Every row of {path.name} is an image and the number of its part.") from error
    return [file for file in paths if numbers.get(file.stem) == PARTS[part]]

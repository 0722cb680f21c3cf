"""ImageNet's validation set (Russakovsky et al. 2015), as the paper prepares it: Resize 256, CenterCrop 224.

Three layouts are read:

    class folders    root/n01440764/*.JPEG …, or root/val/…; a part of the classes is enough
    official         root/ILSVRC2012_val_00000001.JPEG …, with the devkit that maps its numbers to classes
    CSV              root/*.JPEG and rows of file name and label, a class number or an identifier like n01440764;
                     the column of the label and the number of the first class can be named; root/labels.csv is read
                     where neither a CSV nor the devkit is named

Labels are 0 … 999 in the order of the identifiers. The detour to the diffusion model's 256 × 256 is the purifier's.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module, resources
from pathlib import Path

from PIL import Image

from diffpure.data.folder import Files, by_class, check_csv, class_folders, existing, images_in, listed, read_labels
from diffpure.data.images import center_crop, resize
from diffpure.errors import InputError

GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


@cache
def identifiers() -> tuple[str, ...]:
    """The 1000 WordNet identifiers in the order of the labels."""
    return tuple(resources.files(__package__).joinpath("imagenet-wnids.txt").read_text("utf-8").split())


def source(
    *,
    path: Path,
    devkit: Path | None = None,
    labels: Path | None = None,
    label_column: str | None = None,
    label_offset: int = 0,
) -> Files:
    """The source `imagenet` of a spec."""
    if devkit is not None and labels is not None:
        raise InputError("`devkit` and `labels` both say where the labels of ImageNet are; give one of them.")
    check_csv(labels, label_column, label_offset)
    return read(path, devkit=devkit, labels=labels, column=label_column, offset=label_offset)


def read(
    root: str | Path,
    *,
    devkit: str | Path | None = None,
    labels: str | Path | None = None,
    column: str | None = None,
    offset: int = 0,
) -> Files:
    """The validation images of a folder in any of the three layouts; `column` and `offset` describe the CSV."""
    root = existing(root)
    if labels is None and devkit is None and (root / "labels.csv").is_file():
        labels = root / "labels.csv"
    if labels is not None:
        return _by_csv(root, Path(labels), column, offset)
    if devkit is not None:
        return _official(root, existing(devkit))
    inner = root / "val" if (root / "val").is_dir() else root
    index = {name: label for label, name in enumerate(identifiers())}
    known = [name for name in class_folders(inner) if name in index]
    if not known:
        raise InputError(f"{root} has no class folders such as n01440764; a flat folder needs the devkit or a CSV.")
    return by_class(inner, {name: index[name] for name in known}, identifiers(), prepare)


def prepare(image: Image.Image) -> Image.Image:
    """The paper's preparation: the shorter side to 256, then the middle 224 × 224."""
    return center_crop(resize(image, 256), 224)


def _by_csv(root: Path, path: Path, column: str | None, offset: int) -> Files:
    rows = read_labels(path, column)
    index = {name: label for label, name in enumerate(identifiers())}
    index |= {str(label + offset): label for label in range(len(index))}
    wrong = [label for label in rows.values() if label not in index]
    if wrong:
        accepted = f"{offset} … {offset + 999}"
        raise InputError(f"{path.name} has the label {wrong[0]!r}; accepted are {accepted} and names like n01440764.")
    return Files(listed(root, rows), tuple(index[label] for label in rows.values()), identifiers(), prepare)


def _official(root: Path, devkit: Path) -> Files:
    """The flat folder: image k has the class of line k of the ground truth, numbered as meta.mat numbers them."""
    paths = images_in(root)
    found = sorted(devkit.rglob(GROUND_TRUTH)), sorted(devkit.rglob("meta.mat"))
    if not all(found):
        raise InputError(f"{devkit} is not the ILSVRC2012 devkit: it lacks {GROUND_TRUTH} or meta.mat.")
    index = {name: label for label, name in enumerate(identifiers())}
    wnid_of = _meta(found[1][0])
    try:
        labels = tuple(index[wnid_of[int(number)]] for number in found[0][0].read_text("utf-8").split())
    except (ValueError, KeyError) as error:
        raise InputError(f"{GROUND_TRUTH} holds something else than the numbers of classes ({error}).") from error
    if len(labels) != len(paths):
        raise InputError(f"{root} has {len(paths)} images, but the ground truth of the devkit has {len(labels)} lines.")
    return Files(tuple(paths), labels, identifiers(), prepare)


def _meta(path: Path) -> dict[int, str]:
    """ILSVRC number to identifier, for the 1000 classes without children."""
    try:
        loadmat = import_module("scipy.io").loadmat
    except ImportError as error:
        raise InputError("The devkit's meta.mat needs scipy; install it, or use class folders or a CSV.") from error
    try:
        synsets = loadmat(path, squeeze_me=True)["synsets"]
        return {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in synsets if int(s["num_children"]) == 0}
    except Exception as error:  # scipy's reader fails in ways of its own
        raise InputError(f"{path} is damaged or not the meta.mat of ILSVRC2012.") from error

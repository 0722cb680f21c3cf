"""Sources of images: every source gives the same kind of dataset, reads only what is chosen, and refuses the rest."""

from __future__ import annotations

import contextlib
import io
import pickle
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import diffpure
from diffpure.data import images as door
from diffpure.data import samples
from diffpure.data.choice import first
from diffpure.data.cifar10 import CLASSES
from diffpure.data.sources import SOURCES, Dataset, DataSpec, load
from diffpure.data.subsets import SUBSETS, draw
from diffpure.errors import InputError


def picture(seed: int, side: int = 8) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def pixels(seed: int, side: int = 8) -> torch.Tensor:
    return torch.from_numpy(np.array(picture(seed, side))).permute(2, 0, 1).float() / 255


def photos(root: Path, *names: str, side: int = 8) -> Path:
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(seed, side).save(root / name)
    return root


def refused(message: str, table: dict[str, Any], base: Path | None = None) -> None:
    """What is wrong with a [data] table or its files is told in one sentence."""
    with pytest.raises(InputError, match=message) as error:
        load(DataSpec(**table), base)
    assert str(error.value).endswith(".")
    assert ". " not in str(error.value)
    assert "\n" not in str(error.value)


# Every source as a [data] table beside its files: images 2 and 0 of three, with their labels.


def _samples(root: Path) -> dict[str, Any]:
    return {"source": "cifar10-samples"}


def _cifar10(root: Path) -> dict[str, Any]:
    rows = np.random.default_rng(0).integers(0, 10, (3, 3073), dtype=np.uint8)
    (root / "test_batch.bin").write_bytes(rows.tobytes())
    return {"source": "cifar10", "path": "."}


def _imagenet(root: Path) -> dict[str, Any]:
    photos(root / "val", "n01440764/a.JPEG", "n01440764/b.JPEG", "n02123045/c.JPEG", side=256)
    return {"source": "imagenet", "path": "."}


def _celebahq(root: Path) -> dict[str, Any]:
    photos(root / "faces" / "images", "1.png", "2.png", "3.png", side=256)
    (root / "faces" / "list_attr_celeba.txt").write_text("3\nHat Smiling\n1.jpg 1 -1\n2.jpg 1 -1\n3.jpg 1 1\n")
    return {"source": "celebahq", "path": "faces", "attribute": "Smiling", "part": "all"}


def _folder(root: Path) -> dict[str, Any]:
    photos(root / "photos", "cat/a.png", "cat/b.png", "dog/c.png")
    return {"source": "folder", "path": "photos"}


def _npz(root: Path) -> dict[str, Any]:
    np.savez(root / "data.npz", images=np.arange(48, dtype=np.uint8).reshape(3, 4, 4, 1), labels=[0, 0, 1])
    return {"source": "npz", "path": "data.npz"}


def _file(root: Path) -> dict[str, Any]:
    save_file({"images": torch.rand(3, 3, 4, 4), "labels": torch.tensor([0, 0, 1])}, root / "images.safetensors")
    return {"source": "file", "path": "images.safetensors"}


MEMBERS = {"cifar10-samples": _samples, "cifar10": _cifar10, "imagenet": _imagenet, "celebahq": _celebahq,
           "folder": _folder, "npz": _npz, "file": _file}  # fmt: skip


def test_every_source_is_tested() -> None:
    assert set(MEMBERS) == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_keeps_the_contract(name: str, tmp_path: Path) -> None:
    table = MEMBERS[name](tmp_path)
    found = load(DataSpec(**table, images=[2, 0]), tmp_path)
    assert isinstance(found, Dataset)
    assert found.indices == (2, 0)
    assert found.images.dtype == torch.float32
    assert found.labels.dtype == torch.int64
    assert found.images.shape[0] == 2
    assert found.labels.shape == (2,)
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    assert not found.class_names or found.labels.max() < len(found.class_names)
    other = load(DataSpec(**table, images="0-2"), tmp_path)
    assert torch.equal(other.images[[2, 0]], found.images)
    assert torch.equal(other.labels[[2, 0]], found.labels)
    size = 500 if name == "cifar10-samples" else 3
    assert len(load(DataSpec(**table, images="all"), tmp_path).labels) == size
    assert load(DataSpec(**table), tmp_path).indices == tuple(range(min(size, 64)))
    refused("has [35]0*0? images, so there is no image 9999999999", {**table, "images": "0-9999999999"}, tmp_path)


def test_embedded_images_are_the_default_and_stand_at_the_front_door() -> None:
    found = load(DataSpec())
    images, labels = diffpure.samples(64)
    assert torch.equal(found.images, images)
    assert torch.equal(found.labels, labels)
    assert found.class_names == diffpure.class_names() == CLASSES
    assert samples.samples is diffpure.samples


@pytest.mark.parametrize("images", [[0, 1, 2, 7, 8], (0, 1, 2, 7, 8), "0-2, 7-8", " 0-1,2 , 7,8"])
def test_equal_choices_are_equal_specs(images: Any) -> None:
    assert DataSpec(images=images) == DataSpec(images="0-2, 7-8")
    assert load(DataSpec(images=images)).indices == (0, 1, 2, 7, 8)


def test_the_first_images_of_a_choice_are_a_choice() -> None:
    assert first("3-9, 20-29", 8) == "3-9, 20"
    assert first("all", 5) == "0-4"
    assert first("0-99999999999999", 3) == "0-2"  # never expanded
    with pytest.raises(InputError, match="has 17 images, fewer than 18"):
        first("3-9, 20-29", 18)


def test_the_default_choice_is_the_same_spec_as_no_choice() -> None:
    assert DataSpec(images="0-63") == DataSpec(images=tuple(range(64))) == DataSpec()
    whole = DataSpec(source="cifar10", subset="cifar10/paper")
    assert DataSpec(source="cifar10", subset="cifar10/paper", images="all") == whole
    assert DataSpec(source="cifar10", subset="cifar10/paper", images="0-63") != whole


@pytest.mark.parametrize(
    "images", [2.5, 3, -1, [-1], [1.0], [True], ["0"], [], "", "1-", "-1", "9-3", "0..3", "a", {"a": 1}, "1" * 5000]
)
def test_what_is_no_choice_of_images_is_refused(images: Any) -> None:
    refused(r'^Images are "all", ranges such as "0-63, 100-109", or a list of indices from 0, got ', {"images": images})


@pytest.mark.parametrize("images", ["0-9, 5", "3, 3", [4, 4], "0-9999999999, 0"])
def test_an_image_chosen_twice_is_refused(images: Any) -> None:
    refused("names image [0-9]+ twice|there is no image 9999999999", {"images": images})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"source": "cifar"}, "Unknown source of images 'cifar'; did you mean 'cifar10'"),
        ({"source": 5}, "Unknown source of images 5"),
        ({"path": 5}, "`path` is a text, got 5"),
        ({"source": "folder", "path": "a", "size": 2.5}, "`size` is a positive whole number, got 2.5"),
        ({"source": "folder", "path": "a", "size": -3}, "`size` is a positive whole number, got -3"),
        ({"source": "npz", "path": "a", "label_offset": "1"}, "`label_offset` is a whole number, got '1'"),
        ({"path": "a"}, "'cifar10-samples' does not take `path`; its keys are images, subset"),
        ({"source": "npz", "path": "a", "attribute": "x"}, "'npz' does not take `attribute`; its keys are .*path"),
        ({"source": "folder"}, "The source 'folder' needs `path`"),
        ({"source": "celebahq", "path": "a"}, "The source 'celebahq' needs `attribute`"),
        ({"subset": "cifar10/paper"}, "'cifar10/paper' is not one of the source 'cifar10-samples'"),
        ({"source": "cifar10", "subset": "imagenet/paper"}, "is not one of the source 'cifar10'"),
        ({"source": "cifar10", "subset": "cifar10/all"}, "Unknown subset 'cifar10/all'.*cifar10/corrected"),
        ({"source": "cifar10", "subset": 7}, "`subset` is a text, got 7"),
    ],
)
def test_a_wrong_table_is_refused_when_it_is_written(table: dict[str, Any], message: str) -> None:
    refused(message, table)


def test_a_path_object_is_a_path(tmp_path: Path) -> None:
    assert DataSpec(source="folder", path=tmp_path).path == str(tmp_path)  # type: ignore[arg-type]


def test_only_the_chosen_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos(tmp_path, *(f"cat/{i:03}.png" for i in range(50)))
    opened: list[str] = []
    real = door.open_image
    monkeypatch.setattr(
        door, "open_image", lambda source, *a, **k: (opened.append(Path(source).name), real(source, *a, **k))[1]
    )
    found = load(DataSpec(source="folder", path=str(tmp_path), images="7, 3"))
    assert opened == ["007.png", "003.png"]
    assert torch.equal(found.images[0], pixels(7))


# Subsets.


def whole_cifar10(root: Path) -> torch.Tensor:
    """A test set of 10,000 images whose labels say which image it is."""
    rows = np.zeros((10_000, 3073), np.uint8)
    rows[:, 0] = np.arange(10_000) % 10
    rows[:, 1] = np.arange(10_000) // 256
    rows[:, 2] = np.arange(10_000) % 256
    (root / "test_batch.bin").write_bytes(rows.tobytes())
    return torch.arange(10_000) % 10


def test_a_subset_by_name_keeps_the_indices_of_its_source(tmp_path: Path) -> None:
    labels = whole_cifar10(tmp_path)
    table = {"source": "cifar10", "path": str(tmp_path)}
    for name, members in {
        "cifar10/paper": SUBSETS["cifar10"].paper(),
        "cifar10/paper-unique": SUBSETS["cifar10"].unique(),
        "cifar10/corrected": SUBSETS["cifar10"].corrected(),
        "cifar10-bpda/paper": SUBSETS["cifar10-bpda"].paper(),
        "cifar10/seed-3": draw(10_000, 64, 3),
    }.items():
        found = load(DataSpec(**table, subset=name))
        assert found.indices == members
        assert torch.equal(found.labels, labels[list(members)])
    few = load(DataSpec(**table, subset="cifar10/paper", images="1, 0"))
    assert few.indices == SUBSETS["cifar10"].paper()[1::-1]
    refused(
        "'cifar10/paper' has 512 images, so there is no image 512",
        {**table, "subset": "cifar10/paper", "images": "512"},
    )


def test_a_subset_of_another_size_of_source_is_refused(tmp_path: Path) -> None:
    table = _cifar10(tmp_path)
    refused("is one of 10000 images, but the source has 3", {**table, "subset": "cifar10/paper"}, tmp_path)
    faces = _celebahq(tmp_path)
    refused("A subset has between 1 and 3 images", {**faces, "subset": "celebahq/seed-0"}, tmp_path)


# Labels in CSV files, as people have them.


def nips2017(root: Path) -> dict[str, Any]:
    """The columns of the NIPS 2017 images: names without suffix, labels that count from 1."""
    photos(root / "images", "0c7ac.png", "f43fb.png", side=16)
    (root / "dev.csv").write_text(
        "﻿ImageId,URL,x1,TrueLabel,TargetClass\nf43fb,https://a/b.jpg,0,1,9\n0c7ac,https://a/c.jpg,0.5,306,779\n"
    )
    return {"source": "folder", "path": "images", "labels": "dev.csv", "label_column": "TrueLabel", "label_offset": 1}


def test_labels_stand_in_any_column_and_may_count_from_one(tmp_path: Path) -> None:
    table = nips2017(tmp_path)
    found = load(DataSpec(**table, size=8), tmp_path)
    assert found.labels.tolist() == [0, 305]
    assert found.images.shape == (2, 3, 8, 8)
    assert torch.equal(load(DataSpec(**table), tmp_path).images[0], pixels(1, 16))
    other = load(DataSpec(**table | {"label_column": "TargetClass"}), tmp_path)
    assert other.labels.tolist() == [8, 778]
    refused("Unknown column 'Label'.*TrueLabel", table | {"label_column": "Label"}, tmp_path)
    refused(r"dev\.csv has the label 1, which is below the label_offset 2", table | {"label_offset": 2}, tmp_path)


def test_imagenet_labels_that_count_from_one(tmp_path: Path) -> None:
    table = nips2017(tmp_path) | {"source": "imagenet"}
    found = load(DataSpec(**table), tmp_path)
    assert found.labels.tolist() == [0, 305]
    assert found.class_names[0] == "n01440764"
    refused("has the label '1'; accepted are 307 … 1306", table | {"label_offset": 307}, tmp_path)
    refused(
        "describe a CSV; name it with `labels`", {"source": "imagenet", "path": "images", "label_offset": 1}, tmp_path
    )


def test_labels_that_do_not_fit_the_images_are_refused(tmp_path: Path) -> None:
    photos(tmp_path, "a.png", "b.png", "c.png")
    table = {"source": "folder", "path": ".", "labels": "l.csv"}
    for text, message in {
        "a.png,0\nb.png,1\n": r"1 of the images in .* have no label, c\.png first",
        "a.png,0\nb.png,1\nc.png,1\nd.png,1\n": r"lacks 1 of the 4 listed images, d\.png first",
        "a.png,0\na.png,1\nc.png,1\n": r"l\.csv names a\.png twice",
        "a.png,0\nb.png\nc.png,1\n": r"Every row of l\.csv is a file name and a label",
        "file,label\n": r"l\.csv has no row",
    }.items():
        (tmp_path / "l.csv").write_text(text)
        refused(message, table, tmp_path)
    (tmp_path / "l.csv").write_text("a,0\nb,1\nc.png,2\n")
    assert load(DataSpec(**table), tmp_path).labels.tolist() == [0, 1, 2]
    picture(0).save(tmp_path / "a.jpg")
    refused(r"a may be a\.jpg or a\.png; write the name with its suffix", table, tmp_path)


def test_names_of_classes_in_a_csv_are_kept(tmp_path: Path) -> None:
    photos(tmp_path, "a.png", "b.png")
    (tmp_path / "l.csv").write_text("label,file\nzebra,a.png\nant,b.png\n")
    table: dict[str, Any] = {"source": "folder", "path": ".", "labels": "l.csv", "label_column": "label"}
    found = load(DataSpec(**table), tmp_path)
    assert found.labels.tolist() == [1, 0]
    assert found.class_names == ("ant", "zebra")
    refused("to which no label_offset applies", table | {"label_offset": 1}, tmp_path)


# Arrays.


@pytest.mark.parametrize("names", [("images", "labels"), ("x", "y"), ("x_test", "y_test")])
@pytest.mark.parametrize("shape", [(5, 28, 28), (5, 6, 7, 3), (5, 3, 6, 7), (5, 6, 7, 1), (5, 1, 6, 7)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.float64])
def test_arrays_of_every_shape_and_type(tmp_path: Path, names: tuple[str, str], shape: Any, kind: Any) -> None:
    values = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    stored = values if kind is np.uint8 else (values / 255).astype(kind)
    np.savez_compressed(tmp_path / "a.npz", **{names[0]: stored, names[1]: np.array([[4], [3], [2], [1], [0]])})
    found = load(DataSpec(source="npz", path="a.npz", images=[3, 1]), tmp_path)
    expected = torch.from_numpy(values).float() / 255
    expected = expected[:, None] if len(shape) == 3 else expected.movedim(-1, 1) if shape[-1] in (1, 3) else expected
    assert torch.allclose(found.images, expected[[3, 1]], atol=1e-7)
    assert found.labels.tolist() == [1, 3]


def bad_arrays() -> dict[str, tuple[dict[str, Any], str]]:
    good = np.zeros((3, 4, 4, 3), np.uint8)
    return {
        "fewer labels": ({"images": good, "labels": [0, 1]}, "has 3 images but 2 labels"),
        "no labels": ({"images": good}, r"a\.npz holds images, but images and labels are accepted as images and"),
        "float labels": ({"images": good, "labels": [0.0, 1, 2]}, "is no array|one whole number per image"),
        "16-bit": ({"images": good.astype(np.uint16), "labels": [0, 1, 2]}, "are uint16; 8-bit numbers and floats"),
        "too bright": ({"images": good + 7.0, "labels": [0, 1, 2]}, "got values from 7 to 7"),
        "not finite": ({"images": good * np.nan, "labels": [0, 1, 2]}, "NaN or infinite"),
        "flat": ({"images": good.reshape(3, -1), "labels": [0, 1, 2]}, r"have the shape \(3, 48\)"),
        "empty": ({"images": good[:0], "labels": np.zeros(0, int)}, "is no array of numbers"),
        "text": ({"images": np.array(["a"]), "labels": [0]}, "is no array of numbers"),
        "objects": ({"images": np.array([None]), "labels": [0]}, "is no array of numbers|damaged"),
        "columns": ({"images": np.asfortranarray(good), "labels": [0, 1, 2]}, "numpy.ascontiguousarray"),
        "below zero": ({"images": good, "labels": [-1, 0, 1]}, "has the label -1, which is below the label_offset 0"),
    }


@pytest.mark.parametrize("name", bad_arrays())
def test_arrays_that_are_no_dataset_are_refused(tmp_path: Path, name: str) -> None:
    arrays, message = bad_arrays()[name]
    np.savez(tmp_path / "a.npz", **arrays)
    refused(message, {"source": "npz", "path": "a.npz"}, tmp_path)


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    table = {"source": "npz", "path": "a.npz"}
    refused("There is no npz file", table, tmp_path)
    file = tmp_path / "a.npz"
    file.write_bytes(b"no")
    refused("damaged or no npz file", table, tmp_path)
    np.savez(file, images=np.zeros((3, 40, 40, 3), np.uint8), labels=[0, 1, 2])
    file.write_bytes(file.read_bytes()[:2000])
    refused("damaged or no npz file", table, tmp_path)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + b"\xff" * 20)
        archive.writestr("labels.npy", b"")
    refused("damaged or no npz file", table, tmp_path)


def test_a_header_that_promises_too_much_is_not_believed(tmp_path: Path) -> None:
    """A header that promises 4 TB makes nobody allocate them."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (4, 10**6, 10**6)})
    small = io.BytesIO()
    np.save(small, np.arange(4))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", header.getvalue() + bytes(1000))
        archive.writestr("labels.npy", small.getvalue())
    refused("damaged or no npz file", {"source": "npz", "path": "a.npz", "images": "1"}, tmp_path)


def damaged(data: bytes, seed: int) -> bytes:
    """The bytes with some of them changed, and sometimes cut short."""
    draw = np.random.default_rng(seed)
    spoilt = bytearray(data)
    for place in draw.integers(0, len(spoilt), draw.integers(1, 8)):
        spoilt[place] = draw.integers(0, 256)
    return bytes(spoilt[: draw.integers(1, len(spoilt))] if draw.random() < 0.3 else spoilt)


@pytest.mark.parametrize("name", ["npz", "file", "cifar10", "celebahq", "folder"])
def test_damage_of_any_kind_gives_images_or_one_sentence(name: str, tmp_path: Path) -> None:
    table = MEMBERS[name](tmp_path)
    file = {"celebahq": "faces/list_attr_celeba.txt", "folder": "photos/cat/a.png", "cifar10": "test_batch"}.get(name)
    target = tmp_path / (file or table["path"])
    if name == "cifar10":  # the pickled form
        (tmp_path / "test_batch.bin").unlink()
        target.write_bytes(pickle.dumps({b"data": np.zeros((3, 3072), np.uint8), b"labels": [1, 2, 3]}, protocol=2))
    whole = target.read_bytes()
    for seed in range(120):
        target.write_bytes(damaged(whole, seed))
        with contextlib.suppress(InputError):
            assert torch.isfinite(load(DataSpec(**table, images=[0]), tmp_path).images).all()


@pytest.mark.parametrize("path", ["a" * 5000, "a\0b", "\ud800", ""])
@pytest.mark.parametrize("source", ["npz", "file", "folder", "imagenet"])
def test_odd_paths_are_no_paths(source: str, path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        load(DataSpec(source=source, path=path), tmp_path)


def test_tensors_that_are_no_dataset_are_refused(tmp_path: Path) -> None:
    table, file = {"source": "file", "path": "a.safetensors"}, tmp_path / "a.safetensors"
    refused("There is no safetensors file", table, tmp_path)
    file.write_bytes(b"no")
    refused("damaged or no safetensors file", table, tmp_path)
    for tensors, message in [
        ({"x": torch.zeros(2)}, "holds x, but `images` and `labels` are wanted"),
        ({"images": torch.zeros(2, 3, 4, 4), "labels": torch.zeros(1, dtype=torch.long)}, "but 1 labels"),
        ({"images": torch.zeros(2, 3, 4, 4), "labels": torch.zeros(2)}, "are whole numbers"),
        ({"images": torch.full((2, 3, 4, 4), 9.0), "labels": torch.zeros(2, dtype=torch.long)}, "from 9 to 9"),
    ]:
        save_file(tensors, file)
        refused(message, table, tmp_path)


def test_the_page_names_every_source_every_key_and_every_subset() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models-and-data.md").read_text()
    wanted = [*SOURCES, *(field.name for field in fields(DataSpec)), *(f"{family}/paper" for family in SUBSETS)]
    assert [name for name in wanted if f"`{name}`" not in page] == []

"""Image files at the door, and the folders of ImageNet, CelebA-HQ and anybody, with the paper's subsets."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffpure.data import celebahq, folder, imagenet
from diffpure.data.images import center_crop, read_image, read_rgb, resize, to_tensor
from diffpure.data.subsets import SUBSETS, draw, subset
from diffpure.data.subsets import celebahq as celebahq_subset
from diffpure.errors import InputError


def picture(width: int = 12, height: int = 8, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def saved(path: Path, image: Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


def test_plain_files_and_their_bytes_are_read_exactly(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", picture())
    for source in (path, str(path), path.read_bytes()):
        x = read_image(source)
        assert x.dtype == torch.float32
        assert torch.equal(x, as_tensor(picture()))


def test_every_colour_mode_becomes_rgb(tmp_path: Path) -> None:
    image = picture()
    grey = image.convert("L")
    x = read_image(saved(tmp_path / "grey.png", grey))
    assert torch.equal(x, as_tensor(grey.convert("RGB")))
    assert read_image(saved(tmp_path / "palette.png", image.convert("P"))).shape == (3, 8, 12)
    assert read_image(saved(tmp_path / "cmyk.jpg", image.convert("CMYK"))).shape == (3, 8, 12)
    assert read_image(saved(tmp_path / "bits.png", image.convert("1"))).unique().tolist() == [0, 1]


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    clear = picture().convert("RGBA")
    clear.putalpha(0)
    assert torch.equal(read_image(saved(tmp_path / "clear.png", clear)), torch.ones(3, 8, 12))
    clear.putalpha(255)
    assert torch.equal(read_image(saved(tmp_path / "solid.png", clear)), as_tensor(picture()))


def test_sixteen_bits_keep_their_precision(tmp_path: Path) -> None:
    values = np.array([[0, 1, 256, 65535]], dtype=np.uint16)
    path = saved(tmp_path / "deep.png", Image.fromarray(values))
    assert torch.allclose(read_image(path)[0], torch.from_numpy(values.astype(np.float32)) / 65535, atol=1e-8)
    assert np.asarray(read_rgb(path))[0, :, 0].tolist() == [0, 0, 1, 255]


def test_the_orientation_of_the_camera_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270°
    path = saved(tmp_path / "turned.png", picture(), exif=exif)
    assert torch.equal(read_image(path), as_tensor(picture().rotate(270, expand=True)))


def truncated(path: Path) -> None:
    buffer = io.BytesIO()
    picture(64, 64).save(buffer, "PNG")
    path.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])


def header(side: int) -> bytes:
    """A PNG that claims a size and holds nothing."""
    content = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + content + struct.pack(">I", zlib.crc32(b"IHDR" + content))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", 0)


def large_header(path: Path) -> None:
    path.write_bytes(header(9_000))


def enormous_header(path: Path) -> None:
    path.write_bytes(header(60_000))


def not_finite(path: Path) -> None:
    Image.fromarray(np.full((2, 2), np.nan, np.float32)).save(path, "TIFF")


def out_of_range(path: Path) -> None:
    Image.fromarray(np.full((2, 2), 7, np.float32)).save(path, "TIFF")


def text(path: Path) -> None:
    path.write_text("no image")


def absent(path: Path) -> None:
    pass


BAD: dict[Callable[[Path], None], str] = {
    truncated: r"x\.png is damaged or cut short",
    enormous_header: r"x\.png is too large; at most 64,000,000 pixels",
    large_header: r"x\.png says it is 9000×9000 pixels; at most 64,000,000",
    not_finite: r"x\.png holds NaN or infinite values",
    out_of_range: r"x\.png has values outside its range",
    text: r"x\.png is not an image that can be read",
    absent: r"There is no image file x\.png\.",
}


@pytest.mark.parametrize("write", BAD, ids=lambda write: write.__name__)
def test_a_bad_file_is_refused_in_one_sentence(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "x.png")
    with pytest.raises(InputError, match=BAD[write]) as error:
        read_image(tmp_path / "x.png")
    assert str(error.value).endswith(".")
    assert ". " not in str(error.value)


def test_the_papers_preparation_has_torchvisions_sizes() -> None:
    assert resize(picture(500, 375), 256).size == (341, 256)
    assert resize(picture(300, 401), 256).size == (256, 342)
    crop = np.asarray(center_crop(picture(341, 256), 224))
    assert np.array_equal(crop, np.asarray(picture(341, 256))[16:240, 58:282])
    assert imagenet.prepare(picture(500, 375)).size == (224, 224)


def photos(root: Path, *names: str, size: tuple[int, int] = (20, 30)) -> None:
    for seed, name in enumerate(names):
        saved(root / name, picture(*size, seed=seed))


def test_a_folder_of_classes(tmp_path: Path) -> None:
    photos(tmp_path, "dog/b.png", "dog/a.jpg", "cat/c.png", ".cache/d.png")
    files = folder.read(tmp_path, size=16)
    assert files.classes == ("cat", "dog")
    assert [path.name for path in files.paths] == ["c.png", "a.jpg", "b.png"]
    images, labels = files.batch([2, 0])
    assert images.shape == (2, 3, 16, 16)
    assert labels.tolist() == [1, 0]
    assert torch.equal(images[1], to_tensor(center_crop(resize(picture(20, 30, seed=2), 16), 16)))
    with pytest.raises(InputError, match=r"Indices are in 0 … 2, at least one, got \[3\]"):
        files.batch([3])


def test_a_flat_folder_with_a_csv(tmp_path: Path) -> None:
    photos(tmp_path / "images", "a.png", "b.png", "sub/c.png")
    table = tmp_path / "labels.csv"
    table.write_text("file,label\na.png,zebra\nsub/c.png,ant\nb.png,zebra\n")
    files = folder.read(tmp_path / "images", labels=table)
    assert files.labels == (1, 0, 1)
    table.write_text("a.png,7\nb.png,3\n")
    assert folder.read(tmp_path / "images", labels=table).labels == (7, 3)
    table.write_text("gone.png,7\n")
    with pytest.raises(InputError, match=r"lacks 1 of the 1 listed images, gone\.png first"):
        folder.read(tmp_path / "images", labels=table)
    table.write_text("a.png\n")
    with pytest.raises(InputError, match=r"Every row of labels\.csv is a file name and a label"):
        folder.read(tmp_path / "images", labels=table)


def test_folders_that_are_no_dataset_say_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no folder"):
        folder.read(tmp_path / "gone")
    with pytest.raises(InputError, match="has no class folders; give a CSV"):
        folder.read(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(InputError, match="hold no image"):
        folder.read(tmp_path)
    photos(tmp_path, "cat/a.png")
    saved(tmp_path / "cat" / "b.png", picture(5, 5))
    with pytest.raises(InputError, match="Images of a batch have one size"):
        folder.read(tmp_path).batch([0, 1])
    with pytest.raises(InputError, match="has no class folders such as n01440764"):
        imagenet.read(tmp_path)


def test_imagenet_class_folders_have_the_official_labels(tmp_path: Path) -> None:
    assert len(set(imagenet.identifiers())) == 1000
    assert list(imagenet.identifiers()) == sorted(imagenet.identifiers())
    photos(tmp_path, "val/n02123045/a.JPEG", "val/n01440764/b.JPEG", "val/other/c.JPEG", size=(300, 260))
    files = imagenet.read(tmp_path)
    assert files.labels == (0, 281)  # a tench, and the tabby cat that is class 281 everywhere
    assert files.batch([0, 1])[0].shape == (2, 3, 224, 224)


def test_imagenet_official_layout_with_its_devkit(tmp_path: Path) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    photos(tmp_path / "val", *(f"ILSVRC2012_val_0000000{k}.JPEG" for k in (1, 2)), size=(260, 260))
    data = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("num_children", "O")]
    synsets = np.array([(1, "n02123045", 0), (2, "n01440764", 0), (1001, "n00000001", 3)], dtype=fields)
    scipy_io.savemat(data / "meta.mat", {"synsets": synsets})
    (data / imagenet.GROUND_TRUTH).write_text("2\n1\n")
    assert imagenet.read(tmp_path / "val", devkit=tmp_path).labels == (0, 281)
    (data / imagenet.GROUND_TRUTH).write_text("2\n")
    with pytest.raises(InputError, match="has 2 images, but the ground truth of the devkit has 1 lines"):
        imagenet.read(tmp_path / "val", devkit=tmp_path)
    with pytest.raises(InputError, match="is not the ILSVRC2012 devkit"):
        imagenet.read(tmp_path / "val", devkit=tmp_path / "val")


def test_imagenet_flat_folder_with_kaggles_csv(tmp_path: Path) -> None:
    photos(tmp_path, "ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG", size=(260, 260))
    table = tmp_path / "LOC_val_solution.csv"
    table.write_text(
        "ImageId,PredictionString\nILSVRC2012_val_00000002,n01440764 1 2 3 4 n01440764 5 6 7 8\n"
        "ILSVRC2012_val_00000001,281\n"
    )
    assert imagenet.read(tmp_path, labels=table).labels == (0, 281)
    table.with_name("labels.csv").write_text("file,class\nILSVRC2012_val_00000001,7\nILSVRC2012_val_00000002,8\n")
    assert imagenet.read(tmp_path).labels == (7, 8)  # a CSV of that name need not be named
    table.write_text("ILSVRC2012_val_00000001,cat\n")
    with pytest.raises(InputError, match="has the label 'cat'"):
        imagenet.read(tmp_path, labels=table)


def celebahq_folder(root: Path) -> Path:
    photos(root, "images/000001.png", "images/000004.png", "images/000009.jpg", size=(300, 300))
    (root / "list_attr_celeba.txt").write_text(
        "3\nEyeglasses Smiling\n000001.jpg -1  1\n000004.jpg  1 -1\n000009.jpg -1 -1\n"
    )
    (root / "list_eval_partition.txt").write_text("000001.jpg 1\n000004.jpg 1\n000009.jpg 2\n")
    return root


def test_celebahq_with_attributes_and_parts(tmp_path: Path) -> None:
    root = celebahq_folder(tmp_path)
    files = celebahq.read(root, "Eyeglasses")
    assert files.labels == (0, 1)
    assert files.batch([1])[0].shape == (1, 3, 256, 256)
    assert celebahq.read(root, "Smiling", None).labels == (1, 0, 0)
    assert celebahq.read(root, "Smiling", "test").labels == (0,)
    with pytest.raises(InputError, match="Unknown attribute 'Smile'; did you mean 'Smiling'"):
        celebahq.read(root, "Smile")
    with pytest.raises(InputError, match="Unknown part 'validation'"):
        celebahq.read(root, "Smiling", "validation")
    (root / "list_eval_partition.txt").unlink()
    with pytest.raises(InputError, match=r"needs list_eval_partition\.txt beside the images"):
        celebahq.read(root, "Smiling")
    photos(root, "images/999999.png")
    with pytest.raises(InputError, match="1 of the 4 images"):
        celebahq.read(root, "Smiling", None)


@pytest.mark.parametrize(("name", "stated", "different"), [
    ("cifar10", 512, 504), ("imagenet", 512, 510), ("cifar10-bpda", 1000, 960),
])  # fmt: skip
def test_the_papers_subsets_are_smaller_than_stated(name: str, stated: int, different: int) -> None:
    about = subset(name)
    assert len(about.paper()) == about.stated == stated
    assert len(about.unique()) == len(set(about.paper())) == different
    assert f"{different} different images of {stated}" in about.note
    corrected = about.corrected()
    assert len(set(corrected)) == len(corrected) == stated
    assert corrected[:different] == about.unique()


def test_draws_are_numpys() -> None:
    assert draw(10, 3, 5) == tuple(np.random.RandomState(5).choice(10, 3, replace=False))
    assert subset("cifar10").draw(0)[:3] == (9394, 898, 2398)
    assert len(celebahq_subset(3000, 1)) == 8
    assert celebahq_subset(3000, 1) == draw(3000, 60, 1)[:8]
    with pytest.raises(InputError, match="between 1 and 10 images, got 11"):
        draw(10, 11, 0)
    with pytest.raises(InputError, match="Unknown subset 'cifar'; did you mean 'cifar10'"):
        subset("cifar")
    assert set(SUBSETS) == {"cifar10", "imagenet", "cifar10-bpda"}

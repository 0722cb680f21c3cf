"""Purifying files: odd ones keep what they are, damaged ones are reported, a second run continues the first."""

from __future__ import annotations

import io
import os
import struct
import weakref
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import diffpure.files.sources
from diffpure.data.images import read_image
from diffpure.errors import InputError
from diffpure.files import Item, Picture, purify_files, purify_images, read_picture
from diffpure.files.names import seed_of
from diffpure.files.sources import plan
from pictures import identity, noisy, smooth


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Hundreds of small files: what survives a power cut is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def odd_images():
    """One of every kind that is not a plain 8-bit RGB image of the model's size."""
    colour, grey = smooth(16, 16), smooth(16, 16, 1)[:, :, 0]
    alpha = np.full((16, 16, 1), 77, np.uint8)
    return {
        "grey.png": Image.fromarray(grey),
        "bits.png": Image.fromarray(grey > 120),
        "sixteen.png": Image.fromarray(grey.astype(np.uint16) * 257),
        "float.tif": Image.fromarray(grey.astype(np.float32) / 255),
        "palette.png": Image.fromarray(colour).convert("P", palette=Image.Palette.ADAPTIVE),
        "cmyk.jpg": Image.fromarray(colour).convert("CMYK"),
        "alpha.png": Image.fromarray(np.dstack([colour, alpha])),
        "grey-alpha.png": Image.fromarray(np.dstack([grey[:, :, None], alpha])),
        "one.png": Image.fromarray(smooth(1, 1)),
        "wide.webp": Image.fromarray(smooth(10, 50)),
        "sub/photo.jpg": Image.fromarray(smooth(40, 30)),
        "moving.gif": Image.fromarray(colour),
        "sub/plain.ppm": Image.fromarray(colour),
        "sub/paint.bmp": Image.fromarray(colour),
        "sub/scan.tiff": Image.fromarray(colour),
    }


def damaged_files():
    """Ten files, or images in files, that cannot be purified."""
    whole, chunk = io.BytesIO(), b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    Image.fromarray(smooth(64, 64)).save(whole, "JPEG")
    png = io.BytesIO()
    Image.fromarray(smooth(16, 16)).save(png, "PNG")
    nan, endless = io.BytesIO(), io.BytesIO()
    np.savez(nan, x=np.full((1, 16, 16, 3), np.nan, np.float32))
    Image.fromarray(np.full((4, 4), np.inf, np.float32)).save(endless, "TIFF")
    return {
        "cut.jpg": whole.getvalue()[:400],
        "cut.png": png.getvalue()[:60],
        "empty.png": b"",
        "text.png": b"this is not an image",
        "huge.png": b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)),
        "zeros.jpg": bytes(200),
        "nan.npz": nan.getvalue(),
        "damaged.npz": b"PK no",
        "damaged.tar": b"no tar",
        "infinite.tif": endless.getvalue(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """200 files: 190 images, of which 22 are odd, and ten damaged ones; with the names of the good and of the bad."""
    home = tmp_path_factory.mktemp("in")
    (home / "sub").mkdir()
    odd = odd_images()
    for name, image in odd.items():
        image.save(home / name)
    turned = [f"turned-{turn}.jpg" for turn in range(2, 9)]
    for turn, name in enumerate(turned, 2):
        exif = Image.Exif()
        exif[0x0112] = turn
        Image.fromarray(smooth(20, 40)).save(home / name, exif=exif, quality=95)
    plain = [f"plain-{i:03d}.{'jpg' if i % 3 == 0 else 'png'}" for i in range(168)]
    for i, name in enumerate(plain):
        Image.fromarray(smooth(16 + 4 * (i % 5 == 0), 16) // 2 + i // 2).save(home / name)
    bad = damaged_files()
    for name, data in bad.items():
        (home / name).write_bytes(data)
    return home, [*odd, *turned, *plain], list(bad)


def decoded(file):
    """The image (3, H, W) in [0, 1] that a file holds, upright and without its transparency, by Pillow alone."""
    image = ImageOps.exif_transpose(Image.open(file))
    if image.mode in ("I;16", "F"):
        return torch.from_numpy(np.asarray(image, np.float32) / (1 if image.mode == "F" else 65535)).expand(3, -1, -1)
    return torch.from_numpy(np.asarray(image.convert("RGB"), np.float32).transpose(2, 0, 1) / 255)


def test_200_files_of_which_ten_are_damaged(folder, tmp_path):
    home, good, bad = folder
    assert (len(good), len(bad)) == (190, 10)
    report = purify_files(noisy(), [str(home)], tmp_path, seed=3, fit="resize")
    assert sorted(report.done) == sorted(good)
    assert sorted(name for name, _ in report.failed) == sorted(bad)
    assert all(reason.count(". ") == 0 and "\n" not in reason and reason.endswith(".") for _, reason in report.failed)
    assert not list(tmp_path.rglob("*.part"))
    tolerance = {"JPEG": 0.02, "GIF": 0.1}  # what the format itself loses, in the mean; others only round
    for name in good:
        x, after = decoded(home / name), Image.open(tmp_path / name)
        wanted = purify_images(noisy(), x[None], "resize", [seed_of(name, 3)])[0].clamp(0, 1)
        if after.mode in ("L", "LA"):
            wanted = (wanted * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0).expand(3, -1, -1)
        assert after.format == Image.open(home / name).format
        assert decoded(tmp_path / name).shape == x.shape, name  # upright, and of the same size
        assert (decoded(tmp_path / name) - wanted).abs().mean() < tolerance.get(after.format, 1.5 / 255), name


def test_odd_images_keep_what_they_are(folder, tmp_path):
    home, good, _ = folder
    odd = [str(home / name) for name in good if not name.startswith(("plain", "sub/"))]
    purify_files(identity(), odd, tmp_path, fit="resize")
    purify_files(identity(), [str(home / "sub")], tmp_path / "sub", fit="resize")
    modes = {name: Image.open(tmp_path / name).mode for name in odd_images()}
    assert {name for name, mode in modes.items() if mode == "L"} == {"grey.png", "bits.png", "sixteen.png", "float.tif"}
    assert {name for name, mode in modes.items() if mode in ("LA", "RGBA")} == {"alpha.png", "grey-alpha.png"}
    assert set(np.asarray(Image.open(tmp_path / "alpha.png"))[:, :, 3].flatten()) == {77}
    for turn in range(2, 9):  # 5 to 8 lie on their side in the file; upright now, and marked so no more
        image = Image.open(tmp_path / f"turned-{turn}.jpg")
        assert image.size == ((20, 40) if turn >= 5 else (40, 20))
        assert 0x0112 not in image.getexif()
    lossless = [name for name in odd_images() if not name.endswith((".jpg", ".gif")) and name != "wide.webp"]
    for name in lossless:
        assert (decoded(tmp_path / name) - decoded(home / name)).abs().max() < 1.01 / 255, name


@pytest.mark.parametrize("count", [50, 168])
def test_memory_is_bounded_by_the_batch_not_by_the_folder(folder, tmp_path, monkeypatch, count):
    """So many decoded images are alive at once: one batch that is purified, and the next that is read."""
    alive, most = 0, 0

    def gone():
        nonlocal alive
        alive -= 1

    def read(source, largest):
        nonlocal alive, most
        picture = read_picture(source, largest)
        weakref.finalize(picture, gone)
        alive += 1
        most = max(most, alive)
        return picture

    monkeypatch.setattr(diffpure.files.sources, "read_picture", read)
    names = [name for name in folder[1] if name.startswith("plain")][:count]
    report = purify_files(identity(), [str(folder[0] / name) for name in names], tmp_path, batch=4)
    assert len(report.done) == count
    assert most <= 9
    assert alive <= 4


def test_large_images_are_not_batched():
    items = [Item(str(i), 6_000_000, lambda: Picture(torch.zeros(3, 1, 1))) for i in range(5)]
    assert [len(group) for group in plan(items, 16)] == [2, 2, 1]


def test_a_second_run_continues_the_first(folder, tmp_path):
    some = str(folder[0] / "plain-00*.png")
    names = sorted(purify_files(noisy(), [some], tmp_path, seed=1).done)
    first = (tmp_path / names[1]).read_bytes()
    (tmp_path / names[1]).unlink()
    report = purify_files(noisy(), [some], tmp_path, seed=1)
    assert report.done == [names[1]]
    assert len(report.skipped) == len(names) - 1
    assert (tmp_path / names[1]).read_bytes() == first  # its seed is its name's, not its place's


def test_nothing_is_overwritten_or_taken_for_its_own_result(tmp_path):
    home = tmp_path / "photos"
    for name in ("one/a.png", "two/a.png"):
        (home / name).parent.mkdir(parents=True)
        Image.fromarray(smooth(16, 16)).save(home / name)
    for inputs, out, wrong in (
        ([home], home, "lie in"),
        ([home / "one" / "a.png"], home / "one", "lie in"),
        ([home / "one", home / "two"], tmp_path / "out", "Two images"),
        ([home / "one" / "a.png", home / "two" / "a.png"], tmp_path / "out", "Two images"),
    ):
        with pytest.raises(InputError, match=wrong):
            purify_files(identity(), list(map(str, inputs)), out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no images in"):
        purify_files(identity(), [str(tmp_path / "empty")], tmp_path / "out")
    for _ in range(2):  # the second time, the first results lie among the inputs
        report = purify_files(identity(), [str(home)], home / "clean")
        assert len(report.done) + len(report.skipped) == 2


def test_an_unwritable_place_is_one_sentence(tmp_path):
    Image.fromarray(smooth(16, 16)).save(tmp_path / "a.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written or read"):
        purify_files(identity(), [str(tmp_path / "a.png")], tmp_path / "file" / "out")


# ------------------------------------------------------------------------------------------- one door for every image


def sixteen_bits_with_a_clear_value() -> bytes:
    """A 16-bit grey PNG of 0, 30000, 40000, 65535 whose tRNS chunk makes 30000 transparent, byte by byte."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"\0" + struct.pack(">4H", 0, 30000, 40000, 65535)
    header = struct.pack(">IIBBBBB", 4, 1, 16, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"tRNS", struct.pack(">H", 30000)) + chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def test_sixteen_bits_with_a_transparent_value_keep_their_values(tmp_path):
    file = tmp_path / "in" / "deep.png"
    file.parent.mkdir()
    file.write_bytes(sixteen_bits_with_a_clear_value())
    picture = read_picture(file)
    assert torch.allclose(picture.pixels[0, 0], torch.tensor([0, 30000, 40000, 65535]) / 65535)
    assert picture.alpha.tolist() == [[255, 0, 255, 255]]
    assert torch.allclose(read_image(file)[:, 0, 1], torch.ones(3))  # over white, as every transparent pixel
    purify_files(identity(1), [str(file)], tmp_path, fit="tiles")
    after = np.asarray(Image.open(tmp_path / "deep.png"))
    assert after[0].tolist() == [[0, 255], [117, 0], [156, 255], [255, 255]]


def test_both_readers_see_the_same_pixels(folder):
    home, good, _ = folder
    for name in [name for name in good if not name.startswith("plain")]:
        picture, image = read_picture(home / name), read_image(home / name)
        pixels = picture.pixels / 255 if picture.pixels.dtype == torch.uint8 else picture.pixels
        if picture.alpha is not None:
            alpha = torch.from_numpy(picture.alpha) / 255
            pixels = pixels * alpha + 1 - alpha
        assert (pixels - image).abs().max() < 0.51 / 255, name


def test_the_colour_profile_is_kept_where_it_is_true(tmp_path):
    home = tmp_path / "in"
    home.mkdir()
    profiles = {b"RGB ": bytes(16) + b"RGB " + bytes(100), b"CMYK": bytes(16) + b"CMYK" + bytes(100)}
    for kind in ("PNG", "JPEG", "WEBP", "TIFF"):
        Image.fromarray(smooth(16, 16)).save(home / f"a.{kind.lower()}", kind, icc_profile=profiles[b"RGB "])
    Image.fromarray(smooth(16, 16)).convert("CMYK").save(home / "ink.jpg", icc_profile=profiles[b"CMYK"])
    report = purify_files(identity(), [str(home)], tmp_path / "out")
    for kind in ("png", "jpeg", "webp", "tiff"):
        with Image.open(tmp_path / "out" / f"a.{kind}") as after:
            assert after.info["icc_profile"] == profiles[b"RGB "]
    assert "icc_profile" not in Image.open(tmp_path / "out" / "ink.jpg").info
    assert [(name, "profile" in note) for name, note in report.notes] == [("ink.jpg", True)]


@pytest.mark.parametrize("kind", ["gif", "png", "webp", "tiff"])
def test_of_an_animation_the_first_frame_is_kept_and_that_is_said(tmp_path, kind):
    frames = [Image.fromarray(np.full((16, 16, 3), value, np.uint8)) for value in (40, 200)]
    (tmp_path / "in").mkdir()
    frames[0].save(tmp_path / "in" / f"moving.{kind}", save_all=True, append_images=frames[1:])
    report = purify_files(identity(), [str(tmp_path / "in")], tmp_path / "out")
    assert report.notes == [(f"moving.{kind}", "only the first frame was kept")]
    after = Image.open(tmp_path / "out" / f"moving.{kind}")
    assert getattr(after, "n_frames", 1) == 1
    assert abs(int(np.asarray(after.convert("RGB"))[0, 0, 0]) - 40) <= 2


@pytest.mark.parametrize("mode", ["L", "LA"])
def test_grey_images_are_purified_by_a_score_of_one_channel(tmp_path, mode):
    (tmp_path / "in").mkdir()
    Image.fromarray(smooth(16, 16)).convert(mode).save(tmp_path / "in" / "grey.png")
    Image.fromarray(smooth(16, 16)).save(tmp_path / "in" / "colour.png")
    report = purify_files(identity(channels=1), [str(tmp_path / "in")], tmp_path / "out")
    assert report.failed == [
        ("colour.png", "A colour image cannot be purified by a score model of one channel; grey images can.")
    ]
    before, after = (np.asarray(Image.open(tmp_path / side / "grey.png")) for side in ("in", "out"))
    assert np.array_equal(before, after)

"""Purifying files: odd ones keep what they are, damaged ones are reported, a second run continues the first."""

from __future__ import annotations

import io
import itertools
import os
import struct
import tarfile
import weakref
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from typer.testing import CliRunner

import diffpure as dp
import diffpure.files
import diffpure.scores.load
from diffpure import cli
from diffpure.cli import images as image_commands
from diffpure.diffusion.sde import VPSDE
from diffpure.errors import InputError
from diffpure.files import Item, Picture, Report, _groups, _seed_of, _starts, purify_files, purify_images, read_picture

runner = CliRunner()


class Silent(dp.EpsilonScore):
    """A score of exactly 0 at 16 pixels: with the deterministic Langevin sampler, purification is the identity."""

    def __init__(self, size=16):
        super().__init__(VPSDE(), size=size, channels=3)

    def epsilon(self, x, t):
        return torch.zeros_like(x)


def identity(size=16):
    return dp.Purifier(Silent(size), dp.Langevin(eta=0.0, steps=1))


def noisy(size=16):
    return dp.Purifier(Silent(size), dp.OneShot(t_star=0.01))


def smooth(height, width, channels=3):
    """A smooth gradient that survives resizing and JPEG."""
    rows = np.linspace(20, 230, height)[:, None, None]
    columns = np.linspace(0, 20, width)[None, :, None]
    return (rows + columns + np.arange(channels)).round().astype(np.uint8)


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
    turned = [f"turned-{way}.jpg" for way in range(2, 9)]
    for way, name in enumerate(turned, 2):
        exif = Image.Exif()
        exif[0x0112] = way
        Image.fromarray(smooth(20, 40)).save(home / name, exif=exif, quality=95)
    plain = [f"plain-{i:03d}.{'jpg' if i % 3 == 0 else 'png'}" for i in range(168)]
    for i, name in enumerate(plain):
        Image.fromarray(smooth(16 + 4 * (i % 5 == 0), 16) // 2 + i // 2).save(home / name)
    bad = damaged_files()
    for name, data in bad.items():
        (home / name).write_bytes(data)
    return home, [*odd, *turned, *plain], ["nan/x-00000.png" if name == "nan.npz" else name for name in bad]


def decoded(file):
    """The image (3, H, W) in [0, 1] that a file holds, upright and without its transparency, by Pillow alone."""
    image = ImageOps.exif_transpose(Image.open(file))
    if image.mode in ("I;16", "F"):
        return torch.from_numpy(np.asarray(image, np.float32) / (1 if image.mode == "F" else 65535)).expand(3, -1, -1)
    return torch.from_numpy(np.asarray(image.convert("RGB"), np.float32).transpose(2, 0, 1) / 255)


def test_200_files_of_which_ten_are_damaged(folder, tmp_path):
    home, good, bad = folder
    assert (len(good), len(bad)) == (190, 10)
    report = purify_files(noisy(), [str(home)], tmp_path, seed=3)
    assert sorted(report.done) == sorted(good)
    assert sorted(name for name, _ in report.failed) == sorted(bad)
    assert all(reason.count(". ") == 0 and "\n" not in reason and reason.endswith(".") for _, reason in report.failed)
    assert not list(tmp_path.rglob("*.part"))
    tolerance = {"JPEG": 0.02, "GIF": 0.1}  # what the format itself loses, in the mean; others only round
    for name in good:
        x, after = decoded(home / name), Image.open(tmp_path / name)
        wanted = purify_images(noisy(), x[None], "resize", [_seed_of(name, 3)])[0].clamp(0, 1)
        if after.mode == "L":
            wanted = (wanted * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0).expand(3, -1, -1)
        assert after.format == Image.open(home / name).format
        assert decoded(tmp_path / name).shape == x.shape, name  # upright, and of the same size
        assert (decoded(tmp_path / name) - wanted).abs().mean() < tolerance.get(after.format, 1.5 / 255), name


def test_odd_images_keep_what_they_are(folder, tmp_path):
    home, good, _ = folder
    odd = [str(home / name) for name in good if not name.startswith(("plain", "sub/"))]
    purify_files(identity(), odd, tmp_path)
    purify_files(identity(), [str(home / "sub")], tmp_path / "sub")
    modes = {name: Image.open(tmp_path / name).mode for name in odd_images()}
    assert {name for name, mode in modes.items() if mode == "L"} == {"grey.png", "bits.png", "sixteen.png", "float.tif"}
    assert {name for name, mode in modes.items() if mode == "RGBA"} == {"alpha.png", "grey-alpha.png"}
    assert set(np.asarray(Image.open(tmp_path / "alpha.png"))[:, :, 3].flatten()) == {77}
    for way in range(2, 9):  # 5 to 8 lie on their side in the file; upright now, and marked so no more
        image = Image.open(tmp_path / f"turned-{way}.jpg")
        assert image.size == ((20, 40) if way >= 5 else (40, 20))
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

    def read(source):
        nonlocal alive, most
        picture = read_picture(source)
        weakref.finalize(picture, gone)
        alive += 1
        most = max(most, alive)
        return picture

    monkeypatch.setattr(diffpure.files, "read_picture", read)
    names = [name for name in folder[1] if name.startswith("plain")][:count]
    report = purify_files(identity(), [str(folder[0] / name) for name in names], tmp_path, batch=4)
    assert len(report.done) == count
    assert most <= 9
    assert alive <= 4


def test_large_images_are_not_batched():
    pictures = [Picture(torch.zeros(1).expand(3, 2000, 3000), None, False, "PNG") for _ in range(5)]
    items = [Item(str(i), lambda i=i: pictures[i]) for i in range(5)]
    assert [len(group) for group in _groups(items, 16, Report())] == [2, 2, 1]


def test_a_second_run_continues_the_first(folder, tmp_path):
    some = str(folder[0] / "plain-00*.png")
    names = sorted(purify_files(noisy(), [some], tmp_path, seed=1).done)
    first = (tmp_path / names[1]).read_bytes()
    (tmp_path / names[1]).unlink()
    report = purify_files(noisy(), [some], tmp_path, seed=1)
    assert report.done == [names[1]]
    assert len(report.skipped) == len(names) - 1
    assert (tmp_path / names[1]).read_bytes() == first  # its seed is its name's, not its place's


def test_archives_arrays_and_globs(tmp_path):
    stack = np.stack([smooth(16, 16), smooth(16, 16)])
    damaged = np.stack([smooth(16, 16) / 255, np.full((16, 16, 3), np.nan)])
    np.savez(tmp_path / "set.npz", x=stack, y=np.arange(2), z=damaged)
    (tmp_path / "bad.npz").write_bytes(b"PK no")
    data = io.BytesIO()
    Image.fromarray(smooth(16, 16)).save(data, "PNG")
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        for name in ("a/one.png", "../evil.png"):
            info = tarfile.TarInfo(name)
            info.size = len(data.getvalue())
            archive.addfile(info, io.BytesIO(data.getvalue()))
    (tmp_path / "cut.tar").write_bytes((tmp_path / "set.tar").read_bytes()[:600])
    out = tmp_path / "out"
    report = purify_files(identity(), [str(tmp_path / "*.npz"), str(tmp_path / "*.tar")], out)
    assert sorted(report.done) == sorted(
        ["set/x-00000.png", "set/x-00001.png", "set/z-00000.png", "set/a/one.png", "set/evil.png"]
    )
    assert sorted(name for name, _ in report.failed) == ["bad.npz", "cut.tar", "set/z-00001.png"]
    assert not (tmp_path / "evil.png").exists()
    with pytest.raises(InputError, match="no file, folder or match"):
        purify_files(identity(), [str(tmp_path / "nothing*")], out)


@pytest.mark.parametrize("size", [(16, 16), (17, 40), (5, 9), (64, 16), (100, 30)])
def test_tiles_cover_the_image_and_blend_to_the_identity(size):
    x = torch.rand(2, 3, *size)
    assert torch.allclose(purify_images(identity(), x, "tiles", [1, 2], rows=3), x, atol=1e-5)


def test_tiles_overlap_by_a_quarter():
    for length in range(16, 120):
        starts = _starts(length, 16)
        assert starts[0] == 0
        assert starts[-1] == length - 16
        assert all(b - a <= 12 for a, b in itertools.pairwise(starts))


def test_resizing_keeps_a_smooth_image():
    x = torch.from_numpy(smooth(48, 48).transpose(2, 0, 1).copy()).float()[None] / 255
    assert (purify_images(identity(), x, "resize", [1]) - x).abs().max() < 0.05


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


def test_the_command(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(diffpure.scores.load, "load_score", lambda name, like=None: Silent())
    home, good, bad = folder
    out = tmp_path / "out"
    arguments = ["purify", str(home), "-o", str(out), "--sampler", "one-shot", "--seed", "3"]
    found = runner.invoke(cli.app, arguments, catch_exceptions=False)
    assert found.exit_code == 1  # some files failed
    assert f"{len(good)} purified, 0 already there, {len(bad)} failed" in found.output
    one = [str(home / "plain-001.png"), "-o", str(tmp_path / "drawn"), "--seed", "3"]
    for kind in ("strip", "gif"):
        found = runner.invoke(cli.app, ["purify", *one, "--trajectory", kind], catch_exceptions=False)
        assert found.exit_code == 0
        (tmp_path / "drawn" / "plain-001.png").unlink()
    assert sorted(os.listdir(tmp_path / "drawn")) == ["plain-001.trajectory.gif", "plain-001.trajectory.png"]


def test_samplers_by_name():
    assert image_commands.make_sampler("sde", 0.05, 3) == dp.ReverseSDE(t_star=0.05, steps=3)
    assert image_commands.make_sampler("ld", 0.05, None) == dp.Langevin()
    with pytest.raises(InputError, match="did you mean 'few-step'"):
        image_commands.make_sampler("fewstep", 0.1, None)
    with pytest.raises(InputError, match="no steps"):
        image_commands.make_sampler("one-shot", 0.1, 3)

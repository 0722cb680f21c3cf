"""Purifying files: odd ones keep what they are, broken ones are reported, a second run continues the first."""

from __future__ import annotations

import io
import itertools
import os
import struct
import tarfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import diffpure as dp
from diffpure import cli
from diffpure.cli import images as image_commands
from diffpure.errors import InputError
from diffpure.files import _starts, purify_files, purify_images
from diffpure.sde import VPSDE

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
    return dp.Purifier(Silent(size), dp.OneShot(t_star=0.05))


def smooth(height, width, channels=3):
    """A smooth gradient that survives resizing and JPEG."""
    rows = np.linspace(20, 230, height)[:, None, None]
    columns = np.linspace(0, 20, width)[None, :, None]
    return (rows + columns + np.arange(channels)).round().astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Odd and damaged files among ordinary ones; returns the folder, the names of the good and of the bad ones."""
    home = tmp_path / "in"
    (home / "sub").mkdir(parents=True)
    odd = {
        "grey.png": Image.fromarray(smooth(16, 16, 1)[:, :, 0]),
        "sixteen.png": Image.fromarray(smooth(16, 16, 1)[:, :, 0].astype(np.uint16) * 257),
        "palette.png": Image.fromarray(smooth(16, 16)).convert("P"),
        "cmyk.jpg": Image.fromarray(smooth(16, 16)).convert("CMYK"),
        "alpha.png": Image.fromarray(np.dstack([smooth(16, 16), np.full((16, 16), 77, np.uint8)])),
        "one.png": Image.fromarray(smooth(1, 1)),
        "wide.webp": Image.fromarray(smooth(10, 50)),
        "sub/photo.jpg": Image.fromarray(smooth(40, 30)),
        "moving.gif": Image.fromarray(smooth(16, 16)),
        "sub/plain.ppm": Image.fromarray(smooth(16, 16)),
        "sub/paint.bmp": Image.fromarray(smooth(16, 16)),
    }
    for name, image in odd.items():
        image.save(home / name)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.fromarray(smooth(20, 40)).save(home / "turned.jpg", exif=exif)
    for i in range(30):
        Image.fromarray(smooth(16, 16)).save(home / f"plain-{i:02d}.png")
    whole = io.BytesIO()
    Image.fromarray(smooth(64, 64)).save(whole, "JPEG")
    huge = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + huge
    bad = {
        "cut.jpg": whole.getvalue()[:400],
        "empty.png": b"",
        "text.png": b"this is not an image",
        "huge.png": b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)),
        "zeros.jpg": bytes(200),
    }
    for name, data in bad.items():
        (home / name).write_bytes(data)
    good = [*odd, "turned.jpg", *(f"plain-{i:02d}.png" for i in range(30))]
    return home, good, list(bad)


def test_a_folder_of_good_odd_and_damaged_images(folder, tmp_path):
    home, good, bad = folder
    out = tmp_path / "out"
    report = purify_files(identity(), [str(home)], out)
    assert sorted(report.done) == sorted(good)
    assert sorted(name for name, _ in report.failed) == sorted(bad)
    assert all("\n" not in reason and reason.endswith(".") for _, reason in report.failed)
    assert not list(out.rglob("*.part"))
    for name in good:
        before, after = Image.open(home / name), Image.open(out / name)
        assert after.format == before.format
        if name != "turned.jpg":
            assert after.size == before.size
    assert Image.open(out / "turned.jpg").size == (20, 40)  # upright now, and marked so no more
    assert Image.open(out / "grey.png").mode == "L"
    assert Image.open(out / "alpha.png").mode == "RGBA"
    assert set(np.asarray(Image.open(out / "alpha.png"))[:, :, 3].flatten()) == {77}
    assert np.array_equal(np.asarray(Image.open(out / "plain-00.png")), smooth(16, 16))
    assert np.abs(np.asarray(Image.open(out / "sixteen.png")).astype(int) - smooth(16, 16, 1)[:, :, 0]).max() <= 1


def test_a_second_run_continues_the_first(folder, tmp_path):
    home, good, _ = folder
    out = tmp_path / "out"
    purify_files(noisy(), [str(home)], out, seed=1)
    first = (out / "plain-03.png").read_bytes()
    (out / "plain-03.png").unlink()
    report = purify_files(noisy(), [str(home)], out, seed=1)
    assert report.done == ["plain-03.png"]
    assert len(report.skipped) == len(good) - 1
    assert (out / "plain-03.png").read_bytes() == first  # its seed is its name's, not its place's


def test_archives_arrays_and_globs(tmp_path):
    stack = np.stack([smooth(16, 16), smooth(16, 16)])
    broken = np.stack([smooth(16, 16) / 255, np.full((16, 16, 3), np.nan)])
    np.savez(tmp_path / "set.npz", x=stack, y=np.arange(2), z=broken)
    (tmp_path / "bad.npz").write_bytes(b"PK no")
    data = io.BytesIO()
    Image.fromarray(smooth(16, 16)).save(data, "PNG")
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        for name in ("a/one.png", "../evil.png"):
            info = tarfile.TarInfo(name)
            info.size = len(data.getvalue())
            archive.addfile(info, io.BytesIO(data.getvalue()))
    out = tmp_path / "out"
    report = purify_files(identity(), [str(tmp_path / "*.npz"), str(tmp_path / "set.tar")], out)
    assert sorted(report.done) == sorted(
        ["set/x-00000.png", "set/x-00001.png", "set/z-00000.png", "set/a/one.png", "set/evil.png"]
    )
    assert sorted(name for name, _ in report.failed) == ["bad.npz", "set/z-00001.png"]
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


def test_an_unwritable_place_is_one_sentence(tmp_path):
    Image.fromarray(smooth(16, 16)).save(tmp_path / "a.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written or read"):
        purify_files(identity(), [str(tmp_path / "a.png")], tmp_path / "file" / "out")


def test_the_command(folder, tmp_path, monkeypatch):
    import diffpure.scores.load

    monkeypatch.setattr(diffpure.scores.load, "load_score", lambda name: Silent())
    home, good, bad = folder
    out = tmp_path / "out"
    arguments = ["purify", str(home), "-o", str(out), "--sampler", "few-step", "--steps", "2", "--seed", "3"]
    found = runner.invoke(cli.app, arguments, catch_exceptions=False)
    assert found.exit_code == 1  # some files failed
    assert f"{len(good)} purified, 0 already there, {len(bad)} failed" in found.output
    one = [str(home / "plain-00.png"), "-o", str(tmp_path / "drawn"), "--seed", "3"]
    for kind in ("strip", "gif"):
        found = runner.invoke(cli.app, ["purify", *one, "--trajectory", kind], catch_exceptions=False)
        assert found.exit_code == 0
        (tmp_path / "drawn" / "plain-00.png").unlink()
    assert sorted(os.listdir(tmp_path / "drawn")) == ["plain-00.trajectory.gif", "plain-00.trajectory.png"]


def test_samplers_by_name():
    assert image_commands.make_sampler("sde", 0.05, 3) == dp.ReverseSDE(t_star=0.05, steps=3)
    assert image_commands.make_sampler("ld", 0.05, None) == dp.Langevin()
    with pytest.raises(InputError, match="did you mean 'few-step'"):
        image_commands.make_sampler("fewstep", 0.1, None)
    with pytest.raises(InputError, match="no steps"):
        image_commands.make_sampler("one-shot", 0.1, 3)

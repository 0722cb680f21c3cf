"""Output folders: images of any size, a run that was killed goes on to the same files, and settings that never mix."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

from diffpure.errors import InputError
from diffpure.files import purify_files, purify_images
from diffpure.files.tiles import purify_large, purify_tiles, way
from diffpure.purifiers.tiles import starts
from pictures import Counting, encoded, identity, noisy, smooth, tree


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Hundreds of small files: what survives a power cut is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


# ------------------------------------------------------------------------------------------------- sizes and limits


@pytest.mark.parametrize("size", [(16, 16), (17, 40), (5, 9), (64, 16), (100, 30)])
def test_tiles_cover_the_image_and_blend_to_the_identity(size):
    x = torch.rand(2, 3, *size)
    assert torch.allclose(purify_images(identity(), x, "tiles", [1, 2], rows=3), x, atol=1e-5)


def test_tiles_overlap_by_a_quarter():
    for length in range(16, 120):
        found = starts(length, 16)
        assert found[0] == 0
        assert found[-1] == length - 16
        assert all(b - a <= 12 for a, b in itertools.pairwise(found))


def test_resizing_keeps_a_smooth_image():
    x = torch.from_numpy(smooth(48, 48).transpose(2, 0, 1).copy()).float()[None] / 255
    assert (purify_images(identity(), x, "resize", [1]) - x).abs().max() < 0.05


def test_images_above_twice_the_models_size_are_cut_into_tiles():
    for height, width, wanted in (
        (32, 32, "whole"),
        (20, 32, "resize"),
        (64, 64, "resize"),
        (65, 20, "tiles"),
        (427, 640, "tiles"),
    ):
        assert way(height, width, 32, "auto") == wanted
        assert way(height, width, None, "auto") == "whole"
    assert way(427, 640, 32, "resize") == "resize"


def test_the_report_says_what_was_done_with_other_sizes(tmp_path):
    (tmp_path / "in").mkdir()
    for name, size in {"a": (16, 16), "b": (20, 16), "c": (40, 16), "d": (40, 40)}.items():
        Image.fromarray(smooth(*size)).save(tmp_path / "in" / f"{name}.png")
    seen = []
    report = purify_files(identity(), [str(tmp_path / "in")], tmp_path / "out", progress=lambda *n: seen.append(n))
    assert report.fitted(16) == (
        "2 images purified in 12 overlapping tiles of 16×16; 1 image resized to 16×16 and back, which loses detail; "
        "1 image of the model's size 16×16."
    )
    assert seen == [("tiles of c.png", 3, 3), ("tiles of d.png", 9, 9), ("images", 4, 4)]
    for name in "abcd":
        before, after = (np.asarray(Image.open(tmp_path / side / f"{name}.png"), int) for side in ("in", "out"))
        assert np.abs(before - after).max() <= (10 if name == "b" else 0)


def test_tiles_are_handed_out_row_by_row():
    """So that memory grows with a row of tiles and not with the image: no piece is higher than a tile."""
    image = torch.from_numpy(smooth(100, 70)).permute(2, 0, 1)
    pieces = list(purify_tiles(identity(), image, 0, 5))
    assert max(piece.shape[1] for piece in pieces) <= 16
    assert torch.allclose(torch.cat(pieces, 1), image / 255, atol=1e-5)


@pytest.mark.parametrize("size", [(150, 90), (16, 200), (70, 16), (10, 300)])
def test_large_images_are_resized_as_the_purifier_does_it(size):
    """Band by band, out of 8-bit pixels: the same as all of it at once."""
    image = torch.from_numpy(smooth(*size)).permute(2, 0, 1)
    bands = list(purify_large(noisy(), image, 7))
    wanted = purify_images(noisy(), image[None], "resize", [7])[0]
    assert max(band.shape[1] for band in bands) <= 64
    assert torch.allclose(torch.cat(bands, 1), wanted, atol=1e-5)


def test_the_largest_image_is_an_option(tmp_path):
    (tmp_path / "in").mkdir()
    Image.fromarray(smooth(16, 17)).save(tmp_path / "in" / "a.png")
    report = purify_files(identity(), [str(tmp_path / "in")], tmp_path / "out", max_pixels=271)
    assert report.failed == [("a.png", "a.png says it is 17×16 pixels; at most 271 are accepted.")]
    assert purify_files(identity(), [str(tmp_path / "in")], tmp_path / "out", max_pixels=272).done == ["a.png"]


# ------------------------------------------------------------------------------------------------- going on, settings


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_killed_run_with_a_seed_goes_on_to_the_same_files(tmp_path, batch):
    """Killed at every call in turn: each image is purified in the batch that it would have had."""
    (tmp_path / "in").mkdir()
    for i in range(10):
        size = (16, 20) if i in (3, 4) else (16, 16)
        Image.fromarray(smooth(*size)).save(tmp_path / "in" / f"{i}.png")
    (tmp_path / "in" / "5.png").write_bytes(b"damaged")
    options = {"seed": 1, "batch": batch, "fit": "resize"}
    whole = Counting()
    purify_files(whole, [str(tmp_path / "in")], tmp_path / "whole", **options)
    for k in range(1, whole.calls + 1):
        out = tmp_path / f"killed-{k}"
        with pytest.raises(KeyboardInterrupt):
            purify_files(Counting(dies_at=k), [str(tmp_path / "in")], out, **options)
        for lost in sorted(tree(out))[1::2]:  # and some are lost besides
            (out / lost).unlink()
        purify_files(Counting(), [str(tmp_path / "in")], out, **options)
        assert tree(out) == tree(tmp_path / "whole")
        for name in tree(out):
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_other_settings_need_another_folder_or_overwriting(tmp_path):
    source, out = tmp_path / "a.png", tmp_path / "out"
    source.write_bytes(encoded())

    def run(**options):
        return purify_files(noisy(), [str(source)], out, **options)

    assert run(settings={"t_star": 0.1}, seed=1).done == ["a.png"]
    first = (out / "a.png").read_bytes()
    assert run(settings={"t_star": 0.1}, seed=1).skipped == ["a.png"]
    for options, said in (
        ({"settings": {"t_star": 0.2}, "seed": 1}, "with t_star 0.1, and this call has 0.2"),
        ({"settings": {"t_star": 0.1}, "seed": 2}, "with seed 1, and this call has 2"),
        ({"settings": {"t_star": 0.1}}, "with seed 1, and this call has not given"),
        ({"settings": {"t_star": 0.1}, "seed": 1, "fit": "tiles"}, "with fit auto, and this call has tiles"),
    ):
        with pytest.raises(InputError, match=said):
            run(**options)
    assert (out / "a.png").read_bytes() == first
    assert run(settings={"t_star": 0.2}, seed=2, overwrite=True).done == ["a.png"]
    assert (out / "a.png").read_bytes() != first
    assert run(settings={"t_star": 0.2}, seed=2).skipped == ["a.png"]


def test_a_seed_that_was_drawn_is_not_recorded(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded())
    purify_files(noisy(), [str(tmp_path / "a.png")], tmp_path / "out")
    assert json.loads((tmp_path / "out" / ".diffpure.json").read_text())["settings"] == {"fit": "auto"}


def test_an_unfinished_overwriting_is_not_taken_for_whole(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(encoded())
    inputs, out = [str(tmp_path / "*.png")], tmp_path / "out"
    purify_files(identity(), inputs, out)
    with pytest.raises(KeyboardInterrupt):
        purify_files(Counting(dies_at=2), inputs, out, batch=1, settings={"x": 1}, overwrite=True)
    with pytest.raises(InputError, match="did not finish"):
        purify_files(identity(), inputs, out, settings={"x": 1})
    assert len(purify_files(identity(), inputs, out, settings={"x": 1}, overwrite=True).done) == 2
    assert len(purify_files(identity(), inputs, out, settings={"x": 1}).skipped) == 2


def test_files_that_were_not_purified_here_are_neither_taken_nor_replaced(tmp_path):
    source, out = tmp_path / "a.png", tmp_path / "out"
    source.write_bytes(encoded())
    out.mkdir()
    (out / "a.png").write_bytes(b"mine")
    report = purify_files(identity(), [str(source)], out)
    assert report.failed == [("a.png", "A file of this name is there, and no record of how it was made.")]
    assert (out / "a.png").read_bytes() == b"mine"
    (out / ".diffpure.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        purify_files(identity(), [str(source)], out)

"""npz files: images purified in their place, labels kept; bad files are reported, and limits hold before unpacking."""

from __future__ import annotations

import os
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from diffpure.files import archives, arrays, purify_files
from pictures import Counting, encoded, identity, noisy, npy, npz, smooth, tree


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Hundreds of small files: what survives a power cut is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def purified(folder: Path, **options):
    return purify_files(identity(), [str(folder)], folder.parent / "out", **options)


@pytest.fixture
def home(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


# ----------------------------------------------------------------------------------------- npz in, npz out, labels kept


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", ">f4", "float16"])
@pytest.mark.parametrize(
    "shape", [(5, 16, 16, 3), (5, 3, 16, 16), (5, 16, 16), (5, 1, 16, 16), (16, 16, 3), (5, 40, 16)]
)
def test_arrays_keep_their_shape_type_and_neighbours(home, shape, dtype, channels):
    values = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    x = values if dtype == "uint8" else (values / 255).astype(dtype)
    beside = {"y": np.arange(5), "names": np.array(["a", "ß"]), "empty": np.zeros((0, 3))}
    np.savez_compressed(home / "set.npz", x=x, **beside)
    report = purify_files(identity(channels=channels), [str(home)], home.parent / "out", batch=2)
    if channels == 1 and 3 in shape:
        assert "one channel" in report.failed[0][1]
        return
    assert report.done == ["set.npz"]
    found = np.load(home.parent / "out" / "set.npz")
    assert found.files == ["x", *beside]
    assert found["x"].dtype == x.dtype
    assert found["x"].shape == shape
    assert np.abs(found["x"].astype(float) - x.astype(float)).max() < 1e-3
    for name, array in beside.items():
        assert np.array_equal(found[name], array)
    assert report.notes == [("set.npz", report.notes[0][1])]
    assert "kept as they are: y, names, empty" in report.notes[0][1]


def test_arrays_in_fortran_order_are_read_right(home):
    x = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3)).astype(np.uint8)
    np.savez(home / "set.npz", x=np.asfortranarray(x))
    purified(home, batch=2)
    assert np.array_equal(np.load(home.parent / "out" / "set.npz")["x"], x)


def test_a_killed_npz_goes_on_where_it_was(home):
    np.savez(home / "set.npz", x=np.zeros((10, 16, 16, 3), np.uint8), z=np.zeros((3, 16, 16, 3), np.uint8))
    out = home.parent / "out"
    with pytest.raises(KeyboardInterrupt):
        purify_files(Counting(dies_at=3), [str(home)], out, batch=4, seed=1)
    assert not (out / "set.npz").exists()
    rest = Counting()
    assert purify_files(rest, [str(home)], out, batch=4, seed=1).done == ["set.npz"]
    assert rest.calls == 2  # the third batch of x, and z
    found = np.load(out / "set.npz")
    assert found["x"][:, 0, 0, 0].tolist() == [4] * 8 + [2] * 2
    assert tree(out) == {"set.npz"}


def test_every_image_of_an_array_has_its_own_noise_and_the_seed_decides_it(home):
    np.savez(home / "set.npz", x=np.full((4, 16, 16, 3), 0.5, np.float32))
    found = []
    for i, seed in enumerate((1, 1, 2, None)):
        purify_files(noisy(), [str(home)], home.parent / f"{i}", seed=seed)
        found.append(np.load(home.parent / f"{i}" / "set.npz")["x"])
    assert np.array_equal(found[0], found[1])
    assert len({x.tobytes() for x in found}) == 3
    assert len({image.tobytes() for image in found[0]}) == 4


# ----------------------------------------------------------------------------------- bad files and limits


def patched(data: bytes, local: int, central: int, value: int) -> bytes:
    """A zip file with a two-byte field of its first member changed in both of its headers."""
    field, start = struct.pack("<H", value), data.index(b"PK\x01\x02")
    data = data[:local] + field + data[local + 2 :]
    return data[: start + central] + field + data[start + central + 2 :]


IMAGES = smooth(16, 16)[None]
BAD_ARRAYS = {
    "text": (npz(x=np.array(["a", "b"])), "holds no images"),
    "structures": (npz(x=np.zeros(3, [("a", "u1"), ("b", "f4")])), "holds no images"),
    "objects": (npz(x=np.array([{}, None])), "holds no images"),
    "empty": (npz(x=np.zeros((0, 16, 16, 3), np.uint8), y=np.zeros((4, 0, 16, 3), np.uint8)), "holds no images"),
    "labels": (npz(y=np.arange(5)), "holds no images"),
    "nothing": (npz(), "holds no images"),
    "nan": (npz(x=np.stack([smooth(16, 16) / 255, np.full((16, 16, 3), np.nan)])), r"x\[1\] holds values"),
    "range": (npz(x=smooth(16, 16)[None].astype(np.float32)), r"x\[0\] holds values"),
    "ambiguous": (npz(x=np.zeros((3, 16, 16), np.uint8)), "three grey ones"),
    "encrypted": (patched(npz(x=IMAGES), 6, 8, 1), "encrypted"),
    "compression": (patched(npz(x=IMAGES), 8, 10, 99), "compressed in a way"),
    "header": (npz(x=b"\x93NUMPY\x01\x00\x08\x00{'descr'"), "cannot be read"),
    "version": (npz(x=b"\x93NUMPY\x09\x00\x08\x00{'descr'"), "holds no images"),
    "code": (npz(x=npy(IMAGES).replace(b"'descr': '|u1'", b"'descr': exit()")), "cannot be read"),
    "cut": (npz(x=npy(IMAGES)[:300]), "holds fewer"),
    "claims": (npz(x=npy(IMAGES).replace(b"(1, 16, 16, 3)", b"(9**9,6,6,3)  ")), "cannot be read"),
    "many": (npz(x=npy(IMAGES).replace(b"(1, 16, 16, 3), }", b"(9999999,6,6,3),}")), "holds fewer"),
    "huge": (npz(x=npy(IMAGES).replace(b"(1, 16, 16, 3), }", b"(99999999,16,3),}")), "at most 64,000,000"),
    "zip": (b"PK no", "cannot be read"),
    "twice": (npz(x=IMAGES, z=IMAGES).replace(b"z.npy", b"x.npy"), "two arrays of one name"),
}


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_a_bad_npz_is_reported_and_the_rest_is_purified(home, kind):
    data, reason = BAD_ARRAYS[kind]
    (home / "bad.npz").write_bytes(data)
    (home / "good.png").write_bytes(encoded())
    np.savez(home / "good.npz", x=IMAGES)
    report = purified(home)
    assert sorted(report.done) == ["good.npz", "good.png"]
    (name, said), *others = report.failed
    assert (name, others) == ("bad.npz", [])
    assert re.search(reason, said), said
    assert tree(home.parent / "out") == {"good.npz", "good.png"}


def test_names_in_npz_files_lead_nowhere(home):
    victim = home.parent / "victim" / "pic.npy"
    victim.parent.mkdir()
    victim.write_bytes(b"mine")
    for i, name in enumerate(["../../../victim/pic", "../victim/pic", str(victim)[:-4], "../../victim/pic.png"]):
        np.savez(home / f"{i}.npz", **{name: smooth(16, 16)[None]})
    report = purified(home)
    assert not report.done
    assert all("leads elsewhere" in reason for _, reason in report.failed)
    assert victim.read_bytes() == b"mine"
    assert tree(home.parent) == {f"in/{i}.npz" for i in range(4)} | {"victim/pic.npy", "out/.diffpure.json"}


def test_an_npz_is_refused_by_the_size_it_claims_before_it_is_unpacked(home, monkeypatch):
    monkeypatch.setattr(archives, "UNPACKED", 1 << 20)
    np.savez_compressed(home / "bomb.npz", x=np.zeros((5000, 64, 64, 3), np.uint8))  # 61 MB in 60 kB
    tracemalloc.start()
    report = purified(home)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    limit = 100 * (home / "bomb.npz").stat().st_size
    assert report.failed == [("bomb.npz", f"bomb.npz unpacks to 61,440,128 bytes; at most {limit:,} are accepted.")]
    assert peak < 5_000_000


def test_an_npz_is_unpacked_batch_by_batch(home):
    np.savez_compressed(home / "x.npz", x=np.zeros((20_000, 32, 32, 3), np.uint8))  # 61 MB
    tracemalloc.start()
    with zipfile.ZipFile(home / "x.npz") as archive:
        (array,) = arrays.read_images(archive, home / "x.npz", 10**6)
        assert sum(len(values) for _, values in arrays.batches(archive, array, 16)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000

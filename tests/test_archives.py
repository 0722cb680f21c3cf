"""Archives from anybody: nothing is written outside, nothing stops the rest, and nothing is read beyond its limit."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tempfile
import zipfile
from pathlib import Path

import fuzz_files
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diffpure.errors import InputError
from diffpure.files import archives, names, purify_files, read_picture, sources
from pictures import encoded, identity, npy, smooth, tree, write_tar


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


# ------------------------------------------------------------------------------------- nothing is written outside --out


def test_archives_are_purified_below_folders_of_their_names(home):
    write_tar(home / "set.tar", [("a/one.png", encoded()), ("../evil.png", encoded()), ("/abs.png", encoded())])
    write_tar(home / ".album.tar", [("/etc/two.png", encoded())])
    write_tar(home / ".tar.gz", [("three.png", encoded())], "w:gz")
    write_tar(home / "v1.2.tgz", [("four.png", encoded()), ("notes.txt", b"no image")], "w:gz")
    report = purified(home)
    assert not report.failed
    wanted = {"set/a/one.png", "set/evil.png", "set/abs.png", ".album/etc/two.png", "archive/three.png"}
    assert tree(home.parent / "out") == set(report.done) == wanted | {"v1.2/four.png"}


def test_a_link_in_the_folder_does_not_lead_outside(home):
    (home.parent / "elsewhere").mkdir()
    (home.parent / "out").mkdir()
    (home.parent / "out" / "set").symlink_to(home.parent / "elsewhere")
    write_tar(home / "set.tar", [("one.png", encoded())])
    np.savez(home / "other.npz", x=smooth(16, 16)[None])
    (home.parent / "out" / "other.npz").symlink_to(home.parent / "elsewhere" / "other.npz")
    report = purified(home)
    assert [(name, "leads outside" in reason) for name, reason in report.failed] == [
        ("set/one.png", True),
        ("other.npz", True),
    ]
    assert not tree(home.parent / "elsewhere")


@given(st.lists(st.text(alphabet="a.\\/ ~\0\n\x1b\udcffé:", max_size=12), min_size=1, max_size=4))
@example(["..", "../..", "/etc/passwd"])
def test_a_cleaned_name_stays_below(parts):
    try:
        name = names.clean(*parts)
    except InputError:
        return
    out = Path("/somewhere/out")
    inside = Path(os.path.normpath(out / name))
    assert inside != out
    assert inside.is_relative_to(out)
    assert names.clean(name) == name


HOSTILE = st.lists(
    st.text(alphabet=st.sampled_from("ab./\\\n\x1b[]éx\udcff"), max_size=20).map(lambda text: text + ".png"),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(HOSTILE, HOSTILE, st.sampled_from(["set", ".set", "..", "a b", "..."]))
@example(["../../x.png", "/x.png", "a.png/b.png", "a.png"], ["../../x.png"], ".")
def test_whatever_members_are_called_they_are_written_below_or_reported(members, keys, stem):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "deep" / "deeper"
        (root / "in").mkdir(parents=True)
        write_tar(root / "in" / f"{stem}.tar", [(name, encoded()) for name in members], format=tarfile.GNU_FORMAT)
        with zipfile.ZipFile(root / "in" / "arrays.npz", "w") as archive:
            for name in {name.replace("\udcff", "") for name in keys}:
                archive.writestr(f"{name}.npy", npy(smooth(16, 16)[None]))
        report = purify_files(identity(), [str(root / "in")], root / "out", seed=1)
        outside = {name for name in tree(Path(folder)) if not name.startswith("deep/deeper/out/")}
        assert outside == {f"deep/deeper/in/{stem}.tar", "deep/deeper/in/arrays.npz"}
        assert len(report.done) + len(report.failed) >= 1


# --------------------------------------------------------------------------- a bad member is reported and stops nothing


def test_members_that_cannot_be_written_are_reported_and_the_rest_is_purified(home):
    long = "x" * 246 + ".png"
    members = [
        ("a.png", encoded()),
        ("a.png/b.png", encoded()),
        ("c.png/d.png", encoded()),
        ("c.png", encoded()),
        ("a.png", encoded()),  # once more
        (long, encoded()),
        ("y" + long, encoded()),
        ("caf\udce9.png", encoded()),  # a name that is no UTF-8
        ("deep/" * 900 + "e.png", encoded()),
        ("text.png", b"no image"),
        ("last.png", encoded()),
    ]
    write_tar(home / "set.tar", members, format=tarfile.GNU_FORMAT)
    for seed in (None, 1):
        out = home.parent / f"out-{seed}"
        report = purify_files(identity(), [str(home)], out, seed=seed, batch=3)
        wanted = {"a.png", "c.png/d.png", long, "caf\udce9.png", "last.png"}
        assert tree(out) == {f"set/{name}" for name in wanted}
        failed = {name[-11:] for name, _ in report.failed}
        assert failed == {"a.png/b.png", "set/c.png"[-11:], "set/a.png", "xxxxxxx.png", "/deep/e.png", "et/text.png"}


def test_a_name_with_nul_is_reported(home):
    info = tarfile.TarInfo("x.png")
    info.size = len(encoded())
    info.pax_headers = {"path": "nul\0byte.png"}
    with tarfile.open(home / "set.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(encoded()))
    write_tar(home / "other.tar", [("fine.png", encoded())])
    report = purified(home)
    assert report.done == ["other/fine.png"]
    assert [reason for _, reason in report.failed] == [
        "The name 'set/nul\\x00byte.png' holds a character that no file name can hold."
    ]


def test_what_comes_before_the_damage_of_a_tar_is_purified(home):
    """A member takes 1,024 bytes here: its header, and its content up to the next block."""
    content = encoded()
    assert len(content) <= 512
    whole = write_tar(home / "set.tar", [(f"{i}.png", content) for i in range(9)]).read_bytes()
    for cut, rest, done in ((600, b"", 0), (2100, b"", 2), (2048, b"no header" * 100, 2), (3 * 1024 - 1, b"", 3)):
        (home / "set.tar").write_bytes(whole[:cut] + rest)
        report = purify_files(identity(), [str(home)], home.parent / f"{cut}")
        assert [name for name, _ in report.failed] == ["set.tar"]
        assert report.done == [f"set/{i}.png" for i in range(done)]


# ------------------------------------------------------------------------------------------------------------- limits


def test_a_compressed_tar_is_read_once(home, monkeypatch):
    write_tar(home / "set.tar.gz", [(f"{i}.png", encoded()) for i in range(200)], "w:gz")
    unpacked, read = len(gzip.decompress((home / "set.tar.gz").read_bytes())), []

    class Counted(gzip.GzipFile):
        def read(self, size=-1):
            data = super().read(size)
            read.append(len(data))
            return data

    monkeypatch.setattr(archives.gzip, "GzipFile", Counted)
    assert len(purified(home).done) == 200
    assert sum(read) <= unpacked


def test_an_archive_that_unpacks_without_end_is_stopped(home, monkeypatch):
    monkeypatch.setattr(archives, "UNPACKED", 1 << 20)
    members = [("first.png", encoded()), ("zeros.bin", bytes(8 << 20)), ("last.png", encoded())]
    write_tar(home / "set.tar.gz", members, "w:gz")
    report = purified(home)
    assert report.done == ["set/first.png"]
    assert "unpacks to more than 1,048,576 bytes" in report.failed[0][1]


def test_a_member_is_refused_by_the_size_it_claims_before_it_is_read(home, monkeypatch):
    monkeypatch.setattr(sources, "HEADROOM", 1 << 10)
    write_tar(home / "set.tar.gz", [("zeros.png", bytes(1 << 20)), ("last.png", encoded())], "w:gz")
    report = purified(home, max_pixels=1000)
    assert report.done == ["set/last.png"]
    assert report.failed == [("set.tar.gz/zeros.png", "It unpacks to 1,048,576 bytes; at most 9,024 are accepted.")]


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_header_is_refused_by_the_size_it_claims_before_it_is_read(home, kind):
    bomb = tarfile.TarInfo("././@LongLink")
    bomb.type, bomb.size = kind, 1 << 30
    (home / "set.tar.gz").write_bytes(gzip.compress(bomb.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)))
    report = purified(home)
    assert [(name, "holds a header of 1,073,741,824 bytes" in said) for name, said in report.failed] == [
        ("set.tar.gz", True)
    ]


# ------------------------------------------------------------------------------------------------------ damaged images

FORMATS = {
    kind: encoded(smooth(24, 20), kind, **options)
    for kind, options in {"PNG": {}, "JPEG": {}, "WEBP": {}, "BMP": {}, "TIFF": {}, "GIF": {}, "PPM": {}}.items()
}


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=8),
    st.integers(0, 4000),
)
def test_damaged_image_bytes_are_a_picture_or_one_sentence(kind, changes, length):
    data = bytearray(FORMATS[kind])
    for where, value in changes:
        data[where % len(data)] = value
    try:
        picture = read_picture(bytes(data[: length or None]), 10_000)
    except InputError:
        return
    assert picture.pixels.shape[0] in (1, 3)
    assert picture.pixels[0].numel() <= 10_000


@pytest.mark.parametrize("kind", fuzz_files.KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_the_first_cases_of_the_fuzz_run_find_nothing(kind, seed):
    fuzz_files.run(kind, seed)

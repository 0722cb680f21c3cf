"""The same files from a Ray cluster of two workers, of which one dies during the run, as from this process."""

from __future__ import annotations

import operator
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import diffpure as dp
import diffpure.scores.load
from diffpure import cli
from diffpure.errors import InputError
from diffpure.files import purify_files
from pictures import Silent, encoded, noisy, npz, smooth, tree, write_tar

ray = pytest.importorskip("ray", reason="Ray is an optional extra")
PNGS = 30
OPTIONS = {"seed": 1, "batch": 4, "fit": "resize"}


class Deadly(Silent):
    """A score of 0 that kills its process at the second call, unless a file says that this has happened."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker, self.calls = marker, 0

    def epsilon(self, x, t):
        self.calls += 1
        if self.calls == 2 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().epsilon(x, t)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> str:
    """Images of two sizes in two folders, one of them damaged, a tar archive and two npz files, one damaged."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    for name in ("in/a", "in/b"):
        (tmp_path / name).mkdir(parents=True)
    for i in range(PNGS):
        size = (16, 20) if i % 5 == 3 else (16, 16)
        (tmp_path / "in" / "ab"[i % 2] / f"{i}.png").write_bytes(encoded(smooth(*size)))
    (tmp_path / "in" / "a" / "10.png").write_bytes(b"damaged")
    write_tar(tmp_path / "in" / "set.tar", [(f"{i}.png", encoded()) for i in range(3)])
    (tmp_path / "in" / "set.npz").write_bytes(npz(x=np.zeros((6, 16, 16, 3), np.uint8), y=np.arange(6)))
    (tmp_path / "in" / "bad.npz").write_bytes(b"damaged")
    return str(tmp_path / "in")


def contents(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in tree(out)}


def test_the_local_files_although_a_worker_dies(tmp_path, folder, cluster):
    marker = tmp_path / "died"
    local = purify_files(noisy(), [folder], tmp_path / "local", **OPTIONS)
    purifier = dp.Purifier(Deadly(marker), dp.OneShot(t_star=0.01))
    told: list[tuple[int, int | None]] = []
    remote = purify_files(
        purifier, [folder], tmp_path / "ray", **OPTIONS, engine=cluster, progress=lambda *now: told.append(now[1:])
    )
    assert marker.exists()  # a worker died
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert len(remote.done) == PNGS - 1 + 3 + 1
    assert {name for name, _ in remote.failed} == {"a/10.png", "bad.npz"}
    for what in ("done", "failed", "notes"):
        assert sorted(getattr(remote, what)) == sorted(getattr(local, what))
    assert (remote.ways, remote.tiles, remote.skipped) == (local.ways, local.tiles, [])
    assert told[-1] == (local.count, None)  # a tar archive does not say how many


def test_a_folder_goes_on_on_a_cluster_and_here(tmp_path, folder, cluster):
    whole, out = tmp_path / "whole", tmp_path / "out"
    purify_files(noisy(), [folder], whole, **OPTIONS)
    purify_files(noisy(), [folder], out, **OPTIONS)
    for engine in (cluster, None):
        lost = sorted(tree(out))[1::3]
        for name in lost:
            (out / name).unlink()
        report = purify_files(noisy(), [folder], out, **OPTIONS, engine=engine)
        assert sorted(report.done) == lost
        assert len(report.skipped) == PNGS - 1 + 3 + 1 - len(lost)
        assert contents(out) == contents(whole)


def test_the_walk_is_no_further_than_there_is_room(cluster):
    walked: list[int] = []

    def pieces() -> Iterator[int]:
        for i in range(40):
            walked.append(i)
            yield i

    found = []
    for result in cluster.map(operator.add, 100, pieces()):
        found.append(result)
        assert len(walked) - len(found) < 4  # two for each of two workers
    assert sorted(found) == list(range(100, 140))


def test_a_purifier_that_cannot_be_sent_is_one_sentence(tmp_path, folder, cluster):
    purifier = noisy()
    purifier.lock = threading.Lock()
    with pytest.raises(
        InputError, match=r"^The model cannot be sent to Ray workers \(cannot pickle '_thread.lock' object\)\.$"
    ):
        purify_files(purifier, [folder], tmp_path / "out", engine=cluster)


def test_the_command(tmp_path, folder, cluster, monkeypatch):
    monkeypatch.setattr(diffpure.scores.load, "load_score", lambda name, like=None, **_: Silent())
    monkeypatch.chdir(tmp_path)  # relative paths, and workers with another working directory

    def call(*words):
        words = ("purify", "--seed", "1", "--sampler", "one-shot", *words)
        return CliRunner().invoke(cli.app, words, catch_exceptions=False)

    local, remote = call("in", "-o", "local"), call("in", "-o", "ray", "--engine", "ray")
    assert remote.stdout == local.stdout
    assert remote.exit_code == local.exit_code == 1  # two files failed
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    call("in/a/0.png", "-o", "drawn", "--engine", "ray", "--trajectory", "strip")
    assert tree(tmp_path / "drawn") == {"0.png", "0.png.trajectory.png"}
    for words, said in (
        (("--address", "localhost:1"), "--address is for --engine ray"),
        (("--engine", "ray", "--device", "cpu"), "leave --device out"),
        (("--engine", "rya"), "did you mean 'ray'"),
        (("--engine", "ray", "--gpus", "1"), "A task wants 1 GPUs, but the Ray cluster has 0"),
    ):
        with pytest.raises(InputError, match=said):
            call("in", "-o", "other", *words)

"""The same rows from a Ray cluster of two workers, of which one is killed during the run, as from this process."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffpure.attacks import APGD, EOT, PGD
from diffpure.diffusion.samplers import ReverseSDE
from diffpure.errors import InputError
from diffpure.evaluation.engine import Engine, Local, Ray
from diffpure.evaluation.evaluate import evaluate
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense
from diffpure.results.read import read_rows
from diffpure.results.result import Result
from diffpure.threats import Linf
from evaluations import timeless
from problems import images, tiny_classifier, tiny_unet

ray = pytest.importorskip("ray", reason="Ray is an optional extra")
COUNT = 6


def settle(out: Path, engine: Engine) -> Result:
    model = Defense(Purifier(tiny_unet(8), ReverseSDE(t_star=0.05, steps=6)), tiny_classifier())
    x = images(COUNT)
    y = model(x, seeds=range(COUNT)).argmax(1)
    attacks = [PGD(iterations=5, eot=EOT(4)), APGD(iterations=5, eot=EOT(4))]
    return evaluate(
        model,
        x,
        y,
        Linf(8 / 255),
        attacks,
        rules=["one-shot", "average of 3"],
        batch=2,
        per_call=8,
        out=out,
        engine=engine,
    )


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_ours(pid: int) -> bool:
    while pid > 1:
        if (pid := parent(pid)) == os.getpid():
            return True
    return False


def busy_workers() -> list[int]:
    """Processes below this one that run a task of Ray."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"ray::_task" in (entry / "cmdline").read_bytes() and is_ours(int(entry.name)):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    return found


def kill_one(killed: list[int], over: threading.Event) -> None:
    while not killed and not over.is_set():
        for pid in busy_workers()[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        over.wait(0.005)


def test_an_address_where_nothing_is(tmp_path):
    with pytest.raises(InputError, match="no way to reach a Ray cluster at localhost:1 "):
        settle(tmp_path / "r", Ray(address="localhost:1"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="workers are found in /proc")
def test_two_workers_of_which_one_is_killed_give_the_local_rows(tmp_path, cluster):
    local = settle(tmp_path / "local", Local())
    killed: list[int] = []
    over = threading.Event()
    killer = threading.Thread(target=kill_one, args=(killed, over))
    killer.start()
    try:
        remote = settle(tmp_path / "ray", cluster)
    finally:
        over.set()
        killer.join()
    assert killed
    assert timeless(remote.rows) == timeless(local.rows)
    assert remote.summary()["rates"] == local.summary()["rates"]
    _, rows = read_rows(tmp_path / "ray")
    assert len(rows) == len({row.key for row in rows}) == 3 * COUNT
    names = {file.name for file in (tmp_path / "local" / "adversarial").iterdir()}
    assert names == {file.name for file in (tmp_path / "ray" / "adversarial").iterdir()}


@pytest.mark.parametrize(("wanted", "what"), [({"gpus": 1}, "1 GPUs"), ({"cpus": 99}, "99 CPUs")])
def test_resources_that_the_cluster_has_not(cluster, wanted, what):
    x, y = images(2), torch.zeros(2).long()
    with pytest.raises(InputError, match=f"A task wants {what}, but the Ray cluster has"):
        evaluate(tiny_classifier(), x, y, Linf(0.1), rules=["one-shot"], engine=Ray(**wanted))


class Refusing(torch.nn.Module):
    """A model that is fine until it is attacked in earnest."""

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.stack([x.flatten(1).sum(1), -x.flatten(1).sum(1)], 1)
        return logits * float("nan") if len(x) > 2 else logits


def test_an_error_in_a_worker_is_the_same_sentence(cluster):
    x, y = images(4), torch.zeros(4).long()
    with pytest.raises(InputError, match="NaN or infinite; finite logits are accepted"):
        evaluate(Refusing(), x, y, Linf(0.1), rules=["one-shot"], batch=4, per_call=4, engine=cluster)

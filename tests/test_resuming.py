"""An evaluation that is killed, resumed, split otherwise, watched, and written to a full disk: the same rows."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from diffpure.attacks import PGD, AttackRun
from diffpure.errors import InputError
from diffpure.evaluation.engine import Keeper, Local, Step
from diffpure.evaluation.evaluate import Tick, _effort, _ticker, evaluate, run
from diffpure.evaluation.setup import Evaluation
from diffpure.evaluation.store import Store
from diffpure.evaluation.units import Done, Unit
from diffpure.results.read import read_rows
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN
from diffpure.threats import Linf
from evaluations import BATCH, COUNT, RULES, THREAT, Linear, attacks, defense, line_up, problem, ready, settle, timeless

# -------------------------------------------------------------------------------------------------------------- kills


def killed_at(folder: Path, delay: float) -> bool:
    """Run the evaluation in a child and kill it; True if it was still running."""
    child = os.fork()
    if child == 0:
        try:
            settle(folder, engine=Local(save_every=0.0))
        finally:
            os._exit(0)
    time.sleep(delay)
    done, _ = os.waitpid(child, os.WNOHANG)
    if not done:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not done


def test_kill_and_resume_to_the_same_rows(tmp_path, reference):
    began = time.perf_counter()
    settle(tmp_path / "whole", engine=Local(save_every=0.0))
    whole = time.perf_counter() - began
    kills = sum(killed_at(tmp_path / "r", whole * share) for share in (0.3, 0.6, 0.8))
    found = settle(tmp_path / "r")
    assert kills > 0
    assert timeless(found.rows) == timeless(reference.rows)
    _, rows = read_rows(tmp_path / "r")
    assert len(rows) == len({row.key for row in rows}) == len(reference.rows)
    assert not list((tmp_path / "r").rglob("*.part"))
    for file in (tmp_path / "whole" / "adversarial").iterdir():
        one, other = load_file(file), load_file(tmp_path / "r" / "adversarial" / file.name)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_torn_line_is_repaired(tmp_path, reference):
    settle(tmp_path / "r")
    path = tmp_path / "r" / "rows.jsonl"
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 500, len(whole) // 2):
        path.write_bytes(whole[:cut])
        assert timeless(settle(tmp_path / "r").rows) == timeless(reference.rows)
    settle(tmp_path / "r")  # a finished run is only read
    assert len(path.read_text().splitlines()) == 1 + len(reference.rows)


def test_an_interrupted_attack_goes_on_from_its_step(tmp_path, reference):
    steps = []

    def interrupt(tick: Tick) -> None:
        steps.append((tick.attack, tick.step))
        if len(steps) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        settle(tmp_path / "r", progress=interrupt)
    assert (tmp_path / "r" / "state.safetensors").is_file()
    assert AttackRun.of(load_file(tmp_path / "r" / "state.safetensors")).step == steps[-1][1]
    steps += [None] * 9
    found = settle(tmp_path / "r", progress=interrupt)
    assert steps[12] == (steps[2][0], steps[2][1] + 1) if steps[2][1] < 3 else steps[12][1] == 1
    assert timeless(found.rows) == timeless(reference.rows)
    assert not (tmp_path / "r" / "state.safetensors").exists()


def test_a_run_goes_on_with_its_own_threads_and_images_per_call(tmp_path):
    """Threads and images per call decide how sums round: the second process may have others, and must not use them."""

    class Recording:
        device = None

        def run(self, work: Evaluation, units: Sequence[Unit], on_step: Step, keeper: Keeper | None) -> Iterator[Done]:
            seen.append((torch.get_num_threads(), work.job.per_call))
            return iter(())

    seen: list[tuple[int, int]] = []
    before = torch.get_num_threads()
    for count, per_call in ((before, 8), (before + 1, 3)):
        torch.set_num_threads(count)
        assert not settle(tmp_path / "r", per_call=per_call, engine=Recording()).complete
        assert torch.get_num_threads() == count
    torch.set_num_threads(before)
    assert seen == [(before, 8), (before, 8)]


# -------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(("batch", "per_call"), [(1, 1), (32, 64)])
def test_other_plans_draw_the_same_noise(reference, batch, per_call):
    """Purified predictions agree for every image; what an attack finds may differ by rounding, and here does not."""
    found = settle(batch=batch, per_call=per_call)
    assert timeless([r for r in found.rows if r.attack == CLEAN]) == timeless(
        [r for r in reference.rows if r.attack == CLEAN]
    )
    pairs = zip(found.rows, reference.rows, strict=True)
    assert sum(a.predictions != b.predictions for a, b in pairs) <= 1


def test_a_subset_of_the_images_has_the_same_rows(reference):
    x, y = problem()
    found = evaluate(defense(), x[2:4], y[2:4], THREAT, attacks(), rules=RULES, indices=[2, 3], batch=BATCH, per_call=8)
    assert timeless(found.rows) == timeless([row for row in reference.rows if row.image in (2, 3)])


# ----------------------------------------------------------------------------------------------------------- progress


def test_progress_ends_at_one(tmp_path):
    ticks: list[Tick] = []
    settle(tmp_path / "r", progress=ticks.append)
    shares = [tick.share for tick in ticks]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1.0
    assert {tick.attack for tick in ticks} == {CLEAN, "pgd-ce", "apgd-dlr", "square"}


def test_the_time_that_is_left_follows_the_pace(monkeypatch):
    """A machine on which every unit takes 1000 s, whatever it costs in calls."""
    ticks: list[Tick] = []
    work = ready(tried=attacks()[:1], batch=1)
    clock = iter(range(0, 10**6, 1000))
    monkeypatch.setattr("diffpure.evaluation.evaluate.time.perf_counter", lambda: next(clock))
    tick = _ticker(work, work.units, ticks.append, [])
    for unit in work.units:
        tick(unit, 1, 1)
    assert ticks[0].left is None  # one point has no pace
    clean, attacked = (_effort(work, unit, work.images[:1]) for unit in work.units[:2])
    for done, now in list(enumerate(ticks))[2::2]:  # after as many attacked units as clean ones since the first
        pairs = done // 2
        assert now.left == pytest.approx(1000 * done / pairs * (COUNT - pairs - clean / (clean + attacked)))
    assert ticks[-1].left == pytest.approx(0, abs=1e-6)


def test_a_part_of_a_run_ticks_to_its_own_end_and_the_rest_follows(tmp_path, reference):
    ticks: list[Tick] = []
    only = lambda unit: unit.attack == "pgd-ce" and unit.start < 2  # noqa: E731
    first = run(ready(), tmp_path / "r", progress=ticks.append, only=only)
    assert [row.key for row in first.rows] == [(0, 0, "pgd-ce"), (0, 1, "pgd-ce")]
    assert not first.complete
    assert ticks[-1].share == 1
    assert ticks[-1].left == 0
    assert timeless(settle(tmp_path / "r").rows) == timeless(reference.rows)


# ------------------------------------------------------------------------------------------------- folders, bad disks


def test_the_folder_of_another_run(tmp_path):
    settle(tmp_path / "r", seeds=[0])
    before = (tmp_path / "r" / "rows.jsonl").read_bytes()
    with pytest.raises(InputError, match="holds another evaluation \\(with other seeds\\)"):
        settle(tmp_path / "r", seeds=[1])
    assert (tmp_path / "r" / "rows.jsonl").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"holds other files \(thesis.tex"):
        settle(tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_two_processes_do_not_share_a_folder(tmp_path):
    header = ready().header
    with Store.open(tmp_path / "r", header), pytest.raises(InputError, match="Another process is writing"):
        Store.open(tmp_path / "r", header)
    Store.open(tmp_path / "r", header).close()


def said_by_another_user(folder: Path) -> str:
    """What an evaluation into a folder says when somebody without rights runs it: in a child that gives up its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            settle(folder)
            os.write(write, b"nothing")
        except InputError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as said:
        return said.read()


def test_a_folder_that_cannot_be_written(tmp_path, reference):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        settle(tmp_path / "file" / "r")
    with tempfile.TemporaryDirectory() as place:  # the way to tmp_path itself is closed to other users
        Path(place).chmod(0o555)
        said = said_by_another_user(Path(place) / "r")
        assert said == f"{place}/r cannot be written or read (Permission denied); what was finished before is kept."
        assert not list(Path(place).iterdir())
        Path(place).chmod(0o755)
        settle(Path(place) / "r")
        before = {file: file.read_bytes() for file in Path(place).rglob("*") if file.is_file()}
        for folder in (Path(place) / "r", Path(place) / "r" / "adversarial"):
            folder.chmod(0o555)
        (Path(place) / "r" / "rows.jsonl").chmod(0o444)
        assert "Permission denied" in said_by_another_user(Path(place) / "r")
        assert {file: file.read_bytes() for file in Path(place).rglob("*") if file.is_file()} == before
        (Path(place) / "r").chmod(0o755)
        (Path(place) / "r" / "adversarial").chmod(0o755)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files may not grow beyond 6 kB: to the writer that is a full disk, met in the middle of a line."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk(tmp_path, reference, request):
    request.getfixturevalue("small_files")
    with pytest.raises(InputError, match="cannot be written or read") as caught:
        settle(tmp_path / "r")
    assert str(caught.value).count(".") >= 1
    assert "\n" not in str(caught.value)
    whole = (tmp_path / "r" / "rows.jsonl").read_text()
    assert whole.endswith("\n")  # no half-written row
    assert not list((tmp_path / "r").rglob("*.part"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert timeless(settle(tmp_path / "r").rows) == timeless(reference.rows)  # space was made


def test_logits_that_become_nan_are_one_sentence_and_keep_the_rows(tmp_path):
    class Overflowing(Linear):
        ceiling = 0.2

        def forward(self, images: Tensor) -> Tensor:
            logits = super().forward(images)
            return torch.where(logits.abs() > self.ceiling * self.w.abs().sum(), torch.nan, logits)

    model = Overflowing()
    x, y = line_up(model, [0.01, 0.02, 0.3])

    def found(model: Linear) -> Result:
        return evaluate(model, x, y, Linf(0.05), [PGD(iterations=2)], batch=2, out=tmp_path / "r")

    with pytest.raises(InputError, match=r"^The classifier returned logits that are NaN or infinite;[^.]*\.$"):
        found(model)
    _, rows = read_rows(tmp_path / "r")
    assert {row.key for row in rows} == {(0, image, name) for image in (0, 1) for name in ("clean", "pgd-ce")}
    Overflowing.ceiling = 1.0  # mended
    assert timeless(found(model).rows[:2]) == timeless(rows[:2])
    assert found(model).complete

"""An evaluation in worlds with known answers; killed, resumed, split otherwise, forged, and on a broken disk."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from inspect import isabstract
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import diffpure.adapters
import diffpure.attacks
from diffpure.attacks import APGD, EOT, PGD, Attack, Square, Suite
from diffpure.attacks.base import Run
from diffpure.errors import InputError
from diffpure.evaluation.calibrate import _Peak
from diffpure.evaluation.engine import Local, Step, Work
from diffpure.evaluation.estimate import spending
from diffpure.evaluation.evaluate import Tick, _ticker, evaluate, prepare
from diffpure.evaluation.pictures import save_pngs
from diffpure.evaluation.results import CLEAN, Result, Row, read_rows
from diffpure.evaluation.spec import ATTACKS, EvaluationSpec, attacks_of
from diffpure.evaluation.store import Store
from diffpure.evaluation.units import Done
from diffpure.evaluation.verify import Verification, verify
from diffpure.experiments.run import World, estimate_run, load_images, run, run_folder, shipped_specs, verify_run
from diffpure.purify import Defense, Purifier
from diffpure.samplers import ReverseSDE
from diffpure.threats import Linf
from problems import images, tiny_classifier, tiny_unet

RULES = ("one-shot", "average of 3", "worst of 4", "majority of 3")
COUNT, BATCH = 5, 2  # three batches, the last one partial
THREAT = Linf(8 / 255)


class Linear(nn.Module):
    """Two classes, logits ±(⟨w, x⟩ - c): under ℓ∞ the margin falls by exactly 2 ε ‖w‖₁ and no more."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        w = torch.linspace(-1, 1, 3 * size * size).reshape(3, size, size)
        self.w = nn.Parameter(w, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = ((x - 0.5) * self.w).flatten(1).sum(1)
        return torch.stack([-z, z], 1)


def line_up(model: Linear, distances: list[float]) -> tuple[Tensor, Tensor]:
    """Images whose signed margins ⟨w, x - ½⟩/‖w‖₁ are these distances, and their true labels."""
    along = model.w.sign() / 1.0
    x = 0.5 + torch.tensor(distances)[:, None, None, None] * along
    return x, (torch.tensor(distances) > 0).long()


def defense() -> Defense:
    return Defense(Purifier(tiny_unet(8), ReverseSDE(t_star=0.05, steps=3)), tiny_classifier())


def attacks() -> tuple[Attack, ...]:
    return PGD(iterations=2, eot=EOT(2)), APGD(iterations=2, loss="dlr", eot=EOT(2)), Square(queries=3)


@functools.cache
def problem(count: int = COUNT) -> tuple[Tensor, Tensor]:
    x = images(count)
    return x, defense()(x, seeds=range(count)).argmax(1)


def settle(out: Path | None = None, **changes: object) -> Result:
    x, y = problem()
    options = {"rules": RULES, "batch": BATCH, "rows": 8, "out": out, **changes}
    return evaluate(defense(), x, y, THREAT, attacks(), **options)  # type: ignore[arg-type]


def timeless(rows: tuple[Row, ...] | list[Row]) -> list[Row]:
    return [replace(row, seconds=0.0) for row in rows]


@pytest.fixture(scope="module")
def reference() -> Result:
    return settle()


# -------------------------------------------------------------------------------------------------- known answers


def test_a_linear_model_has_its_exact_robust_accuracy(tmp_path):
    eps = 0.1
    model, distances = Linear(), [0.3, 0.11, 0.09, -0.05, -0.25, -0.101, 0.02]
    x, y = line_up(model, distances)
    y[0] = 0  # one image is wrong from the start
    found = evaluate(model, x, y, Linf(eps), [PGD(iterations=5, random_start=False)], out=tmp_path / "r")
    assert found.clean().correct == 6
    survivors = {i for i, d in enumerate(distances) if abs(d) > eps} - {0}
    rows = {row.image: row for row in found.rows if row.attack == "pgd-ce"}
    assert {i for i, row in rows.items() if row.predictions == (int(y[i]),)} == survivors
    assert found.robust().correct == len(survivors)
    assert all(row.size == pytest.approx(eps) and row.within for row in rows.values())
    assert found.header["model"]["stochastic"] is False


def test_what_an_attack_spends_is_known(reference):
    rows = [row for row in reference.rows if row.attack == "pgd-ce"]
    assert {(row.gradients, row.queries) for row in rows} == {(4, 4)}  # 2 steps × 2 draws; first and last look × 2
    forward, gradient = 3, 6  # three steps, each of them again in the backward pass
    assert reference.header["calls"] == [forward, gradient]
    assert {row.score_calls for row in rows} == {4 * gradient + (4 + 4) * forward}
    assert {row.score_calls for row in reference.rows if row.attack == CLEAN} == {4 * forward}
    assert spending(PGD(iterations=2, eot=EOT(2)), 5) == (4, 4)
    assert spending(Suite(attacks=(PGD(iterations=2), APGD(iterations=3, loss="dlr-targeted"))), 5) == (
        2 + 12,
        1 + 1 + 4,
    )


def test_an_attack_that_cheats_is_moved_back():
    class Cheat(PGD.__mro__[1]):  # type: ignore[misc]  # any attack frame
        name = "cheat"

        def start(self, problem, state):
            return state

        def begin(self, problem, state, i, run):
            too_far = torch.ones_like(state["best"])
            too_far[0, 0, 0, 0] = torch.nan
            return {**state, "best": too_far}

        def move(self, problem, state, i, k):
            return state

    model = Linear()
    x, y = line_up(model, [0.2, -0.2])
    found = evaluate(model, x, y, Linf(0.1), [Cheat(iterations=1)])
    rows = [row for row in found.rows if row.attack == "cheat"]
    assert not any(row.within for row in rows)
    assert found.robust().value == 1.0  # no image within the budget is lost
    assert any("2 of 2 perturbations exceeded their budget" in text for text in found.warnings)


def test_draws_of_the_judge_are_not_those_of_the_attack(reference):
    again = settle(seeds=[1])
    assert [r.predictions for r in again.rows] != [r.predictions for r in reference.rows]
    assert timeless(settle().rows) == timeless(reference.rows)


def test_fixed_noise_is_judged_with_the_noise_that_the_attack_knew():
    """With its noise known, a random defence is a deterministic model: what the attack believes is what is judged."""
    x, y = problem()
    known = PGD(iterations=6, step_size=2 / 255, eot=EOT(1, fixed=True))
    found = evaluate(defense(), x, y, Linf(16 / 255), {"known": known}, rules=["one-shot"])
    rows = [row for row in found.rows if row.attack == "known"]
    assert any(row.broken for row in rows)
    assert all(row.broken == (row.predictions[0] != row.label) for row in rows)


def test_a_random_model_without_seeds_is_seeded_image_by_image():
    class Shaky(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.2 * torch.randn_like(x))

    x, y = line_up(Linear(), [0.02, -0.02, 0.3, 0.01])
    one = evaluate(Shaky(), x, y, Linf(0.01), [PGD(iterations=2, eot=EOT(2))], rules=["worst of 5"], batch=4)
    other = evaluate(Shaky(), x, y, Linf(0.01), [PGD(iterations=2, eot=EOT(2))], rules=["worst of 5"], batch=1)
    assert one.header["model"]["stochastic"]
    assert timeless(one.rows) == timeless(other.rows)
    assert len({row.predictions for row in one.rows}) > 1


def test_warnings_of_the_checks(reference):
    assert any(text.startswith("square: The defence is random") for text in reference.warnings)
    x, y = problem(2)
    soft = evaluate(defense().with_gradient("bpda"), x, y, THREAT, [PGD(iterations=1, eot=EOT(2))], rules=["one-shot"])
    assert any("'bpda' is approximate" in text for text in soft.warnings)
    model = Linear()
    x, y = line_up(model, [0.2, -0.2])
    weak = PGD(iterations=1, step_size=1e-4, random_start=False)
    found = evaluate(model, x, y, Linf(0.15), [weak], probe=2)
    assert any("survived an attack without a budget" in text for text in found.warnings)


def test_what_was_not_tried_is_said():
    model = Linear()
    x, y = line_up(model, [0.2, -0.2])
    attack = PGD(iterations=1)
    for attacks, probe, said in (([attack], 0, True), ([attack], 2, False), ([], 0, False)):
        found = evaluate(model, x, y, Linf(0.15), attacks, probe=probe)
        assert any(text.startswith("Not tried: whether more draws") for text in found.warnings) == said


def test_every_result_says_where_the_cross_entropy_saturates():
    steep = Linear()
    x, y = line_up(steep, [0.2, 0.3])
    steep.w.mul_(1e3)
    found = evaluate(steep, x, y, Linf(0.01), [PGD(iterations=1)])
    assert any("2 of 2 images is zero in float32" in text for text in found.warnings)


def test_a_probe_audits_the_gradient():
    x, y = problem(1)
    attack = PGD(iterations=1, eot=EOT(2))
    for mode, doubted in (("exact", False), ("bpda", True)):
        found = evaluate(defense().with_gradient(mode), x, y, THREAT, [attack], rules=["one-shot"], probe=1)
        assert any("audit disagrees" in text for text in found.warnings) == doubted


# ----------------------------------------------------------------------------------------- kills, plans, bad disks


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
    assert Run.of(load_file(tmp_path / "r" / "state.safetensors")).step == steps[-1][1]
    steps += [None] * 9
    found = settle(tmp_path / "r", progress=interrupt)
    assert steps[12] == (steps[2][0], steps[2][1] + 1) if steps[2][1] < 3 else steps[12][1] == 1
    assert timeless(found.rows) == timeless(reference.rows)
    assert not (tmp_path / "r" / "state.safetensors").exists()


def test_a_run_goes_on_with_its_own_threads_and_rows(tmp_path):
    """Threads and rows decide how sums round: the second process may have others, and must not use them."""

    class Recording:
        device = None

        def run(self, work: Work, on_step: Step) -> Iterator[Done]:
            seen.append((torch.get_num_threads(), work.job.rows))
            return iter(())

    seen: list[tuple[int, int]] = []
    before = torch.get_num_threads()
    for count, rows in ((before, 8), (before + 1, 3)):
        torch.set_num_threads(count)
        assert not settle(tmp_path / "r", rows=rows, engine=Recording()).complete
        assert torch.get_num_threads() == count
    torch.set_num_threads(before)
    assert seen == [(before, 8), (before, 8)]


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (32, 64)])
def test_other_plans_draw_the_same_noise(reference, batch, rows):
    """Purified predictions agree for every image; what an attack finds may differ by rounding, and here does not."""
    found = settle(batch=batch, rows=rows)
    assert timeless([r for r in found.rows if r.attack == CLEAN]) == timeless(
        [r for r in reference.rows if r.attack == CLEAN]
    )
    pairs = zip(found.rows, reference.rows, strict=True)
    assert sum(a.predictions != b.predictions for a, b in pairs) <= 1


def test_a_subset_of_the_images_has_the_same_rows(reference):
    x, y = problem()
    found = evaluate(defense(), x[2:4], y[2:4], THREAT, attacks(), rules=RULES, places=[2, 3], batch=BATCH, rows=8)
    assert timeless(found.rows) == timeless([row for row in reference.rows if row.image in (2, 3)])


def test_progress_ends_at_one(tmp_path):
    ticks: list[Tick] = []
    settle(tmp_path / "r", progress=ticks.append)
    shares = [tick.share for tick in ticks]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1.0
    assert {tick.attack for tick in ticks} == {CLEAN, "pgd-ce", "apgd-dlr", "square"}


def test_the_time_that_is_left_follows_the_pace(monkeypatch):
    """A machine on which every unit takes 1000 s, whatever the calibration says."""
    ticks: list[Tick] = []
    ready = prepare(defense(), *problem(), THREAT, attacks()[:1], rules=RULES, batch=1, rows=8)
    clock = iter(range(0, 10**6, 1000))
    monkeypatch.setattr("diffpure.evaluation.evaluate.time.perf_counter", lambda: next(clock))
    tick = _ticker(ready, ticks.append, [])
    for unit in ready.units:
        tick(unit, 1, 1)
    assert ticks[0].left == pytest.approx((1 - ticks[0].share) * ready.estimate.seconds)
    clean, attacked = ready.seconds(ready.units[0]), ready.seconds(ready.units[1])
    for done, now in list(enumerate(ticks))[2::2]:  # after as many attacked units as clean ones since the first
        pairs = done // 2
        assert now.left == pytest.approx(1000 * done / pairs * (COUNT - pairs - clean / (clean + attacked)))
    assert ticks[-1].left == pytest.approx(0, abs=1e-6)


def test_a_part_of_a_run_ticks_to_its_own_end_and_the_rest_follows(tmp_path, reference):
    ticks: list[Tick] = []
    first = settle(tmp_path / "r", only=lambda unit: unit.attack == "pgd-ce" and unit.start < 2, progress=ticks.append)
    assert [row.key for row in first.rows] == [(0, 0, "pgd-ce"), (0, 1, "pgd-ce")]
    assert not first.complete
    assert ticks[-1].share == 1
    assert ticks[-1].left == 0
    assert timeless(settle(tmp_path / "r").rows) == timeless(reference.rows)


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
    header = prepare(defense(), *problem(), THREAT, rules=RULES).header
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

    def run(model: Linear) -> Result:
        return evaluate(model, x, y, Linf(0.05), [PGD(iterations=2)], batch=2, out=tmp_path / "r")

    with pytest.raises(InputError, match=r"^The model returned logits that are NaN or infinite;[^.]*\.$"):
        run(model)
    _, rows = read_rows(tmp_path / "r")
    assert {row.key for row in rows} == {(0, image, name) for image in (0, 1) for name in ("clean", "pgd-ce")}
    model.ceiling = 1.0  # mended
    assert timeless(run(model).rows[:2]) == timeless(rows[:2])
    assert run(model).complete


def test_memory_does_not_grow_with_the_images():
    """Live tensor bytes at their peak, with ten times the images (counted, so that no timing or allocator matters)."""

    def peak(count: int) -> int:
        x, y = line_up(Linear(), [0.1] * count)
        ready = prepare(Linear(), x, y, Linf(0.05), [PGD(iterations=2)], rules=["one-shot"], batch=50, rows=50)
        counter = _Peak()
        with counter:
            for done in Local().run(Work(ready.job, x, y, ready.places, ready.units), lambda *_: None):
                assert done.rows
        return counter.peak - x.nbytes - y.nbytes

    assert peak(2000) <= 1.1 * peak(200)


# -------------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": []}, "needs one place an image"),
        ({"seeds": []}, "needs one place an image"),
        ({"batch": 0}, "batch and rows of at least 1"),
        ({"places": [0, 0, 1, 2, 3]}, "one place an image"),
        ({"rules": ["best of 3"]}, "Unknown decision rule"),
    ],
)
def test_bad_arguments(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        settle(tmp_path / "r", **changes)
    assert not (tmp_path / "r").exists()


def test_labels_beyond_the_classes_and_a_model_in_training(tmp_path):
    x, y = problem()
    with pytest.raises(InputError, match=r"Labels are in \[0, 5\)"):
        evaluate(defense(), x, y + 5, THREAT, attacks(), out=tmp_path / "r")
    with pytest.raises(InputError, match="training mode"):
        evaluate(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(192, 5)), x, y, THREAT, out=tmp_path / "r")
    with pytest.raises(InputError, match="Attacks are"):
        evaluate(defense(), x, y, THREAT, {"mine": lambda *_: x}, out=tmp_path / "r")  # type: ignore[dict-item]
    assert not (tmp_path / "r").exists()


# ------------------------------------------------------------------------------------------------ forgeries


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "r"
    settle(folder)
    return folder


def copied(folder: Path, to: Path) -> Path:
    for file in folder.rglob("*"):
        if file.is_file():
            target = to / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return to


def checked(folder: Path, model: nn.Module | None = None) -> Verification:
    x, y = problem()
    ready = prepare(model or defense(), x, y, THREAT, attacks(), rules=RULES, batch=BATCH, rows=8)
    return verify(folder, ready)


def test_an_honest_run_is_verified(honest):
    found = checked(honest)
    assert found.passed, str(found)
    assert (found.rows, found.images) == (COUNT * 4, COUNT * 3)
    assert "what the run says" in str(found)


def edit_rows(folder: Path, change, seal: bool) -> None:
    """Edit the rows of one attack's image 4, and seal them with a new checksum or not."""
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines[1:], 1):
        data = json.loads(line)
        if (data["image"], data["attack"]) == (4, "pgd-ce"):
            data = {**data, **change}
            lines[i] = Row.of({**data, "sum": _sum_of(data)}).line() if seal else json.dumps(data)
    path.write_text("\n".join(lines) + "\n")


def _sum_of(data: dict) -> str:
    from diffpure.evaluation.results import _checksum

    return _checksum({k: v for k, v in data.items() if k not in ("sum", "seconds")})


@pytest.mark.parametrize("seal", [False, True])
def test_an_edited_row_is_caught(honest, tmp_path, seal):
    folder = copied(honest, tmp_path / "r")
    edit_rows(folder, {"predictions": [9, 9, 9, 9]}, seal)
    found = checked(folder)
    expected = "decisions in the row of image 4, attack pgd-ce" if seal else "image 4, attack pgd-ce, seed 0 was edited"
    assert any(expected in text for text in found.problems)


def test_an_edited_label_size_and_rate_are_caught(honest, tmp_path):
    folder = copied(honest, tmp_path / "r")
    edit_rows(folder, {"label": 7, "size": 0.001}, seal=True)
    problems = "\n".join(checked(folder).problems)
    assert "says label 7, but the data say" in problems
    assert "says size 0.001" in problems
    assert "rates in summary.json are not those of the rows" in problems


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (("rates", "worst case", "one-shot", "value"), "rates in summary.json are not those of the rows"),
        (("rates", CLEAN, "average of 3", "interval"), "rates in summary.json are not those of the rows"),
        (("spent", "gradients"), "costs in summary.json are not those of the rows"),
    ],
)
def test_an_edited_summary_is_caught(honest, tmp_path, what, message):
    folder = copied(honest, tmp_path / "r")
    summary = json.loads((folder / "summary.json").read_text())
    part = functools.reduce(lambda table, key: table[key], what[:-1], summary)
    part[what[-1]] = 0.5
    (folder / "summary.json").write_text(json.dumps(summary))
    (problem,) = checked(folder).problems
    assert message in problem


def test_an_image_outside_the_budget_is_caught(honest, tmp_path):
    folder = copied(honest, tmp_path / "r")
    path = folder / "adversarial" / "pgd-ce-seed0-000004.safetensors"
    x, tensors = problem()[0][4:], load_file(path)
    tensors["z"] = torch.where(x < 0.5, 1.01, -1.01) * THREAT.eps
    tensors["images"] = THREAT.apply(x, tensors["z"])
    save_file(tensors, path)
    assert any("image 4, attack pgd-ce, seed 0 lies outside the budget" in t for t in checked(folder).problems)


def test_an_image_that_is_not_its_perturbation_is_caught(honest, tmp_path):
    folder = copied(honest, tmp_path / "r")
    path = folder / "adversarial" / "square-seed0-000000.safetensors"
    tensors = load_file(path)
    tensors["images"][0] = 0.5
    save_file(tensors, path)
    assert any("is not what its perturbation makes" in text for text in checked(folder).problems)


def test_a_missing_image_a_missing_row_and_a_double_one_are_caught(honest, tmp_path):
    folder = copied(honest, tmp_path / "r")
    (folder / "adversarial" / "apgd-dlr-seed0-000004.safetensors").unlink()
    lines = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join([*lines[:-1], lines[1]]) + "\n")
    problems = "\n".join(checked(folder).problems)
    assert "apgd-dlr-seed0-000004.safetensors is missing" in problems
    assert "1 rows are missing, that of image 4, attack square" in problems
    assert "There are 2 rows of image 0, attack clean" in problems


def test_other_weights_are_caught(honest):
    other = defense()
    with torch.no_grad():
        next(other.classifier.parameters()).view(-1)[0].add_(1e-6)
    found = checked(honest, other)
    assert any("other weights of the classifier" in text for text in found.problems)


# ------------------------------------------------------------------------------------------------------- specs


def tiny_world(spec: EvaluationSpec) -> World:
    """The spec's own images, cut small, with small networks for the ones it names."""
    x, y = load_images(spec.data)
    x, y = x[:, :, 8:16, 8:16].contiguous(), y % 5
    if spec.model.score is None:
        return World(tiny_classifier(), x, y)
    purifier = Purifier(tiny_unet(8), spec.model.make_sampler(), spec.model.gradient, rounds=spec.model.rounds)
    return World(Defense(purifier, tiny_classifier()), x, y)


@pytest.mark.parametrize("name", sorted(shipped_specs()))
def test_every_shipped_spec_runs_and_verifies(name, tmp_path):
    spec = EvaluationSpec.read(shipped_specs()[name]).tiny()
    said = estimate_run(spec, build=tiny_world)
    found = run(spec, run_folder(spec, tmp_path), build=tiny_world)
    assert found.complete
    assert said.images == len(spec.data.images)
    assert Result.load(tmp_path / spec.hash).rows == found.rows
    checked = verify_run(tmp_path / spec.hash, build=tiny_world)
    assert checked.passed, str(checked)


def spec_of(**changes: object) -> EvaluationSpec:
    return EvaluationSpec.of({"model": {"classifier": "cifar10-resnet"}, **changes})


def test_a_spec_survives_its_plain_form():
    for path in shipped_specs().values():
        spec = EvaluationSpec.read(path)
        assert EvaluationSpec.of(spec.plain()) == spec
        assert EvaluationSpec.of(spec.plain()).hash == spec.hash
        assert replace(spec, name="another").hash == spec.hash
        assert replace(spec, seeds=(7,)).hash != spec.hash


def test_what_people_write():
    spec = spec_of(
        data={"images": "0-3, 9"}, threat={"eps": "8/255"}, attacks=[{"kind": "pgd", "eot": 5, "step_size": "2/255"}]
    )
    assert spec.data.images == (0, 1, 2, 3, 9)
    assert spec.threat.make() == Linf(8 / 255)
    assert spec.make_attacks() == {"pgd-ce": PGD(eot=EOT(5), step_size=2 / 255)}
    two = spec_of(attacks=[{"kind": "pgd"}, {"kind": "pgd", "iterations": 7}])
    assert list(two.make_attacks()) == ["pgd-ce", "pgd-ce-2"]


def test_a_preset_takes_arguments_for_all_its_attacks():
    rand = attacks_of({"kind": "autoattack-rand", "iterations": 9, "eot": 3})
    assert [a.iterations for a in rand] == [9, 9]  # type: ignore[attr-defined]
    assert {a.ranking.draws for a in rand} == {3}
    (suite,) = attacks_of({"kind": "autoattack-standard", "queries": 11})
    assert suite.attacks[-1].queries == 11  # type: ignore[attr-defined]
    for kind in ATTACKS:
        assert attacks_of({"kind": kind}) == ATTACKS[kind]


def parts_of(value: object) -> Iterator[Attack]:
    """The attacks in a value: itself, and those it is made of."""
    if isinstance(value, tuple):
        for item in value:
            yield from parts_of(item)
    elif isinstance(value, Attack):
        yield value
        for field in fields(value):
            yield from parts_of(getattr(value, field.name))


def test_a_spec_can_name_every_attack():
    """Every kind and every preset that `diffpure.attacks` and `diffpure.adapters` export."""
    named = {value for preset in ATTACKS.values() for value in (preset, *preset)}
    kinds = {type(attack) for preset in ATTACKS.values() for attack in parts_of(preset)}
    names = [*(vars(package).values() for package in (diffpure.attacks, diffpure.adapters))]
    exported = [value for values in names for value in values]
    assert {v for v in exported if isinstance(v, type) and issubclass(v, Attack) and not isabstract(v)} == kinds
    for preset in exported:
        if isinstance(preset, Attack) or (isinstance(preset, tuple) and preset and isinstance(preset[0], Attack)):
            assert preset in named or any(preset == a.attacks for a in named if isinstance(a, Suite))
    known = attacks_of({"kind": "pgd", "eot": {"draws": 2, "fixed": True}})  # the attacker who knows the noise
    assert known == (PGD(eot=EOT(2, fixed=True)),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"atacks": []}, "Unknown key of a spec 'atacks'; did you mean 'attacks'"),
        ({"model": {"clasifier": "x"}}, r"Unknown key of \[model\] 'clasifier'; did you mean 'classifier'"),
        ({"model": {}}, "incomplete"),
        ({"model": {"classifier": "x", "gradient": "exakt"}}, "did you mean 'exact'"),
        ({"model": {"classifier": "x", "sampler": {"kind": "sde", "tstar": 1}}}, "did you mean 't_star'"),
        ({"model": {"classifier": "x", "sampler": {"kind": "sdee"}}}, "did you mean 'sde'"),
        ({"model": {"classifier": "x", "sampler": {"t_star": 2.0}}}, "t\\* is a time"),
        ({"attacks": [{"kind": "pdg"}]}, "did you mean 'pgd'"),
        ({"attacks": [{"kind": "pgd", "iteration": 3}]}, "did you mean 'iterations'"),
        ({"attacks": [{"kind": "pgd", "eot": {"draw": 3}}]}, "did you mean 'draws'"),
        ({"attacks": [{"kind": "pgd", "loss": "xe"}]}, "Unknown loss"),
        ({"attacks": {"kind": "pgd"}}, "is a list"),
        ({"threat": {"kind": "linf", "eps": -1}}, "eps > 0"),
        ({"threat": {"kind": "l8"}}, "Unknown threat"),
        ({"data": {"images": "0-"}}, "ranges such as"),
        ({"data": {"images": [1, 1]}}, "twice"),
        ({"attacks": [{"kind": "diffattack"}]}, "needs a score"),
        ({"rules": ["worst"]}, "decision rule"),
        ({"batch": 0}, "batch of at least 1"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        spec_of(**changes)
    assert "\n" not in str(caught.value)


def test_a_spec_that_names_what_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        EvaluationSpec.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = [")
    with pytest.raises(InputError, match="no TOML file"):
        EvaluationSpec.read(tmp_path / "bad.toml")
    for changes, message in (
        ({"model": {"classifier": str(tmp_path / "none.pt")}}, "which is not there"),
        ({"data": {"source": "cifar11"}}, "Unknown source of images"),
        ({"data": {"images": [500]}}, "has 500 images"),
        ({"data": {"source": "file", "path": "none.safetensors"}}, "none.safetensors is none"),
        ({"data": {"source": "cifar10", "path": str(tmp_path)}}, "No CIFAR-10"),
    ):
        with pytest.raises(InputError, match=message):
            run(spec_of(**changes), tmp_path / "r")
        assert not (tmp_path / "r").exists()


def test_images_from_a_file(tmp_path):
    x, y = problem()
    save_file({"images": x, "labels": y}, tmp_path / "mine.safetensors")
    spec = spec_of(data={"source": "file", "path": str(tmp_path / "mine.safetensors"), "images": [2, 0]})
    found, labels = load_images(spec.data)
    assert torch.equal(found, x[[2, 0]])
    assert torch.equal(labels, y[[2, 0]])


# ---------------------------------------------------------------------------------------------------- pictures


def test_pngs_keep_the_budget(tmp_path):
    model = Linear()
    x, y = line_up(model, [0.2, -0.1, 0.0])
    x = (x * 255).round() / 255
    evaluate(model, x, y, Linf(7.6 / 255), [PGD(iterations=3)], batch=2, out=tmp_path / "r")
    files = save_pngs(tmp_path / "r", tmp_path / "png")
    assert [str(file.relative_to(tmp_path / "png")) for file in files] == [
        f"pgd-ce-seed0/{place:06d}.png" for place in range(3)
    ]
    levels = torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files]).double()
    assert (levels - x.double() * 255).abs().max() == pytest.approx(7, abs=1e-3)
    with pytest.raises(InputError, match="no adversarial images"):
        save_pngs(tmp_path, tmp_path / "png")

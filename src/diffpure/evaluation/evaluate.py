"""`evaluate`: how many images a model still classifies correctly once each attack has done its worst.

The evaluation trusts nobody. It builds every adversarial image from the perturbation that an attack returned, checks
the budget itself, judges with samples that the attack never saw, and appends a row before it goes on: a run that is
killed goes on where it was, and ends with the same rows.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from diffpure import __version__
from diffpure.attacks import EOT, Attack, AttackRun
from diffpure.attacks.losses import Model
from diffpure.errors import InputError
from diffpure.evaluation import checks
from diffpure.evaluation.calibrate import Calibration, calibrate
from diffpure.evaluation.describe import brief, describe, digest, stable, weight_hashes
from diffpure.evaluation.engine import Engine, Local, Work
from diffpure.evaluation.estimate import Estimate, estimate, largest_call, seconds
from diffpure.evaluation.results import CLEAN, DEFAULT_RULES, SUMMARY, Result, Row, Rule, ordered, slug
from diffpure.evaluation.spec import named
from diffpure.evaluation.store import IMAGES, STATE, Store, read_tensors
from diffpure.evaluation.units import Job, Seeded, Unit, device_of, plan, threads
from diffpure.threats import ThreatModel
from diffpure.validate import check_images, check_labels

FORMAT: Final = 1
_ASKED: Final = 16  # images whose cross-entropy is looked at


@final
@dataclass(frozen=True)
class Tick:
    """Where a run is: rows written of all, the share of the chosen work done, the seconds that are left of it (by the
    calibration at first, then by the pace of the run itself), and the attack under way with its step."""

    rows: int
    total: int
    share: float
    left: float
    attack: str
    seed: int
    images: tuple[int, int]  # the first and the last image under way
    step: int
    steps: int


Progress = Callable[[Tick], None]
Choice = Callable[[Unit], bool]


def evaluate(
    model: Model,
    images: Tensor,
    labels: Tensor,
    threat: ThreatModel,
    attacks: Attack | Sequence[Attack] | Mapping[str, Attack] = (),
    *,
    eot: EOT | int | None = None,
    rules: Sequence[str | Rule] = DEFAULT_RULES,
    seeds: Sequence[int] = (0,),
    batch: int = 16,
    rows: int | None = None,
    memory: int | None = None,
    indices: Sequence[int] | None = None,
    probe: int = 0,
    only: Choice | None = None,
    out: str | Path | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
    on_estimate: Callable[[Estimate], None] | None = None,
    name: str = "",
    spec: Mapping[str, Any] | None = None,
) -> Result:
    """Evaluate a model under attacks; with `out`, a folder, it can be killed at any time and called again to go on.

    model: images in [0, 1] to logits; one with `stochastic = True` is given `seeds=`, and one that is random without
    saying so is run image by image with a seeded generator.   images (B, C, H, W) in [0, 1], labels (B,).
    eot: samples for every attack that takes them.   rules: when an image counts as right.   seeds: repeat it all.
    batch: images attacked together.   rows: images in one call of the model, else chosen to fit `memory` bytes (half
    of what is free).   indices: the images' indices in their data, which name their noise.   probe: on how many images
    the checks attack again, harder.   only: which units to do now; a later call does the rest.   engine: `Local()` or
    `Ray(...)`.   A run that goes on keeps its `rows` and its number of threads, as both decide how sums round.
    """
    ready = prepare(
        model, images, labels, threat, attacks, eot=eot, rules=rules, seeds=seeds, batch=batch, rows=rows,
        memory=memory, indices=indices, name=name, spec=spec,
    )  # fmt: skip
    engine = Local() if engine is None else engine
    ready = replace(ready.on(engine.device), only=only)
    if on_estimate is not None:
        on_estimate(ready.estimate)
    if out is None:
        found = engine.run(_work(ready, ready.units, None), _ticker(ready, progress, []))
        return _result(ready, [row for done in found for row in done.rows], probe)
    with Store.open(out, ready.header) as store:
        ready = ready.planned(store.header)
        have = {row.key for row in store.rows}
        units = [unit for unit in ready.units if not all(key in have for key in ready.keys(unit))]
        with threads(store.header["threads"]):
            for done in engine.run(_work(ready, units, store), _ticker(ready, progress, store.rows)):
                if done.tensors:
                    store.save_tensors(f"{IMAGES}/{done.unit.file}", done.tensors)
                store.append([row for row in done.rows if row.key not in have])
                store.remove(STATE)
        old = Path(out) / SUMMARY
        if not units and old.is_file():
            return Result.load(out)
        result = _result(ready, store.rows, probe)
        if result.complete:
            store.save_summary(result.summary())
    return result


@final
@dataclass(frozen=True)
class Ready:
    """An evaluation that has passed every check and has been calibrated, but not begun."""

    job: Job
    images: Tensor
    labels: Tensor
    header: dict[str, Any]
    calibration: Calibration
    only: Choice | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        """The images' indices in their data."""
        return tuple(self.header["images"])

    @property
    def units(self) -> list[Unit]:
        """The units of the run, or those of them that were chosen."""
        units = plan(len(self.images), self.header["batch"], tuple(self.job.attacks), self.header["seeds"])
        return units if self.only is None else [unit for unit in units if self.only(unit)]

    @property
    def estimate(self) -> Estimate:
        """What all of that costs."""
        return estimate(self.job, self.calibration, self.units)

    def on(self, device: str | None) -> Ready:
        """The same, computed on a device that is not the model's own."""
        machine = self.header["machine"] if device is None else {**self.header["machine"], "device": device}
        return replace(self, header={**self.header, "machine": machine})

    def planned(self, header: Mapping[str, Any]) -> Ready:
        """The same with the plan of the run that it goes on with."""
        return replace(self, job=replace(self.job, rows=header["rows"]), header=dict(header))

    def keys(self, unit: Unit) -> list[tuple[int, int, str]]:
        """The keys of the rows of a unit."""
        return [(unit.seed, place, unit.attack) for place in self.indices[unit.start : unit.stop]]

    def seconds(self, unit: Unit) -> float:
        """How long a unit takes, by the calibration."""
        return seconds(self.job, self.calibration, unit)


def prepare(
    model: Model,
    images: Tensor,
    labels: Tensor,
    threat: ThreatModel,
    attacks: Attack | Sequence[Attack] | Mapping[str, Attack] = (),
    *,
    eot: EOT | int | None = None,
    rules: Sequence[str | Rule] = DEFAULT_RULES,
    seeds: Sequence[int] = (0,),
    batch: int = 16,
    rows: int | None = None,
    memory: int | None = None,
    indices: Sequence[int] | None = None,
    name: str = "",
    spec: Mapping[str, Any] | None = None,
) -> Ready:
    """Check everything, calibrate, and write the header; arguments as for `evaluate`."""
    check_images(images)
    check_labels(labels, len(images))
    chosen = indices if indices is not None else range(len(images))
    if len(set(chosen)) != len(images) or not seeds or not rules or batch < 1 or (rows is not None and rows < 1):
        raise InputError("evaluate needs one place an image, a seed, a rule, and a batch and rows of at least 1.")
    _refuse_training(model)
    device = device_of(model)
    probe = images[:2].to(device)
    if not getattr(model, "stochastic", False) and checks.is_random(model, probe):
        model = Seeded(model)
    by_name = {key: _with_eot(attack, eot) for key, attack in _by_name(attacks).items()}
    job = Job(model, threat, by_name, tuple(Rule.parse(rule) for rule in rules), rows or 1)
    wants_gradient = any(attack.price().gradients for attack in by_name.values())
    largest = largest_call(job, min(batch, len(images)))
    calibration = calibrate(model, probe, gradient=wants_gradient, largest=largest, rows=rows, memory=memory)
    check_labels(labels, len(images), calibration.classes)
    job = replace(job, rows=calibration.rows, calls=calibration.calls)
    header = {
        "format": FORMAT,
        "name": name,
        "spec": spec,
        "model": describe(model),
        "weights": weight_hashes(model),
        "data": digest([images, labels]),
        "images": [int(place) for place in chosen],
        "threat": brief(threat),
        "attacks": {key: stable(attack) for key, attack in by_name.items()},
        "rules": [str(rule) for rule in job.rules],
        "seeds": [int(seed) for seed in seeds],
        "batch": batch,
        "rows": calibration.rows,
        "calls": list(calibration.calls),
        "versions": {"diffpure": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "machine": {"device": str(device), "processor": platform.machine()},
    }
    return Ready(job, images, labels, json.loads(json.dumps(header)), calibration)


def _by_name(attacks: Attack | Sequence[Attack] | Mapping[str, Attack]) -> dict[str, Attack]:
    if isinstance(attacks, Attack):
        attacks = (attacks,)
    out = dict(attacks) if isinstance(attacks, Mapping) else named(attacks)
    for name, attack in out.items():
        if not isinstance(attack, Attack) or name == CLEAN:
            raise InputError(
                f"Attacks are `diffpure.attacks` values and none is called {CLEAN!r}, got {name}: {attack}."
            )
    if len({slug(name) for name in out}) < len(out):
        raise InputError(f"The names of the attacks are too much alike: {', '.join(out)}.")
    return out


def _with_eot(attack: Attack, eot: EOT | int | None) -> Attack:
    if eot is None or not hasattr(attack, "eot"):
        return attack
    return replace(attack, eot=EOT(eot) if isinstance(eot, int) else eot)  # type: ignore[call-arg]


def _refuse_training(model: Model) -> None:
    if isinstance(model, nn.Module):
        for module in model.modules():
            random = isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd)
            if random and module.training:
                raise InputError("The model is in training mode; call its eval() before it is evaluated.")


# ---------------------------------------------------------------------------------------------------- the run itself


def _work(ready: Ready, units: Sequence[Unit], store: Store | None) -> Work:
    work = Work(ready.job, ready.images, ready.labels, ready.indices, units)
    if store is None:
        return work

    def save(unit: Unit, run: AttackRun) -> None:
        store.save_tensors(STATE, run.tensors(), {"unit": repr(unit)})

    def resume(unit: Unit) -> AttackRun | None:
        return _saved_run(store.folder / STATE, unit)

    return replace(work, save=save, resume=resume)


def _saved_run(path: Path, unit: Unit) -> AttackRun | None:
    """The attack that was under way in this unit, if it was saved."""
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("unit") != repr(unit):
            return None
    return AttackRun.of(read_tensors(path))


def _ticker(ready: Ready, progress: Progress | None, written: Sequence[Row]) -> Callable[[Unit, int, int], None]:
    """What turns the steps of units into ticks; `written` grows as rows are stored."""
    if progress is None:
        return lambda unit, step, steps: None
    cost = {unit: ready.seconds(unit) for unit in ready.units}
    total = math.fsum(cost.values()) or 1.0  # exact, so that all of it is a share of 1 in whatever order it is done
    have = {row.key for row in written}
    spent = {unit: cost[unit] for unit in ready.units if all(key in have for key in ready.keys(unit))}
    count = len(ready.images) * len(ready.header["seeds"]) * (1 + len(ready.job.attacks))
    first: list[tuple[float, float]] = []  # when the first tick came, and the share that was done by then

    def left(share: float) -> float:
        now = time.perf_counter()
        first[:] = first or [(now, share)]
        began, before = first[0]
        return (1 - share) * ((now - began) / (share - before) if share > before else total)

    def tick(unit: Unit, step: int, steps: int) -> None:
        spent[unit] = cost[unit] * (step / max(steps, 1))
        images = (ready.indices[unit.start], ready.indices[unit.stop - 1])
        share = min(1.0, math.fsum(spent.values()) / total)
        progress(Tick(len(written), count, share, left(share), unit.attack, unit.seed, images, step, steps))

    return tick


def _result(ready: Ready, rows: Sequence[Row], probe: int) -> Result:
    """What the rows say; the checks can doubt it once all of them are there."""
    found = Result(ready.header, ordered(rows, ready.header))
    return replace(found, warnings=_doubts(ready, rows, probe)) if found.complete else found


def _doubts(ready: Ready, rows: Sequence[Row], probe: int) -> tuple[str, ...]:
    """The warnings of the checks: what rows and a few logits can tell, and with `probe` images what must be tried."""
    job, model = ready.job, ready.job.model
    images, labels = (tensor.to(device_of(model)) for tensor in (ready.images, ready.labels))
    attacked = [row for row in rows if row.attack != CLEAN]
    looks = sum(row.gradients // max(1, job.attacks[row.attack].ranking.samples) for row in attacked)
    about = ready.header["model"]
    found: list[str | None] = [
        checks.approximate_gradient(about["gradient"], about["approximate"]),
        checks.bad_gradients(sum(r.zero for r in attacked), sum(r.nonfinite for r in attacked), looks),
        checks.budget_exceeded([row.within for row in attacked]),
        *_deterministic(job),
        *_black_box(job, rows),
        checks.saturated_cross_entropy(model, images[:_ASKED], labels[:_ASKED]) if job.attacks else None,
        checks.not_probed(len(job.attacks), probe),
    ]
    if probe:
        x, y = images[:probe], labels[:probe]
        found.append(checks.audited(model, x[:1]))
        for name, attack in job.attacks.items():
            found += [f"{name}: {text}" for text in checks.probe(attack, model, x, y, job.threat, range(len(x)))]
    return checks.doubts(found)


def _deterministic(job: Job) -> Iterator[str | None]:
    for name, attack in job.attacks.items():
        if text := checks.attacked_as_deterministic(job.stochastic, attack.ranking.samples):
            yield f"{name}: {text}"


def _black_box(job: Job, rows: Sequence[Row]) -> Iterator[str | None]:
    """Black-box attacks against the best of the white-box ones, under the steadiest rule that there is."""
    black = [name for name, attack in job.attacks.items() if not attack.price().gradients]
    white = [name for name in job.attacks if name not in black]
    rule = next((r for r in job.rules if r.kind in ("average", "majority")), job.rules[0])
    lost = {row.key for row in rows if not rule.right(row)}
    pairs = sorted({(row.seed, row.image) for row in rows})
    for name in black if white else ():
        left = [not any((*pair, other) in lost for other in white) for pair in pairs]
        yield checks.black_box_beats_white_box(
            left, [(*pair, name) not in lost for pair in pairs], random=job.stochastic
        )

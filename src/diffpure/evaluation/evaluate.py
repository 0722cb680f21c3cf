"""`evaluate`: how many images a model still classifies correctly once each attack has done its worst.

The evaluation trusts nobody. It builds every adversarial image from the perturbation that an attack returned, checks
the budget itself, classifies it with samples that the attack never saw, and appends a row before it goes on: a run
that is killed goes on where it was, and ends with the same rows.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from diffpure.attacks import STRONG
from diffpure.attacks.losses import Model
from diffpure.errors import InputError, unknown
from diffpure.evaluation.cost import Estimate, account
from diffpure.evaluation.engine import Engine, Keeper, Local
from diffpure.evaluation.setup import Attacks, Evaluation, Settings, set_up
from diffpure.evaluation.store import IMAGES, Store
from diffpure.evaluation.units import Unit, device_of, threads
from diffpure.evaluation.warn import warnings_of
from diffpure.meter import CALLS
from diffpure.named import checked
from diffpure.results.result import Result
from diffpure.results.rows import SUMMARY, Row, ordered
from diffpure.threats import AnyThreat


@final
@dataclass(frozen=True)
class Tick:
    """Where a run is: rows written of all, the share of the chosen work done, the seconds that are left of it by its
    pace so far (None before there is one), and the attack under way with its step."""

    rows: int
    total: int
    share: float
    left: float | None
    attack: str
    seed: int
    images: tuple[int, int]  # the dataset indices of the first and the last image under way
    step: int
    steps: int


Progress = Callable[[Tick], None]
Choice = Callable[[Unit], bool]


def evaluate(
    model: Model,
    images: Any,
    labels: Any,
    threat: AnyThreat,
    attacks: Attacks | None = None,
    *,
    out: str | Path | None = None,
    probe: int = 0,
    pictures: int = 8,
    engine: Engine | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Result:
    """Evaluate a model under attacks; with `out`, a folder, it can be killed at any time and called again to go on.

    model: images in [0, 1] to logits; one with `stochastic = True` is given `seeds=`, and one that is random without
    saying so is run image by image with a seeded generator.   images (B, C, H, W) in [0, 1], labels (B,).
    threat: such as `Linf(8/255)` or "linf 8/255".   attacks: values, names or tables, one or several; by default
    `STRONG`, and () for none.
    probe: on how many images the checks attack again, harder.   pictures: how many images a run that is kept in `out`
    shows in its report.   engine: `Local()` or `Ray(...)`.
    settings: eot, rules, seeds, batch, per_call, memory, indices, name, class_names: see `Settings`.
    """
    checked(probe, int, "'probe', setting of an evaluation")
    checked(pictures, int, "'pictures', setting of an evaluation")
    if engine is not None and not hasattr(engine, "run"):
        raise InputError(f"An engine is Local() or Ray(…) of diffpure.evaluation.engine, got {engine!r}.")
    known = {field.name for field in fields(Settings)}
    if wrong := settings.keys() - known:
        raise unknown("setting of an evaluation", min(wrong), known)
    chosen = STRONG if attacks is None else attacks
    evaluation = set_up(model, images, labels, threat, chosen, Settings(**settings))
    result = run(evaluation, out, probe, engine, progress)
    if out is not None and pictures and result.complete:
        # By the package's own door, as pictures know evaluations, but evaluations know no pictures.
        from diffpure import keep_pictures

        keep_pictures(out, evaluation, pictures)
    return result


def run(
    evaluation: Evaluation,
    out: str | Path | None = None,
    probe: int = 0,
    engine: Engine | None = None,
    progress: Progress | None = None,
    only: Choice | None = None,
    on_estimate: Callable[[Estimate], None] | None = None,
) -> Result:
    """Run a checked evaluation, or those of its units that are chosen; a later call does the rest.

    A run that goes on keeps its images per call and its number of threads, as both decide how sums round.
    """
    engine = Local() if engine is None else engine
    if engine.device is not None:
        machine = {**evaluation.header["machine"], "device": engine.device}
        evaluation = replace(evaluation, header={**evaluation.header, "machine": machine})
    units = [unit for unit in evaluation.units if only is None or only(unit)]
    if on_estimate is not None:
        on_estimate(evaluation.estimate(units))
    if out is None:
        found = engine.run(evaluation, units, _ticker(evaluation, units, progress, []), None)
        return _result(evaluation, [row for done in found for row in done.rows], probe)
    with Store.open(out, evaluation.header) as store:
        evaluation = evaluation.planned(store.header)
        have = {row.key for row in store.rows}
        missing = [unit for unit in units if not all(key in have for key in evaluation.keys(unit))]
        tick = _ticker(evaluation, units, progress, store.rows)
        with threads(store.header["threads"]):
            for done in engine.run(evaluation, missing, tick, Keeper(store.save_run, store.saved_run)):
                if done.tensors:
                    names = {"classes": json.dumps(store.header.get("classes", []))}
                    store.save_tensors(f"{IMAGES}/{done.unit.file}", done.tensors, names)
                store.append([row for row in done.rows if row.key not in have])
                store.forget_run()
        if not missing and (Path(out) / SUMMARY).is_file():
            return Result.load(out)
        result = _result(evaluation, store.rows, probe)
        if result.complete:
            store.save_summary(result.summary())
    return replace(result, folder=Path(out))


def _result(evaluation: Evaluation, rows: Sequence[Row], probe: int) -> Result:
    """What the rows say; the checks can doubt it once all of them are there."""
    found = Result(evaluation.header, ordered(rows, evaluation.header))
    return replace(found, warnings=warnings_of(evaluation, found, probe)) if found.complete else found


def _ticker(
    evaluation: Evaluation, units: Sequence[Unit], progress: Progress | None, written: Sequence[Row]
) -> Callable[[Unit, int, int], None]:
    """What turns the steps of units into ticks; `written` grows as rows are stored."""
    if progress is None:
        return lambda unit, step, steps: None
    one = evaluation.images[:1].to(device_of(evaluation.job.model))
    cost = {unit: _effort(evaluation, unit, one) for unit in units}
    total = math.fsum(cost.values())  # exact, so that all of it is a share of 1 in whatever order it is done
    have = {row.key for row in written}
    spent = {unit: cost[unit] for unit in units if all(key in have for key in evaluation.keys(unit))}
    count = len(evaluation.units) and sum(unit.stop - unit.start for unit in evaluation.units)
    first: list[tuple[float, float]] = []  # when the first tick came, and the share that was done by then

    def left(share: float) -> float | None:
        now = time.perf_counter()
        first[:] = first or [(now, share)]
        began, before = first[0]
        return (1 - share) * (now - began) / (share - before) if share > before else None

    def tick(unit: Unit, step: int, steps: int) -> None:
        spent[unit] = cost[unit] * (step / max(steps, 1))
        images = (evaluation.indices[unit.start], evaluation.indices[unit.stop - 1])
        share = min(1.0, math.fsum(spent.values()) / total)
        progress(Tick(len(written), count, share, left(share), unit.attack, unit.seed, images, step, steps))

    return tick


def _effort(evaluation: Evaluation, unit: Unit, one: Any) -> float:
    """The work of a unit in calls: a gradient is worth three forward passes, a network more than a classifier."""
    spent = account(evaluation.job, unit, evaluation.classes, one)
    return sum(spent[key] * (3 if key.endswith("gradient") else 1) for key in CALLS)

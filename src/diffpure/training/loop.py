"""One training loop for everything: a loss that is a pure function of the step, and checkpoints that survive kill -9.

Order of the data, augmentation and noise of step k come from (seed, k) alone, never from a generator that runs along,
so a run that is killed at any moment and started again walks the same trajectory, bit for bit on the same machine
with the same number of threads. What is saved is the step, the weights, their average and the optimiser; it is
written beside its place, flushed and renamed, so that a checkpoint is either whole or absent.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from diffpure.errors import InputError
from diffpure.sde import mix

State = dict[str, Tensor]
Loss = Callable[[int], Tensor]  # step -> scalar, a pure function of the step and the weights
Schedule = Callable[[float], float]  # progress in [0, 1) -> factor on the learning rate
CHECKPOINT: Final = "checkpoint.pt"


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """How long to train, and where the checkpoints and the log of the run live."""

    steps: int
    folder: Path | None = None  # no folder: nothing is written
    decay: float = 0.999  # of the exponential moving average of the weights
    clip: float | None = None  # largest norm of the gradient
    checkpoint_seconds: float = 180.0
    log_steps: int = 50
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.decay < 1:
            raise InputError(f"A run needs steps >= 1 and 0 <= decay < 1, got {self.steps} and {self.decay}.")


def generator(seed: int, step: int, purpose: int = 0) -> torch.Generator:
    """The random numbers of one step: a fresh generator that depends on (seed, step, purpose) alone."""
    return torch.Generator().manual_seed(mix(mix(seed, step), purpose) & 0x7FFF_FFFF_FFFF_FFFF)


def batch_indices(seed: int, step: int, size: int, batch: int) -> tuple[int, Tensor]:
    """The epoch of a step and the indices of its batch: a permutation an epoch, no partial batches."""
    per_epoch = size // batch
    if per_epoch < 1:
        raise InputError(f"A batch of {batch} images cannot be drawn from {size}; give at least one batch of images.")
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(size, generator=generator(seed, epoch, 1))
    return epoch, order[place * batch : (place + 1) * batch]


def triangular(peak: float = 0.23, start: float = 0.2, end: float = 0.0) -> Schedule:
    """A factor that rises linearly from `start` to 1 at `peak` and falls linearly to `end`."""
    return lambda p: start + (1 - start) * p / peak if p < peak else end + (1 - end) * (1 - p) / (1 - peak)


def cosine(warmup: float = 0.02, end: float = 0.01) -> Schedule:
    """A factor that rises linearly over `warmup` and falls to `end` along half a cosine."""

    def factor(p: float) -> float:
        if p < warmup:
            return p / warmup
        return end + (1 - end) * (1 + math.cos(math.pi * (p - warmup) / (1 - warmup))) / 2

    return factor


def train(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    loss: Loss,
    schedule: Schedule,
    run: Run,
    report: Callable[[nn.Module, int], str] | None = None,
    console: Console | None = None,
) -> State:
    """Train `model` in place to the end of the run and return the averaged weights.

    An unfinished run in `run.folder` is continued. `report` is called with the averaged model at every checkpoint and
    its sentence goes into the log. An interrupt from the keyboard saves before it leaves.
    """
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    rates = [group["lr"] for group in optimiser.param_groups]
    file = run.folder / CHECKPOINT if run.folder else None
    step = restore(file, model, average, optimiser) if file and file.is_file() else 0
    log = _Log(run.folder / "log.txt" if run.folder else None)
    saved = time.monotonic()

    def save() -> None:
        if file:
            checkpoint(file, step, model, average, optimiser)

    with _threads(run.threads), _bar(console) as bar:
        task = bar.add_task("training", total=run.steps, completed=step, loss="–")
        try:
            while step < run.steps:
                factor = schedule(step / run.steps)
                for group, rate in zip(optimiser.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
                value = _descend(model, optimiser, loss(step), run.clip)
                step += 1
                _average(average, model, min(run.decay, step / (step + 10)))
                if step % run.log_steps == 0 or step == run.steps:
                    log(f"step {step}/{run.steps} loss {value.item():.5f} lr {factor:.4f}")
                    bar.update(task, completed=step, loss=f"{value.item():.4f}")
                if time.monotonic() - saved > run.checkpoint_seconds or step == run.steps:
                    save()
                    if report:
                        with averaged(model, average):
                            log(f"step {step}/{run.steps} {report(model, step)}")
                    saved = time.monotonic()
        except KeyboardInterrupt:
            save()
            raise
    return average


def _descend(model: nn.Module, optimiser: torch.optim.Optimizer, value: Tensor, clip: float | None) -> Tensor:
    """One step of the optimiser down the gradient of `value`."""
    if not torch.isfinite(value):
        raise FloatingPointError("The training loss is not finite; lower the learning rate.")
    optimiser.zero_grad(set_to_none=True)
    value.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimiser.step()
    return value.detach()


@torch.no_grad()
def _average(average: State, model: nn.Module, decay: float) -> None:
    """average ← decay · average + (1 - decay) · weights, over weights and the statistics of normalisation."""
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            average[name].lerp_(value, 1 - decay)
        else:
            average[name].copy_(value)


@contextmanager
def averaged(model: nn.Module, average: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """The model in evaluation mode with the averaged weights; its own weights come back afterwards."""
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    was_training = model.training
    model.load_state_dict(average)
    model.eval()
    try:
        yield model
    finally:
        model.load_state_dict(own)
        model.train(was_training)


def checkpoint(file: Path, step: int, model: nn.Module, average: State, optimiser: torch.optim.Optimizer) -> None:
    """Write the whole state of a run, so that the file is at every moment the old state or the new one."""
    state = {"step": step, "model": model.state_dict(), "average": average, "optimiser": optimiser.state_dict()}
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


def restore(file: Path, model: nn.Module, average: State, optimiser: torch.optim.Optimizer) -> int:
    """Load what `checkpoint` wrote, in place, and return the step to go on with."""
    state: dict[str, Any] = torch.load(file, weights_only=True)
    try:
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(f"{file} belongs to another model; choose another folder for this run.") from error
    for name, value in state["average"].items():
        average[name].copy_(value)
    return int(state["step"])


class _Log:
    """Lines with a time, appended to a file when there is one."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, line: str) -> None:
        if self.file:
            with self.file.open("a") as stream:
                stream.write(f"{time.strftime('%H:%M:%S')} {line}\n")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """A number of threads for the time of the training."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _bar(console: Console | None) -> Progress:
    """A bar with steps, loss and the time left; silent without a console."""
    loss, clock = TextColumn("loss {task.fields[loss]}"), (TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(BarColumn(), MofNCompleteColumn(), loss, *clock, console=console, disable=console is None)

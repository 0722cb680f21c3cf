"""One training loop for everything: batches that are pure functions of the step, checkpoints that survive kill -9.

Order of the data, augmentation and noise of step k come from (seed, k) alone, never from a generator that runs along,
so a run that is killed at any moment and started again walks the same trajectory, bit for bit on the same machine with
the same number of threads. What is saved is the step, the weights, their average and the optimiser, with the options
and the precision of the run, which goes on with the same ones only; it is written under another name, flushed and
renamed, so that a checkpoint is either whole or absent.

A batch is cut into one part per thread, and each thread takes its part through its own replica of the network, which
shares the weights; the gradients are added in a fixed order. On a busy machine this wastes far less than threads
inside every operation, which all wait for the slowest at each of them.
"""

from __future__ import annotations

import copy
import io
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self, final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from diffpure.data.cifar10 import Images
from diffpure.data.photos import Photos
from diffpure.disk import locked, write_whole
from diffpure.errors import InputError
from diffpure.models.checkpoints import digest
from diffpure.named import brief
from diffpure.noise import mix
from diffpure.training.precision import DTYPES, check, settle

State = dict[str, Tensor]
Batch = Callable[[int], tuple[Tensor, ...]]  # the tensors of a step, each with one row per example
Loss = Callable[..., Tensor]  # (model, *rows of those tensors) -> their mean loss, a scalar
Schedule = Callable[[float], float]  # progress in [0, 1) -> factor on the learning rate
CHECKPOINT: Final = "checkpoint.pt"
MANNER: Final = ("threads", "precision", "checkpoint_seconds", "watched")  # how a run is computed, not what it computes


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """How long to train, and where the checkpoints and the log of the run live."""

    steps: int
    folder: Path | None = None  # no folder: nothing is written
    decay: float = 0.999  # of the exponential moving average of the weights
    clip: float | None = None  # largest norm of the gradient
    checkpoint_seconds: float = 180.0
    log_steps: int = 20
    threads: int | None = None  # parts of a batch, one thread each; by default as many as torch uses
    precision: str = "float32"  # or "bfloat16", or "auto": the faster; a run goes on in what it was begun in
    options: Mapping[str, str] = field(default_factory=dict)  # what the trajectory depends on; see `options_of`

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.decay < 1 or (self.threads or 1) < 1:
            raise InputError(f"A run needs steps >= 1, threads >= 1 and 0 <= decay < 1, got {self}.")
        check(self.precision)


def options_of(config: Any, images: Images | Photos) -> dict[str, str]:
    """What decides where a training goes: the fields of its configuration, each in words, and a hash of its data."""
    chosen = {f.name: brief(getattr(config, f.name)) for f in fields(config) if f.name not in MANNER}
    tensors = images.pixels if isinstance(images, Photos) else (images.pixels, images.labels)
    return {**chosen, "data": digest(*tensors)}


def run_of(config: Any, images: Images | Photos, steps: int, folder: Path | None, **options: str) -> Run:
    """The run of a configuration on its images; options: what else decides where it goes."""
    shared = {f.name for f in fields(Run)} & {f.name for f in fields(config)}
    given = {name: getattr(config, name) for name in shared}
    return Run(steps=steps, folder=folder, options={**options_of(config, images), **options}, **given)


def generator(seed: int, step: int, purpose: int = 0) -> torch.Generator:
    """The random numbers of one step: a fresh generator that depends on (seed, step, purpose) alone."""
    return torch.Generator().manual_seed(mix(mix(seed, step), purpose) & 0x7FFF_FFFF_FFFF_FFFF)


def batch_indices(seed: int, step: int, size: int, batch: int) -> tuple[int, Tensor]:
    """The epoch of a step and the indices of its batch: one permutation per epoch, no partial batches."""
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
    batch: Batch,
    loss: Loss,
    schedule: Schedule,
    run: Run,
    report: Callable[[nn.Module], str] | None = None,
    console: Console | None = None,
) -> State:
    """Train `model` in place to the end of the run and return the averaged weights.

    An unfinished run in `run.folder` is continued; one process at a time trains there. `report` is called with the
    averaged model at every checkpoint and its sentence goes into the log. An interrupt from the keyboard is obeyed,
    and saved, at the end of the step.
    """
    with locked(run.folder) if run.folder else nullcontext():
        return _train(model, optimiser, batch, loss, schedule, run, report, console)


def _train(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    batch: Batch,
    loss: Loss,
    schedule: Schedule,
    run: Run,
    report: Callable[[nn.Module], str] | None,
    console: Console | None,
) -> State:
    """The loop of `train`, once the folder of the run is held."""
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    rates = [group["lr"] for group in optimiser.param_groups]
    file = run.folder / CHECKPOINT if run.folder else None
    step, recorded = 0, None
    if file and file.is_file():
        step, recorded = restore(file, model, average, optimiser, run.options)
    precision = settle(run.precision, recorded)
    log = _Log(run.folder / "log.txt" if run.folder else None)
    saved = time.monotonic()
    with Workers(model, loss, run.threads, precision) as workers, _bar(console) as bar, _interrupts() as interrupts:
        task = bar.add_task("training", total=run.steps, completed=step, loss="–")
        while step < run.steps:
            factor = schedule(step / run.steps)
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            value = workers.gradient(*batch(step))
            if not math.isfinite(value):
                raise FloatingPointError("The training loss is not finite; lower the learning rate.")
            if run.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run.clip)
            optimiser.step()
            step += 1
            _average(average, model, min(run.decay, step / (step + 10)))
            if step % run.log_steps == 0 or step == run.steps:
                log(f"step {step}/{run.steps} loss {value:.5f} lr {factor:.4f}")
                bar.update(task, completed=step, loss=f"{value:.4f}")
            due = time.monotonic() - saved > run.checkpoint_seconds or step == run.steps
            if file and (due or interrupts):
                checkpoint(
                    file, step, model, average, optimiser, {"precision": precision, "options": dict(run.options)}
                )
            if interrupts:
                raise KeyboardInterrupt
            if due:
                saved = time.monotonic()
                if report:
                    with averaged(model, average):
                        log(f"step {step}/{run.steps} {report(model)}")
    return average


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Interrupts from the keyboard, collected instead of raised; only the main thread can do so."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@final
class Workers:
    """Threads that compute the gradient of a batch together, each on its rows and its replica of the model."""

    def __init__(self, model: nn.Module, loss: Loss, threads: int | None, precision: str = "float32") -> None:
        self.before = torch.get_num_threads()
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.loss = loss
        self.dtype = DTYPES[precision]
        self.replicas = [model, *(_replica(model) for _ in range((threads or self.before) - 1))]
        # Setting the number of threads concerns the thread that sets it: every worker runs its operations alone.
        self.pool = ThreadPoolExecutor(len(self.replicas), initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()
        torch.set_num_threads(self.before)

    def gradient(self, *rows: Tensor) -> float:
        """Set the gradient of the mean loss on the model's weights and return that loss."""
        count = len(self.replicas)
        parts = list(self.pool.map(self._part, self.replicas, *(tensor.tensor_split(count) for tensor in rows)))
        shares = [len(part) / len(rows[0]) for part in rows[0].tensor_split(count)]
        for weight, *grads in zip(self.weights, *(grads for _, grads in parts), strict=True):
            weight.grad = torch.stack([share * grad for share, grad in zip(shares, grads, strict=True)]).sum(0)
        self._share_buffers()
        return sum(share * value for share, (value, _) in zip(shares, parts, strict=True))

    def _part(self, replica: nn.Module, *rows: Tensor) -> tuple[float, tuple[Tensor, ...]]:
        weights = [p for p in replica.parameters() if p.requires_grad]
        # Threads share the weights, so they must not share the cache of their casts.
        low = self.dtype != torch.float32
        with torch.autocast("cpu", self.dtype if low else None, enabled=low, cache_enabled=False):
            value = self.loss(replica, *rows)
        return value.item(), torch.autograd.grad(value, weights)

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give all replicas the mean of their running statistics."""
        for first, *others in zip(*(replica.buffers() for replica in self.replicas), strict=True):
            if all(torch.equal(first, other) for other in others):
                continue  # the mean of three equal numbers may be another one
            if first.is_floating_point():
                first.copy_(torch.stack([first, *others]).mean(0))
            for other in others:
                other.copy_(first)


def _replica(model: nn.Module) -> nn.Module:
    """A copy of the model with buffers of its own and the very weights of the model."""
    shared = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, shared)


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


def checkpoint(
    file: Path,
    step: int,
    model: nn.Module,
    average: State,
    optimiser: torch.optim.Optimizer,
    about: Mapping[str, Any],
) -> None:
    """Write the whole state of a run, so that the file is at every moment the old state or the new one."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "average": average,
        "optimiser": optimiser.state_dict(),
        **about,
    }
    data = io.BytesIO()
    torch.save(state, data)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, data.getvalue())


def restore(
    file: Path, model: nn.Module, average: State, optimiser: torch.optim.Optimizer, options: Mapping[str, str]
) -> tuple[int, str]:
    """Load what `checkpoint` wrote for the same options, in place; the step to go on with and the precision."""
    state: dict[str, Any] = torch.load(file, weights_only=True)
    recorded = state.get("options", {})  # older checkpoints have none
    if differing := [name for name in options if recorded.get(name, options[name]) != options[name]]:
        raise InputError(
            f"{file} was begun with another {differing[0]}; give the same options and data, or another folder."
        )
    try:
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(f"{file} belongs to another model; choose another folder for this run.") from error
    for name, value in state["average"].items():
        average[name].copy_(value)
    return int(state["step"]), str(state.get("precision", "float32"))


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


def _bar(console: Console | None) -> Progress:
    """A bar with steps, loss and the time left; silent without a console."""
    loss, clock = TextColumn("loss {task.fields[loss]}"), (TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(BarColumn(), MofNCompleteColumn(), loss, *clock, console=console, disable=console is None)

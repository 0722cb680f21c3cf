"""Where the units of an evaluation are computed: in this process, or as tasks on a Ray cluster.

An engine is given units and gives back what they found, in any order. Seeds belong to images and the batch plan to the
run, so every engine gives the same rows. Ray is imported only when its engine is used; it runs a task again when the
worker that held it is lost. Other work that falls into pieces, such as a folder of images, goes through `map`.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, final

import torch
from torch import nn

from diffpure.attacks import AttackRun
from diffpure.disk import uninterrupted
from diffpure.errors import InputError
from diffpure.evaluation.setup import Evaluation
from diffpure.evaluation.units import Batch, Done, Job, Unit, compute, device_of, threads

Step = Callable[[Unit, int, int], None]  # (unit, step, of)
Shared = TypeVar("Shared")
Piece = TypeVar("Piece")
Found = TypeVar("Found")
_PULSE: Final = 5.0  # seconds without a result after which the head is asked whether it is there
_HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings


@final
@dataclass(frozen=True)
class Keeper:
    """How an attack under way is kept, and found again."""

    save: Callable[[Unit, AttackRun], None]
    resume: Callable[[Unit], AttackRun | None]


class Engine(Protocol):
    """Computes units and yields what they found as they are done."""

    @property
    def device(self) -> str | None:
        """Where it computes; None: where the model is."""

    def run(self, work: Evaluation, units: Sequence[Unit], on_step: Step, keeper: Keeper | None) -> Iterator[Done]:
        """The results of the units, in any order; `keeper` keeps an attack under way where the engine can."""

    def map(self, task: Callable[[Shared, Piece], Found], shared: Shared, pieces: Iterable[Piece]) -> Iterator[Found]:
        """`task(shared, piece)` for every piece, in any order; `pieces` is walked no further than there is room."""


@final
@dataclass(frozen=True)
class Local:
    """One unit after the other in this process; an attack under way is saved every `save_every` seconds."""

    save_every: float = 60.0
    device = None

    def run(self, work: Evaluation, units: Sequence[Unit], on_step: Step, keeper: Keeper | None) -> Iterator[Done]:
        """The results in the order of the units."""
        for unit in units:
            yield self._compute(work, unit, on_step, keeper)

    def map(self, task: Callable[[Shared, Piece], Found], shared: Shared, pieces: Iterable[Piece]) -> Iterator[Found]:
        """The results in the order of the pieces."""
        for piece in pieces:
            yield task(shared, piece)

    def _compute(self, work: Evaluation, unit: Unit, on_step: Step, keeper: Keeper | None) -> Done:
        saved = time.monotonic()
        latest: AttackRun | None = None

        def after(run: AttackRun) -> None:
            nonlocal saved, latest
            latest = run
            on_step(unit, run.step, run.steps)
            if keeper is not None and time.monotonic() - saved > self.save_every:
                keeper.save(unit, run)
                saved = time.monotonic()

        batch = work.batch(unit).to(device_of(work.job.model))
        try:
            done = compute(work.job, unit, batch, after, None if keeper is None else keeper.resume(unit))
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, or SIGTERM where the command line asks for it
            if keeper is not None and latest is not None:
                with uninterrupted():  # a second Ctrl-C waits until the first one's work is on the disk
                    keeper.save(unit, latest)
            raise
        if latest is None:
            on_step(unit, 1, 1)  # nothing was attacked
        return done


@final
@dataclass(frozen=True)
class Ray:
    """Units as tasks of a Ray cluster: the one at `address`, or one on this machine.

    cpus, gpus: what a task reserves, by default one CPU per thread of the run (start it with one thread to have more
    tasks).   workers: the size of a cluster on this machine, in tasks.   retries: how often a task is run again when
    its worker is lost.
    """

    address: str | None = None
    cpus: float | None = None
    gpus: float = 0.0
    workers: int | None = None
    retries: int = 5

    @property
    def device(self) -> str:
        """Where a task computes."""
        return "cuda" if self.gpus else "cpu"

    def run(self, work: Evaluation, units: Sequence[Unit], on_step: Step, keeper: Keeper | None) -> Iterator[Done]:
        """The results as they come."""
        for done in self.map(_unit, (work.job, self.device), ((unit, work.batch(unit)) for unit in units)):
            on_step(done.unit, 1, 1)
            yield done

    def map(self, task: Callable[[Shared, Piece], Found], shared: Shared, pieces: Iterable[Piece]) -> Iterator[Found]:
        """The results as they come; so many tasks are under way that no worker waits, and no more.

        A worker unpacks `shared` once. A task whose worker was lost is run again: it must do no harm a second time.
        """
        ray = import_ray()
        started = self.connect(ray)
        try:
            remote = ray.remote(num_cpus=self._cpus, num_gpus=self.gpus, max_retries=self.retries)(_task)
            kept, count, head = _put(ray, shared), torch.get_num_threads(), self._head(ray)
            left, running = iter(pieces), list[Any]()
            while True:
                room = max(0, self._window(ray) - len(running))
                running += [remote.remote(task, [kept], piece, count) for piece in itertools.islice(left, room)]
                if not running:
                    return
                ready, running = ray.wait(running, num_returns=1, timeout=_PULSE)
                if not ready and not _alive(head):
                    started = _abandon()
                    raise InputError(
                        f"The head of the Ray cluster at {head} is gone; start one and run the same command again, "
                        "which goes on from what is finished."
                    )
                for reference in ready:
                    yield _result(ray, reference)
        finally:
            if started:
                ray.shutdown()

    def connect(self, ray: Any) -> bool:
        """Join or start a cluster; True if it is ours to shut down."""
        if ray.is_initialized():
            return False
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Workers on this machine find what this process finds, also the module of a user's own model.
        paths = os.pathsep.join(path for path in sys.path if path)
        # "local": never a cluster that somebody else left running here.
        own: dict[str, Any] = {
            "address": "local",
            "include_dashboard": False,
            "runtime_env": {"env_vars": {"PYTHONPATH": paths}},
        }
        if self.workers is not None:
            own["num_cpus"] = max(1, round(self.workers * self._cpus))
        if self.address is not None:
            _knock(self.address)
        try:
            ray.init(**({"address": self.address} if self.address else own), log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise _unreachable(self.address or "this machine", error) from error
        return True

    def _head(self, ray: Any) -> str:
        """Where the head of the cluster listens."""
        through = self.address is not None and self.address.startswith("ray://")
        return str(self.address if through else ray.get_runtime_context().gcs_address)

    @property
    def _cpus(self) -> float:
        return float(torch.get_num_threads()) if self.cpus is None else self.cpus

    def _window(self, ray: Any) -> int:
        """How many tasks to have under way: two for every slot there is."""
        resources = ray.cluster_resources()
        indices = float("inf")
        for kind, wanted in (("CPU", self._cpus), ("GPU", self.gpus)):
            there = resources.get(kind, 0)
            if wanted > there:
                raise InputError(f"A task wants {wanted:g} {kind}s, but the Ray cluster has {there:g}.")
            indices = min(indices, there / wanted) if wanted else indices
        return max(2, int(2 * indices)) if indices < float("inf") else 2


def import_ray() -> Any:
    """Ray, or one sentence on how to install it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InputError('The Ray engine needs Ray; install it with `pip install "diffpure[ray]"`.') from error


def _knock(address: str, seconds: float = 10.0) -> None:
    """Refuse an address where nobody listens, or one where nobody answers: Ray itself would go on asking for minutes.

    Whoever speaks HTTP/2, as every part of Ray does, answers its opening at once; a connection that is closed instead
    (which may want TLS) is left to Ray.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # "auto" and the like, which Ray resolves
    try:
        with socket.create_connection((host, int(port)), timeout=seconds) as connection:
            connection.sendall(_HTTP2)
            connection.recv(1)
    except ConnectionResetError:
        return
    except TimeoutError as error:
        raise _unreachable(address, TimeoutError(f"no answer within {seconds:g} s")) from error
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _alive(head: str) -> bool:
    """Whether the head of a cluster still answers; when it does not, Ray ends the process within a minute."""
    try:
        _knock(head)
    except InputError:
        return False
    return True


def _abandon() -> bool:
    """Leave a cluster without a head as it is; False.

    Ray's own shutdown would wait for the head and then abort, so at its exit the process ends at once instead.
    """
    atexit.register(_leave)
    return False


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _unreachable(address: str, error: Exception) -> InputError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return InputError(f"There is no way to reach a Ray cluster at {address} ({reason}).")


def _put(ray: Any, shared: object) -> Any:
    """A reference to what all tasks share."""
    try:
        return ray.put(shared)
    except (TypeError, pickle.PicklingError) as error:
        # Ray's own message shows all of the model.
        raise InputError(f"The model cannot be sent to Ray workers ({error.__cause__ or error}).") from error


def _task(task: Callable[[Any, Any], Any], kept: Sequence[Any], piece: Any, count: int) -> Any:
    """A piece of work in a worker, with as many threads as the driver has; `kept` holds the one reference."""
    with threads(count):
        return task(_unpacked(kept[0]), piece)


@functools.lru_cache(maxsize=1)
def _unpacked(reference: Any) -> Any:
    return import_ray().get(reference)


def _unit(shared: tuple[Job, str], piece: tuple[Unit, Batch]) -> Done:
    """One unit of an evaluation in a worker."""
    (job, device), (unit, batch) = shared, piece
    if isinstance(job.model, nn.Module):
        job.model.to(device)
    return compute(job, unit, batch.to(torch.device(device)))


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise InputError(f"A Ray worker was lost too often ({type(error).__name__}); run it again to go on.") from error

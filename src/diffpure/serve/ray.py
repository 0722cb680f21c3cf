"""The service on replicas of a Ray cluster: a Ray Serve application of handlers, behind the same HTTP process.

    client → FastAPI (limits on bodies, token, disconnects) → handle of Ray Serve → a replica: decode, batch, encode

Each replica loads the plan and is a whole `Service` with batches of its own; Ray Serve sends each image to the replica
that has least to do. Purifying is idempotent, so that an image whose replica dies is sent to another one until its time
is over: Ray's own HTTP proxy would answer 500 instead, which is why the process that listens is ours.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

import torch

from diffpure.errors import InputError
from diffpure.evaluation.engine import Ray, import_ray
from diffpure.serve.batching import Kind
from diffpure.serve.limits import Limits, Refusal
from diffpure.serve.load import Plan
from diffpure.serve.metrics import Metrics
from diffpure.serve.model import Classification
from diffpure.serve.service import Door, File

NAME: Final = "diffpure"
_PAUSE: Final = 0.2  # seconds before an image is sent again


class Replica:
    """One replica: a service of its own; refusals are values, because Ray would wrap an exception."""

    def __init__(self, plan: Plan, threads: int) -> None:
        torch.set_num_threads(threads)
        self._service, self._starting = plan.service(), asyncio.Lock()

    async def check_health(self) -> None:
        """Start, and say so if it does not compute: Ray then replaces it."""
        async with self._starting:
            if not self._service.ready:
                await self._service.start()

    async def answer(self, kind: Kind, data: bytes) -> File | Classification | Refusal:
        """The answer to one image file."""
        await self.check_health()
        try:
            return await (self._service.purify(data) if kind == "purify" else self._service.classify(data))
        except Refusal as refusal:
            return refusal


def application(plan: Plan, *, replicas: int = 2, cpus: float = 1, gpus: float = 0, threads: int = 1) -> Any:
    """The Ray Serve application of a plan, whose handle answers images; it has no HTTP of its own."""
    import_ray()
    serve: Any = importlib.import_module("ray.serve")
    resources = {"num_cpus": cpus, "num_gpus": gpus}
    deployment = serve.deployment(
        name=NAME,
        num_replicas=replicas,
        ray_actor_options=resources,
        max_ongoing_requests=plan.limits.queue,
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    return deployment(Replica).bind(replace(plan, device="cuda" if gpus else "cpu"), threads)


def connect(plan: Plan, *, replicas: int = 2, address: str | None = None, gpus: float = 0) -> Replicas:
    """The handler of replicas in the cluster at `address`, or in one that is started on this machine."""
    ray, threads = import_ray(), torch.get_num_threads()
    ours = Ray(address=address, gpus=gpus, workers=replicas).connect(ray)
    try:
        serve: Any = importlib.import_module("ray.serve")
    except ImportError as error:
        raise InputError("Replicas need Ray Serve; install it with `pip install 'ray[serve]'`.") from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # what a user can mend is raised
    serve.start(proxy_location="Disabled")
    built = application(plan, replicas=replicas, cpus=threads, gpus=gpus, threads=threads)
    handle = serve.run(built, name=NAME, route_prefix=None)

    def end() -> None:
        serve.delete(NAME)
        if ours:
            serve.shutdown()
            ray.shutdown()

    # Every replica has a queue of its own; the door of this process is as wide as all of them.
    limits = replace(plan.limits, queue=replicas * plan.limits.queue)
    return Replicas(handle, limits, ray.exceptions.RayActorError, end)


@final
class Replicas:
    """The handler that computes on replicas: those behind a handle of Ray Serve.

    lost: what is raised where a replica is gone.   end: what takes the replicas from the cluster.
    """

    def __init__(self, handle: Any, limits: Limits, lost: type[Exception], end: Callable[[], None]) -> None:
        self.limits, self.metrics, self.ready = limits, Metrics(), True
        self._handle, self._lost, self._end = handle, lost, end
        self._door = Door(limits, self.metrics)

    async def start(self) -> None:
        """Nothing: the replicas are there."""

    async def close(self) -> None:
        """Take the application from the cluster, and end the cluster if it is ours."""
        self.ready = False
        await asyncio.to_thread(self._end)

    async def purify(self, data: bytes) -> File:
        """The purified image file."""
        answer = await self._answer("purify", data)
        assert isinstance(answer, File)
        return answer

    async def classify(self, data: bytes) -> Classification:
        """What the defended classifier says of an image file."""
        answer = await self._answer("classify", data)
        assert isinstance(answer, Classification)
        return answer

    async def _answer(self, kind: Kind, data: bytes) -> File | Classification:
        async with self._door.open(kind):
            while True:
                response = self._handle.answer.remote(kind, data)
                try:
                    answer: File | Classification | Refusal = await response
                except asyncio.CancelledError:
                    response.cancel()
                    raise
                except self._lost:  # the replica is gone; another one does it
                    await asyncio.sleep(_PAUSE)
                    continue
                if isinstance(answer, Refusal):
                    raise answer
                return answer

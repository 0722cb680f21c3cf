"""The service on replicas of a Ray cluster: a Ray Serve application of handlers, behind the same HTTP process.

    client → FastAPI (limits on bodies, token, disconnects) → handle of Ray Serve → a replica: decode, batch, encode

Each replica loads the plan and is a whole `Service` with batches of its own; Ray Serve sends each image to the replica
that has least to do. Purifying is idempotent, so that an image whose replica dies is sent to another one until its time
is over: Ray's own HTTP proxy would answer 500 instead, which is why the process that listens is ours.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, Final, final

import torch

from diffpure.errors import InputError
from diffpure.evaluation.engine import Ray, import_ray
from diffpure.serve.limits import Refusal
from diffpure.serve.load import Plan
from diffpure.serve.metrics import Metrics
from diffpure.serve.service import Classification, Door, File, Kind

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
    from ray import serve

    resources = {"num_cpus": cpus, "num_gpus": gpus}
    deployment = serve.deployment(
        name=NAME,
        num_replicas=replicas,
        ray_actor_options=resources,
        max_ongoing_requests=plan.limits.queue,
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    return deployment(Replica).bind(replace(plan, device="cuda" if gpus else "cpu"), threads)


@final
class Replicas:
    """The handler that computes on replicas; joins the cluster at `address`, or starts one on this machine."""

    def __init__(self, plan: Plan, *, replicas: int = 2, address: str | None = None, gpus: float = 0) -> None:
        self._ray = import_ray()
        threads = torch.get_num_threads()
        cluster = Ray(address=address, gpus=gpus, workers=replicas)
        self._ours = cluster.connect(self._ray)
        try:
            from ray import serve
        except ImportError as error:
            raise InputError('Replicas need Ray Serve; install it with `pip install "ray[serve]"`.') from error
        self._serve: Any = serve
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # what a user can mend is raised
        self._serve.start(proxy_location="Disabled")
        built = application(plan, replicas=replicas, cpus=threads, gpus=gpus, threads=threads)
        self._handle = self._serve.run(built, name=NAME, route_prefix=None)
        # Every replica has a queue of its own; the door of this process is as wide as all of them.
        self.limits, self.metrics = plan.limits, Metrics()
        self._door = Door(replace(plan.limits, queue=replicas * plan.limits.queue), self.metrics)
        self.ready = True

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
                except self._ray.exceptions.RayActorError:  # the replica is gone; another one does it
                    await asyncio.sleep(_PAUSE)
                    continue
                if isinstance(answer, Refusal):
                    raise answer
                return answer

    def _end(self) -> None:
        self._serve.delete(NAME)
        if self._ours:
            self._serve.shutdown()
            self._ray.shutdown()

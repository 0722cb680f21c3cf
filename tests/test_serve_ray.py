"""The service on replicas, without a cluster: an image whose replica is lost is sent again; a real one is killed by
`benchmarks/service.py --ray`."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi", reason="the service is an optional extra")
pytest.importorskip("prometheus_client", reason="the service is an optional extra")
pytest.importorskip("httpx", reason="the client of the tests")

from diffpure.serve.limits import Limits, Refusal
from diffpure.serve.ray import Replicas
from diffpure.serve.service import File
from serving import PNG, asked


class Lost(Exception):
    """A replica is gone."""


class Handle:
    """Stands in for a handle of Ray Serve; `answers` come one after the other, exceptions are raised."""

    def __init__(self, *answers) -> None:
        self.answers, self.sent, self.cancelled = list(answers), [], 0
        self.answer = self

    def remote(self, kind, data):
        self.sent.append((kind, data))
        return self

    def cancel(self):
        self.cancelled += 1

    def __await__(self):
        answer = self.answers.pop(0)
        if answer == "never":
            yield from asyncio.sleep(60).__await__()
        if isinstance(answer, Lost):
            raise answer
        yield from asyncio.sleep(0).__await__()
        return answer


def replicas(handle: Handle, **limits) -> Replicas:
    return Replicas(handle, Limits(**limits), Lost, lambda: None)


def test_an_image_whose_replica_is_lost_is_sent_again():
    handle = Handle(Lost(), Lost(), File(b"clean", "image/png"))
    answer = asked(replicas(handle), lambda each: each.post("/purify", content=b"file", headers=PNG))
    assert (answer.status_code, answer.content) == (200, b"clean")
    assert handle.sent == [("purify", b"file")] * 3


def test_a_refusal_of_a_replica_is_that_of_the_service():
    handle = Handle(Refusal(503, "The service is busy.", 1))
    answer = asked(replicas(handle), lambda each: each.post("/classify", content=b"file", headers=PNG))
    assert (answer.status_code, answer.json()) == (503, {"error": "The service is busy."})
    assert answer.headers["retry-after"] == "1"


def test_an_image_that_takes_too_long_is_taken_back():
    handle = Handle("never")
    limits = replicas(handle, seconds=0.2)
    answer = asked(limits, lambda each: each.post("/purify", content=b"file", headers=PNG))
    assert answer.status_code == 504
    assert handle.cancelled == 1


def test_a_closed_service_is_not_healthy():
    async def ask(each):
        await handler.close()
        return await each.get("/healthz")

    handler = replicas(Handle())
    assert asked(handler, ask).status_code == 503

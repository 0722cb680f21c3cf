"""The service under load: batches across requests, full queues, deadlines, slow and vanished clients, SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi", reason="the service is an optional extra")
pytest.importorskip("prometheus_client", reason="the service is an optional extra")
pytest.importorskip("httpx", reason="the client of the tests")

import diffpure as dp
from diffpure.serve.batching import Batcher, Stopped, Watched
from diffpure.serve.limits import Refusal
from diffpure.serve.server import cut_idle
from pictures import encoded, noisy, smooth
from serving import PNG, Slow, asked, client, service


def many(count: int, path: str = "/purify", data: bytes | None = None):
    """Ask the same thing many times at once."""

    async def ask(each):
        content = encoded() if data is None else data
        return await asyncio.gather(*(each.post(path, content=content, headers=PNG) for _ in range(count)))

    return ask


# ---------------------------------------------------------------------------------------------------------- batching


def test_requests_are_computed_together():
    score = Slow(moment=0.3)  # others arrive while the first batch is computed
    handler = service(dp.Purifier(score, dp.OneShot(t_star=0.01)), limits={"batch": 8, "wait": 0.05})
    answers = asked(handler, many(24))
    assert [answer.status_code for answer in answers] == [200] * 24
    assert sum(score.calls) == 24
    assert max(score.calls) == 8
    assert len(score.calls) <= 6  # of 24 calls without batches


def test_draws_and_images_share_a_batch_and_shapes_do_not():
    seen = []

    def counted(images):
        seen.append(tuple(images.shape))
        return images

    async def ask(each):
        small, large = encoded(smooth(16, 16)), encoded(smooth(8, 24))
        paths = [("/purify", small)] * 2 + [("/purify", large)] * 2 + [("/classify", small)] * 2
        return await asyncio.gather(*(each.post(path, content=data, headers=PNG) for path, data in paths))

    answers = asked(service(counted, draws=3, limits={"wait": 0.5}), ask)
    assert all(answer.status_code == 200 for answer in answers)
    assert sorted(seen) == [(2, 3, 8, 24), (2, 3, 16, 16), (6, 3, 16, 16)]


def test_an_image_gets_noise_of_its_own_in_a_batch():
    answers = asked(service(noisy(), limits={"wait": 0.5}), many(3))
    assert len({answer.content for answer in answers}) == 3


def test_a_full_queue_is_told_at_once():
    handler = service(dp.Purifier(Slow(moment=0.3), dp.OneShot(t_star=0.01)), limits={"queue": 3, "batch": 1})
    answers = asked(handler, many(8))
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * 3 + [503] * 5
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert refused.headers["retry-after"] == "1"
    assert refused.json() == {"error": "The service is busy; try again in a second."}


def test_bodies_and_pixels_are_held_within_a_limit():
    big = np.random.default_rng(0).integers(0, 256, (300, 300, 3)).astype(np.uint8)  # 270 kB of pixels, as of PNG
    handler = service(
        dp.Purifier(Slow(moment=0.2), dp.OneShot(t_star=0.01)),
        limits={"bytes": 300_000, "held": 900_000, "batch": 1, "queue": 20},
        fit="resize",
    )
    answers = asked(handler, many(8, data=encoded(big)))
    assert sorted({answer.status_code for answer in answers}) == [200, 503]


# --------------------------------------------------------------------------------------------------------- deadlines


def test_a_deadline_stops_the_purification_and_frees_the_worker():
    score = Slow(moment=0.3)
    handler = service(dp.Purifier(score, dp.FewStep(t_star=0.1, steps=20)), limits={"seconds": 2.0})

    async def ask(each):
        late = await each.post("/purify", content=encoded(), headers=PNG)
        await asyncio.sleep(0.5)
        stopped = len(score.calls)
        await asyncio.sleep(0.5)
        still = len(score.calls)
        score.moment = 0.0
        return late, stopped, still, await each.post("/purify", content=encoded(), headers=PNG)

    late, stopped, still, after = asked(handler, ask)
    assert (late.status_code, late.json()["error"]) == (504, "The image was not finished within 2 seconds.")
    assert 0 < stopped == still < 20
    assert after.status_code == 200


def test_a_batch_goes_on_for_those_who_still_wait():
    async def run():
        started = threading.Event()

        def compute(works):
            started.set()
            for _ in range(20):
                time.sleep(0.01)
                batcher.check()
            return ["done"] * len(works)

        batcher = Batcher(compute, lambda work: 2, 1.0, 10**9)
        batcher.start()
        tasks = [asyncio.create_task(batcher.answer("purify", torch.zeros(3, 2, 2))) for _ in range(2)]
        await asyncio.to_thread(started.wait)
        tasks[0].cancel()
        answer = await tasks[1]
        await batcher.close()
        return tasks[0].cancelled(), answer

    assert asyncio.run(run()) == (True, "done")


def test_closing_ends_what_is_under_way():
    async def run():
        def compute(works):
            while True:
                time.sleep(0.01)
                batcher.check()

        batcher = Batcher(compute, lambda work: 1, 0.0, 10**9)
        batcher.start()
        task = asyncio.create_task(batcher.answer("purify", torch.zeros(3, 2, 2)))
        await asyncio.sleep(0.05)
        await batcher.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not batcher.alive

    asyncio.run(run())


def test_a_watched_path_is_the_same_path():
    purifier = dp.Purifier(dp.GaussianScore(variance=0.25), dp.FewStep(t_star=0.1, steps=4))
    images, checks = torch.rand(2, 3, 8, 8), []
    watched = purifier.with_gradient(Watched(lambda: checks.append(1)))
    with torch.no_grad():
        assert torch.equal(watched(images, [1, 2]), purifier(images, [1, 2]))
    assert len(checks) == len(purifier.begin(images, dp.Noise((1, 2)))[1])
    assert watched.calls(images, gradient=False) == purifier.calls(images, gradient=False)

    def stop():
        raise Stopped

    with pytest.raises(Stopped):
        purifier.with_gradient(Watched(stop))(images, [1, 2])


def test_a_client_that_is_gone_takes_its_work_back():
    score = Slow(moment=0.02)
    handler = service(dp.Purifier(score, dp.FewStep(t_star=0.1, steps=300)))

    async def ask(each):
        app = each._transport.app
        sent = iter([{"type": "http.request", "body": encoded(), "more_body": False}])
        left = asyncio.Event()

        async def receive():
            with contextlib.suppress(StopIteration):
                return next(sent)
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": "/purify", "raw_path": b"/purify", "query_string": b"",
                 "headers": [(b"content-type", b"image/png")], "root_path": "", "http_version": "1.1"}  # fmt: skip
        task = asyncio.create_task(app(scope, receive, send))
        while not score.calls:
            await asyncio.sleep(0.01)
        left.set()
        await task
        await asyncio.sleep(0.3)
        stopped = len(score.calls)
        await asyncio.sleep(0.3)
        return stopped, len(score.calls), (await each.get("/metrics")).text

    stopped, still, metrics = asked(handler, ask)
    assert stopped == still < 300
    assert 'diffpure_images_total{kind="purify",status="499"} 1.0' in metrics


def test_a_body_that_comes_too_slowly_is_408():
    async def trickle():
        for _ in range(100):
            yield b"x"
            await asyncio.sleep(0.05)

    answer = asked(service(limits={"read": 0.3}), lambda each: each.post("/purify", content=trickle(), headers=PNG))
    assert answer.status_code == 408
    assert answer.headers["connection"] == "close"


def test_a_late_refusal_reaches_its_own_work_only():
    async def run():
        batcher = Batcher(lambda works: [Refusal(422, "No."), "yes"], lambda work: 2, 1.0, 10**9)
        batcher.start()
        found = await asyncio.gather(
            *(batcher.answer("purify", torch.zeros(3, 2, 2)) for _ in range(2)), return_exceptions=True
        )
        await batcher.close()
        return found

    first, second = asyncio.run(run())
    assert (first.status, second) == (422, "yes")


def test_connections_without_a_request_are_cut():
    class Connection:
        cycle, cut = None, False

        @property
        def transport(self):
            return self

        def abort(self):
            self.cut = True

    class Cycle:
        def __init__(self, complete):
            self.response_complete = complete

    idle, silent, busy, reused = WeakKeyDictionary(), Connection(), Connection(), Connection()
    busy.cycle, reused.cycle = Cycle(False), Cycle(True)
    for now in (0.0, 20.0, 31.0):
        if now == 20.0:
            reused.cycle = Cycle(True)  # another request came and was answered
        cut_idle({silent, busy, reused}, idle, now, 30.0)
    assert (silent.cut, busy.cut, reused.cut) == (True, False, False)


# ------------------------------------------------------------------------------------------------- a real server

MODEL = """
import os, time, torch
def purifier():
    def waiting(images):
        while os.path.exists("wait"):
            time.sleep(0.01)
        return images
    return waiting
def classifier():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 4))
"""
SPEC = """
[model]
classifier = "python:mine.py:classifier"
purifier = { kind = "python:mine.py:purifier" }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server in a process of its own, and where it listens."""
    tmp_path = tmp_path_factory.mktemp("served")
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "mine.toml").write_text(SPEC)
    words = ["serve", "--spec", "mine.toml", "--allow-code", "--port", "0", "--batch", "4", "--timeout", "60"]
    command = [sys.executable, "-c", "from diffpure.cli import main; main()", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "DIFFPURE_TOKEN": "0123456789abcdef"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
    assert found, line + process.stderr.read()
    for _ in range(600):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{found[0]}/healthz", timeout=5).read()
            break
        time.sleep(0.1)
    yield process, int(found[1]), tmp_path / "wait"
    if process.poll() is None:
        process.kill()
    process.communicate()


def raw_request(port: int, image: bytes) -> socket.socket:
    """A connection on which one request was sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = "POST /purify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer 0123456789abcdef\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Type: image/png\r\nContent-Length: {len(image)}\r\n\r\n".encode() + image)
    return connection


def answer_of(connection: socket.socket) -> bytes:
    with connection, connection.makefile("rb") as stream:
        return stream.read()


def test_a_batch_over_a_real_connection_and_a_vanished_client(server):
    import base64

    process, port, _ = server
    raw_request(port, encoded()).close()  # gone before it is answered
    broken = socket.create_connection(("127.0.0.1", port), timeout=60)
    broken.sendall(b"POST /purify HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\nhalf of")
    broken.close()
    body = json.dumps({"images": [base64.b64encode(encoded(smooth(16, 16))).decode()] * 6}).encode()
    headers = {"Authorization": "Bearer 0123456789abcdef", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/purify/batch", body, headers)
    results = json.loads(urllib.request.urlopen(request, timeout=60).read())["results"]
    assert [result["type"] for result in results] == ["image/png"] * 6
    assert process.poll() is None


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionError:
        return False
    return True


def test_sigterm_under_load_loses_nothing(server):
    process, port, wait = server
    wait.touch()
    connections = [raw_request(port, encoded(smooth(16, 16))) for _ in range(24)]
    idle = socket.create_connection(("127.0.0.1", port), timeout=60)  # one that asks nothing
    headers = {"Authorization": "Bearer 0123456789abcdef"}
    inside = 0.0
    while inside < 24:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
        text = urllib.request.urlopen(request, timeout=30).read().decode()
        inside = float(re.search(r"^diffpure_images_in_house (\S+)$", text, re.MULTILINE)[1])
    process.send_signal(signal.SIGTERM)
    while listens(port):  # it still has everything to answer
        time.sleep(0.02)
    wait.unlink()
    answers = [answer_of(connection) for connection in connections]
    assert all(answer.startswith(b"HTTP/1.1 200") and b"IHDR" in answer for answer in answers)
    out, err = process.communicate(timeout=60)
    idle.close()
    assert process.returncode == 0, err
    accepted = re.search(r"Answered (\d+) of (\d+) requests", out)
    assert accepted[1] == accepted[2]
    assert "Traceback" not in err


def test_two_services_in_one_process_count_for_themselves():
    async def run():
        async with client(service()) as one, client(service()) as two:
            await one.post("/purify", content=encoded(), headers=PNG)
            return (await two.get("/metrics")).text

    assert 'endpoint="/purify"' not in asyncio.run(run())

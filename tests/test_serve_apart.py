"""The model of a service in a process of its own: the same answers, stopped when nobody waits, started when it died."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import diffpure as dp

pytest.importorskip("fastapi")

from diffpure.data.sources import DataSpec
from diffpure.errors import InputError
from diffpure.experiments.spec import ModelSpec
from diffpure.serve.apart import Apart
from diffpure.serve.batching import Failed, Stopped
from diffpure.serve.load import Plan


def plan(steps: int = 2, classifier: str = "cifar10-resnet") -> Plan:
    model = ModelSpec(
        score="cifar10-small", classifier=classifier, sampler={"kind": "few-step", "t_star": 0.05, "steps": steps}
    )
    return Plan(model=model, data=DataSpec(), draws=2)


def waits() -> None:
    """Somebody waits."""


@pytest.fixture(scope="module")
def apart():
    model = Apart(plan(), threads=1)
    yield model
    model.stop()


def images(count: int) -> torch.Tensor:
    return (dp.samples(count)[0] * 255).round().to(torch.uint8)


def test_its_answers_are_those_of_the_model(apart):
    here = plan().computer()
    assert (apart.size, apart.draws, apart.fit) == (here.size, here.draws, here.fit) == (32, 2, "auto")
    purified = apart.compute("purify", images(3), waits)
    assert [(each.shape, each.dtype) for each in purified] == [((3, 32, 32), torch.uint8)] * 3
    assert all(0 < (each.float() - x.float()).abs().mean() < 20 for each, x in zip(purified, images(3), strict=True))
    told, known = (model.compute("classify", images(2), waits) for model in (apart, here))
    assert [(each.draws, each.names) for each in told] == [(each.draws, each.names) for each in known]
    assert len(told[0].names) == len(told[0].logits) == 10


def test_it_stops_when_nobody_waits_and_goes_on(apart):
    slow = Apart(plan(steps=400), threads=1)
    try:
        began = time.monotonic()

        def gone() -> None:
            if time.monotonic() > began + 0.2:
                raise Stopped

        with pytest.raises(Stopped):
            slow.compute("purify", images(8), gone)
        began = time.monotonic() + 1000  # somebody waits again, and gets the answer to this question
        with pytest.raises(InputError):
            slow.compute("purify", torch.full((1, 3, 32, 32), 2.0), gone)
    finally:
        slow.stop()


def test_a_process_that_died_fails_its_batch_and_is_started_again(apart):
    os.kill(apart.process.pid, signal.SIGKILL)
    with pytest.raises(Failed, match="died"):
        apart.compute("purify", images(1), waits)
    assert len(apart.compute("purify", images(1), waits)) == 1


def test_a_model_that_cannot_be_loaded_is_one_sentence():
    with pytest.raises(InputError, match="cifar10-nothing"):
        Apart(plan(classifier="cifar10-nothing"), threads=1)


def test_a_mistake_is_told_by_its_name_and_ends_nothing(apart):
    told = apart._asked(apart._start(), ("purify", None), waits)
    assert isinstance(told, Failed)
    assert told.args == ("TypeError",)
    assert len(apart.compute("purify", images(1), waits)) == 1

"""What tests share: threads, golden numbers, the evaluation that others are compared with, a browser, a cluster."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from diffpure.evaluation.engine import Ray
    from diffpure.results.result import Result
    from goldens import Paper

os.environ.pop("COLUMNS", None)  # a console that is made while it is set keeps that width; tests set their own
torch.set_num_threads(1)  # pytest-xdist runs one worker a core; more threads than cores spin


@pytest.fixture(scope="session")
def paper() -> Paper:
    """The golden numbers of the paper's schedule, or of another that $DIFFPURE_GOLDEN holds."""
    from goldens import FOLDER, Paper  # only here, as most tests need no network

    file = FOLDER / "vpsde_paper.json"
    if not file.is_file():
        pytest.skip(f"no {file.name} in {FOLDER}")
    return Paper(json.loads(file.read_text()))


@pytest.fixture(scope="session")
def reference() -> Result:
    """The small evaluation, unbroken and without a folder: what every other way to run it must find."""
    from evaluations import settle  # only here, as most tests need no evaluation

    return settle()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Ray]:
    """A Ray cluster of two workers on this machine."""
    from diffpure.evaluation.engine import Ray  # only here, as most tests need no cluster

    ray = pytest.importorskip("ray", reason="Ray is an optional extra")
    engine = Ray(workers=2)
    engine.connect(ray)
    yield engine
    ray.shutdown()

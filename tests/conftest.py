"""Threads for tests, the golden numbers, and the evaluation that others are compared with."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
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

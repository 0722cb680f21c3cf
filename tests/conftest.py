"""Threads for tests, where the golden files are, and the evaluation that others are compared with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from diffpure.evaluation.results import Result

os.environ.pop("COLUMNS", None)  # a console that is made while it is set keeps that width; tests set their own
torch.set_num_threads(1)  # pytest-xdist runs one worker a core; more threads than cores spin


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden numbers: $DIFFPURE_GOLDEN, ../shared/golden, or the reduced set in tests/golden."""
    here = Path(__file__).parent
    candidates = [here.parent.parent / "shared" / "golden", here / "golden"]
    if os.environ.get("DIFFPURE_GOLDEN"):
        candidates.insert(0, Path(os.environ["DIFFPURE_GOLDEN"]))
    for folder in candidates:
        if folder.is_dir():
            return folder
    pytest.skip("no golden files: set DIFFPURE_GOLDEN or provide tests/golden")


@pytest.fixture(scope="session")
def reference() -> Result:
    """The small evaluation, unbroken and without a folder: what every other way to run it must find."""
    from evaluations import settle  # only here, as most tests need no evaluation

    return settle()

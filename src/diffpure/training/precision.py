"""In which numbers to train: float32, or convolutions and products in bfloat16 where this machine really has them.

What a processor announces cannot be trusted: a virtual machine may show the flag and kill the process at the first
instruction, and without the hardware bfloat16 is emulated and slower. So a child process tries a training step in both
and this process reads how it ended. Weights, their average and the optimiser stay in float32.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Final

import torch

from diffpure.errors import InputError, unknown

AUTO: Final = "auto"
DTYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRECISIONS: Final = (*DTYPES, AUTO)

_PROBE: Final = """
import time, torch
from torch import nn
torch.set_num_threads(1)
x = torch.randn(16, 64, 16, 16).contiguous(memory_format=torch.channels_last)
model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(2), nn.Linear(256, 256))
model.to(memory_format=torch.channels_last)
def seconds(low):
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            model(x).float().square().sum().backward()
        best = min(best, time.perf_counter() - start)
    return best
print(seconds(False) / seconds(True))
"""


@cache
def bfloat16_speedup() -> float | None:
    """How many times faster a small training step is in bfloat16 than in float32; None where it dies."""
    try:
        child = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=120, check=True)
        return float(child.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def check(precision: str) -> None:
    """Refuse a precision of another name."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)


def settle(wanted: str, recorded: str | None = None) -> str:
    """The precision of a run: the recorded one where a run goes on, else the wanted one, "auto" being the faster."""
    if recorded is not None and wanted not in (AUTO, recorded):
        raise InputError(f"This run was begun in {recorded}; go on with it in {recorded} or auto, not in {wanted}.")
    if recorded is None and wanted == AUTO:
        return "bfloat16" if (bfloat16_speedup() or 0) > 1 else "float32"
    chosen = recorded or wanted
    if chosen == "bfloat16" and bfloat16_speedup() is None:
        raise InputError("This machine cannot train in bfloat16; choose float32 or auto in a new folder.")
    return chosen

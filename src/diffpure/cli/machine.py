"""`diffpure doctor`: what this machine has, what is missing for what, and how fast a score call is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from typing import Any

from rich.markup import escape

from diffpure import __version__
from diffpure.cli.base import AsJson, Threads, app, console, grid, use_threads
from diffpure.cli.output import print_json

EXTRAS = {
    "diffusers": "score models in diffusers folders or on the hub (pip install 'diffpure[hf]')",
    "gradio": "the playground (pip install 'diffpure[play]')",
    "torchvision": "torchvision classifiers by name",
    "timm": "timm classifiers by name",
    "robustbench": "RobustBench classifiers by name",
    "onnxruntime": "ONNX classifiers (black-box attacks only) and exported scores (pip install 'diffpure[onnx]')",
    "openvino": "scores on OpenVINO, and int8 (pip install 'diffpure[openvino]')",
    "fastapi": "the HTTP service (pip install 'diffpure[serve]')",
    "ray": "evaluations and folders of images on a Ray cluster",
    "foolbox": "attacks of foolbox on our defences",
    "adversarial-robustness-toolbox": "attacks of ART on our defences",
}
FIRST_IMAGE = """
import time; start = time.perf_counter()
import diffpure as dp
from diffpure.data.samples import samples
images, _ = samples(1)
dp.Purifier(dp.load_score("cifar10-small"), dp.FewStep(t_star=0.1))(images)
print(time.perf_counter() - start)
"""


@app.command(epilog="Example: diffpure doctor --json")
def doctor(as_json: AsJson = False, threads: Threads = None) -> None:
    """Show versions, devices, the speed of a score call, and missing extras."""
    use_threads(threads)
    found = {**_versions(), **_devices(), **_speed(), **_extras()}
    if as_json:
        print_json(found)
        return
    console.print(grid({_TITLES.get(key, key): escape(_words(key, value)) for key, value in found.items()}))


_TITLES = {"score_call_seconds": "one score call, 16 images", "first_image_seconds": "import to first purified image"}


def _words(key: str, value: Any) -> str:
    """A finding as people read it."""
    if key == "score_call_seconds":
        return f"{1000 * value:.0f} ms"
    if key == "first_image_seconds":
        return f"{value:.1f} s"
    if key in EXTRAS:
        return value or f"missing, for {EXTRAS[key]}"
    return ", ".join(value) or "none" if isinstance(value, list) else str(value)


def _versions() -> dict[str, Any]:
    import torch

    return {"diffpure": __version__, "python": platform.python_version(), "torch": torch.__version__}


def _devices() -> dict[str, Any]:
    import torch

    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    mps = ["Apple GPU"] if torch.backends.mps.is_available() else []
    return {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "accelerators": [*cuda, *mps]}


def _speed() -> dict[str, Any]:
    import torch

    from diffpure.scores.load import load_score

    score, x, t = load_score("cifar10-small"), torch.zeros(16, 3, 32, 32), torch.full((16,), 0.1)
    seconds = []
    with torch.no_grad():
        for _ in range(4):
            start = time.perf_counter()
            score(x, t)
            seconds.append(time.perf_counter() - start)
    first = subprocess.run([sys.executable, "-c", FIRST_IMAGE], capture_output=True, text=True, check=True)
    return {"score_call_seconds": min(seconds), "first_image_seconds": float(first.stdout)}


def _extras() -> dict[str, Any]:
    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in EXTRAS}

"""Results whose numbers are known, for reports; and some in which every text is an attempt at an injection."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from diffpure.pictures.gallery import Gallery
from diffpure.report.runs import ReportedRun
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN, FORMAT, Row

PAYLOAD = '{0}"><script>alert({0})</script><img src=x onerror=\'alert({0})\'><a href="javascript:alert({0})">`</title>'
PGD = {"title": "PGD-20, EOT 8, step 2/255", "gradient": "exact", "approximate": False, "value": "PGD(…)"}


def reported(right, attacks, *, total=48, gallery=None, warnings=(), **header):
    """A run of `total` images, of which the first right[name] are classified correctly under no attack or an attack."""
    indices = list(range(total))
    rows = [
        Row(seed=0, image=i, attack=name, label=3, predictions=(3 if i < count else 5,))
        for name, count in right.items()
        for i in indices
    ]
    full = {
        "format": FORMAT,
        "name": "",
        "spec": None,
        "model": {
            "title": "ResNet behind FewStep",
            "gradient": "exact",
            "approximate": False,
            "stochastic": True,
            "purifier": "FewStep",
            "parts": {},
        },
        "data": "a hash",
        "indices": indices,
        "classes": [],
        "threat": "Linf(eps=8/255)",
        "attacks": attacks,
        "rules": ["one-shot"],
        "seeds": [0],
        "batch": 16,
        "per_call": 16,
        "threads": 1,
        "date": "2026-11-17T10:30:59+01:00",
        **header,
    }
    return ReportedRun(Path("folder"), Result(full, tuple(rows), tuple(warnings)), gallery)


def pictures(stages=("clean", "attacked"), images=2, names=("cat", "dog"), attack="pgd-ce", shift=8):
    """A gallery of grey pictures, the attacked ones `shift` levels brighter on the left and darker on the right."""
    levels = np.full((len(stages), images, 3, 4, 4), 100, np.uint8)
    if "attacked" in stages:
        levels[stages.index("attacked"), ..., :2] += shift
        levels[stages.index("attacked"), ..., 2:] -= shift
    classes = np.zeros((len(stages), images), np.int64)
    sure = np.full(classes.shape, 0.5, np.float32)
    return Gallery(attack, stages, levels, classes, sure, np.zeros(images, np.int64), names)


def hostile():
    """Two runs in which every text that a file can hold is a payload, and the tokens that tell the payloads apart."""
    tokens: list[str] = []

    def text() -> str:
        tokens.append(f"field{len(tokens)}x")
        return PAYLOAD.format(tokens[-1])

    attack = text()
    gallery = pictures(("clean", "attacked", text()), names=(text(),), attack=text())
    header = {
        "name": text(),
        "model": {"title": text(), "purifier": text(), "parts": {text(): text()}},
        "classes": ["k", "k", "k", text(), "k", text()],
        "data": text(),
        "threat": text(),
        "date": text(),
        "versions": {text(): text()},
        "machine": {"device": text()},
        "spec": {"data": {"source": text(), "deep": [{text(): text()}]}},
    }
    titled = {attack: {"title": text(), "gradient": text(), "approximate": True}}
    first = reported({CLEAN: 2, attack: 1}, titled, total=2, warnings=[text()], gallery=gallery, **header)
    second = reported({CLEAN: 2, attack: 1}, {attack: {**titled[attack], "value": text()}}, total=2, **header)
    return [first, ReportedRun(second.folder, second.result, None, text())], tokens

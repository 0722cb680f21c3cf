"""Fuzz what a stranger may hand over beside images: specs and tables, folders of runs, checkpoints; each from its seed.

    python benchmarks/fuzz.py --seconds 300                            # until the time is over
    python benchmarks/fuzz.py --kind runs --first 4711 --cases 1       # one case again

Whatever is given must be accepted or refused by an `InputError`, which is one sentence. Nothing is written but the file
that was asked for, no code of a pickle runs, and memory stays below a limit. The tests run the same cases, a few.
"""

from __future__ import annotations

import argparse
import atexit
import copy
import functools
import io
import itertools
import json
import pickle
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

import diffpure as dp
from diffpure.attacks import PGD, Square
from diffpure.classifiers.load import load_classifier
from diffpure.evaluation.evaluate import run as run_evaluation
from diffpure.evaluation.setup import Evaluation, Settings, set_up
from diffpure.experiments.spec import EvaluationSpec, read_toml
from diffpure.experiments.table import Table, shipped_tables
from diffpure.pictures.gallery import FILE, Gallery
from diffpure.report.page import write
from diffpure.report.runs import read_run
from diffpure.results.read import read_rows
from diffpure.results.result import Result
from diffpure.results.rows import ROWS, SUMMARY, _checksum
from diffpure.scores.load import load_score
from diffpure.verification.files import verify_files
from diffpure.verification.verify import verify

MIB = 1 << 20
WORDS = (
    "", " ", "\0", "\x1b[31m", "../../x", "/etc/passwd", "linf", "pgd", "8/255", "1/0", "nan", "all", "0-9999999999",
    "average of 0", "worst of 99999999999999999999", "one-shot", "exact", "sde", "python:os:getcwd", "x" * 5000, "é𝔘",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 64, 10**6, 2**31, 2**63, 10**400, 0.0, -0.0, 0.5, 1e308, float("nan"), float("inf"), True)
SPEC: dict[str, Any] = {
    "name": "a name",
    "model": {
        "classifier": "cifar10-resnet",
        "score": {"name": "cifar10-small"},
        "sampler": {"kind": "sde", "t_star": 0.1, "steps": 8},
        "gradient": "exact",
        "rounds": 1,
    },
    "data": {"source": "cifar10-samples", "images": "0-7"},
    "threat": {"kind": "linf", "eps": "8/255"},
    "attacks": [
        {"kind": "pgd", "iterations": 20, "eot": 10, "gradient": "exact", "step_size": "2/255"},
        {"kind": "apgd-dlr", "restarts": 2},
        {"kind": "autoattack-rand"},
    ],
    "rules": ["one-shot", "average of 10"],
    "seeds": [0, 1],
    "batch": 16,
    "probe": 0,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- changes


def junk(draw: random.Random, depth: int = 0) -> Any:
    """Any value that TOML or JSON can hold."""
    match draw.randrange(7 if depth < 3 else 3):
        case 0:
            return draw.choice(WORDS)
        case 1:
            return draw.choice(NUMBERS)
        case 2:
            return draw.choice((True, False, date(2026, 1, 1)))
        case 3 | 4:
            return [junk(draw, depth + 1) for _ in range(draw.randrange(4))]
        case _:
            return {
                draw.choice((*WORDS, "kind", "name", "eps")): junk(draw, depth + 1) for _ in range(draw.randrange(4))
            }


def changed(draw: random.Random, value: Any) -> Any:
    """A copy of plain data in which something is another value, is missing, is new, or stands elsewhere."""
    found = copy.deepcopy(value)
    places = [(parent, key) for parent in _containers(found) for key in _keys(parent)]
    if not places:
        return junk(draw)
    parent, key = draw.choice(places)
    match draw.randrange(6):
        case 0:
            del parent[key]
        case 1:
            other, place = draw.choice(places)
            parent[key] = copy.deepcopy(other[place]) if place in _keys(other) else None
        case 2 if isinstance(parent, dict):
            parent[draw.choice((*WORDS, str(key) + "s"))] = junk(draw)
        case 3 if isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            parent[key] = draw.choice(NUMBERS)
        case 4:
            parent[key] = functools.reduce(lambda inner, _: [inner], range(draw.choice((1, 3, 100))), parent[key])
        case _:
            parent[key] = junk(draw)
    return found


def _containers(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [value, *(part for v in inner for part in _containers(v))]
    return []


def _keys(parent: Any) -> list[Any]:
    return list(parent) if isinstance(parent, dict) else list(range(len(parent)))


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Bytes of which some are flipped, cut off, doubled or inserted, mostly near the beginning or the end."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        near = draw.choice((64, 4096, len(found)))
        where = min(len(found), draw.randrange(max(1, min(near, len(found)))))
        where = where if draw.random() < 0.7 else len(found) - where
        match draw.randrange(5):
            case 0 if where < len(found):
                found[where] ^= 1 << draw.randrange(8)
            case 1:
                found[where : where + 8] = draw.choice((b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\xff\0\0\0\0"))
            case 2:
                del found[where:]
            case 3:
                found[where:where] = found[where : where + draw.randrange(64)]
            case _:
                found[where : where + 8] = draw.randbytes(8)
    return bytes(found)


# ------------------------------------------------------------------------------------------------------------ specs


def specs(draw: random.Random, folder: Path) -> None:
    """A spec, a table and a TOML file that are not quite right."""
    table: Any = SPEC
    for _ in range(draw.choice((1, 1, 2, 5))):
        table = changed(draw, table)
    if (spec := accepted(EvaluationSpec.of, table)) is not None:
        again = EvaluationSpec.of(spec.plain())
        assert again.hash == spec.hash, "a spec and its plain form have different names"
        assert "/" not in spec.folder_name, spec.folder_name
        assert spec.folder_name.strip("."), spec.folder_name
        accepted(spec.tiny)
    plain = _shipped()[draw.choice(sorted(_shipped()))]
    for _ in range(draw.choice((1, 1, 2, 5))):
        plain = changed(draw, plain)
    if (made := accepted(Table.of, plain)) is not None:
        scale = draw.choice(("small", *map(str, made.scales)))
        accepted(lambda: list(itertools.islice(made.entries(scale, tiny=draw.random() < 0.5), 5)))
    path = folder / "spec.toml"
    path.write_bytes(damaged(draw, draw.choice(sorted(shipped_tables().values())).read_bytes()))
    if (read := accepted(read_toml, path)) is not None:
        accepted(Table.of, read)


@functools.cache
def _shipped() -> dict[str, Any]:
    return {name: read_toml(path) for name, path in shipped_tables().items()}


# ------------------------------------------------------------------------------------------------------------- runs


class Halves(nn.Module):
    """Two classes: which half of an image is brighter."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.tensor_split(2, dim=-1)
        return torch.stack([left.mean((1, 2, 3)), right.mean((1, 2, 3))], 1)


@functools.cache
def honest() -> tuple[Evaluation, Path]:
    """A small evaluation and the folder of its run, made once per process."""
    images = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    settings = Settings(batch=2, per_call=8, rules=("one-shot",), name="fuzzed", spec=EvaluationSpec.of(SPEC).plain())
    work = set_up(
        Halves(), images, Halves()(images).argmax(1), "linf 8/255", [PGD(iterations=2), Square(queries=3)], settings
    )
    top = tempfile.mkdtemp(prefix="diffpure-fuzz-")
    atexit.register(shutil.rmtree, top, ignore_errors=True)
    folder = Path(top) / "run"
    result = run_evaluation(work, folder)
    some = {"pictures": torch.zeros(1, 2, 3, 4, 4, dtype=torch.uint8).numpy(), "labels": torch.zeros(2).long().numpy()}
    each = {"classes": torch.zeros(1, 2).long().numpy(), "confidence": torch.zeros(1, 2).numpy()}
    Gallery(attack="pgd-ce", stages=("clean",), **some, **each).save(folder, result.header)
    return work, folder


def runs(draw: random.Random, folder: Path) -> None:
    """A run in which bytes, lines or values of its files are changed, even with checksums that fit."""
    work, kept = honest()
    run = Path(shutil.copytree(kept, folder / "run"))
    for _ in range(draw.choice((1, 1, 2, 4))):
        if (run / ROWS).is_file():
            draw.choice((_bytes_of_a_file, _lines, _values, _summary, _missing))(draw, run)
    before = contents(folder)
    for check in (Result.load, verify_files, lambda path: verify(path, work, again=draw.randrange(2))):
        if (found := accepted(check, run)) is not None:
            accepted(str, found)
    if (header := accepted(lambda: read_rows(run, on_bad=lambda _: None)[0])) is not None and header.get("spec"):
        accepted(EvaluationSpec.of, header["spec"])
    assert contents(folder) == before, "reading a run changed a file"
    kind = draw.choice(("html", "md", "csv", "json"))
    if (read := accepted(read_run, run)) is not None:
        accepted(write, [read], folder / f"report.{kind}", kind)
    after = contents(folder)
    after.pop(f"report.{kind}", None)
    assert after == before, "a report changed a file"


def _bytes_of_a_file(draw: random.Random, run: Path) -> None:
    path = draw.choice(sorted(file for file in run.rglob("*") if file.is_file()))
    path.write_bytes(damaged(draw, path.read_bytes()))


def _lines(draw: random.Random, run: Path) -> None:
    lines = (run / ROWS).read_bytes().splitlines(keepends=True)
    if not lines:
        return
    i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(4):
        case 0:
            del lines[i]
        case 1:
            lines.insert(j, lines[i])
        case 2:
            lines[i], lines[j] = lines[j], lines[i]
        case _:
            lines[i] = draw.choice(
                (b"\xff\xfe\n", b"[" * 50_000 + b"\n", b"null\n", b"\n", b'{"header": {}}\n', b"1e999\n")
            )
    (run / ROWS).write_bytes(b"".join(lines))


def _values(draw: random.Random, run: Path) -> None:
    """Change values of the header or of a row, and seal the row with a checksum that fits."""
    lines = (run / ROWS).read_text("utf-8", "replace").splitlines()
    i = draw.choice((0, draw.randrange(len(lines)))) if lines else 0
    try:
        data = json.loads(json.dumps(changed(draw, json.loads(lines[i])), default=str))
        if i and isinstance(data, dict):
            data["sum"] = _checksum({key: value for key, value in data.items() if key not in ("sum", "seconds")})
        lines[i] = json.dumps(data)
    except (ValueError, RecursionError, IndexError):
        return
    (run / ROWS).write_text("\n".join(lines) + "\n")


def _summary(draw: random.Random, run: Path) -> None:
    try:
        data = changed(draw, json.loads((run / SUMMARY).read_text("utf-8", "replace")))
    except (ValueError, OSError):
        return
    (run / SUMMARY).write_text(json.dumps(data, default=str))


def _missing(draw: random.Random, run: Path) -> None:
    files = sorted(file for file in run.rglob("*") if file.is_file())
    path = draw.choice(files)
    path.unlink()
    if draw.random() < 0.3:
        path.mkdir()
    elif draw.random() < 0.3 and path.name not in (ROWS, SUMMARY):
        path.write_bytes(save({"z": torch.zeros(1), draw.choice(("images", "labels", FILE)): torch.zeros(2, 3)}))


# ------------------------------------------------------------------------------------------------------ checkpoints


@functools.cache
def _weights(name: str) -> dict[str, bytes]:
    """The weights of an embedded model in each kind of file."""
    model = load_score(name) if name == "cifar10-small" else load_classifier(name)
    state = {key: value.contiguous() for key, value in model.state_dict().items()}  # type: ignore[attr-defined]
    found = {"safetensors": save(state)}
    for kind, zipped in (("pt", True), ("pth", False)):
        data = io.BytesIO()
        torch.save(state, data, _use_new_zipfile_serialization=zipped)
        found[kind] = data.getvalue()
    return found


class Payload:
    """What a pickle would run: it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.write_text, (self.marker, "ran")


def checkpoints(draw: random.Random, folder: Path) -> None:
    """A file of weights that is damaged, cut short, or holds a pickle that would write a file."""
    name, load = draw.choice((("cifar10-vit-tiny", load_classifier), ("cifar10-small", load_score)))
    kind, data = draw.choice(list(_weights(name).items()))
    marker = folder / "marker"
    match draw.randrange(6):
        case 0:
            data = pickle.dumps({"weight": Payload(marker)}, protocol=draw.randrange(2, 5))
        case 1:
            sealed = io.BytesIO()
            torch.save({"weight": Payload(marker)}, sealed)
            data = sealed.getvalue()
        case _:
            data = damaged(draw, data)
    if draw.random() < 0.3:
        data = damaged(draw, data)
    path = folder / f"weights.{draw.choice((kind, 'safetensors', 'pt', 'bin', 'onnx', ''))}"
    path.write_bytes(data)
    model = accepted(functools.partial(load, like=name), path)
    assert model is None or isinstance(model, nn.Module)
    assert not marker.exists(), "a pickle ran"
    assert set(folder.iterdir()) == {path}, "reading weights wrote a file"


# ------------------------------------------------------------------------------------------------------------- cases


def accepted(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or None where it refused its arguments in one sentence."""
    try:
        return function(*arguments)
    except dp.InputError as error:
        said = str(error)
    assert said.endswith((".", "?")), f"no sentence: {said[:300]!r}"
    assert len(said) < 2_100, f"a sentence of {len(said)} characters: {said[:300]!r}"
    return None


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


KINDS: dict[str, Callable[[random.Random, Path], None]] = {"specs": specs, "runs": runs, "checkpoints": checkpoints}


def case(kind: str, seed: int) -> None:
    """One case in folders of its own; an exception is a finding."""
    with tempfile.TemporaryDirectory(prefix="diffpure-fuzz-") as top:
        folder = Path(top) / "deep" / "case"
        folder.mkdir(parents=True)
        KINDS[kind](random.Random(f"{kind} {seed}"), folder)
        assert [entry.name for entry in Path(top).iterdir()] == ["deep"], "a file was written outside"
        assert [entry.name for entry in (Path(top) / "deep").iterdir()] == ["case"], "a file was written outside"


def main() -> None:
    """Run cases until the time is over; exit code 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long, if --cases is not given")
    parser.add_argument("--cases", type=int, help="how many cases of each kind")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="only these kinds")
    parser.add_argument("--memory", type=int, default=400, help="MiB that the process may grow by")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    end, findings, seed, start = time.monotonic() + chosen.seconds, 0, chosen.first, None
    while seed - chosen.first < chosen.cases if chosen.cases is not None else time.monotonic() < end:
        for kind in chosen.kind or KINDS:
            try:
                case(kind, seed)
            except Exception:
                findings += 1
                print(f"--kind {kind} --first {seed} --cases 1\n{traceback.format_exc()}", flush=True)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        start = used if start is None else start  # after the first cases everything is imported
        if used - start > chosen.memory:
            print(f"Seed {seed}: the memory grew by {used - start} MiB, more than {chosen.memory}.")
            findings += 1
            break
        seed += 1
    print(f"{seed - chosen.first} seeds from {chosen.first}, {findings} findings")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()

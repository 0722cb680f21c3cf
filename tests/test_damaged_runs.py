"""A run whose files were damaged, and one that would go on with another model: begun again, or one sentence."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from diffpure.attacks import PGD
from diffpure.errors import InputError
from diffpure.evaluation.evaluate import Tick, evaluate
from diffpure.purifiers.blur import Blur
from diffpure.purify import Defense
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN, Row, _checksum
from evaluations import THREAT, problem, settle, timeless


def test_a_damaged_state_is_begun_again(tmp_path, reference):
    """Whatever is left of an attack under way: nothing, noise, another file, a state that has lost its tensors."""

    def interrupt(tick: Tick) -> None:
        if tick.attack != CLEAN and tick.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        settle(tmp_path / "r", progress=interrupt)
    state = tmp_path / "r" / "state.safetensors"
    whole, tensors = state.read_bytes(), load_file(state)
    with safe_open(state, "pt") as file:
        about = file.metadata()
    few = {"at": tensors["at"]}
    small = {**tensors, "rank": tensors["rank"][:1]}
    other = {**tensors, "at": torch.tensor([7, 9])}
    texts = [b"noise", whole[:-1], *(save(kept, about) for kept in (few, small, other))]
    for i, text in enumerate(texts):
        copy = shutil.copytree(tmp_path / "r", tmp_path / f"copy-{i}")
        (copy / "state.safetensors").write_bytes(text)
        assert timeless(settle(copy).rows) == timeless(reference.rows)


def test_a_damaged_summary_and_rows_that_are_foreign_or_double_are_one_sentence(tmp_path):
    settle(tmp_path / "r")
    rows, summary = tmp_path / "r" / "rows.jsonl", tmp_path / "r" / "summary.json"
    whole, lines = summary.read_bytes(), rows.read_text().splitlines(keepends=True)
    summary.write_text("{")
    with pytest.raises(InputError, match=r"summary.json is damaged; delete it and evaluate again to write it anew"):
        settle(tmp_path / "r")
    summary.unlink()
    settle(tmp_path / "r")
    assert summary.read_bytes() == whole
    foreign = json.loads(lines[-1]) | {"image": 99}
    sealed = Row.of({**foreign, "sum": _checksum({k: v for k, v in foreign.items() if k not in ("seconds", "sum")})})
    for more, message in ((lines[1], "a second row: image 0, attack clean"), (sealed.line() + "\n", "image 99")):
        rows.write_text("".join([*lines, more]))
        with pytest.raises(InputError, match=message) as caught:
            settle(tmp_path / "r")
        assert "\n" not in str(caught.value)


def test_functions_that_differ_only_in_what_they_close_over_are_told_apart(tmp_path):
    x, y = problem()
    w = torch.linspace(-1, 1, 5 * x[0].numel()).reshape(-1, 5)

    def classifier(w: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda z: z.flatten(1) @ w

    def run(model: Any) -> Result:
        return evaluate(model, x, y, THREAT, [PGD(iterations=1)], rules=["one-shot"], out=tmp_path / "r")

    found = run(classifier(w))
    assert timeless(run(classifier(w.clone())).rows) == timeless(found.rows)  # the same function goes on
    with pytest.raises(InputError, match=r"holds another evaluation \(with other model\)"):
        run(classifier(-w))
    with pytest.raises(InputError, match=r"holds another evaluation \(with other model\)"):
        run(Defense(Blur(), classifier(w)))
    secret = threading.Lock()
    unknown = lambda z: z.flatten(1) @ w if secret else z  # noqa: E731
    with pytest.raises(InputError, match=r"of the model cannot be told from another one.*leave `out` away"):
        evaluate(unknown, x, y, THREAT, rules=["one-shot"], out=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert evaluate(unknown, x, y, THREAT, (), rules=["one-shot"]).complete

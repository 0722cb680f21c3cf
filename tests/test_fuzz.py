"""A few cases of each kind of the fuzz run in `benchmarks/fuzz.py`, whose seeds are its names."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FUZZ = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "fuzz.py"))


@pytest.mark.parametrize("kind", FUZZ["KINDS"])
def test_what_a_stranger_hands_over_is_accepted_or_refused_in_one_sentence(kind):
    for seed in range(12):
        FUZZ["case"](kind, seed)


def test_the_fuzz_run_finds_what_it_looks_for(monkeypatch, tmp_path):
    """A check that writes beside its folder, and one that raises something else, are findings."""
    monkeypatch.setitem(FUZZ["KINDS"], "specs", lambda draw, folder: (folder.parent / "outside").touch())
    with pytest.raises(AssertionError, match="written outside"):
        FUZZ["case"]("specs", 0)
    with pytest.raises(KeyError):
        FUZZ["accepted"](lambda: {}["nothing"])
    marker = tmp_path / "marker"
    import pickle

    pickle.loads(pickle.dumps(FUZZ["Payload"](marker)))  # where a pickle is run, it makes the file
    assert marker.exists()

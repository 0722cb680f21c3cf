"""Measure every table and figure of the paper at small scale, cheapest first, into results/paper.

python benchmarks/paper_runs.py [--out results/paper] [--page docs/reproduction.md] [--minutes 60] [TABLE ...]

Every row is a run of its own: it is finished, or goes on where it was stopped when the script is called again; one
whose images or models are not there is named and left out. With --minutes no new row is begun after that time. After
each table the page is written anew, so that something finished is there at every stop.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from diffpure.experiments import measure, search
from diffpure.experiments.load import PLAIN, run_folder, run_spec
from diffpure.experiments.needs import missing, sentence
from diffpure.experiments.paper import PREFIX, tables
from diffpure.experiments.spec import EvaluationSpec
from diffpure.experiments.table import EVALUATION, Table, finished

# Cheapest first; what answers a question of its own before what only fills a figure.
ORDER = (
    "step-size", "pictures", "table14", "table8", "table13", "table1", "table6", "steps", "table2", "table9", "table4",
    "table15", "combination", "table5b", "t-star", "eot", "langevin",
)  # fmt: skip


class OutOfTime(Exception):
    """The minutes are over."""


def run_table(table: Table, out: Path, until: float) -> None:
    """Run what is missing of a table, row by row."""

    def run(spec: EvaluationSpec) -> object:
        if (done := finished(spec, out)) is not None:
            return done
        if lacking := missing(spec):
            print(sentence(lacking, spec.name), flush=True)
            return None
        if time.monotonic() > until:
            raise OutOfTime
        began = time.monotonic()
        result = run_spec(spec, run_folder(spec, out))
        print(f"{spec.name}: {(time.monotonic() - began) / 60:.1f} min\n{result}\n", flush=True)
        return result

    if table.kind == "search":
        search.search(table, run)  # type: ignore[arg-type]
    elif table.kind == EVALUATION:
        for entry in table.entries():
            run(entry.spec)
    elif time.monotonic() <= until:
        measure.measure(table, out, loader=PLAIN)


def write_page(out: Path, page: Path) -> None:
    """The page of everything that is measured so far."""
    command = [sys.executable, "-c", "from diffpure.cli import main; main()", "paper", "--runs", str(out)]
    subprocess.run([*command, "--page", str(page)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", default=ORDER, help="names without paper/; all, cheapest first")
    parser.add_argument("--out", type=Path, default=Path("results/paper"))
    parser.add_argument("--page", type=Path, default=Path("docs/reproduction.md"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    until, known = time.monotonic() + 60 * given.minutes, tables()
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in given.tables:
            run_table(known[PREFIX + name], given.out, until)
            write_page(given.out, given.page)
    except OutOfTime:
        print("The minutes are over; the same command goes on.")
        write_page(given.out, given.page)


if __name__ == "__main__":
    main()

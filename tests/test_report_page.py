"""What a report says of results whose numbers are known: its sentences, titles, tables, pictures and escapes."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from diffpure.errors import InputError
from diffpure.experiments.spec import EvaluationSpec
from diffpure.pictures.gallery import Gallery
from diffpure.report import words
from diffpure.report.axes import sweeps
from diffpure.report.page import html, write
from diffpure.report.panels import panels, perturbation
from diffpure.report.plots import encoded, trade_off
from diffpure.report.runs import ReportedRun, read_run
from diffpure.report.tables import conclusion, images
from diffpure.report.texts import as_json, comma_separated, markdown
from diffpure.results.result import Result
from diffpure.results.rows import CLEAN, Row
from reports import PAYLOAD, PGD, hostile, pictures, reported

# ----------------------------------------------------------------------------------------------- sentences and words


def test_the_conclusion_is_one_sentence_with_the_attack_its_parameters_and_the_numbers():
    assert conclusion(reported({CLEAN: 34, "pgd-ce": 10}, {"pgd-ce": PGD})) == (
        "Under PGD-20 (ℓ∞ 8/255, EOT 8, step 2/255, exact gradient) the purified classifier keeps 20.8 % [11.7, 34.3] "
        "of 48 images, against 70.8 % [56.8, 81.8] without attack (one-shot)."
    )


def test_the_conclusion_of_several_attacks_names_the_strongest_and_the_worst_case():
    bpda = {**PGD, "gradient": "bpda", "approximate": True}
    run = reported(
        {CLEAN: 34, "pgd-ce": 10, "pgd-ce@bpda": 20}, {"pgd-ce": PGD, "pgd-ce@bpda": bpda}, model={"title": "ResNet"}
    )
    assert conclusion(run) == (
        "Under PGD-20 (ℓ∞ 8/255, EOT 8, step 2/255, exact gradient), the strongest of 2 attacks, the classifier keeps "
        "20.8 % [11.7, 34.3] of 48 images, and 20.8 % [11.7, 34.3] in the worst case per image, against "
        "70.8 % [56.8, 81.8] without attack (one-shot)."
    )
    assert run.title("pgd-ce@bpda") == "PGD-20, EOT 8, step 2/255, bpda gradient (approximate)"


def test_what_was_not_measured_is_called_so_in_every_format(tmp_path):
    run = reported({CLEAN: 34}, {})
    assert conclusion(run) == (
        "Without attack the purified classifier is correct on 70.8 % [56.8, 81.8] of 48 images (one-shot); "
        "robust accuracy: not measured."
    )
    assert "<td>robust accuracy</td><td>not measured</td>" in html([run])
    assert "| robust accuracy |  | not measured |" in markdown([run])
    assert "worst case" not in comma_separated([run]) + as_json([run])
    with pytest.raises(InputError, match="plots robust accuracy"):
        write([run], tmp_path / "plot.png", "png")
    assert html([run, reported({CLEAN: 34, "pgd-ce": 10}, {"pgd-ce": PGD})]).count("<td>not measured</td>") == 3
    spec = {"data": {"source": "file", "path": "/home/somebody/attacked.safetensors"}}
    brought = reported({CLEAN: 34}, {}, spec=spec)  # somebody may have attacked them before
    assert conclusion(brought).startswith("Without a further attack the purified classifier")
    assert "dataset indices 0–47 of the file attacked.safetensors" in html([brought])


@pytest.mark.parametrize(
    ("title", "gradient", "said"),
    [
        ("Square, queries 5000", "", "Under Square (ℓ∞ 8/255, queries 5000) "),
        ("PGD-20", "", "Under PGD-20 (ℓ∞ 8/255) "),
        (
            "APGD-20, EOT 8 + FAB-T-20, EOT 8",
            "exact",
            "Under APGD-20, EOT 8 + FAB-T-20, EOT 8, exact gradient (ℓ∞ 8/255) ",
        ),
    ],
)
def test_the_conclusion_under_other_attacks(title, gradient, said):
    about = {**PGD, "title": title, "gradient": gradient}
    assert conclusion(reported({CLEAN: 34, "name": 10}, {"name": about})).startswith(said + "the purified classifier")


def test_attacks_with_one_title_are_told_apart():
    run = reported({CLEAN: 1, "a": 1, "b": 1}, {"a": PGD, "b": PGD})
    assert [run.title(name) for name in run.result.lines] == [
        "no attack",
        "PGD-20, EOT 8, step 2/255, exact gradient (a)",
        "PGD-20, EOT 8, step 2/255, exact gradient (b)",
        "worst case per image",
        "minimum of attacks",
    ]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (range(100), "0–99"),
        ([7], "7"),
        ([0, 1, 2, 5, 9, 8], "0–2, 5, 9, 8"),
        (range(0, 60, 3), "0, 3, 6, 9, 12, 15, 18, 21, 24, 27, … (20 in all)"),
    ],
)
def test_indices_are_written_as_ranges(numbers, said):
    assert words.ranges(numbers) == said


def test_the_page_writes_no_list_of_indices_and_no_backtick():
    run = reported(
        {CLEAN: 34, "pgd-ce": 10},
        {"pgd-ce": PGD},
        spec={"data": {"source": "cifar10", "images": list(range(48))}},
        warnings=["Not tried; `probe` = 8 images tries.", "A ` alone."],
    )
    page = html([run])
    assert "<code>probe</code> = 8" in page
    assert "`" not in page
    assert '"images": "0–47"' in page.replace("&#34;", '"')
    assert "48 (dataset indices 0–47 of cifar10)" in page


@pytest.mark.parametrize(
    ("date", "said"),
    [
        ("2026-11-17T10:30:59+01:00", "2026-11-17 09:30 UTC"),
        ("2026-11-17T10:30:59", "2026-11-17 10:30"),
        ("yesterday", "yesterday"),
        (None, "not recorded"),
    ],
)
def test_the_date_of_a_run(date, said):
    assert words.date({"date": date}) == said
    assert f"<dt>Date</dt><dd>{said}</dd>" in html([reported({CLEAN: 1}, {}, date=date)])


# ------------------------------------------------------------------------------------------------ tables and pictures


def test_the_table_of_images_says_what_each_was_misclassified_under():
    run = reported({CLEAN: 3, "a": 2, "b": 1}, {"a": PGD, "b": PGD}, total=4, classes=list("wxyzabcd"))
    lines = images(run)
    assert [line.index for line in lines] == [0, 1, 2, 3]
    assert {line.label for line in lines} == {"z"}
    assert [line.misclassified for line in lines] == [(), ("b",), ("a", "b"), ("no attack", "a", "b")]
    assert lines[1].predictions == (("z", True), ("b", False))  # under no attack, and under the strongest: class 5


@pytest.mark.parametrize(
    ("rule", "said"), [("one-shot", 3), ("average of 3", 4), ("worst of 3", 5), ("majority of 3", 5)]
)
def test_the_class_of_an_image_is_that_of_the_decision_rule(rule, said):
    run = reported({CLEAN: 1}, {}, total=1, rules=[rule])
    row = Row(seed=0, image=0, attack=CLEAN, label=3, predictions=(3, 5, 5), averages={3: 4})
    run = ReportedRun(run.folder, Result(run.result.header, (row,)))
    assert images(run)[0].predictions == ((f"class {said}", said == 3),)


@pytest.mark.parametrize(
    ("shift", "factor", "levels"), [(8, 15, (248, 8)), (1, 127, (255, 1)), (0, 127, (128, 128)), (90, 1, (218, 38))]
)
def test_the_perturbation_is_amplified_by_one_whole_factor_around_grey(shift, factor, levels):
    gallery = pictures(shift=shift)
    assert perturbation(gallery)[0] == factor
    (panel, _) = panels(reported({CLEAN: 2, "pgd-ce": 1}, {"pgd-ce": PGD}, total=2, gallery=gallery))
    assert [frame.stage for frame in panel.frames] == ["no attack", "attacked", f"perturbation ×{factor}"]
    with Image.open(io.BytesIO(base64.b64decode(panel.frames[2].url.partition(",")[2]))) as picture:
        assert (np.asarray(picture)[:, :2] == levels[0]).all()
        assert (np.asarray(picture)[:, 2:] == levels[1]).all()
    assert perturbation(pictures(stages=("given", "purified"))) is None


def test_pictures_come_from_as_many_files_as_it_takes(tmp_path):
    run = reported({CLEAN: 3, "pgd-ce": 1}, {"pgd-ce": PGD}, total=5)
    run.result.save(tmp_path / "rows.jsonl")
    (tmp_path / "adversarial").mkdir()
    for start in (0, 2, 4):
        part = np.arange(start, min(start + 2, 5))
        x = np.ones((len(part), 1, 4, 4), np.float32) * (100 + part.reshape(-1, 1, 1, 1)) / np.float32(255)
        arrays = {"images": x, "z": x * 0, "labels": part * 0 + 3, "indices": part}
        save_file(arrays, tmp_path / "adversarial" / f"pgd-ce-seed0-{start:06d}.safetensors")
    gallery = read_run(tmp_path, pictures=3).gallery
    assert gallery.pictures[1, :, 0, 0, 0].tolist() == [100, 101, 102]
    assert gallery.classes.tolist() == [[3, 3, 3], [3, 5, 5]]
    assert len(read_run(tmp_path).gallery.labels) == 5
    assert read_run(tmp_path, pictures=0).gallery is None
    save_file({"images": x}, tmp_path / "adversarial" / "pgd-ce-seed0-000000.safetensors")
    with pytest.raises(InputError, match="damaged"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pictures": np.zeros((2, 2, 4, 4, 4), np.uint8)},
        {"pictures": np.zeros((2, 2, 3, 4, 4), np.float32)},
        {"classes": np.zeros((2, 3), np.int64)},
        {"stages": ("clean",)},
        {"names": (1, 2)},
    ],
)
def test_pictures_that_do_not_fit_are_refused_and_not_loaded(wrong, tmp_path):
    good = pictures()
    with pytest.raises(InputError):
        Gallery(**{**vars(good), **wrong})
    for key, value in wrong.items():
        object.__setattr__(good, key, value)  # as a stranger's file may hold them
    good.save(tmp_path, {})
    assert Gallery.load(tmp_path, {}) is None


UNTITLED = {"title": 3, "gradient": "exact", "approximate": False, "parts": {}}


@pytest.mark.parametrize("wrong", [{"model": UNTITLED}, {"classes": None}])
def test_a_header_without_what_is_printed_is_one_sentence(tmp_path, wrong):
    reported({CLEAN: 1}, {}, total=1, **wrong).result.save(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="no title of the model or no list of classes"):
        read_run(tmp_path)


def test_what_a_spec_leaves_out_is_what_its_defaults_are():
    spec = EvaluationSpec.of({"model": {"classifier": "cifar10-resnet"}})
    threat = {"kind": type(spec.threat).__name__.lower(), "eps": spec.threat.eps}
    assert {"threat": threat, "data": {"source": spec.data.source}} == words.USUAL
    assert "threat" not in spec.plain()
    runs = [
        reported({CLEAN: 9}, {}, spec=spec.plain()),
        reported({CLEAN: 9}, {}, spec={**spec.plain(), "threat": {"kind": "linf", "eps": 0.1}}),
    ]
    ((axis, points),) = sweeps(runs)
    assert (axis, [value for value, _ in points]) == ("ε", [8 / 255, 0.1])


# -------------------------------------------------------------------------------------------------- what a file holds


class Seen(HTMLParser):
    """The tags, attributes, identifiers and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = set(), [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text += data

    def values(self, name):
        return [value for key, value in self.attributes if key == name]


def test_nothing_that_a_file_holds_becomes_markup():
    runs, tokens = hostile()
    for chosen in (runs, runs[:1], runs[1:]):
        seen = Seen(html(chosen, remark=PAYLOAD))
        assert not seen.tags & {"script", "iframe", "object", "embed", "base", "form", "svg"}
        assert not [key for key, _ in seen.attributes if key.startswith("on") or key == "style"]
        assert all(re.fullmatch(r"#[a-z0-9-]+|data:,", value) for value in seen.values("href"))
        assert all(re.fullmatch(r"data:image/png;base64,[\w+/=]+", value) for value in seen.values("src"))
        assert all(
            re.fullmatch(r"[a-z0-9-]+", value)
            for value in seen.values("id") + [v.replace(" ", "") for v in seen.values("class")]
        )
    said = Seen(html(runs)).text
    assert [token for token in tokens if f"<script>alert({token})</script>" not in said] == []


def test_every_anchor_of_the_page_leads_somewhere():
    seen = Seen(html(hostile()[0]))
    ids = seen.values("id")
    assert len(set(ids)) == len(ids)
    assert {value[1:] for value in seen.values("href") if value.startswith("#")} <= set(ids)


def test_the_policy_of_the_page_admits_its_own_style_and_pictures_only():
    page = html(hostile()[0])
    (policy,) = (v for v in Seen(page).values("content") if "default-src" in v)
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'", "img-src data:", f"style-src 'sha256-{digest}'", "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip
    assert "url(" not in style
    assert "@import" not in style


def test_markdown_and_csv_are_escaped_too():
    runs, _ = hostile()
    text = markdown(runs)
    assert re.search(r"(?<!\\)[<>`]", text) is None
    assert {line.count(" | ") for line in text.splitlines() if line.startswith("| ")} == {2}
    run = reported({CLEAN: 1, "=cmd": 1}, {"=cmd": {**PGD, "title": "@sum, a | b"}}, name="=1+1\n- [x](javascript:0)")
    rows = list(csv.DictReader(io.StringIO(comma_separated([run]))))
    assert {row["run"][0] for row in rows} == {rows[1]["attack"][0]} == {rows[1]["name"][0]} == {"'"}
    assert markdown([run]).startswith("## =1+1 - \\[x\\](javascript:0)\n")
    assert r"| @sum, a \| b, exact gradient | =cmd |" in markdown([run])


def test_texts_that_cannot_be_printed_or_drawn_are_still_reported():
    odd = "_\ud800\x1b[31m\u202e $\\frac$ {{ 7 * 7 }} {% raw %}"
    run = reported({CLEAN: 1, "pgd-ce": 1}, {"pgd-ce": {**PGD, "title": odd}}, name=odd, warnings=[odd])
    for text in (html([run, run]), markdown([run]), comma_separated([run]), as_json([run])):
        text.encode()
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "{{ 7 * 7 }}" in html([run])
    assert encoded(trade_off([run])).startswith(b"\x89PNG")


def test_json_holds_titles_and_the_conclusion():
    run = reported({CLEAN: 34, "pgd-ce": 10}, {"pgd-ce": PGD})
    (found,) = json.loads(as_json([run]))
    assert found["conclusion"] == conclusion(run)
    assert found["date"] == "2026-11-17 09:30 UTC"
    assert found["titles"]["pgd-ce"] == "PGD-20, EOT 8, step 2/255, exact gradient"
    assert found["rates"]["pgd-ce"]["one-shot"]["value"] == 10 / 48

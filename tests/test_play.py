"""What the playground computes, without a browser: what is seen, what is copied, what is refused."""

from __future__ import annotations

import base64
import io
import re
import struct
import tomllib
import zlib
from dataclasses import replace

import pytest
import torch
from PIL import Image

import diffpure as dp
from diffpure.errors import InputError
from diffpure.experiments.load import Loader, run_spec
from diffpure.experiments.spec import EvaluationSpec
from diffpure.play import show
from diffpure.play.copies import _pairs, as_python, as_spec
from diffpure.play.session import ATTACKS, DRAWS, SAMPLERS, Bench, Choices, Scene, attack, look

FAST = Choices(sampler="one-shot", iterations=2)


@pytest.fixture(scope="module")
def bench():
    return Bench()


def attacked(bench, choices, scene, defended):
    *_, last = attack(bench, choices, scene, defended=defended)
    return last


def bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A PNG file whose header claims that many pixels."""
    chunks = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(b"")
    framed = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


# ------------------------------------------------------------------------------------------------------ what is seen


def test_a_view_shows_what_the_models_say(bench):
    scene = attacked(bench, FAST, Scene(bench.samples[3]), defended=False)
    view = look(bench, FAST, scene)
    classifier = dp.load_classifier("cifar10-resnet")
    purifier = dp.Purifier(dp.load_score("cifar10-small"), dp.OneShot(t_star=0.1))
    images = [x.expand(DRAWS, -1, -1, -1) for x in (scene.picture.pixels, scene.adversarial)]
    assert [stage.name for stage in view.stages] == ["clean", "adversarial", "diffused", "purified"]
    assert view.label == scene.picture.label == 3
    assert torch.equal(view["clean"].probabilities, classifier(scene.picture.pixels).softmax(1))
    assert torch.equal(view["adversarial"].probabilities, classifier(scene.adversarial).softmax(1))
    assert torch.equal(view["purified"].probabilities, classifier(purifier(images[1], 0)).softmax(1))
    assert torch.equal(view.defended[0], classifier(purifier(images[0], 0)).softmax(1))
    assert torch.equal(view.defended[1], view["purified"].probabilities)
    assert torch.equal(view.frames[0], view["diffused"].picture)
    assert torch.equal(view.frames[-1], view["purified"].picture)


def test_the_draws_differ_and_the_seed_fixes_them(bench):
    scene = Scene(bench.samples[0])
    first, again, other = (look(bench, replace(FAST, seed=seed), scene).defended[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (first.std(0) > 0).all()


@pytest.mark.parametrize(("sampler", "score"), [("ddim", "photos-small"), *((s, "cifar10-small") for s in SAMPLERS)])
def test_every_sampler_and_score_purifies(bench, sampler, score):
    choices = replace(FAST, sampler=sampler, score=score, t_star=0.05, steps=2)
    view = look(bench, choices, Scene(bench.samples[1]))
    assert view["purified"].probabilities.shape == (DRAWS, 10)
    assert (view["purified"].picture - view["clean"].picture).abs().mean() < 0.1  # another picture of the same


@pytest.mark.parametrize(("kind", "defended"), [*((kind, False) for kind in ATTACKS), ("momentum", True)])
def test_an_attack_step_by_step_is_the_whole_attack(bench, kind, defended):
    choices, scene = replace(FAST, attack=kind, budget="l2 0.5"), Scene(bench.samples[2])
    steps = [after.attacked.run.step for after in attack(bench, choices, scene, defended=defended)]
    run = attacked(bench, choices, scene, defended).attacked.run
    model = bench.defence(choices) if defended else dp.load_classifier("cifar10-resnet")
    whole = choices.make_attack(defended=defended)(model, scene.picture.pixels, torch.tensor([2]), dp.L2(0.5), seeds=0)
    assert steps == [1, 2, 3]
    assert run.done
    assert torch.equal(run.z, whole)
    assert dp.L2(0.5).within(scene.picture.pixels, run.z)


def test_an_attack_that_nobody_asks_for_further_steps_takes_none(bench):
    before = bench.defence(FAST)
    calls = []
    before.classifier.register_forward_hook(lambda *_: calls.append(1))
    try:
        steps = attack(bench, replace(FAST, iterations=50), Scene(bench.samples[0]), defended=False)
        assert next(steps).attacked.run.step == 1
        done = len(calls)
        steps.close()
        assert len(calls) == done <= 4
    finally:
        before.classifier._forward_hooks.clear()


def test_another_sampler_shares_the_weights_and_leaves_the_purifier_as_it_was():
    purifier = dp.Purifier(dp.GaussianScore(), dp.DDIM(t_star=0.2, steps=4))
    other = purifier.with_sampler({"kind": "one-shot", "t_star": 0.1})
    assert (purifier.sampler, other.sampler) == (dp.DDIM(t_star=0.2, steps=4), dp.OneShot(t_star=0.1))
    assert other.score is purifier.score
    assert purifier.moments(3) == pytest.approx([0.2, 0.1, 0.0])
    assert purifier.with_sampler("ld").moments(3) == [0.0, 0.5, 1.0]


# --------------------------------------------------------------------------------------------------------- own files


def test_an_own_file_is_cropped_said_and_labelled_by_the_undefended_classifier(bench, tmp_path):
    Image.new("RGB", (90, 60), "teal").save(tmp_path / "mine.png")
    scene = Scene(bench.own(tmp_path / "mine.png"))
    view = look(bench, FAST, scene)
    assert scene.picture.pixels.shape == (1, 3, 32, 32)
    assert view.label == int(view["clean"].probabilities.argmax())
    html = show.panels(view, FAST)
    assert "the square in the middle of 90×60 pixels, resized to 32×32" in html
    assert "Nobody labelled it" in html


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"just text", "mine.png is not an image that can be read; JPEG, PNG, WebP, BMP and TIFF are."),
        (b"", "mine.png is not an image that can be read; JPEG, PNG, WebP, BMP and TIFF are."),
        (bomb(), "mine.png is too large; at most 64,000,000 pixels are accepted."),
        (bomb(8, 8), "mine.png is damaged or cut short and cannot be decoded."),
    ],
)
def test_a_file_that_is_no_image_is_refused_in_one_sentence(bench, tmp_path, content, said):
    (tmp_path / "mine.png").write_bytes(content)
    with pytest.raises(InputError) as caught:
        bench.own(tmp_path / "mine.png")
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("classifier", "python:mine.py:make", "Unknown classifier"),
        ("score", "/etc/passwd", "Unknown score"),
        ("sampler", "ld", "Unknown sampler"),
        ("attack", "autoattack-standard", "Unknown attack"),
        ("budget", "linf 8", "at most 1"),
        ("budget", "a lot", "such as 'linf 8/255'"),
        ("t_star", 0.0, "t\\* is a time in"),
        ("t_star", float("nan"), "t\\* is a time in"),
        ("steps", 10_000, "steps is a whole number in 1 … 200, got 10000"),
        ("iterations", 0, "iterations is a whole number"),
        ("seed", None, "a whole number"),
    ],
)
def test_what_a_page_may_send_is_checked(key, value, said):
    with pytest.raises(InputError, match=said):
        Choices(**{key: value})


# -------------------------------------------------------------------------------------------------------- the copies


def check_python(bench, choices, scene):
    """Run the copied program, and expect the page's probabilities."""
    scope: dict[str, object] = {}
    exec(as_python(bench, choices, scene), scope)
    assert torch.equal(scope["probabilities"], look(bench, choices, scene)["purified"].probabilities)


def check_spec(bench, choices, scene, folder):
    """Read the copied spec, expect that of the page, and run a tiny version of it."""
    spec = EvaluationSpec.of(tomllib.loads(as_spec(bench, choices, scene)))
    defended = scene.attacked is None or scene.attacked.defended
    assert spec == bench.spec(choices, scene.picture, defended=defended)
    assert spec.data.images == (None if scene.picture.index is None else str(scene.picture.index))
    small = replace(spec.tiny(), data=replace(spec.data, images=spec.data.images or "0"))
    assert run_spec(small, folder, bench.loader).complete


@pytest.mark.parametrize("defended", [None, False, True])
def test_the_copied_program_and_spec_do_what_the_page_did(bench, tmp_path, capsys, defended):
    scene = Scene(bench.samples[4])
    if defended is not None:
        scene = attacked(bench, FAST, scene, defended)
    check_python(bench, FAST, scene)
    assert len(capsys.readouterr().out.splitlines()) == 10
    check_spec(bench, replace(FAST, budget="l2 0.5"), scene, tmp_path / "run")


@pytest.mark.parametrize("defended", [False, True])
def test_an_attack_with_earlier_settings_is_copied_with_them(bench, defended):
    then = replace(FAST, attack="pgd", score="photos-small", classifier="cifar10-vit-tiny", seed=7)
    scene = attacked(bench, then, Scene(bench.samples[5]), defended)
    check_python(bench, replace(FAST, t_star=0.05, sampler="ddim", steps=2), scene)
    assert "other settings" in show.panels(look(bench, FAST, scene), FAST)


def test_an_own_file_is_copied_by_its_name(bench, tmp_path, monkeypatch):
    name = 'it\'s "mine".png'
    Image.effect_noise((40, 50), 80).save(tmp_path / name)
    scene = Scene(bench.own(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    check_python(bench, FAST, attacked(bench, replace(FAST, classifier="cifar10-vit-tiny"), scene, defended=False))
    check_spec(bench, FAST, scene, tmp_path / "run")


def test_a_stopped_attack_says_where(bench):
    steps = attack(bench, replace(FAST, iterations=9), Scene(bench.samples[0]), defended=False)
    scene = [next(steps), next(steps)][1]
    assert "stopped after step 2 of 10" in show.panels(look(bench, FAST, scene), FAST)
    assert "stopped after step 2 of 10" in as_python(bench, FAST, scene)
    assert "step 2 of 10, about 12 s left" in show.progress(scene, 3.0)


def test_plain_data_is_written_as_toml():
    plain = {"a b": ["é\n\"'\\\x7f\t", 1, -2.5, 1e-9, True], "table": {"x": {"y": "8/255"}, "none": {}}, "n": 10**12}
    assert tomllib.loads("\n".join(_pairs(plain))) == plain


# --------------------------------------------------------------------------------------------------- a spec of others


def test_the_model_of_a_spec_is_the_defence(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 12))\n"
    )
    (tmp_path / "mine.toml").write_text(
        '[model]\nclassifier = "python:mine.py:make"\nscore = "cifar10-small"\n'
        'sampler = { kind = "ancestral", t_star = 0.3, steps = 2 }\n[data]\nimages = "10-14"\n'
    )
    spec = EvaluationSpec.read(tmp_path / "mine.toml")
    with pytest.raises(InputError, match="--allow-code"):
        Bench(spec, Loader(tmp_path))
    mine = Bench(spec, Loader(tmp_path, allow_code=True))
    assert (len(mine.samples), mine.first.t_star, mine.names[-1]) == (5, 0.3, "class 11")
    then = replace(mine.first, iterations=1)
    now = replace(mine.first, t_star=0.1)
    assert mine.defence(now).purifier.sampler == dp.Ancestral(t_star=0.1, steps=2)
    scene = attacked(mine, then, Scene(mine.samples[1]), defended=True)
    check_python(mine, now, scene)
    check_spec(mine, now, scene, tmp_path / "run")


def test_a_spec_with_another_purifier_has_no_t_star(tmp_path):
    table = {"model": {"classifier": "cifar10-vit-tiny", "purifier": {"kind": "blur", "sigma": 0.5}}}
    blur = Bench(EvaluationSpec.of({**table, "data": {"images": "0-3"}}))
    scene = attacked(blur, replace(blur.first, iterations=1), Scene(blur.samples[0]), defended=True)
    view = look(blur, blur.first, scene)
    assert not blur.has_t_star
    assert [stage.name for stage in view.stages] == ["clean", "adversarial", "purified"]
    assert view.frames is None
    assert len(view.defended[0]) == 1  # nothing is random
    assert "without noise" in show.panels(view, blur.first)
    check_python(blur, blur.first, scene)
    with pytest.raises(InputError, match="needs a score or purifier"):
        Bench(EvaluationSpec.of({"model": {"classifier": "cifar10-vit-tiny"}}))


# ------------------------------------------------------------------------------------------------------------ HTML


def test_the_panels_hold_pictures_bars_and_answers(bench):
    choices = replace(FAST, sampler="ddim", steps=3)
    before = show.panels(look(bench, choices, Scene(bench.samples[0])), choices)
    scene = attacked(bench, FAST, Scene(bench.samples[0]), defended=True)
    after = show.panels(look(bench, choices, scene), choices)
    titles = [re.findall(r"<b>(.*?)</b>", html) for html in (before, after)]
    rest = ["Diffused to t* = 0.1", "Purified", "The way back"]
    assert titles[0] == ["Clean", "Adversarial", *rest]
    assert titles[1] == ["Clean", "Adversarial", "Perturbation ×15", *rest]
    assert (before.count("<li"), after.count("<li")) == (30, 40)
    assert after.count('class="line"') == 20  # over the draws of two pictures
    assert len(re.findall(r"of 8 draws correct", after)) == 2
    gif = re.search(r"data:image/gif;base64,([^\"]*)", after)[1]
    with Image.open(io.BytesIO(base64.b64decode(gif))) as image:
        assert image.n_frames > 2
        assert image.size == (128, 128)


def test_names_are_text_and_only_ten_of_a_thousand_classes_are_shown(bench):
    view = look(bench, FAST, Scene(replace(bench.samples[0], name="<script>alert(1)</script>\x07")))
    names = tuple(f"<b>{k}</b>" for k in range(1000))
    p = torch.zeros(3, 1000)
    p[:, 500] = 1
    stages = tuple(replace(stage, probabilities=p) for stage in view.stages)
    html = show.panels(replace(view, names=names, stages=stages, label=999, defended=(p,)), FAST)
    assert "<script>" not in html
    assert "\x07" not in html
    assert "<b>500" not in html
    assert html.count('class="name"') == 10 * len(stages)
    assert "&lt;b&gt;999&lt;/b&gt;" in html
    assert show.problem("<i>").count("&lt;i&gt;") == 1

"""What the page did, as code and as a spec, to be run anywhere.

The Python code draws from the same seeds as the page and finds the same image and probabilities; the spec evaluates
the model that was attacked (the defence, before any attack) under the chosen attack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pprint import pformat
from typing import Any

from diffpure.named import brief, short
from diffpure.play.session import DRAWS, Attacked, Bench, Choices, Scene
from diffpure.purifiers.diffusion import Purifier


def as_spec(bench: Bench, choices: Choices, scene: Scene) -> str:
    """The TOML file of an evaluation with these choices."""
    defended = scene.attacked is None or scene.attacked.defended
    spec = bench.spec(choices, scene.picture, defended=defended)
    plain = {"name": spec.name, "rules": list(spec.rules), **spec.plain()}
    eps = short(spec.threat.eps)
    tables = {
        "model": plain.pop("model"),
        "data": {"source": spec.data.source, "images": "0-63", **plain.pop("data", {})},
        "threat": {"kind": type(spec.threat).__name__.lower(), "eps": eps if "/" in eps else spec.threat.eps},
    }
    plain.pop("threat", None)
    attacks = plain.pop("attacks")
    own = "# Your own file has no label, so these are images of the source instead."
    alone = '# One image proves nothing; images = "0-499" are more.'
    lines = ["# Save this as mine.toml, then: diffpure evaluate mine.toml", *_pairs(plain)]
    for name, table in tables.items():
        note = [own if scene.picture.index is None else alone] if name == "data" else []
        lines += ["", f"[{name}]", *note, *_pairs(table)]
    for table in attacks:
        lines += ["", "[[attacks]]", *_pairs(table)]
    return "\n".join([*lines, ""])


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_toml(value)}" for key, value in table.items()]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    """Plain data as TOML writes it in one line; the standard library only reads TOML."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_pairs(value)) + " }" if value else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # A text of JSON is one of TOML, except that TOML escapes DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_python(bench: Bench, choices: Choices, scene: Scene) -> str:
    """A program that finds what the page shows."""
    model, picture, attacked = bench.defence(choices), scene.picture, scene.attacked
    imports, lines = ["import diffpure as dp"], list[str]()
    names = "dp.class_names()"
    if bench.given is None:
        lines += [
            f"classifier = {_classifier(choices)}",
            f"purifier = {_purifier(bench, choices)}",
            "model = dp.Defense(purifier, classifier)",
        ]
    else:
        imports += [
            "from pathlib import Path",
            "from diffpure.experiments.load import Loader",
            "from diffpure.experiments.spec import EvaluationSpec",
        ]
        spec, loader = bench.spec(choices, picture, defended=True), bench.loader
        code = ", allow_code=True" if loader.allow_code else ""
        lines += [
            f"spec = EvaluationSpec.of({pformat(spec.plain(), width=100, sort_dicts=False)})",
            f"loader = Loader(Path({str(loader.base or '.')!r}){code})",
            "data, model = loader.data(spec), loader.model(spec.model)",
            "purifier, classifier = model.purifier, model.classifier",
        ]
        names = "data.class_names or range(probabilities.shape[1])"
    if picture.index is None:
        imports += ["from diffpure.data.folder import square", "from diffpure.data.images import read_rgb, to_tensor"]
        lines.append(f"image = to_tensor(square({picture.pixels.shape[-1]})(read_rgb({picture.name!r})))[None]")
    elif bench.given is None:
        lines += [
            f"images, labels = dp.samples({picture.index + 1})",
            f"image, label = images[{picture.index}:], labels[{picture.index}:]",
        ]
    else:
        lines.append("image, label = data.images, data.labels")
    lines.append("")
    if attacked is None:
        lines += ["adversarial = image  # no attack", ""]
    else:
        lines += [*_attack(bench, choices, attacked, labelled=picture.label is not None), ""]
    draws = DRAWS if model.stochastic else 1
    lines += [
        f"purified = purifier(adversarial.expand({draws}, -1, -1, -1), seeds={choices.seed})  # {draws} draws",
        "probabilities = classifier(purified).softmax(1)",
        f"for name, p in zip({names}, probabilities.T):",
        '    print(f"{name!s:12} {p.mean():6.1%}  [{p.min():.1%}, {p.max():.1%}]")',
    ]
    return "\n".join([*imports, "", *lines, ""])


def _attack(bench: Bench, choices: Choices, attacked: Attacked, *, labelled: bool) -> list[str]:
    """The lines that make the adversarial image again: with the choices of then, whatever is chosen now."""
    then, run = attacked.choices, attacked.run
    same = bench.spec_of(then).model == bench.spec_of(choices).model
    classifier = "classifier" if bench.given is not None or then.classifier == choices.classifier else _classifier(then)
    victim = "model" if attacked.defended else classifier
    if attacked.defended and not same:
        other = _purifier(bench, then)
        victim = f"dp.Defense({other}, {classifier})" if bench.given is None else f"model.with_purifier({other})"
    gradient = ', gradient="exact"' if attacked.defended else ""
    kind = type(then.make_attack(defended=attacked.defended)).__name__
    stopped = "" if run.done else f"  # the page was stopped after step {run.step} of {run.steps}"
    return [
        *([] if labelled else [f"label = {classifier}(image).argmax(1)  # nobody labelled the file"]),
        f"victim = {victim}",
        f"attack = dp.{kind}(iterations={then.iterations}{gradient}){stopped}",
        f"threat = dp.{brief(then.threat)}",
        f"adversarial = threat.apply(image, attack(victim, image, label, threat, seeds={then.seed}))",
    ]


def _classifier(choices: Choices) -> str:
    return f'dp.load_classifier("{choices.classifier}")'


def _purifier(bench: Bench, choices: Choices) -> str:
    """The purifier as an expression; that of a spec differs from the loaded one in its sampler alone."""
    purifier = bench.defence(choices).purifier
    assert isinstance(purifier, Purifier)
    sampler = f"dp.{brief(purifier.sampler, always=('t_star',))}"
    if bench.given is not None:
        return f"purifier.with_sampler({sampler})"
    return f'dp.Purifier(dp.load_score("{choices.score}"), {sampler})'

"""A view as HTML: a card per picture with bars of probabilities under it, and who classified it as what.

A bar is the mean over the draws, the thin line over it reaches from the least to the most. Texts are escaped where they
are printed, because names of classes and files come from anywhere.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from typing import Final, final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from torch import Tensor

from diffpure.evaluation.cost import duration
from diffpure.named import brief
from diffpure.pictures.gallery import eight_bits
from diffpure.play.session import Choices, Scene, View
from diffpure.report.panels import amplified, data_url, png
from diffpure.report.strips import save_gif
from diffpure.report.words import printable, threat
from diffpure.threats import L2, Linf

ROWS: Final = 10  # classes under a picture, at most


@final
@dataclass(frozen=True)
class Bar:
    """The probability of a class in per cent: mean, least and most over the draws."""

    name: str
    mean: float
    least: float
    most: float
    right: bool
    first: bool


@final
@dataclass(frozen=True)
class Card:
    """A picture under its title, with what is to be said of it, and the bars of its probabilities if it has some."""

    title: str
    said: str
    url: str = ""
    bars: tuple[Bar, ...] = ()


def panels(view: View, choices: Choices) -> str:
    """The pictures, their probabilities, and the answers of both models."""
    return _template("panels.html").render(
        cards=_cards(view, choices),
        notes=_notes(view, choices),
        answers=_answers(view),
        draws=len(view.defended[0]),
        attacked=view.scene.attacked is not None,
    )


def progress(scene: Scene, elapsed: float) -> str:
    """How far the attack on a scene has come, and the time that is left at its speed."""
    assert scene.attacked is not None
    run = scene.attacked.run
    left = elapsed / run.step * (run.steps - run.step)
    said = f"Attack: step {run.step} of {run.steps}, about {duration(left)} left."
    return _template("status.html").render(said=said, step=run.step, steps=run.steps)


def problem(said: str) -> str:
    """What was wrong, in its one sentence."""
    return _template("status.html").render(said=said, step=0, steps=0)


def _cards(view: View, choices: Choices) -> list[Card]:
    rows, draws = _classes(view), len(view.defended[0])
    many = f"first of {draws} draws" if draws > 1 else "without noise"
    said = {
        "clean": ("Clean", "before the undefended classifier"),
        "adversarial": ("Adversarial", "before the undefended classifier"),
        "diffused": (f"Diffused to t* = {choices.t_star:g}", many),
        "purified": ("Purified", f"{many}; what the classifier of the defence sees"),
    }
    cards = {}
    for stage in view.stages:
        title, about = said.get(stage.name, (stage.name, many))
        bars = _bars(stage.probabilities, rows, view)
        cards[stage.name] = Card(title, about, data_url(png(eight_bits(stage.picture.numpy()))), bars)
    if view.scene.attacked is None:
        added = [Card("Adversarial", "Not attacked yet.")]
    else:
        clean, adversarial = (eight_bits(view[name].picture.numpy()) for name in ("clean", "adversarial"))
        factor, difference = amplified(clean, adversarial)
        added = [
            cards["adversarial"],
            Card(f"Perturbation ×{factor}", "adversarial minus clean, around grey", data_url(png(difference))),
        ]
    shown = [cards["clean"], *added, *(cards[name] for name in cards if name not in ("clean", "adversarial"))]
    if view.frames is not None:
        file = io.BytesIO()
        save_gif(file, [frame.expand(3, -1, -1).numpy() for frame in view.frames])
        shown.append(Card("The way back", "from t* to 0, the first draw", data_url(file.getvalue(), "gif")))
    return shown


def _classes(view: View) -> list[int]:
    """The classes that are shown: those with the highest mean in any picture, and the label, in their order."""
    highest = [stage.probabilities.mean(0) for stage in view.stages]
    ranked = sorted(range(len(view.names)), key=lambda k: (k != view.label, -max(float(p[k]) for p in highest)))
    return sorted(ranked[:ROWS])


def _bars(p: Tensor, rows: list[int], view: View) -> tuple[Bar, ...]:
    mean, least, most = (100 * p.mean(0), 100 * p.amin(0), 100 * p.amax(0))
    first = int(mean.argmax())
    return tuple(
        Bar(view.names[k], float(mean[k]), float(least[k]), float(most[k]), k == view.label, k == first) for k in rows
    )


def _notes(view: View, choices: Choices) -> list[str]:
    """What the picture and the attack are."""
    picture, attacked, name = view.scene.picture, view.scene.attacked, view.names[view.label]
    notes = [f"{picture.name}."]
    if picture.size is not None:
        side, (width, height) = picture.pixels.shape[-1], picture.size
        fitted = f"the square in the middle of {width}×{height} pixels, resized to {side}×{side}, the classifier's size"
        if (width, height) == (side, side):
            fitted = f"{side}×{side} pixels"
        notes = [f"{picture.name}: {fitted}. Nobody labelled it, so {name}, the undefended classifier's class, counts."]
    if attacked is None:
        return [*notes, "Diffused and purified is the clean image."]
    adversarial = view.scene.adversarial
    assert adversarial is not None
    z = (adversarial - picture.pixels).cpu()
    whom = "the defence, through its exact gradient" if attacked.defended else "the undefended classifier"
    steps = "" if attacked.run.done else f", stopped after step {attacked.run.step} of {attacked.run.steps}"
    size = f"ℓ∞ {255 * float(Linf(1).size(z)):.3g}/255, ℓ2 {float(L2(1).size(z)):.2f}"
    budget = threat({"threat": brief(attacked.choices.threat)})
    notes.append(f"Attack on {whom}: {attacked.title}, budget {budget}{steps}; the perturbation has {size}.")
    if attacked.choices != choices:
        notes.append("It was made with other settings than those that are chosen now.")
    return [*notes, "Diffused and purified is the adversarial image."]


def _answers(view: View) -> list[tuple[str, list[tuple[str, bool]]]]:
    """The class that each model gives without and under the attack, and whether it is right."""
    bare = [
        view[name].probabilities for name in ("clean", "adversarial") if name != "adversarial" or view.scene.attacked
    ]
    rows = (("undefended classifier", bare), ("defence", list(view.defended)))
    return [(name, [_answer(p, view) for p in found]) for name, found in rows]


def _answer(p: Tensor, view: View) -> tuple[str, bool]:
    """The class of the mean probabilities; of several draws also how many were right."""
    first, right = int(p.mean(0).argmax()), int((p.argmax(1) == view.label).sum())
    sure = f"{view.names[first]} {100 * float(p.mean(0)[first]):.0f}\N{NO-BREAK SPACE}%"
    return (sure if len(p) == 1 else f"{sure}; {right} of {len(p)} draws correct"), first == view.label


@cache
def _template(name: str) -> Template:
    """A template of the package; it escapes everything that it prints."""
    found = Environment(
        loader=PackageLoader("diffpure.play"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return found.get_template(name)

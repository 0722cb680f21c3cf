"""The page of the playground, in Gradio: what is on it, and what happens when it is touched.

Nothing is shared between visitors but the models; what computes goes through one queue, one at a time. The page asks
no other server for anything: the fonts are the system's, and nothing is reported to anyone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from importlib import resources
from typing import Any, Final

import gradio as gr

from diffpure.errors import InputError
from diffpure.pictures.gallery import eight_bits
from diffpure.play import show
from diffpure.play.copies import as_python, as_spec
from diffpure.play.session import ATTACKS, BUDGETS, CLASSIFIERS, SAMPLERS, SCORES, Bench, Choices, Scene, look
from diffpure.play.session import attack as attack_steps

TITLE: Final = "diffpure playground"
ABOUT: Final = (
    f"# {TITLE}\n"
    "Choose one of these images or drop your own, attack it, and see what purification brings back. "
    "One image shows how it works; it proves nothing about robustness, which takes an evaluation of hundreds of images "
    "(`diffpure evaluate`)."
)
LARGEST: Final = "20mb"  # of an upload
KEPT: Final = 3600  # seconds that an upload stays on the disk
_NAMES: Final = tuple(f.name for f in fields(Choices))


@dataclass
class Stop:
    """Whether a visitor asked the attack to stop."""

    asked: bool = False


def build(bench: Bench) -> gr.Blocks:
    """The page over these models and images."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(KEPT, KEPT)) as page:
        gr.Markdown(ABOUT)
        scene, stop = gr.State(Scene(bench.samples[0])), gr.State(Stop())
        with gr.Row():
            samples = _samples(bench)
            own = gr.File(label="Your own image", height=160, scale=1, min_width=240)
        with gr.Row():
            undefended = gr.Button("Attack the undefended classifier", variant="primary")
            adaptive = gr.Button("Attack the defence (adaptive)", variant="primary")
            halt = gr.Button("Stop", variant="stop", interactive=False)
        status, panels = gr.HTML(elem_id="status"), gr.HTML(elem_id="panels")
        controls = _controls(bench)
        with gr.Accordion("Copy as Python", open=False):
            python = gr.Code(language="python", show_label=False, interactive=False, elem_id="python")
        with gr.Accordion("Copy as spec", open=False):
            spec = gr.Code(show_label=False, interactive=False, elem_id="spec")

        seen, given = [panels, python, spec, status], [scene, *controls.values()]
        does = _Handlers(bench)
        work: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private"}
        work["show_progress"] = "hidden"
        last = {**work, "trigger_mode": "always_last"}  # of a slider that moves on, only where it stops counts
        page.load(does.show, given, seen, **work)
        samples.select(does.choose, given, [scene, *seen], **work)
        own.upload(does.take, [own, *given], [scene, own, *seen], **work)
        models = ("classifier", "score", "sampler", "t_star", "steps", "seed")
        gr.on([controls[name].change for name in models], does.show, given, seen, **last)
        attacks = ("attack", "budget", "iterations")
        gr.on([controls[name].change for name in attacks], does.copy, given, [python, spec, status], **last)
        buttons = [undefended, adaptive, halt]
        at_once: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}
        for button, defended in ((undefended, False), (adaptive, True)):
            begun = button.click(_begin, stop, buttons, **at_once)
            done = begun.then(partial(does.attack, defended), [stop, *given], [scene, *seen], **work)
            done.then(_finish, None, buttons, **at_once)
        halt.click(_halt, stop, None, **at_once)
    return page


def _samples(bench: Bench) -> gr.Gallery:
    pictures = []
    for picture in bench.samples:
        pixels = eight_bits(picture.pixels[0].expand(3, -1, -1).permute(1, 2, 0).cpu().numpy())
        pictures.append((pixels, bench.names[picture.label or 0]))
    return gr.Gallery(
        pictures,
        show_label=False,
        format="png",
        allow_preview=False,
        height="auto",
        scale=4,
        elem_id="samples",
        buttons=[],
        interactive=False,
    )


def _controls(bench: Bench) -> dict[str, Any]:
    """A control for each of the choices, by its name; what a spec fixes is hidden."""
    first, free = bench.first, bench.given is None
    narrow: dict[str, Any] = {"min_width": 190}  # on a phone each has a row of its own
    with gr.Row():
        with gr.Column(), gr.Group(elem_id="defence"):
            t_star = gr.Slider(
                0.01,
                max(0.25, first.t_star),
                first.t_star,
                step=0.005,
                label="t*: how far to diffuse",
                info="More removes more of the perturbation, and more of the image.",
                visible=bench.has_t_star,
                elem_id="t-star",
            )
            steps = gr.Slider(1, 50, first.steps, step=1, label="Steps of the way back", visible=free, elem_id="steps")
            with gr.Row():
                sampler = gr.Dropdown(list(SAMPLERS), value=first.sampler, label="Sampler", visible=free, **narrow)
                score = gr.Dropdown(list(SCORES), value=first.score, label="Score model", visible=free, **narrow)
            with gr.Row():
                classifier = gr.Dropdown(
                    list(CLASSIFIERS), value=first.classifier, label="Classifier", visible=free, **narrow
                )
                seed = gr.Number(first.seed, precision=0, label="Seed of all noise", elem_id="seed", **narrow)
        with gr.Column(), gr.Group(elem_id="attack"):
            iterations = gr.Slider(1, 100, first.iterations, step=1, label="Iterations", elem_id="iterations")
            with gr.Row():
                attack = gr.Dropdown(list(ATTACKS), value=first.attack, label="Attack", **narrow)
                budget = gr.Dropdown(
                    list(BUDGETS),
                    value=first.budget,
                    label="Budget",
                    info="A norm and its size; others can be typed.",
                    allow_custom_value=True,
                    elem_id="budget",
                    **narrow,
                )
    made = (classifier, score, sampler, t_star, steps, attack, budget, iterations, seed)
    return dict(zip(_NAMES, made, strict=True))


class _Handlers:
    """What happens when the page is touched: given the scene and the values of the controls, what changes on it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def show(self, scene: Scene, *values: Any) -> tuple[Any, ...]:
        """Purify again: the panels, the two copies and the status."""
        try:
            choices = _choices(values)
            panels = show.panels(look(self.bench, choices, scene), choices)
            return panels, *self._copies(scene, choices), ""
        except InputError as error:
            return *_same(3), _problem(error)

    def copy(self, scene: Scene, *values: Any) -> tuple[Any, ...]:
        """The two copies and the status."""
        try:
            return *self._copies(scene, _choices(values)), ""
        except InputError as error:
            return *_same(2), _problem(error)

    def choose(self, event: gr.SelectData, scene: Scene, *values: Any) -> tuple[Any, ...]:
        """Another image to look at."""
        chosen = Scene(self.bench.samples[event.index])
        return chosen, *self.show(chosen, *values)

    def take(self, file: str, scene: Scene, *values: Any) -> tuple[Any, ...]:
        """A visitor's own file to look at; the field for it becomes empty again."""
        try:
            chosen = Scene(self.bench.own(file))
        except InputError as error:
            return scene, None, *_same(3), _problem(error)
        return chosen, None, *self.show(chosen, *values)

    def attack(self, defended: bool, stop: Stop, scene: Scene, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Attack step by step until the end or until the visitor stops it or leaves."""
        began = time.monotonic()
        try:
            for after in attack_steps(self.bench, _choices(values), scene, defended=defended):
                scene = after
                if stop.asked:
                    break
                yield scene, *_same(3), show.progress(scene, time.monotonic() - began)
        except InputError as error:
            yield scene, *_same(3), _problem(error)
            return
        yield scene, *self.show(scene, *values)

    def _copies(self, scene: Scene, choices: Choices) -> tuple[str, str]:
        return as_python(self.bench, choices, scene), as_spec(self.bench, choices, scene)


def _choices(values: tuple[Any, ...]) -> Choices:
    return Choices(**dict(zip(_NAMES, values, strict=True)))


def _same(count: int) -> list[Any]:
    """So many outputs that stay as they are."""
    return [gr.update() for _ in range(count)]


def _problem(error: InputError) -> str:
    gr.Warning(str(error))
    return show.problem(str(error))


def _begin(stop: Stop) -> list[Any]:
    stop.asked = False
    return [gr.update(interactive=False), gr.update(interactive=False), gr.update(interactive=True)]


def _finish() -> list[Any]:
    return [gr.update(interactive=True), gr.update(interactive=True), gr.update(interactive=False)]


def _halt(stop: Stop) -> None:
    stop.asked = True


def start(bench: Bench, host: str, port: int) -> tuple[gr.Blocks, str]:
    """Serve the page in the background; returns it and its address."""
    style = resources.files("diffpure.play").joinpath("templates", "page.css").read_text("utf-8")
    fonts: dict[str, Any] = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    page = build(bench)
    try:
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            share=False,
            theme=gr.themes.Default(primary_hue="blue", **fonts),
            css=style,
            max_file_size=LARGEST,
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            quiet=True,
            prevent_thread_lock=True,
        )
    except OSError as error:
        raise InputError(f"The port {port} of {host} cannot be used; choose another one.") from error
    return page, str(address)

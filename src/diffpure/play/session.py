"""What the playground computes, without a page: choices and an image in, pictures and probabilities out.

    Choices   the values of the controls; they become the spec of an evaluation, so that the page says what it does
    Bench     the models and images that all visitors share, loaded when they are first asked for
    Scene     what one visitor looks at: an image, and an attack on it
    View      what is seen: clean → adversarial → diffused → purified, each with the classifier's probabilities

The purifier's noise is drawn anew for every draw; one seed fixes them all, and no draw is one that an attack has seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from diffpure.attacks import attacks_of
from diffpure.attacks.base import Attack
from diffpure.attacks.state import AttackRun
from diffpure.data.folder import square
from diffpure.data.images import read_rgb, to_tensor
from diffpure.diffusion.samplers import SAMPLERS as ALL_SAMPLERS
from diffpure.diffusion.samplers import sampler_of
from diffpure.errors import InputError, unknown
from diffpure.experiments.load import PLAIN, Loader
from diffpure.experiments.spec import EvaluationSpec, ModelSpec
from diffpure.named import check_fields
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense, PurifierBase
from diffpure.threats import ThreatModel, threat_of
from diffpure.validate import as_labels

CLASSIFIERS: Final = ("cifar10-resnet", "cifar10-resnet-at", "cifar10-vit-tiny")
SCORES: Final = ("cifar10-small", "photos-small")
SAMPLERS: Final = ("ddim", "ancestral", "few-step", "sde", "ode", "one-shot")  # those that diffuse to a t*
ATTACKS: Final = ("momentum", "pgd", "apgd-ce")
BUDGETS: Final = ("linf 2/255", "linf 4/255", "linf 8/255", "linf 16/255", "l2 0.5", "l2 1", "l2 2")
DRAWS: Final = 8  # of the purifier's noise
SHOWN: Final = 20  # images to choose from
FRAMES: Final = 11  # of the way back
LONGEST: Final = 200  # steps of a sampler or an attack: a visitor waits for them
_KNOWN: Final = {"classifier": CLASSIFIERS, "score": SCORES, "sampler": SAMPLERS, "attack": ATTACKS}


@final
@dataclass(frozen=True, kw_only=True)
class Choices:
    """The values of the controls.

    budget: a threat in words, such as "linf 8/255".   iterations: steps of the attack.   seed: of all noise.
    """

    classifier: str = CLASSIFIERS[0]
    score: str = SCORES[0]
    sampler: str = SAMPLERS[0]
    t_star: float = 0.1
    steps: int = 5
    attack: str = ATTACKS[0]
    budget: str = "linf 8/255"
    iterations: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        # A page can be sent anything: names that would load another file or run code never reach a loader.
        check_fields(self)
        for what, known in _KNOWN.items():
            if getattr(self, what) not in known:
                raise unknown(what, getattr(self, what), known)
        for what in ("steps", "iterations"):
            if not 1 <= getattr(self, what) <= LONGEST:
                raise InputError(f"{what} is a whole number in 1 … {LONGEST}, got {getattr(self, what)}.")
        sampler_of(self.model_table()["sampler"])
        threat_of(self.budget)

    @property
    def threat(self) -> ThreatModel:
        """What the attacker may do."""
        return threat_of(self.budget)

    def attack_table(self, *, defended: bool) -> dict[str, Any]:
        """The attack of a spec: on a defence it goes through the exact gradient."""
        return {"kind": self.attack, "iterations": self.iterations, **({"gradient": "exact"} if defended else {})}

    def make_attack(self, *, defended: bool) -> Attack:
        """The attack itself."""
        return attacks_of(self.attack_table(defended=defended))[0]

    def model_table(self) -> dict[str, Any]:
        """The [model] of a spec."""
        sampler: dict[str, Any] = {"kind": self.sampler, "t_star": self.t_star}
        if "steps" in inspect.signature(ALL_SAMPLERS[self.sampler]).parameters:
            sampler["steps"] = self.steps
        return {"classifier": self.classifier, "score": self.score, "sampler": sampler}


@final
@dataclass(frozen=True, eq=False)
class Picture:
    """An image (1, C, H, W) in [0, 1]; index: its dataset index, None for a visitor's own file.

    label: None where nobody gave one; then what the undefended classifier says stands for it.
    """

    pixels: Tensor
    name: str
    label: int | None = None
    index: int | None = None
    size: tuple[int, int] | None = None  # (width, height) of an own file


@final
@dataclass(frozen=True, eq=False)
class Attacked:
    """An attack that was run, perhaps not to its end, and the choices with which it was."""

    choices: Choices
    defended: bool
    run: AttackRun

    @property
    def title(self) -> str:
        """The attack in the field's words."""
        return self.choices.make_attack(defended=self.defended).title


@final
@dataclass(frozen=True, eq=False)
class Scene:
    """What one visitor looks at."""

    picture: Picture
    attacked: Attacked | None = None

    @property
    def adversarial(self) -> Tensor | None:
        """The adversarial image (1, C, H, W), if there was an attack."""
        if self.attacked is None:
            return None
        return self.attacked.choices.threat.apply(self.picture.pixels, self.attacked.run.z)


@final
@dataclass(frozen=True, eq=False)
class Stage:
    """A picture (C, H, W), near [0, 1], and the classifier's probabilities of it: (draws, classes), or (1, classes)."""

    name: str
    picture: Tensor
    probabilities: Tensor


@final
@dataclass(frozen=True, eq=False)
class View:
    """Everything that is seen of a scene.

    label: the class that counts as right.   defended: the defence's probabilities (draws, classes) without attack, and
    of the adversarial image if there is one.   frames: the first draw's way back (T, C, H, W), if it has one.
    """

    scene: Scene
    names: tuple[str, ...]
    label: int
    stages: tuple[Stage, ...]
    defended: tuple[Tensor, ...]
    frames: Tensor | None

    def __getitem__(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


@final
class Bench:
    """The models and images of a playground: those inside the package, or those of a spec.

    given: a spec whose model is the defence and whose images are the ones to choose from.   loader: how it is loaded.
    `has_t_star` says whether the defence diffuses to a t* that can be chosen, `first` what is chosen at first.
    """

    def __init__(self, given: EvaluationSpec | None = None, loader: Loader = PLAIN) -> None:
        self.given, self.loader, self.first, self.has_t_star = given, loader, Choices(), True
        self._models: dict[tuple[str, str], Defense] = {}
        if given is not None:
            if not given.model.defended:
                raise InputError("The playground purifies, so [model] of its spec needs a score or purifier.")
            sampler = sampler_of(given.model.sampler)
            self.has_t_star = given.model.score is not None and hasattr(sampler, "t_star")
            self.first = replace(self.first, t_star=getattr(sampler, "t_star", self.first.t_star))
        self.data = loader.data(self.spec_of(self.first))
        classes = self.defence(self.first).classify(self.data.images[:1].to(loader.device)).shape[1]
        named = self.data.class_names
        self.names = tuple(named[k] if k < len(named) else f"class {k}" for k in range(classes))
        self.samples = self._samples()

    def defence(self, choices: Choices) -> Defense:
        """The defence that is chosen; its weights are shared with all others."""
        key = (choices.classifier, choices.score) if self.given is None else ("", "")
        if key not in self._models:
            model = self.loader.model(self.spec_of(choices).model)
            assert isinstance(model, Defense)
            self._models[key] = model
        loaded = self._models[key]
        if not isinstance(loaded.purifier, Purifier):
            return loaded
        return loaded.with_purifier(loaded.purifier.with_sampler(self.spec_of(choices).model.sampler))

    def spec(self, choices: Choices, picture: Picture, *, defended: bool) -> EvaluationSpec:
        """The evaluation of the defence, or of the undefended classifier, under the chosen attack.

        It is on the picture alone, or on the first images of the source where the picture is a visitor's own.
        """
        base, index = self.spec_of(choices), picture.index
        return EvaluationSpec(
            name="From the playground",
            model=base.model if defended else ModelSpec(classifier=base.model.classifier, flip=base.model.flip),
            data=base.data if index is None else replace(base.data, subset=None, images=str(index)),
            threat=choices.threat,
            attacks=(choices.attack_table(defended=defended),),
            rules=("one-shot", f"average of {DRAWS}") if defended else ("one-shot",),
            seeds=(choices.seed,),
        )

    def _samples(self) -> tuple[Picture, ...]:
        """The images to choose from: the first of each class, then the second, and so on."""
        labels = as_labels(self.data.labels, len(self.data.labels), len(self.names)).tolist()
        order = sorted(range(len(labels)), key=lambda i: (labels[:i].count(labels[i]), labels[i]))
        return tuple(
            Picture(
                self.data.images[i : i + 1].to(self.loader.device),
                f"Image {self.data.indices[i]}: {self.names[labels[i]]}",
                labels[i],
                self.data.indices[i],
            )
            for i in order[:SHOWN]
        )

    def own(self, file: str | Path) -> Picture:
        """A visitor's own file: the square in the middle, at the size that the models are for."""
        channels, height, width = self.data.images.shape[1:]
        if channels != 3 or height != width:
            raise InputError(
                f"Own files are for models of square colour images; these take {channels}×{height}×{width}."
            )
        image = read_rgb(file)
        pixels = to_tensor(square(width)(image))[None].to(self.loader.device)
        return Picture(pixels, Path(file).name, size=image.size)

    @torch.no_grad()
    def label(self, choices: Choices, picture: Picture) -> int:
        """The class that counts as right: that of the data set, or what the undefended classifier says."""
        if picture.label is not None:
            return picture.label
        return int(self.defence(choices).classify(picture.pixels).argmax())

    def spec_of(self, choices: Choices) -> EvaluationSpec:
        """The spec of the models and images: the given one with the chosen t*, or one of the package."""
        if self.given is None:
            return EvaluationSpec.of({"model": choices.model_table()})
        model = self.given.model
        if not self.has_t_star:
            return self.given
        table = model.sampler if isinstance(model.sampler, Mapping) else {"kind": model.sampler}
        return replace(self.given, model=replace(model, sampler={**table, "t_star": choices.t_star}))


def attack(bench: Bench, choices: Choices, scene: Scene, *, defended: bool) -> Iterator[Scene]:
    """The scene after each step of the attack on the defence, or on the undefended classifier; who stops asking, stops
    the attack."""
    model, picture = bench.defence(choices), scene.picture
    y = torch.tensor([bench.label(choices, picture)])
    made, run = choices.make_attack(defended=defended), None
    while run is None or not run.done:
        run = made.run(
            model if defended else model.classifier,
            picture.pixels,
            y,
            choices.threat,
            seeds=choices.seed,
            on_step=lambda _: True,  # one step, and the next call goes on from it
            resume=run,
        )
        yield replace(scene, attacked=Attacked(choices, defended, run))


@torch.no_grad()
def look(bench: Bench, choices: Choices, scene: Scene) -> View:
    """What is seen of a scene: the adversarial image, or without an attack the clean one, on its way through the
    defence."""
    model, x, adversarial = bench.defence(choices), scene.picture.pixels, scene.adversarial
    draws = DRAWS if model.stochastic else 1

    def probabilities(images: Tensor) -> Tensor:
        return model.classify(images).softmax(1).cpu()

    def repeated(image: Tensor) -> Tensor:
        return image.expand(draws, -1, -1, -1)

    given = {"clean": x} if adversarial is None else {"clean": x, "adversarial": adversarial}
    way, frames = _way(model.purifier, repeated(list(given.values())[-1]), choices.seed)
    stages = tuple(Stage(name, images[0].cpu(), probabilities(images)) for name, images in (given | way).items())
    defended = [stages[-1].probabilities]
    if adversarial is not None:
        defended.insert(0, probabilities(model.purifier(repeated(x), choices.seed)))
    return View(scene, bench.names, bench.label(choices, scene.picture), stages, tuple(defended), frames)


def _way(purifier: PurifierBase, images: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """The pictures of the way through the purifier (B, C, H, W), the purified ones last, and the states of the first
    image (T, C, H, W)."""
    if not isinstance(purifier, Purifier) or purifier.rounds > 1 or not hasattr(purifier.sampler, "t_star"):
        return purifier.stages(images, seed), None
    states = purifier.trajectory(images, purifier.moments(FRAMES), seed)
    return {"diffused": states[0], "purified": states[-1]}, states[:, 0].cpu()

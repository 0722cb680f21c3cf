"""The contract of a defence: a purifier before a classifier, both plain modules.

A purifier maps images in [0, 1] to images in [0, 1], by steps of a state that may be anything (pixels, latents):

    images → begin: the state and a path → the gradient mode walks the path → finish: images of the same shape

What is shared by all of them stands here: seeds one per image, rounds, gradient modes, what they tell of themselves.
A plain image-to-image module becomes one by `as_purifier`, so that a user's own defence is evaluated like any other.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Self, final

import torch
from torch import Tensor, nn

from diffpure.diffusion.gradients import BPDA, Calls, Gradient, gradient_mode, network_calls
from diffpure.diffusion.paths import Path
from diffpure.errors import InputError
from diffpure.meter import CLASSIFIER, NETWORK, count
from diffpure.noise import Noise, Seeds
from diffpure.validate import as_images, check_logits
from diffpure.vote import Vote, VoteRule

PER_CALL: Final = 256  # draws of a vote in one call of the purifier, as many as images elsewhere


class PurifierBase(nn.Module, ABC):
    """Images in [0, 1] → images in [0, 1]; subclasses say how a purification begins, steps and finishes.

    gradient: the mode that autograd follows unless an attack names its own.   rounds: purify that many times in a row.
    """

    def __init__(self, gradient: Gradient = "exact", *, rounds: int = 1) -> None:
        super().__init__()
        if not isinstance(rounds, int) or rounds < 1:
            raise InputError(f"rounds is a whole number of at least 1, got {rounds!r}.")
        self.gradient = gradient_mode(gradient)
        self.rounds = rounds

    @property
    @abstractmethod
    def stochastic(self) -> bool:
        """Whether two calls on one image differ unless they are given the same seed."""

    @property
    def mirrors(self) -> bool:
        """Whether all of its noise comes from the `noise` that `begin` is given: antithetic attacks mirror that."""
        return False

    @property
    def size(self) -> int | None:
        """The resolution that its network wants, None for any."""
        return None

    @property
    def channels(self) -> int | None:
        """The channels that its network wants, None for any."""
        return None

    @abstractmethod
    def begin(self, images: Tensor, noise: Noise) -> tuple[Tensor, Path]:
        """The first state (B, ...) of images (B, C, H, W) in [0, 1], and the path from it."""

    @abstractmethod
    def finish(self, state: Tensor, images: Tensor) -> Tensor:
        """The purified images, shaped like `images`, from the last state."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What it is, in a few words for tables."""

    def parts(self) -> dict[str, object]:
        """What it is made of, by name: everything whose weights or code decide what it computes."""
        return {"purifier": self}

    def stages(self, images: Tensor, seeds: Seeds = None) -> dict[str, Tensor]:
        """Pictures of the way, in order, the purified images last: each (B, C, H, W), near [0, 1]."""
        return {"purified": self(images, seeds)}

    def precision(self, images: Tensor) -> AbstractContextManager[Any]:
        """The context in which its network computes."""
        return contextlib.nullcontext()

    def forward(self, images: Tensor, seeds: Seeds = None) -> Tensor:
        """Purified images (B, C, H, W), near [0, 1]; seeds are integers, one per image, or fresh entropy without."""
        images = as_images(images, self.channels, self._dtype())
        if isinstance(self.gradient, BPDA) and torch.is_grad_enabled() and images.requires_grad:
            with torch.no_grad():
                purified = self._purified(images, seeds)
            return images + (purified - images).detach()
        return self._purified(images, seeds)

    def _purified(self, images: Tensor, seeds: Seeds) -> Tensor:
        noise, x = Noise.of(seeds, len(images)), images
        for round_ in range(self.rounds):
            with self.precision(images):
                state, path = self.begin(x, noise.child(round_))
                state = self.gradient(path, state)
            x = self.finish(state, images)
        return x

    @torch.no_grad()
    def calls(self, images: Tensor, *, gradient: bool) -> Calls:
        """The network calls of one evaluation of each of the images: (without, with) a graph."""
        state, path = self.begin(as_images(images, self.channels, self._dtype()), Noise.of(0, len(images)).child(0))
        plain, graph = self.gradient.calls(path, state) if gradient else (network_calls(path), 0)
        times = self.rounds * len(state) // len(images)  # a purifier may cut an image into several rows
        return times * plain, times * graph

    def with_gradient(self, gradient: Gradient) -> Self:
        """The same purifier (sharing its weights) with another gradient mode."""
        other = copy.copy(self)
        # A copy shares the tables of its modules, buffers and hooks, and so would change with the other.
        vars(other).update({key: copy.copy(value) for key, value in vars(self).items() if isinstance(value, dict)})
        other.gradient = gradient_mode(gradient)
        return other

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: a purifier with dropout is another defence."""
        return super().train(False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title}, {self.gradient.name} gradient)"

    def titled(self, *words: str) -> str:
        """The words of a title, and the rounds."""
        return ", ".join(filter(None, (*words, f"{self.rounds} rounds" if self.rounds > 1 else "")))

    def _dtype(self) -> torch.dtype | None:
        """The floating-point numbers that its weights are, if it has any."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), None)


# ----------------------------------------------------------------------------------------------------- any module


@final
@dataclass(frozen=True)
class CallPath(Path):
    """One step: a call of a function from images to images."""

    function: Callable[[Tensor], Tensor]
    held: tuple[Tensor, ...] = ()
    context: Tensor | None = None

    def __len__(self) -> int:
        return 1

    def step(self, x: Tensor, i: int) -> Tensor:
        count(NETWORK, x)
        out = self.function(x)
        if not isinstance(out, Tensor) or out.shape != x.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise InputError(f"A purifier returns images of the shape it was given, {tuple(x.shape)}, got {got}.")
        return out

    def weights(self) -> Iterable[Tensor]:
        return self.held


@final
class ModulePurifier(PurifierBase):
    """Any image-to-image module or function as a purifier: one step, which is its call.

    One with `stochastic = True` is called with `seeds=`, one integer per image.
    """

    def __init__(self, module: Callable[..., Tensor], gradient: Gradient = "exact", *, rounds: int = 1) -> None:
        super().__init__(gradient, rounds=rounds)
        self.module = module.requires_grad_(False).eval() if isinstance(module, nn.Module) else module

    @property
    def stochastic(self) -> bool:
        return bool(getattr(self.module, "stochastic", False))

    @property
    def title(self) -> str:
        name = getattr(self.module, "__name__", None) or type(self.module).__name__
        return self.titled(str(getattr(self.module, "title", name)))

    def parts(self) -> dict[str, object]:
        return {"purifier": self.module}

    def begin(self, images: Tensor, noise: Noise) -> tuple[Tensor, Path]:
        module = self.module
        function = (lambda x: module(x, seeds=noise.seeds)) if self.stochastic else module
        return images, CallPath(function, (*self.parameters(), *self.buffers()))

    def finish(self, state: Tensor, images: Tensor) -> Tensor:
        return state


def as_purifier(purifier: Any) -> PurifierBase:
    """The purifier, or any callable from images to images as one."""
    if isinstance(purifier, PurifierBase):
        return purifier
    if not callable(purifier):
        raise InputError(f"A purifier is called with images and returns images, got {type(purifier).__name__}.")
    return ModulePurifier(purifier)


# -------------------------------------------------------------------------------------------------------- defence


class Defense(nn.Module):
    """A classifier that sees purified images only: images in [0, 1] → logits.

    purifier: any purifier or image-to-image module.   classifier: any callable from images in [0, 1] to logits; it does
    its own normalisation.   name: what results call it. Logits that are not finite are refused: it fails closed.
    draws: purify each image so often, each time with noise of its own, and let the draws decide together.   rule: the
    "average" of their probabilities, as log-probabilities, or the "majority" of their classes (`diffpure.vote`). An
    attack goes through the vote, with the gradient of all draws; that of a majority is the gradient of the average.
    One draw gives the classifier's own logits.
    """

    def __init__(
        self,
        purifier: Any,
        classifier: Callable[[Tensor], Tensor],
        *,
        name: str = "",
        draws: int = 1,
        rule: VoteRule = "average",
    ) -> None:
        super().__init__()
        if not callable(classifier):
            raise InputError(f"A classifier is called with images and returns logits, got {type(classifier).__name__}.")
        if isinstance(classifier, PurifierBase):
            raise InputError("A Defense takes the purifier first and the classifier second; they were given swapped.")
        self.purifier = as_purifier(purifier)
        self.classifier = classifier.eval() if isinstance(classifier, nn.Module) else classifier
        self.name = name
        vote = Vote(draws, rule)
        self.vote = vote if vote.draws > 1 else None
        if self.vote and not self.stochastic:
            raise InputError(
                f"Draws differ by the purifier's noise, and {self.purifier.title} has none, or does not say that it is "
                f"random (`stochastic = True`, called with `seeds=`); use draws=1, got {draws}."
            )

    @property
    def draws(self) -> int:
        """How many draws of each image decide together."""
        return self.vote.draws if self.vote else 1

    @property
    def stochastic(self) -> bool:
        """Whether two calls on one image differ unless they are given the same seed."""
        return self.purifier.stochastic

    @property
    def mirrors(self) -> bool:
        """Whether antithetic attacks reach all of its noise."""
        return self.purifier.mirrors

    @property
    def title(self) -> str:
        """What it is, in a few words for tables."""
        vote = f", {self.vote}" if self.vote else ""
        return self.name or f"{title_of(self.classifier)} behind {self.purifier.title}{vote}"

    def parts(self) -> dict[str, object]:
        """What it is made of, by name."""
        vote = {"vote": str(self.vote)} if self.vote else {}
        return {**self.purifier.parts(), "classifier": self.classifier, **vote}

    def with_gradient(self, gradient: Gradient) -> Defense:
        """The same defence (sharing its weights) with another gradient mode."""
        return self.with_purifier(self.purifier.with_gradient(gradient))

    def with_purifier(self, purifier: Any) -> Defense:
        """The same classifier and vote (sharing the weights) behind another purifier."""
        return self._with(purifier, self.classifier)

    def with_classifier(self, classifier: Callable[[Tensor], Tensor]) -> Defense:
        """Another classifier behind the same purifier (sharing its weights), with the same vote."""
        return self._with(self.purifier, classifier)

    def _with(self, purifier: Any, classifier: Callable[[Tensor], Tensor]) -> Defense:
        vote = self.vote or Vote()
        return Defense(purifier, classifier, name=self.name, draws=vote.draws, rule=vote.rule)

    def stages(self, images: Tensor, seeds: Seeds = None) -> dict[str, Tensor]:
        """Pictures of the way of the first draw, as its purifier shows them: each (B, C, H, W), near [0, 1]."""
        first = Noise.of(seeds, len(images)).child(0).seeds if self.vote else seeds
        return self.purifier.stages(images, first)

    def forward(self, images: Tensor, seeds: Seeds = None) -> Tensor:
        """Logits (B, classes) of the purified images; the seeds of an image's draws follow from its own."""
        if self.stochastic and torch._C._get_tracing_state() is not None:
            raise InputError("A traced defence would keep the noise of the trace, and a predictable defence is none.")
        if not self.vote:
            return self.classify(self.purifier(images, seeds))
        rows, drawn = self.drawn(images, seeds)
        pieces = [slice(a, a + PER_CALL) for a in range(0, len(rows), PER_CALL)]
        return self.decide(torch.cat([self.classify(self.purifier(rows[p], drawn[p])) for p in pieces]))

    def drawn(self, images: Tensor, seeds: Seeds = None) -> tuple[Tensor, tuple[int, ...]]:
        """What a vote purifies: its draws of images (B, C, H, W), one image after the other, and their seeds."""
        images, noise = as_images(images, self.purifier.channels), Noise.of(seeds, len(images))
        return images.repeat_interleave(self.draws, 0), noise.draws(self.draws).seeds if self.vote else noise.seeds

    def classify(self, purified: Tensor) -> Tensor:
        """Logits (B, classes) of images that are purified already, each by itself."""
        count(CLASSIFIER, purified)
        return check_logits(self.classifier(purified), len(purified))

    def decide(self, logits: Tensor) -> Tensor:
        """Logits (B, classes) of those of all draws (B · draws, classes)."""
        return check_logits(self.vote(logits), len(logits) // self.draws) if self.vote else logits


def title_of(model: Any) -> str:
    """What a model calls itself, or its class."""
    return str(getattr(model, "title", "") or getattr(model, "__name__", "") or type(model).__name__)

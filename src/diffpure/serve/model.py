"""What computes the batches of a service: the defence, in this process or in one of its own.

    purify      8-bit or float images → purified 8-bit pixels, with fresh seeds
    classify    images → `draws` purifications each → logits, averaged as the decision rule "average of N" does it,
                or decided by the defence's own vote where it has one

A purification is stopped by `check`, which raises between two steps when nobody waits for the batch any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from diffpure.errors import InputError
from diffpure.files.pictures import eight_bits
from diffpure.files.tiles import Fit, as_floats, purify_images
from diffpure.noise import Noise
from diffpure.purify import Defense
from diffpure.serve.batching import Kind, Watched

Check = Callable[[], None]  # raises where a batch is to be stopped


@final
@dataclass(frozen=True)
class Classification:
    """What the defended classifier says of an image: per class, in the order of its logits.

    label: the class of the largest logit.   logits: averaged over the draws, or what the defence's vote makes of them.
    probabilities: their softmax.   spread: the standard deviation of each logit over the draws, None for one draw.
    agreement: the share of draws whose own largest logit is the label's.   names: of the classes, empty where they are
    not known.
    """

    label: int
    name: str | None
    draws: int
    agreement: float
    logits: tuple[float, ...]
    probabilities: tuple[float, ...]
    spread: tuple[float, ...] | None
    names: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


class Computer(Protocol):
    """What a service asks for the answers to a batch."""

    @property
    def size(self) -> int | None:
        """The resolution that the purifier wants, None for any."""

    @property
    def draws(self) -> int:
        """Purifications per classified image."""

    @property
    def fit(self) -> Fit:
        """How images of another size are purified."""

    def compute(self, kind: Kind, images: Tensor, check: Check) -> Sequence[Tensor | Classification]:
        """One answer per image (B, C, H, W): its purified 8-bit pixels (C, H, W), or its classification."""

    def stop(self) -> None:
        """End; nothing is under way."""


@final
class Model:
    """A defence that computes in this process; it is moved nowhere.

    batch: images in one call of the purifier at most.   draws: by default those of the defence.   names: of
    the classes.   device: where the defence is.
    """

    def __init__(
        self,
        defense: Defense,
        *,
        batch: int = 16,
        draws: int | None = None,
        fit: Fit = "auto",
        names: Sequence[str] = (),
        device: str = "cpu",
    ) -> None:
        draws = defense.draws if draws is None else draws
        if defense.vote and draws != defense.draws:
            raise InputError(f"The model votes over {defense.draws} draws itself, so leave draws out, got {draws}.")
        self.draws, self.fit, self.size = draws, fit, defense.purifier.size
        self._defense, self._batch, self._names, self._device = defense, batch, tuple(names), device

    @torch.no_grad()
    def compute(self, kind: Kind, images: Tensor, check: Check) -> Sequence[Tensor | Classification]:
        """One answer per image."""
        watched = self._defense.with_gradient(Watched(check))
        if kind == "classify":
            return self._classifications(watched, images, check)
        seeds = Noise.of(None, len(images)).seeds
        clean = purify_images(watched.purifier, images, self.fit, seeds, self._batch, device=self._device)
        return list(eight_bits(clean))

    def stop(self) -> None:
        """Nothing: it ends with this process."""

    def _classifications(self, watched: Defense, images: Tensor, check: Check) -> list[Classification]:
        rows = as_floats(images).repeat_interleave(self.draws, 0)
        parts = []
        for first in range(0, len(rows), self._batch):
            check()
            part = rows[first : first + self._batch].to(self._device)
            parts.append(watched.classify(watched.purifier(part)).double().cpu())
        logits = torch.cat(parts)
        return [self._classification(each) for each in logits.reshape(len(images), self.draws, -1)]

    def _classification(self, logits: Tensor) -> Classification:
        decided = self._defense.decide(logits)[0] if self._defense.vote else logits.mean(0)
        label = int(decided.argmax())
        names = self._names if len(self._names) == len(decided) else ()
        return Classification(
            label=label,
            name=names[label] if names else None,
            draws=len(logits),
            agreement=float((logits.argmax(1) == label).double().mean()),
            logits=tuple(decided.tolist()),
            probabilities=tuple(decided.softmax(0).tolist()),
            spread=tuple(logits.std(0).tolist()) if len(logits) > 1 else None,
            names=names,
        )

"""Two views of one image: the classifier sees it as it is and flipped horizontally, and their average decides.

    log p̄,      p̄ = ½ softmax f(x) + ½ softmax f(flip x)

What is left of a perturbation after purification was made for one view, and the other meets it the wrong way round; so
against attacks that know neither purifier nor views, the average is right more often than the view that they were made
for, at one more call of the classifier and none of the score. An attacker who knows of it differentiates through both:
autograd does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, final

import torch
from torch import Tensor, nn

from diffpure.errors import InputError
from diffpure.purify import title_of
from diffpure.vote import Vote


@final
class FlipAverage(nn.Module):
    """A classifier whose answer is the average of its probabilities for an image and for its horizontal flip.

    classifier: any callable from images (B, C, H, W) in [0, 1] to logits (B, K). Returns log-probabilities (B, K).
    """

    def __init__(self, classifier: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        if not callable(classifier):
            raise InputError(f"A classifier is called with images and returns logits, got {type(classifier).__name__}.")
        self.classifier = classifier.eval() if isinstance(classifier, nn.Module) else classifier

    @property
    def title(self) -> str:
        """What it is, in a few words for tables."""
        return f"{title_of(self.classifier)} (average with the horizontal flip)"

    def forward(self, x: Tensor) -> Tensor:
        """The logarithm of the mean probabilities (B, K) of both views."""
        both = torch.stack([x, x.flip(-1)], 1).flatten(0, 1)
        return Vote(2)(self.classifier(both))

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, the one that is deployed."""
        return super().train(False)

    def extra_repr(self) -> str:
        return "average of the probabilities of an image and of its horizontal flip"

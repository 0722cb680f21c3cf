"""The defence: a purifier before a classifier, both plain modules.

Images come and go in [0, 1]; this is the only file that changes range or resolution. One image's walk:

    [0, 1] → resize to the score model's size → 2x - 1 → sampler: x(t*) and the path → gradient mode walks the path
           → (x + 1)/2 → back to the image's size → classifier → logits

Nothing is clamped on the way, as in the paper: a clamp would hide gradient from an attack.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffpure.diffusion.gradients import GradientMode, gradient_mode, is_approximate
from diffpure.diffusion.samplers import ReverseSDE, Sampler
from diffpure.diffusion.score import ScoreModel
from diffpure.errors import InputError
from diffpure.noise import Noise
from diffpure.validate import check_images

Seeds = Sequence[int] | Tensor | None


class Purifier(nn.Module):
    """Diffuse each image to t*, then follow the sampler's path back to a clean one.

    score: ∇ log p_t, with its schedule and size; its weights are frozen.   sampler: how to go there and back.
    gradient: "exact", "adjoint", "backprop", "surrogate", "bpda", or a `GradientMode`.
    rounds: purify that many times in a row.   autocast: a dtype for the score's own computation, such as
    torch.bfloat16, on machines that have it.
    """

    def __init__(
        self,
        score: ScoreModel,
        sampler: Sampler | None = None,
        gradient: str | GradientMode = "exact",
        *,
        rounds: int = 1,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not callable(score) or not hasattr(score, "sde"):
            raise InputError(f"A score model has a schedule `sde` and is called as score(x, t), got {type(score)}.")
        if rounds < 1:
            raise InputError(f"rounds is at least 1, got {rounds}.")
        self.score = score.requires_grad_(False).eval() if isinstance(score, nn.Module) else score
        self.sampler = ReverseSDE() if sampler is None else sampler
        self.gradient = gradient_mode(gradient)
        self.rounds = rounds
        self.autocast = autocast

    @property
    def stochastic(self) -> bool:
        """Whether two calls on one image differ unless they are given the same seed."""
        return self.sampler.stochastic

    @property
    def approximate_gradient(self) -> bool:
        """Whether what autograd returns is not the gradient of what is computed."""
        return is_approximate(self.gradient)

    def with_gradient(self, gradient: str | GradientMode) -> Purifier:
        """The same purifier (sharing its weights) with another gradient mode."""
        other = copy.copy(self)
        other.gradient = gradient_mode(gradient)
        return other

    def forward(self, images: Tensor, seeds: Seeds = None) -> Tensor:
        """Purified images (B, C, H, W), near [0, 1]; seeds are integers, one an image, or fresh entropy without."""
        check_images(images, getattr(self.score, "channels", None))
        noise = Noise.of(seeds, len(images))
        x = self._enter(images)
        with self._precision(images):
            for round_ in range(self.rounds):
                start, path = self.sampler(self.score, x, noise.child(round_))
                x = self.gradient(path, start)
        return self._leave(x, images)

    @torch.no_grad()
    def trajectory(self, images: Tensor, times: Sequence[float], seeds: Seeds = None) -> Tensor:
        """The states at (the grid's times nearest to) the given times, for pictures: (T, B, C, H, W), near [0, 1].

        A time at or above t* is the diffused image, time 0 the purified one; only the first round is shown. Langevin's
        time is the share of its walk: 0 is the image itself, 1 the purified one.
        """
        check_images(images, getattr(self.score, "channels", None))
        noise = Noise.of(seeds, len(images))
        with self._precision(images):
            x, path = self.sampler(self.score, self._enter(images), noise.child(0))
            states = [x]
            for i in range(len(path)):
                states.append(path.step(states[-1], i))
        grid = [float(path.time(i).mean()) for i in range(len(states))]
        nearest = [min(range(len(grid)), key=lambda i: abs(grid[i] - t)) for t in times]
        return torch.stack([self._leave(states[i], images) for i in nearest])

    def train(self, mode: bool = True) -> Purifier:
        """Keep the score in evaluation mode: a purifier with dropout is another defence."""
        super().train(mode)
        if isinstance(self.score, nn.Module):
            self.score.eval()
        return self

    def extra_repr(self) -> str:
        """What its modules do not say of it."""
        return f"{self.sampler}, {self.gradient}, rounds={self.rounds}"

    def _enter(self, images: Tensor) -> Tensor:
        return 2 * _resize(images, self.score.size, self.score.size) - 1

    def _leave(self, x: Tensor, images: Tensor) -> Tensor:
        return _resize((x + 1) / 2, images.shape[-2], images.shape[-1])

    def _precision(self, images: Tensor) -> torch.autocast:
        return torch.autocast(images.device.type, dtype=self.autocast, enabled=self.autocast is not None)


def _resize(x: Tensor, height: int | None, width: int | None) -> Tensor:
    """Bilinear resizing, as in the paper's detour 224 → 256 → 224; nothing where the size is right or free."""
    if height is None or width is None or x.shape[-2:] == (height, width):
        return x
    return F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)


class Defense(nn.Module):
    """A classifier that sees purified images only: images in [0, 1] → logits.

    The classifier is any callable from images in [0, 1] to logits; it does its own normalisation.
    """

    def __init__(self, purifier: Purifier, classifier: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        if not callable(classifier):
            raise InputError(f"A classifier is called with images and returns logits, got {type(classifier).__name__}.")
        self.purifier = purifier
        self.classifier = classifier.eval() if isinstance(classifier, nn.Module) else classifier

    @property
    def stochastic(self) -> bool:
        """Whether two calls on one image differ unless they are given the same seed."""
        return self.purifier.stochastic

    def with_gradient(self, gradient: str | GradientMode) -> Defense:
        """The same defence (sharing its weights) with another gradient mode."""
        return Defense(self.purifier.with_gradient(gradient), self.classifier)

    def forward(self, images: Tensor, seeds: Seeds = None) -> Tensor:
        """Logits (B, classes) of the purified images."""
        logits = self.classifier(self.purifier(images, seeds))
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(images):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(f"A classifier returns logits ({len(images)}, classes), got {got}.")
        return logits

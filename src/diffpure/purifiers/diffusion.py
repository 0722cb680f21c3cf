"""The paper's purifier: diffuse an image to t*, then follow the way back that a sampler solves with a score model.

    [0, 1] → resize (or cut) to the score model's size → 2x - 1 → sampler: x(t*) and the path
           → gradient mode walks the path → (x + 1)/2 → back to the image's size

Nothing is clamped on the way, as in the paper: a clamp would hide gradient from an attack.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffpure.diffusion.gradients import Gradient
from diffpure.diffusion.paths import Path, Segment
from diffpure.diffusion.samplers import AnySampler, ReverseSDE, sampler_of
from diffpure.diffusion.score import Metered, ScoreModel, as_score
from diffpure.diffusion.sde import over
from diffpure.errors import InputError, unknown
from diffpure.named import brief
from diffpure.noise import Noise, Seeds
from diffpure.purifiers.tiles import blend, corners, cut
from diffpure.purify import PurifierBase
from diffpure.validate import as_images


def _frozen(score: ScoreModel) -> ScoreModel:
    """A score as one, in evaluation mode, with weights that do not learn."""
    score = as_score(score)
    return score.requires_grad_(False).eval() if isinstance(score, nn.Module) else score


@final
class Purifier(PurifierBase):
    """Diffuse each image to t*, then follow the sampler's path back to a clean one.

    score: ∇ log p_t, with its schedule and size; its weights are frozen.   sampler: how to go there and back, by name,
    table or value.   gradient: "exact", "adjoint", "backprop", "surrogate", "bpda", a table or a `GradientMode`.
    rounds: purify that many times in a row.   autocast: a dtype for the score's own computation, such as
    torch.bfloat16, on machines that have it.   fit: images of another size than the score's are resized to it and back,
    or purified in overlapping tiles, each with noise of its own.
    """

    def __init__(
        self,
        score: ScoreModel,
        sampler: AnySampler | None = None,
        gradient: Gradient = "exact",
        *,
        rounds: int = 1,
        autocast: torch.dtype | None = None,
        fit: Literal["resize", "tiles"] = "resize",
    ) -> None:
        super().__init__(gradient, rounds=rounds)
        if fit not in ("resize", "tiles"):
            raise unknown("fit", fit, ("resize", "tiles"))
        self.score = _frozen(score)
        self.sampler = ReverseSDE() if sampler is None else sampler_of(sampler)
        self.autocast = autocast
        self.fit = fit

    @property
    def size(self) -> int | None:
        return self.score.size

    @property
    def channels(self) -> int | None:
        return self.score.channels

    @property
    def stochastic(self) -> bool:
        return self.sampler.stochastic

    @property
    def mirrors(self) -> bool:
        return True

    @property
    def title(self) -> str:
        tiles = "in tiles" if self.fit == "tiles" else ""
        precision = "" if self.autocast is None else str(self.autocast).removeprefix("torch.")
        return self.titled(brief(self.sampler, always=("t_star",)), tiles, precision)

    def parts(self) -> dict[str, object]:
        return {"score": self.score}

    def begin(self, images: Tensor, noise: Noise) -> tuple[Tensor, Path]:
        size = self._tile(images)
        if size is None:
            return self.sampler(Metered(self.score), self._enter(images), noise)
        count = len(corners(images.shape[-2], images.shape[-1], size))
        return self.sampler(Metered(self.score), 2 * cut(images, size) - 1, noise.draws(count))

    def finish(self, state: Tensor, images: Tensor) -> Tensor:
        if self._tile(images) is not None:
            return blend((state + 1) / 2, images.shape)
        return _resize((state + 1) / 2, images.shape[-2], images.shape[-1])

    def precision(self, images: Tensor) -> torch.autocast:
        return torch.autocast(images.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def stages(self, images: Tensor, seeds: Seeds = None) -> dict[str, Tensor]:
        """The diffused images, where the sampler diffuses, and the purified ones."""
        if not hasattr(self.sampler, "t_star") or self.rounds > 1:
            return super().stages(images, seeds)
        diffused, purified = self.trajectory(images, [1.0, 0.0], seeds)
        return {"diffused": diffused, "purified": purified}

    @torch.no_grad()
    def trajectory(self, images: Tensor, times: Sequence[float], seeds: Seeds = None) -> Tensor:
        """The states at (the grid's times nearest to) the given times, for pictures: (T, B, C, H, W), near [0, 1].

        A time at or above t* is the diffused image, time 0 the purified one; only the first round is shown. Langevin's
        time is the share of its walk: 0 is the image itself, 1 the purified one.
        """
        images = as_images(images, self.channels)
        with self.precision(images):
            state, path = self.begin(images, Noise.of(seeds, len(images)).child(0))
            states = [state]
            for i in range(len(path)):
                states.append(path.step(states[-1], i))
        grid = [float(path.time(i).mean()) for i in range(len(states))]
        nearest = [min(range(len(grid)), key=lambda i: abs(grid[i] - t)) for t in times]
        return torch.stack([self.finish(states[i], images) for i in nearest])

    def moments(self, count: int) -> list[float]:
        """So many times, evenly from the start of the way back to its end, for `trajectory`."""
        t_star = getattr(
            self.sampler, "t_star", None
        )  # Langevin dynamics walk from time 0 to 1, all others from t* to 0
        shares = [k / (count - 1) for k in range(count)]
        return shares if t_star is None else [t_star * (1 - share) for share in shares]

    def with_sampler(self, sampler: AnySampler) -> Self:
        """The same purifier (sharing its weights) with another sampler."""
        other = self.with_gradient(self.gradient)
        other.sampler = sampler_of(sampler)
        return other

    def with_score(self, score: ScoreModel) -> Self:
        """The same purifier with another score, whose weights are frozen."""
        other = self.with_gradient(self.gradient)
        other.score = _frozen(score)
        return other

    def deviation(self, images: Tensor, seeds: Seeds = None, *, states: int = 4) -> tuple[Tensor, Tensor]:
        """The purified images, and how far the reverse path is from the forward one, per image: (B, C, H, W), (B,).

            deviation = Σ_k α(t_k) mean (x(t_k) - x̂(t_k))²,      x(t) = √α(t) x + std(t) ε with the ε of the start,

        at `states` times spread over the path, the purified image being the last. Each piece of the path keeps the
        gradient mode.
        """
        if self.rounds != 1:
            raise InputError(f"The deviation along the path is that of one round, got {self.rounds} rounds.")
        if self.fit != "resize":
            raise InputError("The deviation along the path is that of whole images, not of tiles.")
        images = as_images(images, self.channels)
        sde, x = self.score.sde, self._enter(images)
        total = images.new_zeros(len(images))
        with self.precision(images):
            state, path = self.begin(images, Noise.of(seeds, len(images)).child(0))
            # A sampler without diffusion (Langevin) starts at x itself, at time 0.
            t = path.time(0)
            eps = (state - over(sde.alpha(t).sqrt(), x) * x) / over(sde.std(t).clamp_min(1e-12), x)
            for first, last in pairwise(torch.linspace(0, len(path), states + 1).round().int().tolist()):
                state = self.gradient(Segment(path, first, last, path.context), state)
                t = path.time(last)
                away = (sde.diffuse(x, t, eps) - state).square().flatten(1).mean(1)
                total = total + over(sde.alpha(t), away) * away
        return self.finish(state, images), total

    def _tile(self, images: Tensor) -> int | None:
        """The side of the tiles, where images are cut into some."""
        wanted = self.fit == "tiles" and self.size is not None and images.shape[-2:] != (self.size, self.size)
        return self.size if wanted else None

    def _enter(self, images: Tensor) -> Tensor:
        return 2 * _resize(images, self.size, self.size) - 1


def _resize(x: Tensor, height: int | None, width: int | None) -> Tensor:
    """Bilinear resizing, as in the paper's detour 224 → 256 → 224; nothing where the size is right or free."""
    if height is None or width is None or x.shape[-2:] == (height, width):
        return x
    return F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)

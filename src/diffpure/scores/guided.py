"""The UNet of guided diffusion (Dhariwal & Nichol 2021), the paper's ImageNet model at 256 × 256.

A residual block is modulated by time, h ↦ norm(h)·(1 + scale) + shift, sums are not rescaled, and attention has
heads. The network reads an integer step 0 … N-1 and returns ε and, for a learned variance, v with

    log σ²(x, i) = f log β_i + (1 - f) log β̃_i,      f = (v + 1)/2,

β̃ the variance of the posterior q(x_{i-1} | x_i, x_0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import STEPS, VPSDE, over
from diffpure.errors import InputError
from diffpure.models.checkpoints import expect
from diffpure.scores.layers import GroupNorm, cos_sin, downsample, pointwise, tokens, untokens, upsample


@final
class ResidualBlock(nn.Module):
    """x ↦ shortcut(x) + h, with scale and shift from time in h; `resample` acts on both branches."""

    def __init__(
        self, inputs: int, outputs: int, time: int, dropout: float, resample: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.resample = resample
        self.in_layers = nn.Sequential(GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time, 2 * outputs))
        self.out_layers = nn.Sequential(
            GroupNorm(32, outputs), nn.SiLU(), nn.Dropout(dropout), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        norm, activation, convolution = self.in_layers
        h = activation(norm(x))
        if self.resample is not None:
            h, x = self.resample(h), self.resample(x)
        h = convolution(h)
        scale, shift = self.emb_layers(time).to(h.dtype)[:, :, None, None].chunk(2, dim=1)
        norm, activation, dropout, convolution = self.out_layers
        h = convolution(dropout(activation(norm(h) * (1 + scale) + shift)))
        out: Tensor = self.skip_connection(x) + h
        return out


@final
class Attention(nn.Module):
    """x ↦ x + attention over all positions; each head's channels hold its own q, k and v."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = GroupNorm(32, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = pointwise(self.qkv, tokens(self.norm(x)))
        q, k, v = h.reshape(*h.shape[:2], self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + untokens(pointwise(self.proj_out, h), x)


@final
class Stage(nn.ModuleList):
    """Layers run one after another, those that want it with the time embedding."""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, time) if isinstance(layer, ResidualBlock) else layer(x)
        return x


@final
class GuidedUNet(nn.Module):
    """The raw network: x (B, C, H, W) in [-1, 1] and steps (B,) ↦ ε (B, C, H, W), then v if the variance is learned."""

    def __init__(
        self,
        *,
        channels: int = 3,
        outputs: int = 6,
        width: int = 256,
        multipliers: Sequence[float] = (1, 1, 2, 2, 4, 4),
        blocks: int = 2,
        attention: Sequence[int] = (8, 16, 32),
        heads: Callable[[int], int] = lambda channels: channels // 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width = width
        time, widths = 4 * width, [int(width * m) for m in multipliers]
        self.time_embed = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))

        def layers(inputs: int, target: int, level: int) -> list[nn.Module]:
            block = ResidualBlock(inputs, target, time, dropout)
            return [block, Attention(target, heads(target))] if 2**level in attention else [block]

        now, skips = widths[0], [widths[0]]
        self.input_blocks = nn.ModuleList([Stage([nn.Conv2d(channels, now, 3, padding=1)])])
        for level, target in enumerate(widths):
            for _ in range(blocks):
                self.input_blocks.append(Stage(layers(now, target, level)))
                now = target
                skips.append(now)
            if level + 1 < len(widths):
                self.input_blocks.append(Stage([ResidualBlock(now, now, time, dropout, downsample)]))
                skips.append(now)

        first, last = (ResidualBlock(now, now, time, dropout) for _ in range(2))
        self.middle_block = Stage([first, Attention(now, heads(now)), last])

        self.output_blocks = nn.ModuleList()
        for level, target in reversed(list(enumerate(widths))):
            for block in range(blocks + 1):
                stage = layers(now + skips.pop(), target, level)
                now = target
                if level > 0 and block == blocks:
                    stage.append(ResidualBlock(now, now, time, dropout, upsample))
                self.output_blocks.append(Stage(stage))

        self.out = nn.Sequential(GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, outputs, 3, padding=1))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The network of guided diffusion's command-line options; float32 until `half_convolutions`."""
        expect(
            "guided diffusion", config, class_cond=False, use_scale_shift_norm=True, resblock_updown=True,
            use_new_attention_order=False, num_heads_upsample=-1, predict_xstart=False,
        )  # fmt: skip
        size, per_head, heads = config["image_size"], config["num_head_channels"], config["num_heads"]
        given = config["channel_mult"]
        if not given and size not in MULTIPLIERS:
            raise InputError(f"Guided diffusion at {size} pixels needs its channel_mult, such as '1,2,2'.")
        channels = config.get("in_channels", 3)
        return cls(
            channels=channels,
            outputs=2 * channels if config["learn_sigma"] else channels,
            width=config["num_channels"],
            multipliers=[float(m) for m in given.split(",")] if given else MULTIPLIERS[size],
            blocks=config["num_res_blocks"],
            attention=[size // int(r) for r in config["attention_resolutions"].split(",") if r],
            heads=(lambda _: heads) if per_head == -1 else (lambda channels: channels // per_head),
            dropout=config.get("dropout", 0.0),
        )

    def half_convolutions(self) -> Self:
        """Make the convolutions of the blocks float16 (`use_fp16`); norms, time and the output head stay."""
        for part in (self.input_blocks, self.middle_block, self.output_blocks):
            for module in part.modules():
                if isinstance(module, nn.Conv1d | nn.Conv2d):
                    module.half()
        return self

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        time = self.time_embed(cos_sin(steps, self.width).to(x.dtype))
        h = x.to(next(self.input_blocks.parameters()).dtype)
        skips = []
        for stage in self.input_blocks:
            h = stage(h, time)
            skips.append(h)
        h = self.middle_block(h, time)
        for stage in self.output_blocks:
            h = stage(torch.cat([h, skips.pop()], dim=1), time)
        out: Tensor = self.out(h.to(x.dtype))
        return out


@final
class GuidedScore(EpsilonScore):
    """Guided diffusion as a score model: asked at the step ⌊N·t⌋, while std(t) stays continuous, as the paper does."""

    def __init__(self, network: GuidedUNet, size: int | None = 256, channels: int = 3) -> None:
        super().__init__(VPSDE(), size, channels)
        self.network = network

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The score model of guided diffusion's command-line options, with random weights."""
        expect(
            "guided diffusion", config, noise_schedule="linear", diffusion_steps=STEPS, timestep_respacing=str(STEPS)
        )
        network = GuidedUNet.from_config(config)
        if config["use_fp16"]:
            network.half_convolutions()
        return cls(network, config["image_size"], config.get("in_channels", 3))

    def index(self, t: Tensor) -> Tensor:
        """⌊N·t⌋, where a multiple of 1/N that rounding left just below itself still counts as that multiple."""
        return torch.floor(t * STEPS + 1e-3).long().clamp(0, STEPS - 1)

    def epsilon(self, x: Tensor, t: Tensor) -> Tensor:
        return self.epsilon_step(x, self.index(t))

    def epsilon_step(self, x: Tensor, i: Tensor) -> Tensor:
        return self._outputs(x, i)[:, : x.shape[1]]

    def epsilon_and_log_variance(self, x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        """ε̂ and the learned log σ² of the ancestral step from x_i; both (B, C, H, W)."""
        out = self._outputs(x, i)
        if out.shape[1] == x.shape[1]:
            raise InputError("This network learned no variance; use a fixed one.")
        eps, v = out.chunk(2, dim=1)
        chain = VPSDE().discrete()
        j = i.clamp(min=1)  # β̃_0 is zero, so its logarithm is taken from step 1
        posterior = chain.beta_of_step(j) * chain.one_minus_alpha_bar(j - 1) / chain.one_minus_alpha_bar(j)
        f = (v + 1) / 2
        return eps, f * over(chain.beta_of_step(i).log(), x) + (1 - f) * over(posterior.log(), x)

    def _outputs(self, x: Tensor, i: Tensor) -> Tensor:
        out: Tensor = self.network(x, i.to(x.device).expand(x.shape[0]))
        return out


# Channel multipliers that guided diffusion implies when `channel_mult` is empty, by image size.
MULTIPLIERS: dict[int, tuple[float, ...]] = {
    512: (0.5, 1, 1, 2, 2, 4, 4),
    256: (1, 1, 2, 2, 4, 4),
    128: (1, 1, 2, 3, 4),
    64: (1, 2, 3, 4),
}

"""One contract for every purifier: what each member is, computes, counts and gives back, up to a verified report.

Adding a purifier means adding a line to `PURIFIERS` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffpure.attacks import PGD
from diffpure.diffusion.gradients import GRADIENT_MODES
from diffpure.diffusion.paths import Path
from diffpure.diffusion.samplers import Ancestral, FewStep, ReverseSDE, Sampler
from diffpure.errors import InputError
from diffpure.evaluation.evaluate import run
from diffpure.evaluation.setup import Evaluation, Settings, set_up
from diffpure.meter import CALLS, NETWORK, count, metered
from diffpure.models.identity import identify
from diffpure.noise import Noise
from diffpure.pictures.make import make_gallery
from diffpure.purifiers.blur import Blur
from diffpure.purifiers.diffusion import Purifier
from diffpure.purify import Defense, ModulePurifier, PurifierBase
from diffpure.report.runs import read_run
from diffpure.threats import Linf
from diffpure.verification.verify import verify
from evaluations import timeless
from problems import images, tiny_classifier, tiny_unet

# ----------------------------------------------------------------------------------------------------------- members


class Rounding(nn.Module):
    """To 8 levels, and no gradient: BPDA is the only way through."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return (7 * x).round() / 7


class Shaking(nn.Module):
    """A stochastic module of somebody who knows seeds and nothing else of this package."""

    stochastic = True
    title = "shaking"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, seeds: Any) -> Tensor:
        return 0.9 * x + self.scale * Noise.of(seeds, len(x))(0, x)


def contrast(x: Tensor) -> Tensor:
    """A plain function."""
    return 0.5 + 0.8 * (x - 0.5)


@dataclass(frozen=True)
class Descent(Path):
    """z ← z - η ∂‖½ + zW - x‖²/∂z, with the attacked images x as the context that every step reads."""

    generator: Tensor
    steps: int
    context: Tensor | None

    def __len__(self) -> int:
        return self.steps

    def step(self, x: Tensor, i: int) -> Tensor:
        count(NETWORK, x)
        assert self.context is not None
        return x - 0.1 * 2 * (x @ self.generator + 0.5 - self.context.flatten(1)) @ self.generator.T


class Latent(PurifierBase):
    """The nearest image that a small linear generator can make, found by three steps in its latent space (B, 6)."""

    def __init__(self, gradient: Any = "exact", *, rounds: int = 1) -> None:
        super().__init__(gradient, rounds=rounds)
        rows = torch.randn(6, 192, generator=torch.Generator().manual_seed(0))
        self.register_buffer("generator", rows / rows.norm(dim=1, keepdim=True))

    generator: Tensor
    stochastic = False
    title = "latent descent"

    def begin(self, images: Tensor, noise: Noise) -> tuple[Tensor, Path]:
        start = 0.5 * (images.flatten(1) - 0.5) @ self.generator.T  # an encoder's guess
        return start, Descent(self.generator, 3, images)

    def finish(self, state: Tensor, images: Tensor) -> Tensor:
        return (0.5 + state @ self.generator).view_as(images)


def diffusion(sampler: Sampler) -> Callable[..., PurifierBase]:
    return lambda **options: Purifier(tiny_unet(8), sampler, **options)


@dataclass(frozen=True)
class Member:
    """How a purifier is made (with gradient= and rounds=), the modes it admits, and its network calls per image."""

    make: Callable[..., PurifierBase]
    modes: tuple[str, ...] = ("exact", "backprop", "bpda")
    calls: int = 1
    stages: tuple[str, ...] = ("purified",)


SDE = ("exact", "adjoint", "backprop", "surrogate", "bpda")
NO_EULER = ("exact", "backprop", "surrogate", "bpda")
PURIFIERS: dict[str, Member] = {
    "sde": Member(diffusion(ReverseSDE(t_star=0.05, steps=3)), SDE, 3, ("diffused", "purified")),
    "few-step": Member(diffusion(FewStep(t_star=0.1, steps=2, order=1)), NO_EULER, 3, ("diffused", "purified")),
    "ancestral": Member(diffusion(Ancestral(t_star=0.1, steps=4)), NO_EULER, 4, ("diffused", "purified")),
    "blur": Member(lambda **options: Blur(1.0, **options)),
    "rounding": Member(lambda **options: ModulePurifier(Rounding(), **options), ("bpda",)),
    "latent": Member(Latent, calls=3),
    "function": Member(lambda **options: ModulePurifier(contrast, **options)),
    "shaking": Member(lambda **options: ModulePurifier(Shaking(), **options)),
}
EACH = pytest.mark.parametrize("member", PURIFIERS.values(), ids=PURIFIERS)
SEEDS = (5, 6)


def classified(member: Member, mode: str = "") -> Defense:
    return Defense(member.make(gradient=mode or member.modes[0]), tiny_classifier())


# ----------------------------------------------------------------------------------------------------------- computing


@EACH
def test_images_of_the_same_shape_that_depend_on_image_and_seed_alone(member):
    purifier, x = member.make(), images(2)
    purified = purifier(x, SEEDS)
    assert purified.shape == x.shape
    assert torch.equal(purifier(x, SEEDS), purified)
    torch.testing.assert_close(purifier(x[1:], SEEDS[1:]), purified[1:])  # in any batch
    assert torch.equal(purifier(x, [8, 9]), purified) != purifier.stochastic
    assert torch.equal(purifier(x), purifier(x)) != purifier.stochastic  # fresh entropy without seeds
    assert not torch.equal(purified, x)


@EACH
def test_rounds_purify_that_often(member):
    once, twice, x = member.make(), member.make(rounds=2), images(2)
    assert twice.calls(x[:1], gradient=False) == (2 * member.calls, 0)
    if not once.stochastic:
        torch.testing.assert_close(twice(x), once(once(x)))
    else:
        assert not torch.equal(
            twice(x, SEEDS), once(once(x, SEEDS).clamp(0, 1), SEEDS)
        )  # every round has noise of its own
    with pytest.raises(InputError, match="rounds is a whole number of at least 1, got 0"):
        member.make(rounds=0)


@EACH
def test_what_it_tells_of_itself(member):
    purifier, x = member.make(), images(2)
    assert purifier.title
    assert "\n" not in purifier.title
    assert len(repr(purifier)) < 120
    assert "exact gradient" in repr(purifier)
    parts = purifier.parts()
    assert parts
    assert {name: identify(part) for name, part in parts.items()} == {
        name: identify(part) for name, part in member.make().parts().items()
    }
    stages = purifier.stages(x, SEEDS)
    assert tuple(stages) == member.stages
    torch.testing.assert_close(stages["purified"], purifier(x, SEEDS))
    assert all(picture.shape == x.shape for picture in stages.values())
    assert purifier.train().training is False


@EACH
def test_the_meter_counts_what_calls_says(member):
    x = images(2)
    for mode in member.modes:
        purifier = member.make(gradient=mode)
        with metered() as forward, torch.no_grad():
            purifier(x, SEEDS)
        assert purifier.calls(x[:1], gradient=False) == (member.calls, 0)
        assert (forward["network"], forward["network_gradient"]) == (2 * member.calls, 0)
        with metered() as both:
            leaf = x.clone().requires_grad_()
            purifier(leaf, SEEDS).sum().backward()
        plain, graph = purifier.calls(x[:1], gradient=True)
        assert (both["network"], both["network_gradient"]) == (2 * plain, 2 * graph), mode


@EACH
def test_it_admits_its_gradient_modes_and_refuses_the_others_in_one_sentence(member):
    x, y = images(2), torch.tensor([0, 1])
    for mode in GRADIENT_MODES:
        attack = PGD(iterations=1, gradient=mode)
        if mode in member.modes:
            run = attack.run(classified(member), x, y, Linf(0.1), seeds=SEEDS)
            assert run.state["zero"].sum() == run.state["nonfinite"].sum() == 0, mode
            continue
        with pytest.raises(InputError) as caught:
            attack(classified(member), x, y, Linf(0.1), seeds=SEEDS)
        assert "\n" not in str(caught.value)
        assert "gradient" in str(caught.value), mode


def test_a_module_without_a_gradient_says_what_to_use():
    x, y, model = images(2), torch.tensor([0, 1]), classified(PURIFIERS["rounding"])
    for mode in ("exact", "backprop"):
        with pytest.raises(InputError, match="gradient='bpda'"):
            PGD(iterations=1, gradient=mode)(model, x, y, Linf(0.1))
    model = Defense(Rounding(), tiny_classifier())  # its own gradient is exact
    with pytest.raises(InputError, match="gradient='bpda'"):
        PGD(iterations=1)(model, x, y, Linf(0.1))
    assert PGD(iterations=1, gradient="bpda")(model, x, y, Linf(0.1)).abs().max() > 0


@EACH
def test_exact_is_backprop_and_bpda_is_the_identity(member):
    x = images(2)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def gradient(mode: str) -> Tensor:
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad((member.make(gradient=mode)(leaf, SEEDS) * weight).sum(), leaf)
        return found

    assert torch.equal(gradient("bpda"), weight)
    if "exact" in member.modes:
        torch.testing.assert_close(gradient("exact"), gradient("backprop"))


@EACH
def test_another_gradient_mode_shares_the_weights_and_not_the_table_of_modules(member):
    purifier = member.make()
    other = purifier.with_gradient("bpda")
    assert (purifier.gradient.name, other.gradient.name) == ("exact", "bpda")
    for ours, theirs in zip(purifier.parameters(), other.parameters(), strict=True):
        assert ours is theirs
    for ours, theirs in zip(purifier.buffers(), other.buffers(), strict=True):
        assert ours is theirs
    other.extra = nn.Linear(1, 1)
    assert not hasattr(purifier, "extra")
    torch.testing.assert_close(other(images(2), SEEDS), purifier(images(2), SEEDS))


# ---------------------------------------------------------------------------------------------------------- evaluating


def whole(member: Member) -> Evaluation:
    x, model = images(3), classified(member)
    y = model(x, seeds=range(3)).argmax(1)
    attack = PGD(iterations=1, eot=2, step_size=0.05)
    settings = Settings(rules=("one-shot", "average of 2"), batch=2, per_call=3, name="contract")
    return set_up(model, x, y, Linf(0.1), {"mine": attack}, settings)


@EACH
def test_it_is_evaluated_resumed_verified_estimated_and_reported(member, tmp_path):
    work = whole(member)
    said, loose = work.estimate(), run(work)
    spent = loose.spent()
    assert {key: spent[key] for key in CALLS} == said.calls
    assert (spent["gradients"], spent["queries"]) == (said.gradients, said.queries)
    folder = tmp_path / "r"
    part = run(work, folder, only=lambda unit: unit.start == 0)
    assert not part.complete
    found = run(whole(member), folder)
    assert timeless(found.rows) == timeless(loose.rows)
    checked = verify(folder, whole(member), again=1)
    assert checked.passed, str(checked)
    about = found.header["model"]
    assert about["stochastic"] == work.job.model.purifier.stochastic  # type: ignore[attr-defined]
    assert work.job.model.purifier.title in about["title"]  # type: ignore[attr-defined]
    assert all(about["parts"].values())
    pictures = make_gallery(folder, whole(member), 2)
    assert pictures.stages == ("clean", "attacked", *member.stages)
    reported = read_run(folder)
    assert reported.result.rows == found.rows
    assert reported.gallery is not None
    assert reported.gallery.stages == pictures.stages


def test_other_weights_of_any_purifier_are_another_run(tmp_path):
    for name, member in PURIFIERS.items():
        run(whole(member), tmp_path / name)
        other = whole(member)
        purifier = other.job.model.purifier  # type: ignore[attr-defined]
        tensors = [*purifier.parameters(), *purifier.buffers()]
        if not tensors:
            continue
        with torch.no_grad():
            tensors[0].add_(1e-3)
        other = set_up(
            other.job.model, other.images, other.labels, other.job.threat, other.job.attacks,
            Settings(rules=("one-shot", "average of 2"), batch=2, per_call=3, name="contract"),
        )  # fmt: skip
        with pytest.raises(InputError, match=r"holds another evaluation \(with other model\)"):
            run(other, tmp_path / name)
        assert not verify(tmp_path / name, other).passed

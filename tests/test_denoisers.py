"""Denoisers as score models: closed forms, and what is said of one that is used wrongly."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffpure.diffusion.sde import VPSDE
from diffpure.errors import InputError
from diffpure.scores import DenoiserScore, GaussianScore

AT = torch.tensor([0.1, 0.1], dtype=torch.float64)


def noisy(size: int = 16) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_a_wiener_denoiser_is_the_gaussian_score() -> None:
    mean, variance = 0.2, 0.25
    x = noisy().double()
    for t in (0.001, 0.1, 0.5, 1.0):
        at = torch.full((2,), t, dtype=torch.float64)
        exact = GaussianScore(mean, variance)(x, at)

        def wiener(y: Tensor, sigma: Tensor) -> Tensor:
            gain = variance / (variance + sigma**2)
            return mean + gain[:, None, None, None] * (y - mean)

        def wiener_unit(y: Tensor, sigma: Tensor) -> Tensor:
            return (wiener(2 * y - 1, 2 * sigma) + 1) / 2

        sigma = VPSDE().std(at) / VPSDE().alpha(at).sqrt()
        scores = [
            DenoiserScore(wiener),
            DenoiserScore(wiener_unit, unit_range=True),
            DenoiserScore(lambda y, sigma=sigma: wiener(y, sigma), blind=True),
        ]
        for score in scores:
            assert ((score(x, at) - exact).abs() / exact.abs().clamp(min=1)).max() < 1e-5


def test_a_denoiser_module_moves_and_freezes_with_its_score() -> None:
    score = DenoiserScore(nn.Conv2d(3, 3, 3, padding=1), blind=True)
    assert len(list(score.requires_grad_(False).parameters())) == 2
    assert score(noisy(size=20), torch.tensor([0.1, 0.1], dtype=torch.float64)).shape == (2, 3, 20, 20)


def smooth(y: Tensor, sigma: Tensor) -> Tensor:
    """The best linear denoiser of 5 × 5 pixels, for images in [0, 1], as a published network returns them."""
    local = lambda z: F.avg_pool2d(F.pad(z, (2, 2, 2, 2), mode="reflect"), 5, stride=1)  # noqa: E731
    mean = local(y)
    variance = local((y - mean) ** 2).clamp(min=1e-6)
    return (mean + (1 - sigma.reshape(-1, 1, 1, 1) ** 2 / variance).clamp(min=0) * (y - mean)).clamp(0, 1)


def test_a_denoiser_in_the_wrong_range_is_told_so_once() -> None:
    score = DenoiserScore(smooth)
    with pytest.warns(UserWarning, match=r"with unit_range=True it reaches 2\d\.\d dB, so that is probably its range"):
        score(noisy(size=32), AT)
    for fine in (score, DenoiserScore(smooth, unit_range=True)):
        with warnings.catch_warnings(action="error"):
            fine(noisy(size=32), AT)


def test_a_denoiser_that_returns_the_noise_is_told_so() -> None:
    with pytest.warns(UserWarning, match="that it returns the image, not the noise"):
        DenoiserScore(lambda y, sigma: y - smooth(y, sigma), unit_range=True)(noisy(size=32), AT)


@pytest.mark.parametrize(("shape", "expected"), [("batch", (2,)), ("image", (2, 1, 1, 1)), ("map", (2, 1, 16, 16))])
def test_sigma_comes_in_the_shape_that_is_wanted(shape: Any, expected: tuple[int, ...]) -> None:
    seen = []

    def denoise(y: Tensor, sigma: Tensor) -> Tensor:
        seen.append(sigma)
        return y / 2

    DenoiserScore(denoise, sigma_shape=shape, unit_range=True)(noisy(), AT)
    assert [tuple(sigma.shape) for sigma in seen] == [expected]
    assert torch.allclose(seen[0], VPSDE().sigma(AT)[0].float() / 2)


def test_noise_beyond_what_a_denoiser_was_trained_for_warns_once() -> None:
    limit = VPSDE().sigma(0.07).item() / 2
    score = DenoiserScore(smooth, unit_range=True, sigma_max=limit)
    low = torch.tensor([0.069, 0.07], dtype=torch.float64)
    with warnings.catch_warnings(action="error"):
        score(noisy(size=32), low)
    with pytest.warns(UserWarning, match=r"beyond its sigma_max = 0\.\d+; t\* up to 0\.0(7|69) keeps within it"):
        score(noisy(size=32), AT)
    with warnings.catch_warnings(action="error"):
        score(noisy(size=32), AT)


def test_a_denoiser_of_another_shape_does_not_broadcast() -> None:
    for wrong in (lambda y: y[:, :1], lambda y: y.mean(0, keepdim=True), lambda y: [y]):
        with pytest.raises(InputError, match=r"images of the shape that it was given, \(2, 3, 16, 16\), got"):
            DenoiserScore(wrong, blind=True)(noisy(), AT)
    with pytest.raises(InputError, match="did you mean 'image'"):
        DenoiserScore(smooth, sigma_shape="images")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sigma_max is positive, got 0"):
        DenoiserScore(smooth, sigma_max=0)
    with pytest.raises(InputError, match="called with noisy images and σ, got int"):
        DenoiserScore(3)  # type: ignore[arg-type]

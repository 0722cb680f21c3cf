"""The paper's networks compute the function of the reference: proven on files of keys, random weights and results.

Where the files are, and how each is read: `goldens.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from diffpure.classifiers.attributes import AttributeClassifier
from diffpure.classifiers.wrn import DMWideResNet
from diffpure.diffusion.score import EpsilonScore
from diffpure.diffusion.sde import VPSDE, DiscreteVP, over
from diffpure.errors import InputError
from diffpure.models.checkpoints import LAYOUTS, load_state, read
from diffpure.scores.ddpmpp import DDPMpp
from diffpure.scores.guided import GuidedScore
from goldens import FOLDER, NETWORKS, REDUCED, Run, build, built, family, giving, names, record, runs, score_of


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Max abs difference below the tolerance times the size of the expected tensor, or times one if it is smaller."""
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), f"off by {error:.1e}"


def test_golden_files_are_there() -> None:
    assert names("full") or names("small"), f"{FOLDER} holds no golden file"


@pytest.mark.skipif(FOLDER != REDUCED, reason="only the reduced set promises that no golden test goes without a file")
def test_golden_files_of_the_repository_reach_every_test() -> None:
    assert runs()
    assert (FOLDER / "vpsde_paper.json").is_file()
    assert list(FOLDER.glob("*.small.pth"))
    assert all(giving(f"output/{tensor}") for tensor in ("score", "ld_drift", "p_sample"))
    assert {family(name, "full") for name in names("full")} == set(NETWORKS)


@pytest.mark.parametrize("name", names("full"))
def test_golden_full_size_keys(name: str) -> None:
    about = record(name, "full")
    with torch.device("meta"):
        network = build(NETWORKS[family(name, "full")], about["config"])
    ours = [[key, list(value.shape), str(value.dtype)[6:]] for key, value in network.state_dict().items()]
    assert ours == about["state_dict"]
    assert sum(p.numel() for p in network.parameters()) == about["num_parameters"]


@pytest.mark.parametrize("name", names("small"))
def test_golden_output_and_gradient(name: str) -> None:
    network, tensors = built(name)
    if "output/y_unit_input" in tensors:  # the file's y is without the normalisation that belongs to the classifier
        close(network(tensors["input/x"]), tensors["output/y_unit_input"], 1e-5)
        network.normalize = nn.Identity()
    x = tensors["input/x"].requires_grad_()
    y = network(x, tensors["input/t"]) if "input/t" in tensors else network(x)
    y = y if isinstance(y, Tensor) else y.sample
    close(y, tensors["output/y"], 1e-5)
    if "output/y_wrapper" in tensors:
        close(AttributeClassifier(network)(x), tensors["output/y_wrapper"], 1e-5)  # type: ignore[arg-type]
    if "grad/x" in tensors:
        (gradient,) = torch.autograd.grad((y * tensors["input/w"]).sum(), x)
        error = (gradient - tensors["grad/x"]).abs().max()
        assert error <= 1e-4 * tensors["grad/x"].abs().max()


@pytest.mark.parametrize("name", giving("output/score"))
def test_golden_score_and_drifts(name: str) -> None:
    score, tensors = score_of(name)
    x = tensors["input/x"][:2]
    for k, t in enumerate(tensors["input/score_t"].double()):
        times = t.expand(2)
        ours = score(x, times)
        if "input/score_disc_steps" in tensors:
            # The reference truncates 1000 t in float32, where a multiple of 1/1000 may fall one lower than ours.
            steps = tensors["input/score_disc_steps"][k]
            if isinstance(score, GuidedScore):
                assert (score.index(times) - steps).abs().max() <= 1
            ours = -score.epsilon_step(x, steps) / over(score.sde.std(times), x)
        exact = tensors["output/score_float64_std"][k]
        assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max()
        loose = 1e-3 if t < 0.01 else 1e-4  # below 0.01 the reference's own 1 - α has lost its digits
        beta = score.sde.beta(t).float()
        for key, value in {
            "score": ours,
            "drift": -beta / 2 * x - beta * ours,
            "ode_drift": -beta / 2 * x - beta / 2 * ours,
        }.items():
            expected = tensors[f"output/{key}"][k]
            assert (value - expected).abs().max() <= loose * expected.abs().max(), key


@pytest.mark.parametrize("name", giving("output/ld_drift"))
def test_golden_langevin_drift(name: str) -> None:
    score, tensors = score_of(name)
    sigma2, lam, start = 0.001, 0.01, tensors["input/ld_x_init"]
    x = tensors["input/x"][: len(start)]
    at = torch.full((len(x),), 0.01, dtype=torch.float64)
    ours = -lam / 2 * (-score(x, at) + (x - start) / sigma2)
    expected = tensors["output/ld_drift"]
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", giving("output/p_sample"))
def test_golden_ancestral_step(name: str) -> None:
    score, tensors = score_of(name)
    assert isinstance(score.sde, VPSDE)
    chain = score.sde.discrete(getattr(score, "steps", 1000))
    x, i, noise = tensors["input/x"], tensors["input/t"], tensors["input/p_noise"]
    learned = isinstance(score, GuidedScore)
    results = learned_step(score, chain, x, i) if learned else fixed_small_step(score, chain, x, i)
    for key, value in results.items():
        if f"output/p_{key}" in tensors:
            close(value, tensors[f"output/p_{key}"], 1e-3 if key == "pred_xstart" else 5e-5)
    moves = (i != 0).float()[:, None, None, None]
    sample = results["mean"] + moves * torch.exp(results["log_variance"] / 2) * noise
    close(sample, tensors["output/p_sample"], 5e-5)


def learned_step(score: Any, chain: DiscreteVP, x: Tensor, i: Tensor) -> dict[str, Tensor]:
    """The posterior mean of the clipped x0, with the learned variance."""
    eps, log_variance = score.epsilon_and_log_variance(x, i)
    alpha_bar, before = chain.alpha_bar(i), chain.alpha_bar(i - 1)
    x0 = over(alpha_bar.rsqrt(), x) * x - over((1 / alpha_bar - 1).sqrt(), x) * eps
    x0 = x0.clamp(-1, 1)
    beta, rest = chain.beta_of_step(i), chain.one_minus_alpha_bar(i)
    mean = over(beta * before.sqrt() / rest, x) * x0
    mean = mean + over((1 - beta).sqrt() * chain.one_minus_alpha_bar(i - 1) / rest, x) * x
    return {"mean": mean, "log_variance": log_variance, "pred_xstart": x0}


def fixed_small_step(score: EpsilonScore, chain: DiscreteVP, x: Tensor, i: Tensor) -> dict[str, Tensor]:
    """The mean from ε, with the variance of the posterior (`fixedsmall`)."""
    eps = score.epsilon_step(x, i)
    beta, rest = chain.beta_of_step(i), chain.one_minus_alpha_bar(i)
    mean = over((1 - beta).rsqrt(), x) * (x - over(beta / rest.sqrt(), x) * eps)
    variance = beta * chain.one_minus_alpha_bar(i - 1) / rest
    return {"mean": mean, "log_variance": over(variance.log(), x).expand_as(x)}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.small.pth")), ids=lambda path: path.name)
def test_golden_checkpoint_gives_the_moving_average(path: Path) -> None:
    name = path.name.removesuffix(".small.pth")
    about, tensors = record(name, "small"), load_file(FOLDER / f"{name}.small.safetensors")
    network = DDPMpp.from_config(about["config"]).eval()
    load_state(network, LAYOUTS["score-sde"](read(path), network), path.name)
    y = network(tensors["input/x"], tensors["input/t"])
    close(y, tensors["output/y_ema"], 1e-5)
    if "output/y_raw_model" in tensors:
        assert (y - tensors["output/y_raw_model"]).abs().max() > 1e-2


@pytest.mark.parametrize("name", [name for name in names("full") if "state_dict_legacy_names" in record(name, "full")])
def test_golden_legacy_attention_names(name: str) -> None:
    about = record(name, "full")
    legacy = dict(about["state_dict_legacy_names"])
    old = {legacy.get(key, key): key for key, _, _ in about["state_dict"]}
    assert all(key == current for key, current in LAYOUTS["diffusers"](old, nn.Module()).items())


@pytest.mark.parametrize("run", runs(), ids=lambda run: run.name)
def test_golden_reverse_sde_and_its_exact_gradient(run: Run) -> None:
    (score, _), tensors = score_of(run.network), run.tensors
    x = start = tensors["input/x_tstar"].requires_grad_()
    steps = zip(tensors["input/t_prime_start"], tensors["input/t_prime_end"], tensors["input/dW"], strict=True)
    for begin, end, dW in steps:
        t = 1 - begin.double()
        beta = score.sde.beta(t).float()
        drift = -beta / 2 * x - beta * score(x, t.expand(len(x)))
        x = x - (end - begin) * drift + beta.sqrt() * dW
    close(x, tensors["output/x0"], 5e-5)
    (gradient,) = torch.autograd.grad((x * tensors["input/w"]).sum(), start)
    assert (gradient - tensors["grad/exact"]).abs().max() <= 1e-4 * tensors["grad/exact"].abs().max()


def test_an_unknown_configuration_is_refused() -> None:
    with pytest.raises(InputError, match=r"DMWideResNet with padding = 4 is not implemented; accepted is 0\."):
        DMWideResNet.from_config({"depth": 10, "width": 1, "num_classes": 10, "activation": "relu", "padding": 4})

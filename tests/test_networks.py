"""Score networks against independent libraries and closed forms: diffusers' UNet, its schedulers, Gaussian data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffpure.diffusion.sde import STEPS, VPSDE, DiscreteVP
from diffpure.errors import InputError
from diffpure.models.cards import card
from diffpure.models.checkpoints import LAYOUTS
from diffpure.scores import load_score
from diffpure.scores.ddpm import DDPMScore, DDPMUNet
from diffpure.scores.ddpmpp import DDPMpp, DDPMppScore
from diffpure.scores.guided import GuidedScore, GuidedUNet
from diffpure.scores.hf import HFScore, from_diffusers, load_folder, schedule, unet2d

GOLDEN = Path(__file__).parent / "golden"

UNET2D = {
    "sample_size": 16, "in_channels": 3, "out_channels": 3, "block_out_channels": [32, 64], "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 32, "norm_eps": 1e-6, "downsample_padding": 0, "flip_sin_to_cos": False, "freq_shift": 1,
    "attention_head_dim": None,
}  # fmt: skip


def ddpm() -> DDPMUNet:
    return DDPMUNet(size=16, width=32, multipliers=(1, 2), blocks=1, attention=(8,)).eval()


def ddpmpp() -> DDPMpp:
    return DDPMpp(size=16, width=16, multipliers=(1, 2), blocks=1, attention=(8,)).eval()


def guided(outputs: int = 6) -> GuidedUNet:
    heads = lambda channels: channels // 32  # noqa: E731
    return GuidedUNet(outputs=outputs, width=32, multipliers=(1, 2), blocks=1, attention=(2,), heads=heads).eval()


def noisy(batch: int = 2, size: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


# Diffusers' name of each part of our DDPM.
NAMES = [
    ("temb.dense.0", "time_embedding.linear_1"), ("temb.dense.1", "time_embedding.linear_2"),
    ("mid.block_1", "mid_block.resnets.0"), ("mid.block_2", "mid_block.resnets.1"),
    ("mid.attn_1", "mid_block.attentions.0"), ("norm_out", "conv_norm_out"), ("downsample.conv", "downsamplers.0.conv"),
    ("upsample.conv", "upsamplers.0.conv"), ("nin_shortcut", "conv_shortcut"), ("temb_proj", "time_emb_proj"),
    (".block.", ".resnets."), (".attn.", ".attentions."), ("up.0.", "up_blocks.1."), ("up.1.", "up_blocks.0."),
    ("down.", "down_blocks."), (".q.", ".to_q."), (".k.", ".to_k."), (".v.", ".to_v."), (".proj_out.", ".to_out.0."),
]  # fmt: skip


def as_diffusers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of our small DDPM under the names and shapes of diffusers."""
    renamed = {}
    for key, value in state.items():
        for ours, theirs in NAMES:
            key = key.replace(ours, theirs)
        if ".attentions." in key:
            key = key.replace(".norm.", ".group_norm.")
            value = value.flatten(1) if value.ndim == 4 else value
        renamed[key] = value
    return renamed


def test_ddpm_is_the_unet_of_diffusers_at_equal_cost() -> None:
    pytest.importorskip("diffusers")
    ours, theirs = ddpm(), unet2d(UNET2D).eval()
    theirs.load_state_dict(as_diffusers(ours.state_dict()))
    x, steps = noisy(), torch.tensor([0, 700])
    with FlopCounterMode(display=False) as our_cost:
        y = ours(x, steps)
    with FlopCounterMode(display=False) as their_cost:
        expected = theirs(x, steps).sample
    assert (y - expected).abs().max() < 1e-5
    assert our_cost.get_total_flops() == their_cost.get_total_flops()


GUIDED = {
    "image_size": 32, "num_channels": 32, "num_res_blocks": 2, "num_heads": 4, "num_head_channels": 32,
    "channel_mult": "1,2,3", "learn_sigma": True, "use_fp16": False,
}  # fmt: skip
RESIDUAL = {
    "in_layers.0": "norm1", "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj", "out_layers.0": "norm2",
    "out_layers.3": "conv2", "skip_connection": "conv_shortcut",
}  # fmt: skip


def guided_places(levels: int, blocks: int) -> dict[str, str]:
    """Diffusers' name of each part of guided diffusion."""
    indices = {
        "time_embed.0": "time_embedding.linear_1", "time_embed.2": "time_embedding.linear_2", "out.0": "conv_norm_out",
        "out.2": "conv_out", "input_blocks.0.0": "conv_in", "middle_block.0": "mid_block.resnets.0",
        "middle_block.1": "mid_block.attentions.0", "middle_block.2": "mid_block.resnets.1",
    }  # fmt: skip
    n = 1
    for level in range(levels):
        for i in range(blocks):
            indices[f"input_blocks.{n}.0"] = f"down_blocks.{level}.resnets.{i}"
            indices[f"input_blocks.{n}.1"] = f"down_blocks.{level}.attentions.{i}"
            n += 1
        indices[f"input_blocks.{n}.0"] = f"down_blocks.{level}.downsamplers.0"
        n += 1
    for n in range(levels * (blocks + 1)):
        up, i = divmod(n, blocks + 1)
        indices[f"output_blocks.{n}.0"] = f"up_blocks.{up}.resnets.{i}"
        indices[f"output_blocks.{n}.1"] = f"up_blocks.{up}.attentions.{i}"
        indices[f"output_blocks.{n}.2"] = f"up_blocks.{up}.upsamplers.0"
    return indices


def guided_as_diffusers(network: GuidedUNet, indices: dict[str, str], head: int) -> dict[str, Tensor]:
    """The state of a guided UNet under the names of diffusers, q, k and v taken apart head by head."""
    renamed: dict[str, Tensor] = {}
    for key, value in network.state_dict().items():
        part = max((place for place in indices if key.startswith(f"{place}.")), key=len)
        there, rest = indices[part], key.removeprefix(f"{part}.")
        if ".attentions." in there and "_layers" in rest:  # without attention the up block is the second one
            there = there.split(".attentions.")[0] + ".upsamplers.0"
        for ours, theirs in RESIDUAL.items():
            rest = rest.replace(ours, theirs)
        if rest.startswith("qkv"):
            heads = value.reshape(-1, 3, head, *value.shape[1:2]).transpose(0, 1)
            for name, tensor in zip("qkv", heads, strict=True):
                renamed[f"{there}.to_{name}.{rest[4:]}"] = tensor.reshape(-1, *value.shape[1:2])
        elif ".attentions." in there:
            rest = rest.replace("proj_out", "to_out.0").replace("norm", "group_norm")
            renamed[f"{there}.{rest}"] = value.squeeze(-1) if value.ndim == 3 else value
        else:
            renamed[f"{there}.{rest}"] = value
    return renamed


@pytest.mark.parametrize("resolutions", ["16,8", "8"])
def test_guided_diffusion_is_the_adm_unet_of_diffusers_at_equal_cost(resolutions: str) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    ours = GuidedUNet.from_config({**GUIDED, "attention_resolutions": resolutions}).eval()
    attends = [str(32 // 2**level) in resolutions.split(",") for level in range(3)]
    down = ["AttnDownBlock2D" if attend else "ResnetDownsampleBlock2D" for attend in attends]
    up = ["AttnUpBlock2D" if attend else "ResnetUpsampleBlock2D" for attend in reversed(attends)]
    theirs = unet2d({
        "sample_size": 32, "in_channels": 3, "out_channels": 6, "block_out_channels": [32, 64, 96],
        "layers_per_block": 2, "down_block_types": down, "up_block_types": up, "norm_num_groups": 32,
        "norm_eps": 1e-5, "attn_norm_num_groups": 32, "flip_sin_to_cos": True, "freq_shift": 0,
        "attention_head_dim": 32, "downsample_type": "resnet", "upsample_type": "resnet",
        "resnet_time_scale_shift": "scale_shift",
    }).eval()  # fmt: skip
    theirs.load_state_dict(guided_as_diffusers(ours, guided_places(3, 2), 32))
    x, steps = noisy(size=32), torch.tensor([3, 700])
    with FlopCounterMode(display=False) as our_cost:
        y = ours(x, steps)
    with FlopCounterMode(display=False) as their_cost:
        expected = theirs(x, steps).sample
    assert (y - expected).abs().max() < 1e-5
    assert our_cost.get_total_flops() == their_cost.get_total_flops()


@pytest.mark.parametrize("make", [ddpm, ddpmpp, guided])
def test_double_precision_and_memory_layout_change_nothing(make: Any) -> None:
    network, x, labels = make(), noisy(), torch.tensor([3, 40])
    y = network(x, labels)
    fast = network.to(memory_format=torch.channels_last)(x, labels)
    assert (fast - y).abs().max() < 1e-5
    assert (network.double()(x.double(), labels) - y).abs().max() < 1e-5


def test_guided_half_precision_touches_only_the_convolutions_of_the_blocks() -> None:
    network = guided()
    y = network(noisy(), torch.tensor([3, 40]))
    network.half_convolutions()
    half = {key for key, value in network.state_dict().items() if value.dtype == torch.float16}
    convolutions = {name for name, module in network.named_modules() if isinstance(module, nn.Conv1d | nn.Conv2d)}
    assert {key.rpartition(".")[0] for key in half} == convolutions - {"out.2"}
    rough = network(noisy(), torch.tensor([3, 40]))
    assert rough.dtype == torch.float32
    assert 0 < (rough - y).abs().max() < 2e-2


def test_guided_drops_the_variance_and_truncates_time() -> None:
    score = GuidedScore(guided(), size=16)
    grid = 0.1 - torch.arange(100, dtype=torch.float64) * 1e-3  # rounding leaves many of these just below k/1000
    assert score.index(grid).tolist() == list(range(100, 0, -1))
    assert score.index(torch.tensor([1.0, 0.0567, 1e-5], dtype=torch.float64)).tolist() == [999, 56, 0]
    x, i = noisy(), torch.tensor([10, 999])
    assert torch.equal(score.epsilon_step(x, i), score.network(x, i)[:, :3])
    assert torch.equal(score.epsilon(x, torch.tensor([0.0103, 1.0], dtype=torch.float64)), score.epsilon_step(x, i))


def test_guided_learned_variance_lies_between_its_two_bounds() -> None:
    score = GuidedScore(guided(), size=16)
    chain, i = VPSDE().discrete(), torch.tensor([0, 500])
    _, log_variance = score.epsilon_and_log_variance(noisy(), i)
    v = score.network(noisy(), i)[:, 3:]
    upper = chain.beta_of_step(i).log()
    lower = (chain.beta_of_step(1) * chain.one_minus_alpha_bar(0) / chain.one_minus_alpha_bar(1)).log()
    assert torch.allclose(log_variance[0], lower.float() + (v[0] + 1) / 2 * (upper[0] - lower).float(), atol=1e-5)
    with pytest.raises(InputError, match="learned no variance"):
        GuidedScore(guided(outputs=3), size=16).epsilon_and_log_variance(noisy(), i)


def test_ddpm_and_its_kin_count_the_end_of_step_i_as_i_plus_one_over_n() -> None:
    score = DDPMScore(ddpm(), size=16)
    x, i = noisy(), torch.tensor([49, 999])
    assert torch.equal(score.epsilon_step(x, i), score.network(x, i))
    assert (score.epsilon(x, (i + 1).double() / STEPS) - score.network(x, i)).abs().max() < 1e-5


def test_ddpmpp_is_asked_at_999_t() -> None:
    score = DDPMppScore(ddpmpp(), size=16)
    t = torch.tensor([0.05, 0.7], dtype=torch.float64)
    assert torch.equal(score.epsilon(noisy(), t), score.network(noisy(), (999 * t).float()))


def test_configurations_beyond_the_papers_are_refused_in_one_sentence() -> None:
    config = json.loads((GOLDEN / "ncsnpp.small.json").read_text())["config"]
    with pytest.raises(InputError, match=r"^DDPM\+\+ with fir = True is not implemented; accepted is False\.$"):
        DDPMpp.from_config({**config, "model": {**config["model"], "fir": True}})
    config = json.loads((GOLDEN / "guided_unet.small.json").read_text())["config"]
    with pytest.raises(InputError, match=r"^guided diffusion with class_cond = True is not implemented"):
        GuidedScore.from_config({**config, "class_cond": True})


def save_hf(folder: Path, network: nn.Module, scheduler: dict[str, Any], legacy: bool = False) -> None:
    """A diffusers folder, as new pipelines lay it out or as the first ones did."""
    root = folder if legacy else folder / "unet"
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(UNET2D))
    state = network.state_dict()
    if legacy:
        old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        for new, name in old.items():
            state = {key.replace(f".{new}.", f".{name}."): value for key, value in state.items()}
        torch.save(state, root / "diffusion_pytorch_model.bin")
        (root / "scheduler_config.json").write_text(json.dumps(scheduler))
    else:
        save_file(state, root / "diffusion_pytorch_model.safetensors")
        (folder / "scheduler").mkdir()
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_diffusers_folder_becomes_a_score(tmp_path: Path, legacy: bool) -> None:
    pytest.importorskip("diffusers")
    network = unet2d(UNET2D).eval()
    save_hf(tmp_path, network, {"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02}, legacy)
    score = load_score(tmp_path)
    assert isinstance(score, HFScore)
    assert (score.size, score.channels, score.sde) == (16, 3, VPSDE())
    x, i = noisy(), torch.tensor([5, 900])
    assert (score.epsilon_step(x, i) - network(x, i).sample).abs().max() < 1e-5


def test_a_loaded_diffusers_network_becomes_a_score() -> None:
    diffusers = pytest.importorskip("diffusers")
    network = unet2d(UNET2D).eval()
    scheduler = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    x, i = noisy(), torch.tensor([5, 900])
    for given in (scheduler, scheduler.config, dict(scheduler.config)):
        score = from_diffusers(network, given)
        assert (score.size, score.channels, score.steps) == (16, 3, 1000)
        v, a = network(x, i).sample, scheduler.alphas_cumprod[i][:, None, None, None]
        assert (score.epsilon_step(x, i) - (a.sqrt() * v + (1 - a).sqrt() * x)).abs().max() < 1e-4
    betas = from_diffusers(network, diffusers.DDIMScheduler(trained_betas=[0.01, 0.02, 0.03])).sde
    assert betas == DiscreteVP((0.01, 0.02, 0.03))


def test_what_is_no_pixel_network_or_scheduler_of_diffusers_is_refused() -> None:
    diffusers = pytest.importorskip("diffusers")
    network, latent = unet2d(UNET2D), SimpleNamespace(config={"cross_attention_dim": 768})
    with pytest.raises(InputError, match="which sees the image alone, got SimpleNamespace"):
        from_diffusers(latent, {})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"A UNet2DModel of diffusers is accepted, .* got Conv2d"):
        from_diffusers(nn.Conv2d(3, 3, 1), {})
    with pytest.raises(InputError, match="A scheduler of diffusers or its configuration is accepted, got int"):
        from_diffusers(network, 1000)
    with pytest.raises(InputError, match="rescale_betas_zero_snr"):
        from_diffusers(network, diffusers.DDIMScheduler(rescale_betas_zero_snr=True))
    wide = unet2d({**UNET2D, "sample_size": [16, 24]})
    with pytest.raises(InputError, match=r"square images is accepted, got sample_size \(16, 24\)"):
        from_diffusers(wide, {})
    with pytest.raises(InputError, match=r"returned \(2, 6, 16, 16\) for images \(2, 3, 16, 16\)"):
        from_diffusers(unet2d({**UNET2D, "out_channels": 6}), {})(noisy(), torch.tensor([0.1, 0.1]))


def test_predictions_of_x0_and_v_give_the_same_epsilon() -> None:
    x0, eps, t = noisy(seed=1), noisy(seed=2), torch.tensor([0.1, 0.6], dtype=torch.float64)
    sde = VPSDE()
    x = sde.diffuse(x0, t, eps)
    signal, std = (c.float()[:, None, None, None] for c in (sde.alpha(t).sqrt(), sde.std(t)))
    targets = {"epsilon": eps, "sample": x0, "v_prediction": signal * eps - std * x0}

    for prediction, target in targets.items():
        score = HFScore(Constant(target), sde, prediction=prediction)
        assert torch.allclose(score.epsilon(x, t), eps, atol=1e-5)
    with pytest.raises(InputError, match="Unknown prediction type 'flow'"):
        HFScore(Constant(x0), prediction="flow")


class Constant(nn.Module):
    """A network in the manner of diffusers that has the answer already."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor, steps: Tensor, return_dict: bool) -> tuple[Tensor]:
        return (self.answer,)


@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_schedules_are_those_of_diffusers(kind: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.DDPMScheduler(beta_schedule=kind).betas
    ours = schedule({"beta_schedule": kind, "num_train_timesteps": 1000})
    chain = ours.discrete() if isinstance(ours, VPSDE) else ours
    assert isinstance(chain, DiscreteVP)
    assert torch.allclose(torch.tensor(chain.betas), theirs, rtol=1e-4, atol=1e-7)


def test_a_score_sde_file_loads_by_its_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path))
    config = json.loads((GOLDEN / "ncsnpp_checkpoint.small.json").read_text())["config"]
    small = replace(card("cifar10-ddpmpp"), config=config)
    monkeypatch.setattr("diffpure.models.cards.cards", lambda kind=None: {small.name: small})
    score = load_score(GOLDEN / "ncsnpp_checkpoint.small.pth", like="cifar10-ddpmpp")
    assert isinstance(score, DDPMppScore)
    assert not any(p.requires_grad for p in score.parameters())
    with pytest.raises(InputError, match=r"say like=NAME, one of cifar10-ddpmpp\.$"):
        load_score(GOLDEN / "ncsnpp_checkpoint.small.pth")
    with pytest.raises(InputError, match="Half precision belongs to guided diffusion"):
        load_score(GOLDEN / "ncsnpp_checkpoint.small.pth", like="cifar10-ddpmpp", half=True)


def test_unknown_and_absent_score_models_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"run `diffpure models fetch imagenet-guided`\.$"):
        load_score("imagenet-guided")
    with pytest.raises(InputError, match="did you mean 'cifar10-ddpmpp'"):
        load_score("cifar10-ddpmp")
    with pytest.raises(InputError, match="not a readable JSON file"):
        load_folder(tmp_path)


def test_legacy_attention_names_touch_nothing_else() -> None:
    state = {"mid_block.attentions.0.query.weight": 0, "up.value.weight": 1, "mid_block.resnets.0.key.bias": 2}
    expected = ["mid_block.attentions.0.to_q.weight", "up.value.weight", "mid_block.resnets.0.key.bias"]
    assert list(LAYOUTS["diffusers"](state, nn.Module())) == expected

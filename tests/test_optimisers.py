"""Muon: its steps against the singular value decomposition, torch's own Muon and Adam, and a run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffpure.training.loop import Run, cosine, generator, train
from diffpure.training.optimisers import ADAM, OPTIMISERS, polar


@pytest.mark.parametrize("shape", [(24, 24), (16, 90), (90, 16)])
def test_polar_keeps_the_directions_and_makes_their_lengths_alike(shape):
    """U Vᵀ but for singular values near 1: the iteration is a polynomial of the matrix, which no direction leaves."""
    matrices = torch.randn(3, *shape, generator=generator(0, 0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    inside = u.mT @ polar(matrices) @ v.mT
    lengths = inside.diagonal(dim1=1, dim2=2)
    assert torch.allclose(inside, torch.diag_embed(lengths), atol=1e-9)
    known = s > 0.05 * s.amax(1, keepdim=True)  # weaker directions need more rounds
    assert lengths[known].min() > 0.5
    assert lengths.max() < 1.3


def test_nothing_to_learn_moves_nothing():
    assert torch.equal(polar(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def steps(optimiser: torch.optim.Optimizer, weight: nn.Parameter, count: int = 4) -> list[Tensor]:
    """Where a weight goes along gradients that are the same for every optimiser."""
    path = []
    for i in range(count):
        weight.grad = torch.randn(weight.shape, generator=generator(1, i))
        optimiser.step()
        path.append(weight.detach().clone())
    return path


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(40, 32), (32, 72)])
def test_matrices_learn_as_with_torchs_muon(shape):
    """Torch computes the iteration in bfloat16, whose rounding is what may differ."""
    model = nn.Linear(shape[1], shape[0], bias=False)
    theirs = nn.Parameter(model.weight.detach().clone())
    peer = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    begun = theirs.detach().clone()
    for ours, expected in zip(steps(OPTIMISERS["muon"](model, 0.01), model.weight), steps(peer, theirs), strict=True):
        assert (ours - expected).norm() < 0.03 * (expected - begun).norm()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_kernel_learns_as_its_matrix(layout):
    conv = nn.Conv2d(16, 24, 3, bias=False).to(memory_format=layout)
    flat = nn.Linear(16 * 9, 24, bias=False)
    flat.weight.data = conv.weight.detach().flatten(1).clone()
    kernel, matrix = (OPTIMISERS["muon"](part, 0.01) for part in (conv, flat))
    for i in range(3):
        conv.weight.grad = torch.randn(24, 16, 3, 3, generator=generator(2, i))
        flat.weight.grad = conv.weight.grad.flatten(1).clone()
        kernel.step()
        matrix.step()
    assert torch.allclose(conv.weight.flatten(1), flat.weight, atol=1e-6)


@pytest.mark.parametrize("part", [nn.Conv2d(3, 24, 3, bias=False), nn.Linear(24, 10, bias=False), nn.PReLU(24)])
def test_vectors_and_the_ends_of_a_network_learn_as_with_adam(part):
    (weight,) = part.parameters()
    theirs = nn.Parameter(weight.detach().clone())
    peer = torch.optim.Adam([theirs], lr=ADAM * 0.01, betas=(0.9, 0.99))
    for ours, expected in zip(steps(OPTIMISERS["muon"](part, 0.01), weight), steps(peer, theirs), strict=True):
        assert torch.allclose(ours, expected, atol=1e-7)


def test_a_run_goes_on_to_the_same_weights(tmp_path):
    def run(folder: Path | None, stop: int | None = None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 4))

        def batch(step: int) -> tuple[Tensor]:
            if step == stop:
                raise KeyboardInterrupt
            return (torch.randn(8, 20, generator=generator(3, step)),)

        def loss(replica: nn.Module, x: Tensor) -> Tensor:
            return F.mse_loss(replica(x), x[:, :4])

        how = Run(steps=12, folder=folder, threads=1, checkpoint_seconds=0.0)
        return train(model, OPTIMISERS["muon"](model, 0.01), batch, loss, cosine(), how)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop=7)
    whole, resumed = run(None), run(tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)

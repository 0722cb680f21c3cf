"""The paper's figure "numeric error against step size": the gradient through the solver in the Gaussian world.

python examples/gradient_error.py [out.png]
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import diffpure as dp

T_STAR, SIZES = 0.1, (5e-2, 2e-2, 1e-2, 5e-3, 2e-3, 1e-3)


def error(variance: float, dt: float, mode: str) -> float:
    """|φ_ana - φ_num| / |φ_ana| for φ = ∂x(0)/∂x(t*) of data N(0, σ0²)."""
    x = torch.ones(1, 1, 1, 1, dtype=torch.float64, requires_grad=True)
    score = dp.GaussianScore(0.0, variance)
    _, path = dp.ReverseSDE(t_star=T_STAR, dt=dt, end=1e-12)(score, x, dp.Noise((0,)))
    (numeric,) = torch.autograd.grad(dp.Purifier(score, gradient=mode).gradient(path, x).sum(), x)
    alpha = score.sde.alpha(T_STAR)
    known = variance * alpha.sqrt() / (1 - alpha + variance * alpha)
    return ((known - numeric) / known).abs().item()


figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for ax, mode in zip(axes, ("exact", "adjoint"), strict=True):
    for variance in (0.01, 0.05, 0.1, 0.5, 1.0):
        ax.loglog(SIZES, [error(variance, dt, mode) for dt in SIZES], "o-", label=f"σ₀² = {variance:g}")
    ax.set(title=f"{mode} gradient", xlabel="step size")
axes[0].set_ylabel("relative error of ∂x(0)/∂x(t*)")
axes[1].legend(loc="lower right")
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "gradient_error.png", dpi=150)

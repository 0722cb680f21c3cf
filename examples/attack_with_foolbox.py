"""Attack a defence with somebody else's library: foolbox's PGD on digits behind a diffusion, with and without EOT."""

import foolbox
import torch
from sklearn.datasets import load_digits
from torch import nn

import diffpure as dp
from diffpure.adapters import Averaged, foolbox_model

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)

classifier = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimiser = torch.optim.Adam(classifier.parameters(), 5e-3)
for _ in range(150):  # on noisy digits: a purified image is never quite clean
    optimiser.zero_grad()
    nn.functional.cross_entropy(classifier(x[:1500] + 0.2 * torch.randn_like(x[:1500])), y[:1500]).backward()
    optimiser.step()

score = dp.GaussianScore(mean=2 * x.mean().item() - 1, variance=4 * x.var().item())  # the simplest model of a digit
model = dp.Defense(dp.Purifier(score, dp.ReverseSDE(t_star=0.1, dt=0.02)), classifier)

x, y = x[1500:1564], y[1500:1564]
attack = foolbox.attacks.LinfPGD(steps=20, rel_stepsize=0.1)
for name, target in {
    "the undefended classifier": foolbox_model(classifier),
    "the defence, one sample per step": foolbox_model(model),
    "the defence, ten samples per step": foolbox_model(model, samples=10),
}.items():
    _, adversarial, _ = attack(target, x, y, epsilons=0.15)
    right = (Averaged(model, 20)(adversarial, seeds=range(64)).argmax(1) == y).sum()
    print(f"attacking {name}: the defence is right on {right} of 64")

"""Attack digits behind a diffusion with ART's PGD: the purifier as preprocessor, the averaged defence as model."""

import torch
from art.attacks.evasion import ProjectedGradientDescent
from art.estimators.classification import PyTorchClassifier
from sklearn.datasets import load_digits
from torch import nn

import diffpure as dp
from diffpure.adapters import Averaged, art_preprocessor

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
purifier = dp.Purifier(score, dp.ReverseSDE(t_star=0.1, dt=0.02))
defence = dp.Defense(purifier, classifier)
evaluated = Averaged(defence, 20)
targets = {
    "the undefended classifier": (classifier, []),
    "the defence, one sample per step": (classifier, [art_preprocessor(purifier)]),
    "the defence, eight samples per step": (Averaged(defence, 8), []),
}

x, y = x[1500:1564], y[1500:1564]
for name, (model, defences) in targets.items():
    options = {"clip_values": (0.0, 1.0), "preprocessing_defences": defences, "device_type": "cpu"}
    target = PyTorchClassifier(model, nn.CrossEntropyLoss(), (1, 8, 8), 10, **options)
    attack = ProjectedGradientDescent(target, eps=0.15, eps_step=0.02, max_iter=20, verbose=False)
    adversarial = torch.from_numpy(attack.generate(x.numpy(), y.numpy()))
    right = (evaluated(adversarial, seeds=range(64)).argmax(1) == y).sum()
    print(f"attacking {name}: the defence is right on {right} of 64")

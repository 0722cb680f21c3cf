"""The way back as a picture: an attacked image, diffused to t*, and the states of the reverse SDE.

python examples/trajectory_strip.py [out.png]
"""

import sys
from pathlib import Path

import diffpure as dp
from diffpure.data.samples import samples
from diffpure.report.strips import save_strip

images, labels = samples(4)
classifier, score = dp.load_classifier("cifar10-resnet"), dp.load_score("cifar10-small")
threat = dp.Linf(8 / 255)
attacked = threat.apply(images, dp.PGD(iterations=10)(classifier, images, labels, threat, seeds=range(4)))

times = (0.1, 0.075, 0.05, 0.025, 0.0)
purifier = dp.Purifier(score, dp.ReverseSDE(t_star=0.1, dt=5e-3, denoise=True))
states = purifier.trajectory(attacked, times, seeds=range(4))
stages = {"clean": images, "attacked": attacked} | {f"t = {t:g}": s for t, s in zip(times, states, strict=True)}
out = Path(sys.argv[1] if len(sys.argv) > 1 else "trajectory.png")
save_strip(out, {name: stage.numpy() for name, stage in stages.items()}, across=True)

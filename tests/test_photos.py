"""The score network for photographs of any size, and the photographs it is trained on."""

from __future__ import annotations

import io
import signal
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import diffpure as dp
from diffpure import cli
from diffpure.data import photos
from diffpure.data.images import resize, to_tensor
from diffpure.data.photos import Photos
from diffpure.errors import InputError
from diffpure.files import names, purify_files, tiles
from diffpure.files import purify as files
from diffpure.scores.load import load_score
from diffpure.scores.photos import PhotoUNet, mirrored
from diffpure.scores.tiled import TiledScore
from diffpure.training import recipes
from diffpure.training.cost import multiply_adds, parameters
from diffpure.training.loop import generator
from diffpure.training.recipes import follow
from diffpure.training.score import ScoreConfig, drawn, train_score
from problems import shaken


def small(widths: tuple[int, ...] = (8, 12), blocks: tuple[int, ...] = (1, 1)) -> PhotoUNet:
    torch.manual_seed(0)
    return shaken(PhotoUNet(widths=widths, blocks=blocks, embedding=8)).eval()


def image(height: int, width: int, rows: int = 1) -> Tensor:
    return 2 * torch.rand(rows, 3, height, width, generator=generator(0, height, width)) - 1


def times(*t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------------ network


def test_the_network_costs_what_a_hand_counts():
    model, (a, b, c), e = PhotoUNet(), (48, 64, 96), 64
    half, quarter, eighth = 112**2, 56**2, 28**2
    blocks = 9 * 2 * (6 * half * a**2 + 6 * quarter * b**2 + 3 * eighth * c**2)
    door_and_exit = 2 * 9 * half * 12 * a
    resampling = 2 * 4 * (quarter * a * b + eighth * b * c)
    levels = 16 * e + e * e + 2 * e * (6 * a + 6 * b + 3 * c) + e
    total = multiply_adds(model, image(224, 224), times(0.1))
    assert total == blocks + door_and_exit + resampling + levels
    assert parameters(model) <= 1_500_000


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 13), (16, 16), (33, 20), (224, 224)], ids=str)
def test_any_size_is_accepted(size):
    model, x = small(), image(*size, rows=2)
    with torch.no_grad():
        score = model(x, times(0.01, 0.2))
    assert score.shape == x.shape
    assert torch.isfinite(score).all()
    assert model.size is None


def test_gradients_are_finite_and_reach_every_weight_and_pixel():
    model, x = small(), image(7, 13).requires_grad_()
    model(x, times(0.1)).square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert x.grad is not None
    assert (x.grad != 0).all()


def test_the_denoised_image_tends_to_the_image_as_t_tends_to_zero():
    model, x = small(), image(16, 24)
    for t in (1e-2, 1e-3, 1e-4, 1e-5):
        with torch.no_grad():
            change = (model.sde.denoised(x, times(t), model(x, times(t))) - x).abs().max()
        assert change < 10 * model.sde.std(t)


def test_a_silent_network_is_the_score_of_gaussian_data():
    """With F = 0 the preconditioning alone is exact for data N(0, σ_d²): its score is -x / (1 - α + σ_d² α)."""
    model, x, t = PhotoUNet(), image(9, 5, rows=2), times(0.02, 0.2)
    exact = -x / (1 - 0.75 * model.sde.alpha(t))[:, None, None, None]
    with torch.no_grad():
        assert torch.allclose(model(x, t), exact.float(), rtol=1e-4)


def test_the_noise_level_matters():
    model, x = small().double(), image(16, 16).double()
    level = [model.network(x, times(value)) for value in (0.0, 2.0)]
    assert (level[0] - level[1]).abs().max() > 1e-3


def test_it_refuses_widths_and_blocks_that_do_not_fit():
    with pytest.raises(InputError, match="as many numbers of blocks"):
        PhotoUNet(widths=(16, 16), blocks=(1,))
    with pytest.raises(InputError, match="Two widths"):
        PhotoUNet(widths=(16,), blocks=(1,))


def test_the_benchmark_denoises_gaussian_data_as_well_as_anything_can():
    """A silent network is exact for data N(0, σ_d²): D = σ_d²/(σ² + σ_d²) z, with the mean square of the posterior."""
    denoising = pytest.importorskip("denoising", reason="needs benchmarks/")
    random, sigma = generator(0, 0), 0.1
    clean = 0.5 + 0.25 * torch.randn(3, 200, 200, generator=random)  # N(0, ½²) in [-1, 1]
    noisy = clean + sigma * torch.randn(clean.shape, generator=random)
    denoised = denoising.one_call(PhotoUNet())(noisy, sigma)
    shrink = 0.25**2 / (sigma**2 + 0.25**2)
    assert torch.allclose(denoised, 0.5 + shrink * (noisy - 0.5), atol=1e-5)
    assert (denoised - clean).square().mean().item() == pytest.approx(shrink * sigma**2, rel=0.02)
    assert denoising.psnr(torch.full((3, 2, 2), 1.1), torch.full((3, 2, 2), 0.9)) == pytest.approx(20)


# -------------------------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize(
    ("widths", "blocks"), [((4, 4), (1, 1)), ((4, 4), (2, 1)), ((4, 4, 4), (1, 2, 1))], ids=["small", "deep", "three"]
)
def test_an_output_sees_its_receptive_field_and_no_further(widths, blocks):
    """The gradient of one output pixel, for every phase of the stride: its farthest pixel is at `receptive_field`."""
    model = small(widths, blocks).double()
    reach, stride = model.receptive_field, model.stride
    middle = -(-reach // stride) * stride
    x = torch.rand(1, 3, 8, 2 * middle + stride, dtype=torch.float64, generator=generator(0, 0))
    farthest = 0
    for phase in range(stride):
        pixels = x.clone().requires_grad_()
        out = model.epsilon(pixels, times(0.1))[0, :, :, middle + phase].sum()
        (seen,) = torch.autograd.grad(out, pixels)
        columns = seen.abs().sum((0, 1, 2)).nonzero().flatten() - middle - phase
        farthest = max(farthest, int(columns.abs().max()))
    assert farthest == reach


@pytest.mark.parametrize("widths", [(8, 12), (8, 8, 8)])
def test_a_tile_is_exact_beyond_the_receptive_field(widths):
    """Away from its cut edges, a tile that starts at a multiple of the stride gives what the whole image gives."""
    model = small(widths, (1,) * len(widths)).double()
    stride, reach = model.stride, model.receptive_field
    margin = -(-reach // stride) * stride
    x = image(3 * margin + 5, 3 * margin + 3).double()
    top, left = stride, 2 * stride
    tile = x[..., top : top + 2 * margin + stride, left:]  # its right edge is the image's own
    with torch.no_grad():
        whole = model(x, times(0.1))[..., top : top + 2 * margin + stride, left:]
        alone = model(tile, times(0.1))
    difference = (whole - alone).abs().amax((0, 1))
    assert difference[margin:-margin, margin:].max() < 1e-12 * whole.abs().max()
    assert difference[0].max() > 0


@pytest.mark.parametrize(
    "sampler", [dp.OneShot(0.05), dp.DDIM(0.05, steps=2), dp.FewStep(0.05, steps=2)], ids=lambda s: type(s).__name__
)
def test_purified_in_tiles_an_image_and_its_gradient_are_those_of_the_whole(sampler):
    """With the same noise, and to the last digits of double precision, at sizes that are no multiple of anything."""
    score = small().double()
    tiled = TiledScore(score, 64)
    x = (image(79, 61, rows=2).double() + 1) / 2
    assert (tiled.tile, tiled.count(79, 61)) == (16, 5 * 4)
    found = []
    for each in (score, tiled):
        leaf = x.clone().requires_grad_()
        out = dp.Purifier(each, sampler)(leaf, [3, 4])
        (gradient,) = torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), leaf)
        found.append((out.detach(), gradient))
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


def test_only_a_convolutional_score_and_windows_beyond_its_receptive_field_are_taken():
    with pytest.raises(InputError, match="GaussianScore has none"):
        TiledScore(dp.GaussianScore())
    with pytest.raises(InputError, match="a side of at least"):
        TiledScore(small(), 8)


def test_a_large_file_is_purified_in_tiles_with_progress_and_others_in_groups_that_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "LARGE", 64 * 64)
    monkeypatch.setattr(files, "LARGE", 64 * 64)
    monkeypatch.setattr(tiles.TiledScore.__init__, "__defaults__", (96, lambda: None))
    purifier, seen = dp.Purifier(small(), dp.FewStep(0.05, steps=1)), []
    pixels = {"large.png": (150, 130), "a.png": (40, 40), "b.png": (40, 40), "c.png": (40, 40), "line.png": (1, 70)}
    for name, (height, width) in pixels.items():
        Image.fromarray(numbered(height, width).permute(1, 2, 0).numpy()).save(tmp_path / name)
    batches, call = [], PhotoUNet.forward

    def forward(self, x, t):
        batches.append(tuple(x.shape))
        return call(self, x, t)

    monkeypatch.setattr(PhotoUNet, "forward", forward)
    report = purify_files(purifier, [str(tmp_path)], tmp_path / "out", seed=1, progress=lambda *told: seen.append(told))
    assert not report.failed
    assert max(rows * height * width for rows, _, height, width in batches) <= 96**2
    assert {shape[0] for shape in batches if shape[-1] == 40} == {1, 2}
    ticks = [told[1:] for told in seen if told[0] == "tiles of large.png"]
    assert ticks == [(k + 1, len(ticks)) for k in range(len(ticks))]
    assert len(ticks) > 3
    purified = np.asarray(Image.open(tmp_path / "out" / "large.png")).astype(int)
    given = numbered(150, 130)[None].float() / 255
    whole = purifier(given, [names.seed_of("large.png", 1)])[0].clamp(0, 1).mul(255).round().permute(1, 2, 0).numpy()
    assert np.abs(purified - whole).max() <= 1  # what rounding may do to a value between two


def test_a_shift_by_the_stride_shifts_the_result():
    model = small().double()
    reach, stride = model.receptive_field, model.stride
    x = image(2 * reach + 4 * stride, 2 * reach + 4 * stride).double()
    with torch.no_grad():
        here, there = model(x, times(0.1)), model(x.roll((stride, stride), (2, 3)), times(0.1))
    inside = slice(reach + 2 * stride, -reach - stride)
    assert torch.allclose(here.roll((stride, stride), (2, 3))[..., inside, inside], there[..., inside, inside])


def test_an_image_is_mirrored_at_its_edges_as_often_as_needed():
    x = torch.arange(6.0).reshape(1, 2, 3)
    expected = np.pad(x.numpy(), ((0, 0), (0, 5), (0, 7)), mode="symmetric")
    assert np.array_equal(mirrored(x, 7, 10).numpy(), expected)
    assert mirrored(x, 2, 3) is x
    assert torch.equal(mirrored(x[:, :1, :1], 2, 2), torch.zeros(1, 2, 2))


# -------------------------------------------------------------------------------------------------------- photographs


def odd_pictures() -> dict[str, Image.Image]:
    """One picture a colour mode, each of another size."""
    random = np.random.default_rng(0)
    rgb = Image.fromarray(random.integers(0, 256, (20, 30, 3), dtype=np.uint8))
    return {
        "b/rgb.png": rgb,
        "a.png": rgb.convert("L").resize((9, 40)),
        "c.png": Image.new("RGBA", (12, 12), (255, 0, 0, 0)),
        "d.gif": rgb.convert("P"),
        "e.png": Image.fromarray(np.full((10, 10), 65535, np.uint16)),
        "f.jpg": rgb.convert("CMYK"),
    }


@pytest.fixture(params=["folder", "tar"])
def source(request, tmp_path) -> Path:
    """The odd pictures, and a text file, as a folder or as a tar archive."""
    root = tmp_path / "set"
    for name, picture in odd_pictures().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture.save(root / name)
    (root / "labels.csv").write_text("a.png,3\n")
    if request.param == "folder":
        return root
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        archive.add(root, arcname=".")
    return tmp_path / "set.tar"


def test_folders_and_archives_of_odd_images_are_read(source):
    found = photos.read(source)
    shapes = [(3, 40, 9), (3, 20, 30), (3, 12, 12), (3, 20, 30), (3, 10, 10), (3, 20, 30)]
    assert [tuple(pixels.shape) for pixels in found.pixels] == shapes
    assert all(pixels.dtype == torch.uint8 for pixels in found.pixels)
    assert torch.equal(found.pixels[1].permute(1, 2, 0), torch.from_numpy(np.array(odd_pictures()["b/rgb.png"])))
    assert (found.pixels[2] == 255).all()  # transparency is laid over white
    assert (found.pixels[4] == 255).all()


def test_large_photographs_are_reduced(tmp_path):
    Image.new("RGB", (600, 300)).save(tmp_path / "wide.png")
    assert photos.read(tmp_path).pixels[0].shape == (3, 256, 512)


def test_what_holds_no_photographs_is_refused(tmp_path):
    with pytest.raises(InputError, match="There is no folder or tar"):
        photos.read(tmp_path / "absent")
    with pytest.raises(InputError, match="holds no image"):
        photos.read(tmp_path)
    (tmp_path / "no.tar").write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"no\.tar is damaged or no tar archive"):
        photos.read(tmp_path / "no.tar")
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"broken\.png is not an image"):
        photos.read(tmp_path)


def test_a_damaged_member_of_an_archive_is_named(tmp_path):
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        info = tarfile.TarInfo("x/cut.png")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"\x89PNG"))
    with pytest.raises(InputError, match=r"x/cut\.png"):
        photos.read(tmp_path / "set.tar")


def numbered(height: int, width: int) -> Tensor:
    """An image whose channels hold the row, the column and zero."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows, columns, torch.zeros_like(rows)]).to(torch.uint8)


def test_crops_are_contiguous_squares_from_anywhere():
    found = Photos((numbered(20, 30),)).crops(torch.zeros(400, dtype=torch.int64), 8, 1.0, generator(0, 0))
    assert found.shape == (400, 3, 8, 8)
    corners = found[:, :2, :1, :1]
    assert torch.equal(found[:, :2], corners + numbered(8, 8)[:2].float())
    assert corners.amin((0, 2, 3)).tolist() == [0, 0]
    assert corners.amax((0, 2, 3)).tolist() == [12, 22]


def test_half_of_the_crops_are_reduced_from_larger_squares():
    found = Photos((numbered(40, 40),)).crops(torch.zeros(400, dtype=torch.int64), 8, 1.5, generator(0, 0))
    steps = (found[:, 1, 4, 4] - found[:, 1, 4, 3]).round(decimals=3)
    assert 150 < (steps > 1.01).sum() < 250
    assert steps.min() == 1
    assert 1.4 < steps.max() <= 1.5


def test_photographs_smaller_than_the_crop_are_mirrored():
    picture = numbered(3, 5)
    found = Photos((picture,)).crops(torch.zeros(1, dtype=torch.int64), 8, 1.25, generator(0, 0))
    assert torch.equal(found[0], mirrored(picture, 8, 8).float())
    assert torch.equal(Photos((numbered(9, 4),)).squares(4)[0], numbered(9, 4)[:, 3:7])


# ----------------------------------------------------------------------------------------------------------- training


def dataset(count: int = 10) -> Photos:
    sizes = [(20 + i, 40 - i) for i in range(count)]
    return Photos(
        tuple(torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator(1, *size)) for size in sizes)
    )


CONFIG = ScoreConfig(examples=48, batch=4, crop=16, rate=1e-3, decay=0.9, weighting="relative", threads=1)


def test_the_batch_of_a_step_depends_on_seed_and_step_alone():
    first, again, later = (drawn(dataset(), CONFIG, step) for step in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], later[0])
    assert first[0].shape == (4, 3, 16, 16)
    assert first[0].abs().max() <= 1


def test_an_interrupted_training_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    def trained(folder: Path | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return train_score(PhotoUNet(widths=(8, 8), blocks=(1, 1), embedding=8), dataset(), CONFIG, None, folder)

    whole, crops, seen = trained(None), Photos.crops, []

    def interrupt(self, *arguments):
        seen.append(1)
        if len(seen) == 7:
            signal.raise_signal(signal.SIGINT)
        return crops(self, *arguments)

    monkeypatch.setattr(Photos, "crops", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path)
    resumed = trained(tmp_path)
    assert len(seen) == 12
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_a_training_can_start_with_the_weights_of_another(tmp_path):
    def trained(folder: str, **changes: object) -> dict[str, Tensor]:
        torch.manual_seed(len(folder))
        model = PhotoUNet(widths=(8, 8), blocks=(1, 1), embedding=8)
        return train_score(model, dataset(), replace(CONFIG, **changes), None, tmp_path / folder)

    first = trained("one")
    second = trained("second", start=str(tmp_path / "one"), rate=0.0)
    assert all(torch.allclose(first[key], second[key]) for key in first)
    with pytest.raises(InputError, match="begun with another start"):
        trained("second", rate=0.0)
    with pytest.raises(InputError, match="to start with"):
        trained("third", start=str(tmp_path / "absent"))


def test_a_deeper_network_starts_as_an_embedded_one(tmp_path):
    still = replace(CONFIG, start="photos-small", rate=0.0, examples=4)
    deeper = PhotoUNet(blocks=(3, 4, 3))
    deeper.load_state_dict(train_score(deeper, dataset(), still, None, tmp_path))
    x, t = torch.rand(1, 3, 24, 24), torch.tensor([0.1], dtype=torch.float64)
    assert torch.allclose(deeper.eval().epsilon(x, t), load_score("photos-small").epsilon(x, t), atol=1e-4)
    with pytest.raises(InputError, match="of shape"):
        train_score(PhotoUNet(widths=(8, 8, 8)), dataset(), still, None, tmp_path / "narrow")


def test_other_photographs_do_not_continue_a_training(tmp_path):
    model = PhotoUNet(widths=(8, 8), blocks=(1, 1), embedding=8)
    train_score(model, dataset(), CONFIG, None, tmp_path)
    with pytest.raises(InputError, match="begun with another data"):
        train_score(model, dataset(9), CONFIG, None, tmp_path)


def test_the_command_trains_on_a_folder_or_an_archive(source, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "HELD_OUT_PHOTOS", 2)
    options = ["--examples", "4", "--batch", "2", "--crop", "16", "--threads", "1"]
    command = ["train", "score", "--recipe", "photos-small", *options, "--data", str(source), "--out", str(tmp_path)]
    found = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert found.exit_code == 0
    assert "sha256" in found.output
    assert (tmp_path / "photos-small.safetensors").is_file()
    assert "step 2/2 ε-error" in (tmp_path / "log.txt").read_text()


def test_the_recipe_wants_photographs(tmp_path):
    with pytest.raises(InputError, match="give a folder or a tar archive"):
        recipes.find("photos-small").read(None)
    with pytest.raises(InputError, match="crop >= 1"):
        follow("photos-small", dataset(), None, crop=0)


# ------------------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize(("name", "sigma"), [("china.jpg", 25), ("flower.jpg", 43), ("china.jpg", 66)])
def test_the_embedded_weights_denoise_better_than_any_gaussian_blur(name, sigma):
    """On scikit-learn's photographs, which no training saw: better by 1.5 dB than the best of twenty blurs."""
    sklearn = pytest.importorskip("sklearn.datasets")
    ndimage = pytest.importorskip("scipy.ndimage")
    denoising = pytest.importorskip("denoising", reason="needs benchmarks/")
    picture = resize(Image.fromarray(sklearn.load_sample_image(name)), 200)
    clean = to_tensor(picture)[:, :, 20:211]  # odd on purpose
    noisy = clean + sigma / 255 * torch.randn(clean.shape, generator=generator(0, sigma))
    blurred = [ndimage.gaussian_filter(noisy.numpy(), (0, width / 8, width / 8)) for width in range(1, 21)]
    best = max(denoising.psnr(torch.from_numpy(each), clean) for each in blurred)
    model = load_score("photos-small")
    assert denoising.psnr(denoising.one_call(model)(noisy, sigma / 255), clean) > best + 1.5

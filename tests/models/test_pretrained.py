"""Pretrained weights: files of torchvision, timm, PSA and SEAM fit by name; every other file is refused by name."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import mcis.models.torchvision_ops  # noqa: F401  (before timm, which imports torchvision)

import timm  # isort: skip

from mcis.datasets.errors import UserError
from mcis.models.backbones import Backbone, resnet50, small, vgg16
from mcis.models.pretrained import BUNDLED_BACKBONES, bundled_weights, load_pretrained
from mcis.models.timm_backbones import build_timm_backbone

VIT = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def of_50() -> Backbone:
    """A ResNet-50; tests leave its weights as they are."""
    torch.manual_seed(0)
    return resnet50()


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def close(got: Tensor, expected: Tensor) -> None:
    """Equal to rounding, measured by the largest value: sums of thousands of terms cancel in single entries."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def state_of(backbone: Backbone) -> dict[str, Tensor]:
    return dict(backbone.body.state_dict())


# --- files that fit


def saved(state: Any, path: Path) -> Path:
    torch.save(state, path)
    return path


def test_resnet_takes_torchvisions_weights_and_computes_the_same(tmp_path: Path) -> None:
    """Every fourth position of the dilated network is torchvision's own, of stride 32, its batch norm in eval mode."""
    from torchvision.models import resnet50 as torchvision_resnet50

    torch.manual_seed(1)
    original = torchvision_resnet50(weights=None).eval()
    for norm in (m for m in original.modules() if isinstance(m, nn.BatchNorm2d)):
        for statistic in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            assert statistic is not None
            nn.init.uniform_(statistic, 0.4, 0.8)
    backbone = resnet50()
    load_pretrained(backbone, saved(original.state_dict(), tmp_path / "resnet50.pth"))
    for layer, dilation in (("layer3", 1), ("layer4", 2)):  # a first block has there that of the stage before
        conv = backbone.body.get_submodule(f"{layer}.0.conv2")
        assert isinstance(conv, nn.Conv2d)
        conv.dilation = conv.padding = (dilation, dilation)
    pictures = images(1, 3, 70, 96)
    with torch.inference_mode():
        x = original.maxpool(original.relu(original.bn1(original.conv1(pictures))))
        x = original.layer4(original.layer3(original.layer2(original.layer1(x))))
        assert x.shape == (1, 2048, 3, 3)
        close(backbone(pictures)[:, :, ::4, ::4], x)


def test_vgg16_takes_torchvisions_convolutions_and_keeps_its_own(tmp_path: Path) -> None:
    from torchvision.models.vgg import cfgs, make_layers

    features = make_layers(cfgs["D"], batch_norm=False)
    state = {f"features.{key}": value for key, value in features.state_dict().items()}
    backbone = vgg16()
    extra = {key: value.clone() for key, value in backbone.body.state_dict().items() if key.startswith("extra")}
    load_pretrained(backbone, saved(state | {"classifier.6.bias": torch.zeros(1000)}, tmp_path / "vgg16.pth"))
    assert len(state) == 26
    assert len(extra) == 6
    assert backbone.body.state_dict().keys() == (state | extra).keys()
    for key, value in (state | extra).items():
        assert torch.equal(backbone.body.state_dict()[key], value), key


def saved_by_safetensors(state: dict[str, Tensor], path: Path) -> Path:
    safetensors.torch.save_file(state, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


@pytest.mark.parametrize("save", [saved, saved_by_safetensors])
@pytest.mark.parametrize("name", ["resnet18", VIT])
def test_weights_of_timm_fit(tmp_path: Path, name: str, save: Callable[[dict[str, Tensor], Path], Path]) -> None:
    """The file of the whole network, classification layers included."""
    torch.manual_seed(1)
    original = timm.create_model(name).eval()
    backbone = build_timm_backbone(name, stride=32 if name == "resnet18" else None)
    load_pretrained(backbone, save(original.state_dict(), tmp_path / "weights.pth"))
    pictures = images(1, 3, 224, 224)
    with torch.inference_mode():
        features = original.forward_features(pictures)  # type: ignore[operator]
        if name == VIT:
            features = features[:, 1:].transpose(1, 2).unflatten(2, (14, 14))
        close(backbone(pictures), features)


@pytest.mark.parametrize(
    ("name", "tensors", "last"), list(zip(BUNDLED_BACKBONES, (296, 386, 386), (15, 20, 20), strict=True))
)
def test_bundled_weights_are_those_of_an_efficientnet_lite(name: str, tensors: int, last: int) -> None:
    """Each tensor stands behind timm's name of it."""
    backbone, path = build_timm_backbone(name.removeprefix("timm/")), bundled_weights(name)
    load_pretrained(backbone, path)
    state, got = torch.load(path, weights_only=True), backbone.body.state_dict()
    assert len(state) == tensors
    assert torch.equal(got["conv_stem.weight"], state["_conv_stem.weight"])
    assert torch.equal(got["blocks.0.0.bn1.running_var"], state["_blocks.0._bn1.running_var"])
    assert torch.equal(got["blocks.6.0.conv_pwl.weight"], state[f"_blocks.{last}._project_conv.weight"])


# --- files that do not


class Evil:
    """What a hostile file would hold: reading it by pickle makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.pth", b"", "cannot be read as weights"),
        ("text.pth", b"not weights at all", "cannot be read as weights"),
        ("text.safetensors", b"not weights at all", "cannot be read as weights"),
        ("damaged.pth", b"PK\x03\x04 a damaged archive", "cannot be read as weights"),
        ("pickle.pth", pickle.dumps({"conv1.weight": 1}, 2), "cannot be read as weights"),
        ("list.pth", [torch.zeros(1)], "contains no state_dict"),
        ("nested.pth", {"state_dict": {"conv1": {"weight": torch.zeros(1)}}}, "contains no state_dict"),
        ("tensor.pth", torch.zeros(3), "contains no state_dict"),
        ("nothing.pth", {}, "265 missing tensors, 0 of a different shape"),
        ("absent.pth", None, "no weights file"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_a_file_without_weights_is_told(tmp_path: Path, of_50: Backbone, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        saved(content, path)
    with pytest.raises(UserError, match=message) as raised:
        load_pretrained(of_50, path)
    assert str(path) in raised.value.found
    assert "state_dict file" in raised.value.remedy


def of_another_shape(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"conv1.weight": torch.zeros(64, 4, 7, 7)}


def of_101(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """It has every tensor of the shallower network, of the same shape."""
    from torchvision.models import resnet101

    return dict(resnet101(weights=None).state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_another_shape, r"0 missing tensors, 1 of a different shape, 0 unexpected \(conv1.weight\)"),
        (of_101, r"0 missing tensors, 0 of a different shape, 255 unexpected \(layer3\.10\."),
        (lambda state: {"fc.weight": torch.zeros(2)}, "265 missing tensors, 0 of a different shape, 0 unexpected"),
        (
            lambda state: {k: v for k, v in of_another_shape(state).items() if k != "bn1.weight"},
            r"1 missing tensors, 1 of a different shape, 0 unexpected \(bn1.weight, conv1",
        ),
    ],
    ids=["another shape", "deeper", "other tensors", "both"],
)
def test_another_architecture_is_refused_and_changes_nothing(
    tmp_path: Path, of_50: Backbone, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    before = state_of(of_50)["layer3.0.conv1.weight"].clone()
    path = saved(change(state_of(of_50) | {"layer3.0.conv1.weight": before + 1}), tmp_path / "other.pth")
    with pytest.raises(UserError, match=message):
        load_pretrained(of_50, path)
    assert torch.equal(state_of(of_50)["layer3.0.conv1.weight"], before)


def test_a_backbone_without_pretrained_layers_refuses_weights(tmp_path: Path) -> None:
    """It would use nothing of the file."""
    backbone = small()
    with pytest.raises(UserError, match="whose layers are all new"):
        load_pretrained(backbone, saved(state_of(backbone), tmp_path / "small.pth"))


def test_a_hostile_file_runs_nothing(tmp_path: Path, of_50: Backbone) -> None:
    trace, path = tmp_path / "trace", tmp_path / "evil.pth"
    saved({"conv1.weight": Evil(trace)}, path)
    with pytest.raises(UserError, match="cannot be read as weights"):
        load_pretrained(of_50, path)
    assert not trace.exists()
    torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
    assert trace.exists(), "the file was not hostile after all"

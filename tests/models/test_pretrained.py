"""Tests of pretrained weights: files of torchvision and timm load, and every other file is an error that names it."""

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
def backbone_50() -> Backbone:
    """Returns a ResNet-50. Tests must not change its weights."""
    torch.manual_seed(0)
    return resnet50()


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compares up to rounding relative to the largest value: in single entries, sums of thousands of terms cancel."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def body_state(backbone: Backbone) -> dict[str, Tensor]:
    return dict(backbone.body.state_dict())


def save(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


def save_safetensors(state: dict[str, Tensor], path: Path) -> Path:
    path = path.with_suffix(".safetensors")
    safetensors.torch.save_file(state, path)
    return path


# --- files that fit


def test_resnet_with_torchvisions_weights_computes_the_same(tmp_path: Path) -> None:
    """Every fourth position of the dilated network is a position of torchvision's network with stride 32."""
    from torchvision.models import resnet50 as torchvision_resnet50

    torch.manual_seed(1)
    original = torchvision_resnet50(weights=None).eval()
    for norm in (m for m in original.modules() if isinstance(m, nn.BatchNorm2d)):
        for statistic in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            assert statistic is not None
            nn.init.uniform_(statistic, 0.4, 0.8)
    backbone = resnet50()
    load_pretrained(backbone, save(original.state_dict(), tmp_path / "resnet50.pth"))
    for layer, dilation in (("layer3", 1), ("layer4", 2)):  # torchvision's dilation in the first blocks
        conv = backbone.body.get_submodule(f"{layer}.0.conv2")
        assert isinstance(conv, nn.Conv2d)
        conv.dilation = (dilation, dilation)
        conv.padding = (dilation, dilation)
    pictures = images(1, 3, 70, 96)
    with torch.inference_mode():
        x = original.maxpool(original.relu(original.bn1(original.conv1(pictures))))
        x = original.layer4(original.layer3(original.layer2(original.layer1(x))))
        assert x.shape == (1, 2048, 3, 3)
        assert_close(backbone(pictures)[:, :, ::4, ::4], x)


def test_vgg16_loads_torchvisions_convolutions_and_keeps_its_new_layers(tmp_path: Path) -> None:
    from torchvision.models.vgg import cfgs, make_layers

    features = make_layers(cfgs["D"], batch_norm=False)
    state = {f"features.{key}": value for key, value in features.state_dict().items()}
    backbone = vgg16()
    extra = {key: value.clone() for key, value in backbone.body.state_dict().items() if key.startswith("extra")}
    load_pretrained(backbone, save(state | {"classifier.6.bias": torch.zeros(1000)}, tmp_path / "vgg16.pth"))
    assert len(state) == 26
    assert len(extra) == 6
    assert backbone.body.state_dict().keys() == (state | extra).keys()
    for key, value in (state | extra).items():
        assert torch.equal(backbone.body.state_dict()[key], value), key


@pytest.mark.parametrize("save_state", [save, save_safetensors])
@pytest.mark.parametrize("name", ["resnet18", VIT])
def test_weights_of_timm_load(tmp_path: Path, name: str, save_state: Callable[[dict[str, Tensor], Path], Path]) -> None:
    """The file contains the complete network, including the classification layers."""
    torch.manual_seed(1)
    original = timm.create_model(name).eval()
    backbone = build_timm_backbone(name, stride=32 if name == "resnet18" else None)
    load_pretrained(backbone, save_state(original.state_dict(), tmp_path / "weights.pth"))
    pictures = images(1, 3, 224, 224)
    with torch.inference_mode():
        features = original.forward_features(pictures)  # type: ignore[operator]
        if name == VIT:
            features = features[:, 1:].transpose(1, 2).unflatten(2, (14, 14))
        assert_close(backbone(pictures), features)


@pytest.mark.parametrize(
    ("name", "tensors", "last"), list(zip(BUNDLED_BACKBONES, (296, 386, 386), (15, 20, 20), strict=True))
)
def test_bundled_weights_load(name: str, tensors: int, last: int) -> None:
    """Each tensor gets timm's name."""
    backbone = build_timm_backbone(name.removeprefix("timm/"))
    path = bundled_weights(name)
    load_pretrained(backbone, path)
    state = torch.load(path, weights_only=True)
    loaded = backbone.body.state_dict()
    assert len(state) == tensors
    assert torch.equal(loaded["conv_stem.weight"], state["_conv_stem.weight"])
    assert torch.equal(loaded["blocks.0.0.bn1.running_var"], state["_blocks.0._bn1.running_var"])
    assert torch.equal(loaded["blocks.6.0.conv_pwl.weight"], state[f"_blocks.{last}._project_conv.weight"])


# --- files that do not fit


class Malicious:
    """Content of a malicious file: unpickling it creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def file_name_only(value: Any) -> str:
    """Names a test case after its file."""
    return value if isinstance(value, str) and "." in value else ""


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
    ids=file_name_only,
)
def test_a_file_without_weights_is_an_error(
    tmp_path: Path, backbone_50: Backbone, name: str, content: Any, message: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save(content, path)
    with pytest.raises(UserError, match=message) as raised:
        load_pretrained(backbone_50, path)
    assert str(path) in raised.value.found
    assert "state_dict file" in raised.value.remedy


def with_different_shape(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"conv1.weight": torch.zeros(64, 4, 7, 7)}


def with_different_shape_and_missing(state: dict[str, Tensor]) -> dict[str, Tensor]:
    changed = with_different_shape(state)
    del changed["bn1.weight"]
    return changed


def resnet101_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state that has every tensor of the shallower network, with the same shapes."""
    from torchvision.models import resnet101

    return dict(resnet101(weights=None).state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_different_shape, r"0 missing tensors, 1 of a different shape, 0 unexpected \(conv1.weight\)"),
        (resnet101_state, r"0 missing tensors, 0 of a different shape, 255 unexpected \(layer3\.10\."),
        (lambda state: {"fc.weight": torch.zeros(2)}, "265 missing tensors, 0 of a different shape, 0 unexpected"),
        (
            with_different_shape_and_missing,
            r"1 missing tensors, 1 of a different shape, 0 unexpected \(bn1.weight, conv1",
        ),
    ],
    ids=["different shape", "deeper network", "other tensors", "different shape and missing"],
)
def test_another_architecture_is_an_error_and_changes_nothing(
    tmp_path: Path, backbone_50: Backbone, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    before = body_state(backbone_50)["layer3.0.conv1.weight"].clone()
    path = save(change(body_state(backbone_50) | {"layer3.0.conv1.weight": before + 1}), tmp_path / "other.pth")
    with pytest.raises(UserError, match=message):
        load_pretrained(backbone_50, path)
    assert torch.equal(body_state(backbone_50)["layer3.0.conv1.weight"], before)


def test_weights_for_a_backbone_of_new_layers_are_an_error(tmp_path: Path) -> None:
    """No tensor of the file would be used."""
    backbone = small()
    with pytest.raises(UserError, match="whose layers are all new"):
        load_pretrained(backbone, save(body_state(backbone), tmp_path / "small.pth"))


def test_code_in_a_malicious_file_does_not_run(tmp_path: Path, backbone_50: Backbone) -> None:
    trace = tmp_path / "trace"
    path = tmp_path / "malicious.pth"
    save({"conv1.weight": Malicious(trace)}, path)
    with pytest.raises(UserError, match="cannot be read as weights"):
        load_pretrained(backbone_50, path)
    assert not trace.exists()
    torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
    assert trace.exists(), "the file is malicious"

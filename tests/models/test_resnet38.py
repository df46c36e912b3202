"""Tests of Wide ResNet-38: names and shapes in public weights files, and outputs compared with a network by hand."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mcis.models.backbones import Backbone, Layer, resnet38
from mcis.models.dropout import seed_dropout
from mcis.models.pretrained import load_pretrained

Shapes = dict[str, tuple[int, ...]]
BLOCKS = {
    "b2": (64, 128, 128),
    "b2_1": (128, 128, 128),
    "b2_2": (128, 128, 128),
    "b3": (128, 256, 256),
    "b3_1": (256, 256, 256),
    "b3_2": (256, 256, 256),
    "b4": (256, 512, 512),
    "b4_1": (512, 512, 512),
    "b4_2": (512, 512, 512),
    "b4_3": (512, 512, 512),
    "b4_4": (512, 512, 512),
    "b4_5": (512, 512, 512),
    "b5": (512, 512, 1024),
    "b5_1": (1024, 512, 1024),
    "b5_2": (1024, 512, 1024),
}
"""Input, middle and output channels of the blocks of two 3x3 convolutions."""
DILATIONS = {"b5": (1, 2), "b5_1": (2, 2), "b5_2": (2, 2), "b6": (1, 4), "b7": (1, 4)}
"""Dilations of the first two convolutions of a block. Other blocks have none."""
BOTTLENECKS = {"b6": (1024, 512, 1024, 2048), "b7": (2048, 1024, 2048, 4096)}
"""Input, middle and output channels of the blocks of a 1x1, a 3x3 and a 1x1 convolution."""


def norm_shapes(name: str, channels: int) -> Shapes:
    return {f"{name}.{part}": (channels,) for part in ("weight", "bias", "running_mean", "running_var")}


def imagenet_shapes() -> Shapes:
    """Returns the tensors of the ImageNet file, ilsvrc-cls_rna-a1_cls1000_ep-0001, under the public code's names."""
    shapes: Shapes = {"conv1a.weight": (64, 3, 3, 3)}
    for block, (inputs, middle, outputs) in BLOCKS.items():
        shapes |= norm_shapes(f"{block}.bn_branch2a", inputs) | norm_shapes(f"{block}.bn_branch2b1", middle)
        shapes[f"{block}.conv_branch2a.weight"] = (middle, inputs, 3, 3)
        shapes[f"{block}.conv_branch2b1.weight"] = (outputs, middle, 3, 3)
        if "_" not in block:  # the first block of a stage
            shapes[f"{block}.conv_branch1.weight"] = (outputs, inputs, 1, 1)
    for block, (inputs, first, second, outputs) in BOTTLENECKS.items():
        shapes |= norm_shapes(f"{block}.bn_branch2a", inputs)
        shapes |= norm_shapes(f"{block}.bn_branch2b1", first) | norm_shapes(f"{block}.bn_branch2b2", second)
        shapes[f"{block}.conv_branch2a.weight"] = (first, inputs, 1, 1)
        shapes[f"{block}.conv_branch2b1.weight"] = (second, first, 3, 3)
        shapes[f"{block}.conv_branch2b2.weight"] = (outputs, second, 1, 1)
        shapes[f"{block}.conv_branch1.weight"] = (outputs, inputs, 1, 1)
    return shapes | norm_shapes("bn7", 4096)


def trained_shapes(**layers: tuple[int, int]) -> Shapes:
    """Returns the tensors of a network trained with torch: ImageNet's, batch counters and additional 1x1 layers.

    Args:
        layers: Output and input channels of the additional layers.
    """
    shapes = imagenet_shapes()
    norms = [name.removesuffix(".running_var") for name in shapes if name.endswith(".running_var")]
    counters: Shapes = {f"{norm}.num_batches_tracked": () for norm in norms}
    additional = {f"{name}.weight": (*channels, 1, 1) for name, channels in layers.items()}
    return shapes | counters | additional


FILES = {
    "ImageNet": imagenet_shapes(),
    "resnet38_cls.pth": trained_shapes(fc8=(20, 4096)),
    "resnet38_aff.pth": trained_shapes(f8_3=(64, 512), f8_4=(128, 1024), f8_5=(256, 4096), f9=(448, 448)),
    "resnet38_SEAM.pth": trained_shapes(fc8=(21, 4096), f8_3=(64, 512), f8_4=(128, 1024), f9=(192, 195)),
}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.manual_seed(0)
    return resnet38()


def save_constants(shapes: Mapping[str, tuple[int, ...]], path: Path) -> Path:
    """Writes a small file of tensors with these shapes. All entries of a tensor share one value in memory."""
    state = {}
    for number, (name, shape) in enumerate(shapes.items()):
        state[name] = torch.full((), 0.01 * (number % 7)).expand(shape)
    torch.save(state, path)
    return path


def test_tensors_have_the_public_names_and_shapes(backbone: Backbone) -> None:
    assert {name: tuple(t.shape) for name, t in backbone.body.state_dict().items()} == imagenet_shapes()


def test_norms_are_frozen(backbone: Backbone) -> None:
    assert not [name for name, _ in backbone.named_parameters() if ".bn" in name]


def test_there_are_105_million_parameters(backbone: Backbone) -> None:
    assert round(sum(parameter.numel() for parameter in backbone.parameters()) / 1e6) == 105


@pytest.mark.parametrize("name", FILES)
def test_public_files_load(backbone: Backbone, tmp_path: Path, name: str) -> None:
    path = save_constants(FILES[name], tmp_path / "weights.pth")
    load_pretrained(backbone, path)
    content = torch.load(path, weights_only=True)
    assert all(torch.equal(tensor, content[key]) for key, tensor in backbone.body.state_dict().items())


def outputs_by_hand(state: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """Computes the features and the two layers of pixel correlation with convolutions and norms only."""

    def norm_relu(name: str, x: Tensor) -> Tensor:
        keys = ("running_mean", "running_var", "weight", "bias")
        mean, variance, weight, bias = (state[f"{name}.{key}"] for key in keys)
        return torch.relu(functional.batch_norm(x, mean, variance, weight, bias))

    def conv(name: str, x: Tensor, stride: int = 1, dilation: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        return functional.conv2d(x, weight, stride=stride, padding=dilation * (weight.shape[2] // 2), dilation=dilation)

    inputs = {}
    x = conv("conv1a", x)
    for block in (*BLOCKS, *BOTTLENECKS):
        stride = 2 if block in ("b2", "b3", "b4") else 1
        first_dilation, dilation = DILATIONS.get(block, (1, 1))
        inputs[block] = norm_relu(f"{block}.bn_branch2a", x)
        shortcut = conv(f"{block}.conv_branch1", inputs[block], stride) if "_" not in block else x
        y = conv(f"{block}.conv_branch2a", inputs[block], stride, first_dilation)
        y = norm_relu(f"{block}.bn_branch2b1", y)
        y = conv(f"{block}.conv_branch2b1", y, 1, dilation)
        if block in BOTTLENECKS:
            y = conv(f"{block}.conv_branch2b2", norm_relu(f"{block}.bn_branch2b2", y))
        x = shortcut + y
    return {"features": norm_relu("bn7", x), "conv4": inputs["b5"], "conv5": inputs["b6"]}


@pytest.fixture
def network() -> Backbone:
    """Returns a network whose norms change values."""
    torch.manual_seed(1)
    backbone = resnet38().eval()
    with torch.inference_mode():
        for name, tensor in backbone.body.state_dict().items():
            if "running" in name or ".bn" in name or name.startswith("bn7"):
                tensor.uniform_(0.4, 0.8)
    return backbone


def test_the_network_computes_what_the_public_code_computes(network: Backbone) -> None:
    pictures = torch.randn(1, 3, 40, 56)
    with torch.inference_mode():
        expected = outputs_by_hand(network.body.state_dict(), pictures)
        with network.capture_outputs(*network.correlation_layers) as layers:
            features = network(pictures)
    conv4, conv5 = layers
    assert features.shape == (1, 4096, 5, 7)
    assert conv4.shape == (1, 512, 5, 7)
    assert conv5.shape == (1, 1024, 5, 7)
    for output, name in ((features, "features"), (conv4, "conv4"), (conv5, "conv5")):
        torch.testing.assert_close(output, expected[name], rtol=0, atol=1e-5 * expected[name].abs().max().item())


def test_training_drops_half_of_the_feature_channels(network: Backbone) -> None:
    pictures = torch.randn(1, 3, 40, 56)
    seed_dropout(network.train(), [5])
    with torch.inference_mode(), network.capture_outputs(Layer("bn7", 4096, network.layout)) as last:
        features = network(pictures)
    is_active = last[0].flatten(2).any(dim=2)
    is_kept = features.flatten(2).any(dim=2)
    assert is_kept[is_active].float().mean().item() == pytest.approx(0.5, abs=0.05)

"""Wide ResNet-38: names and shapes of the public files of weights, and what the network computes, composed by hand."""

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
    "b2": (64, 128, 128), "b2_1": (128, 128, 128), "b2_2": (128, 128, 128),
    "b3": (128, 256, 256), "b3_1": (256, 256, 256), "b3_2": (256, 256, 256),
    "b4": (256, 512, 512), **{f"b4_{n}": (512, 512, 512) for n in range(1, 6)},
    "b5": (512, 512, 1024), "b5_1": (1024, 512, 1024), "b5_2": (1024, 512, 1024),
}  # fmt: skip
"""Input, middle and output channels of the blocks of two 3x3 convolutions."""
BOTTLENECKS = {"b6": (1024, 512, 1024, 2048), "b7": (2048, 1024, 2048, 4096)}
"""Channels along the blocks of a 1x1, a 3x3 and a 1x1 convolution."""


def norm(name: str, channels: int) -> Shapes:
    return {f"{name}.{part}": (channels,) for part in ("weight", "bias", "running_mean", "running_var")}


def imagenet() -> Shapes:
    """The tensors of the file of ImageNet weights, ilsvrc-cls_rna-a1_cls1000_ep-0001, as the public code names them."""
    shapes: Shapes = {"conv1a.weight": (64, 3, 3, 3)}
    for block, (inputs, middle, outputs) in BLOCKS.items():
        shapes |= norm(f"{block}.bn_branch2a", inputs) | norm(f"{block}.bn_branch2b1", middle)
        shapes[f"{block}.conv_branch2a.weight"] = (middle, inputs, 3, 3)
        shapes[f"{block}.conv_branch2b1.weight"] = (outputs, middle, 3, 3)
        if "_" not in block:  # the first block of a stage
            shapes[f"{block}.conv_branch1.weight"] = (outputs, inputs, 1, 1)
    for block, (inputs, first, second, outputs) in BOTTLENECKS.items():
        shapes |= norm(f"{block}.bn_branch2a", inputs)
        shapes |= norm(f"{block}.bn_branch2b1", first) | norm(f"{block}.bn_branch2b2", second)
        shapes[f"{block}.conv_branch2a.weight"] = (first, inputs, 1, 1)
        shapes[f"{block}.conv_branch2b1.weight"] = (second, first, 3, 3)
        shapes[f"{block}.conv_branch2b2.weight"] = (outputs, second, 1, 1)
        shapes[f"{block}.conv_branch1.weight"] = (outputs, inputs, 1, 1)
    return shapes | norm("bn7", 4096)


def trained_by_torch(**layers: tuple[int, int]) -> Shapes:
    """The file of a network that torch trained: ImageNet's tensors, counters of batches, and further 1x1 layers."""
    shapes = imagenet()
    counters: Shapes = {
        name.replace("running_var", "num_batches_tracked"): () for name in shapes if name.endswith("running_var")
    }
    return shapes | counters | {f"{name}.weight": (*channels, 1, 1) for name, channels in layers.items()}


FILES = {
    "ImageNet": imagenet(),
    "resnet38_cls.pth": trained_by_torch(fc8=(20, 4096)),
    "resnet38_aff.pth": trained_by_torch(f8_3=(64, 512), f8_4=(128, 1024), f8_5=(256, 4096), f9=(448, 448)),
    "resnet38_SEAM.pth": trained_by_torch(fc8=(21, 4096), f8_3=(64, 512), f8_4=(128, 1024), f9=(192, 195)),
}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.manual_seed(0)
    return resnet38()


def saved(shapes: Mapping[str, tuple[int, ...]], path: Path) -> Path:
    """A file of tensors of one value each, of a few kilobytes whatever their shapes."""
    torch.save({name: torch.full((), 0.01 * (n % 7)).expand(s) for n, (name, s) in enumerate(shapes.items())}, path)
    return path


def test_tensors_have_the_public_names_and_shapes(backbone: Backbone) -> None:
    assert {name: tuple(t.shape) for name, t in backbone.body.state_dict().items()} == imagenet()
    parameters = dict(backbone.named_parameters())
    assert not [name for name in parameters if ".bn" in name], "norms are frozen"
    assert round(sum(p.numel() for p in parameters.values()) / 1e6) == 105


@pytest.mark.parametrize("name", FILES)
def test_public_files_load_by_name(backbone: Backbone, tmp_path: Path, name: str) -> None:
    path = saved(FILES[name], tmp_path / "weights.pth")
    load_pretrained(backbone, path)
    content = torch.load(path, weights_only=True)
    assert all(torch.equal(tensor, content[key]) for key, tensor in backbone.body.state_dict().items())


def by_hand(state: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The features and the two layers that pixel correlation compares, out of convolutions and norms alone."""

    def normed(name: str, x: Tensor) -> Tensor:
        mean, variance, weight, bias = (state[f"{name}.{p}"] for p in ("running_mean", "running_var", "weight", "bias"))
        return torch.relu(functional.batch_norm(x, mean, variance, weight, bias))

    def conv(name: str, x: Tensor, stride: int = 1, dilation: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        return functional.conv2d(x, weight, stride=stride, padding=dilation * (weight.shape[2] // 2), dilation=dilation)

    found = {}
    x = conv("conv1a", x)
    for block in (*BLOCKS, *BOTTLENECKS):
        stride = 2 if block in ("b2", "b3", "b4") else 1
        first, dilation = {"b5": (1, 2), "b5_1": (2, 2), "b5_2": (2, 2), "b6": (1, 4), "b7": (1, 4)}.get(block, (1, 1))
        y = found[block] = normed(f"{block}.bn_branch2a", x)
        beside = conv(f"{block}.conv_branch1", y, stride) if "_" not in block else x
        y = normed(f"{block}.bn_branch2b1", conv(f"{block}.conv_branch2a", y, stride, first))
        y = conv(f"{block}.conv_branch2b1", y, 1, dilation)
        if block in BOTTLENECKS:
            y = conv(f"{block}.conv_branch2b2", normed(f"{block}.bn_branch2b2", y))
        x = beside + y
    return {"features": normed("bn7", x), "conv4": found["b5"], "conv5": found["b6"]}


def test_the_network_is_the_public_codes() -> None:
    """With norms that change values; dropout is left out of evaluation and drops whole channels in training."""
    torch.manual_seed(1)
    backbone = resnet38().eval()
    with torch.inference_mode():
        for name, tensor in backbone.body.state_dict().items():
            if "running" in name or ".bn" in name or name.startswith("bn7"):
                tensor.uniform_(0.4, 0.8)
    pictures = torch.randn(1, 3, 40, 56)
    with torch.inference_mode():
        expected = by_hand(backbone.body.state_dict(), pictures)
        with backbone.capture_outputs(*backbone.correlation_layers) as middle:
            features = backbone(pictures)
        for got, name in ((features, "features"), (middle[0], "conv4"), (middle[1], "conv5")):
            torch.testing.assert_close(got, expected[name], rtol=0, atol=1e-5 * expected[name].abs().max().item())
        assert [tuple(output.shape) for output in (features, *middle)] == [
            (1, channels, 5, 7) for channels in (4096, 512, 1024)
        ]
        seed_dropout(backbone.train(), [5])
        with backbone.capture_outputs(Layer("bn7", 4096, backbone.layout)) as last:
            left = backbone(pictures).flatten(2).any(dim=2)
    assert left[last[0].flatten(2).any(dim=2)].float().mean().item() == pytest.approx(0.5, abs=0.05)

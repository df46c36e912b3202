"""Backbones: strides, structure against networks composed by hand, frozen norms, and where their positions lie."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision)
from mcis.datasets.errors import UserError
from mcis.models.backbones import IMAGENET, Backbone, resnet50, small, to_float_images
from mcis.models.dropout import seed_dropout
from mcis.models.registry import BACKBONES

WIDTHS = {
    "small": 96, "vgg16": 512, "vgg16_largefov": 512, "resnet50": 2048, "resnet101": 2048, "resnet38": 4096,
}  # fmt: skip
RESNET_BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}


@pytest.fixture(scope="module")
def built() -> dict[str, Backbone]:
    """Each backbone with its defaults, made once; tests leave their weights as they are."""
    torch.manual_seed(0)
    return {name: BACKBONES[name]() for name in WIDTHS}


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def close(got: Tensor, expected: Tensor) -> None:
    """Equal to rounding, measured by the largest value: sums of thousands of terms cancel in single entries."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


# --- images


def test_pixels_become_channels_first_in_the_unit_range() -> None:
    pixels = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).view(2, 4, 5, 3)
    unit = to_float_images(pixels)
    assert unit.dtype == torch.float32
    assert unit.shape == (2, 3, 4, 5)
    assert unit[1, 2, 3, 4].item() == pytest.approx(pixels[1, 3, 4, 2].item() / 255)
    assert to_float_images(torch.full((1, 1, 1, 3), 255, dtype=torch.uint8)).max() == 1


def test_normalizing_takes_imagenets_mean_and_deviation() -> None:
    color = torch.tensor([0.485 + 0.229, 0.456 - 0.224, 0.406 + 2 * 0.225]).view(1, 3, 1, 1).expand(2, 3, 4, 5)
    expected = torch.tensor([1.0, -1.0, 2.0]).view(1, 3, 1, 1).expand(2, 3, 4, 5)
    torch.testing.assert_close(IMAGENET(color), expected)


# --- every backbone


@pytest.mark.parametrize("name", BACKBONES)
def test_features_have_the_promised_width_and_stride(built: dict[str, Backbone], name: str) -> None:
    backbone = built[name]
    assert (backbone.channels, backbone.layout.stride) == (WIDTHS[name], 8)
    with torch.inference_mode():
        features = backbone.eval()(images(1, 3, 48, 64))
    assert features.shape == (1, WIDTHS[name], 6, 8)
    assert features.isfinite().all()
    assert (features.min() == 0) == (name != "small"), "it has no ReLU at its end"


@pytest.mark.parametrize("name", BACKBONES)
def test_an_images_features_do_not_depend_on_its_batch(built: dict[str, Backbone], name: str) -> None:
    """In training mode too, and nothing in the backbone remembers what it saw."""
    backbone = built[name].train()
    seed_dropout(backbone, range(3))
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    batch = images(3, 3, 24, 32) * torch.tensor([1.0, 5.0, 0.1]).view(3, 1, 1, 1)
    with torch.inference_mode():
        together = backbone(batch)
        for b in range(3):
            seed_dropout(backbone, [b])
            close(backbone(batch[b : b + 1])[0], together[b])
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("resnet101", "resnet38") else n for n in BACKBONES]
)
def test_a_dot_moves_with_its_pixel(name: str, dot_offsets: Callable[..., Tensor]) -> None:
    """What a dot changes is centered at its pixel, in each level: half a stride off is four to eight pixels."""
    torch.manual_seed(0)
    backbone = BACKBONES[name]().eval()
    with torch.inference_mode():
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight.fill_(1 / layer.weight[0].numel())  # a mean: drawn ones lean to a side
        layouts = [*(level.layout for level in backbone.levels), backbone.layout]
        off = dot_offsets(backbone.forward_levels, layouts, 161, 8)
    assert off.abs().max() < 1.5, f"{off.tolist()} pixels"


# --- small


def test_small_is_five_convolutions() -> None:
    backbone = small(channels=12)
    x = images(1, 3, 30, 41)
    weights = list(backbone.parameters())
    for layer, stride in enumerate((2, 2, 2, 1, 1)):
        weight, bias = weights[2 * layer : 2 * layer + 2]
        assert (bias == 0).all()
        x = functional.conv2d(x if layer == 0 else torch.relu(x), weight, bias, stride=stride, padding=1)
    close(backbone(images(1, 3, 30, 41)), x)
    assert round(sum(w.numel() for w in small().parameters()) / 1e6, 1) == 0.2


def test_small_of_stride_4_is_the_same_network_looked_at_more_finely() -> None:
    """With the same weights, every second position is the one of stride 8, borders included."""
    with pytest.raises(UserError, match="stride 16"):
        small(stride=16)
    coarse, fine = small(channels=12), small(channels=12, stride=4)
    fine.load_state_dict(coarse.state_dict())
    assert (coarse.layout.stride, fine.layout.stride) == (8, 4)
    pictures = images(2, 3, 48, 40)
    with torch.inference_mode():
        assert fine(pictures).shape == (2, 12, 12, 10)
        close(fine(pictures)[:, :, ::2, ::2], coarse(pictures))


# --- VGG-16


def vgg16_by_hand(weights: dict[str, nn.Parameter], x: Tensor, pools: Sequence[tuple[int, int, int]]) -> Tensor:
    """VGG-16's 13 convolutions, conv5 dilated by 2, each block with the pooling behind it: size, stride, padding."""
    index = 0
    for block, (layers, dilation) in enumerate([(2, 1), (2, 1), (3, 1), (3, 1), (3, 2)]):
        for _ in range(layers):
            weight, bias = weights[f"features.{index}.weight"], weights[f"features.{index}.bias"]
            x = torch.relu(functional.conv2d(x, weight, bias, padding=dilation, dilation=dilation))
            index += 2
        if block < len(pools):
            x = functional.max_pool2d(x, *pools[block])
        index += 1
    return x


def test_vgg16_is_the_recipes(built: dict[str, Backbone]) -> None:
    """Composed by hand: pool4 3x3 with stride 1, no pool5, three more convolutions with ReLU."""
    backbone = built["vgg16"]
    weights = dict(backbone.body.named_parameters())
    assert len(weights) == 2 * (13 + 3)
    pictures = images(1, 3, 40, 56)
    with torch.inference_mode():
        x = vgg16_by_hand(weights, pictures, [(2, 2, 0)] * 3 + [(3, 1, 1)])
        for layer in (0, 2, 4):
            weight, bias = weights[f"extra_convs.{layer}.weight"], weights[f"extra_convs.{layer}.bias"]
            assert weight.shape == (512, 512, 3, 3)
            assert weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
            assert (bias == 0).all()
            x = torch.relu(functional.conv2d(x, weight, bias, padding=1))
        close(backbone(pictures), x)


def test_the_segmenters_vgg16_is_deeplab_largefovs(built: dict[str, Backbone]) -> None:
    """Composed by hand: the 13 convolutions alone, all poolings 3x3."""
    backbone = built["vgg16_largefov"]
    weights = dict(backbone.body.named_parameters())
    assert len(weights) == 2 * 13
    pictures = images(1, 3, 41, 57)
    with torch.inference_mode():
        x = vgg16_by_hand(weights, pictures, [(3, 2, 1)] * 3 + [(3, 1, 1)] * 2)
        assert x.shape[2:] == (6, 8)
        close(backbone(pictures), x)
        assert backbone(images(1, 3, 321, 321)).shape == (1, 512, 41, 41)


# --- ResNet


@pytest.mark.parametrize("name", RESNET_BLOCKS)
def test_resnet_is_dilated_where_it_does_not_stride(built: dict[str, Backbone], name: str) -> None:
    """In all blocks of a stage, the first one included (RELEASED_RECIPE, "Segmentation network")."""
    layers = [getattr(built[name].body, f"layer{i}") for i in range(1, 5)]
    assert tuple(len(layer) for layer in layers) == RESNET_BLOCKS[name]
    assert [block.conv2.dilation[0] for block in layers[2]] == [2] * len(layers[2])
    assert [block.conv2.dilation[0] for block in layers[3]] == [4, 4, 4]
    assert all(block.conv2.padding == block.conv2.dilation for layer in layers for block in layer)
    assert not [m for m in built[name].modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)], "they are frozen"
    assert not [key for key, _ in built[name].named_parameters() if "bn" in key or "downsample.1" in key]


def test_resnet_of_stride_16_is_dilated_in_its_last_stage_alone() -> None:
    """With the same weights, its low level is that of stride 8, which the dilation comes behind."""
    fine, coarse = resnet50(), resnet50(stride=16)
    coarse.load_state_dict(fine.state_dict())
    assert [coarse.body.get_submodule(f"layer{n}.0.conv2").dilation[0] for n in (3, 4)] == [1, 2]  # type: ignore[index]
    pictures = images(1, 3, 65, 97)
    with torch.inference_mode():
        (low, *_, features), (expected, *_) = coarse.forward_levels(pictures), fine.forward_levels(pictures)
    assert features.shape == (1, 2048, 5, 7)
    assert torch.equal(low, expected)
    with pytest.raises(UserError, match="resnet50 with stride 4"):
        resnet50(stride=4)

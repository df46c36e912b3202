"""Tests of backbones: strides, structure compared with networks composed by hand, frozen norms, and positions."""

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

WIDTHS = {"small": 96, "vgg16": 512, "vgg16_largefov": 512, "resnet50": 2048, "resnet101": 2048, "resnet38": 4096}
RESNET_BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
SLOW = ("resnet101", "resnet38")


@pytest.fixture(scope="module")
def built() -> dict[str, Backbone]:
    """Returns each backbone with default options. Tests must not change their weights."""
    torch.manual_seed(0)
    return {name: BACKBONES[name]() for name in WIDTHS}


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compares up to rounding relative to the largest value: in single entries, sums of thousands of terms cancel."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


# --- images


def test_pixels_become_channels_first_in_the_unit_range() -> None:
    pixels = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).view(2, 4, 5, 3)
    unit = to_float_images(pixels)
    assert unit.dtype == torch.float32
    assert unit.shape == (2, 3, 4, 5)
    assert unit[1, 2, 3, 4].item() == pytest.approx(pixels[1, 3, 4, 2].item() / 255)


def test_the_largest_pixel_value_becomes_one() -> None:
    assert to_float_images(torch.full((1, 1, 1, 3), 255, dtype=torch.uint8)).max() == 1


def test_imagenet_normalization_subtracts_the_mean_and_divides_by_the_deviation() -> None:
    color = torch.tensor([0.485 + 0.229, 0.456 - 0.224, 0.406 + 2 * 0.225]).view(1, 3, 1, 1).expand(2, 3, 4, 5)
    expected = torch.tensor([1.0, -1.0, 2.0]).view(1, 3, 1, 1).expand(2, 3, 4, 5)
    torch.testing.assert_close(IMAGENET(color), expected)


# --- every backbone


@pytest.mark.parametrize("name", BACKBONES)
def test_features_have_the_declared_width_and_stride(built: dict[str, Backbone], name: str) -> None:
    backbone = built[name]
    assert backbone.channels == WIDTHS[name]
    assert backbone.layout.stride == 8
    with torch.inference_mode():
        features = backbone.eval()(images(1, 3, 48, 64))
    assert features.shape == (1, WIDTHS[name], 6, 8)
    assert features.isfinite().all()


@pytest.mark.parametrize("name", BACKBONES)
def test_all_backbones_but_small_end_with_a_relu(built: dict[str, Backbone], name: str) -> None:
    with torch.inference_mode():
        features = built[name].eval()(images(1, 3, 48, 64))
    assert (features.min() == 0) == (name != "small")


@pytest.mark.parametrize("name", BACKBONES)
def test_features_of_an_image_do_not_depend_on_its_batch(built: dict[str, Backbone], name: str) -> None:
    """Also in training mode, and a forward pass does not change the state."""
    backbone = built[name].train()
    state_before = {key: value.clone() for key, value in backbone.state_dict().items()}
    batch = images(3, 3, 24, 32) * torch.tensor([1.0, 5.0, 0.1]).view(3, 1, 1, 1)
    with torch.inference_mode():
        seed_dropout(backbone, range(3))
        together = backbone(batch)
        for b in range(3):
            seed_dropout(backbone, [b])
            assert_close(backbone(batch[b : b + 1])[0], together[b])
    assert all(torch.equal(value, state_before[key]) for key, value in backbone.state_dict().items())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BACKBONES]
)
def test_the_response_to_a_dot_is_centered_at_its_pixel(name: str, dot_offsets: Callable[..., Tensor]) -> None:
    """In each level. An error of half a stride would be four to eight pixels."""
    torch.manual_seed(0)
    backbone = BACKBONES[name]().eval()
    with torch.inference_mode():
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight.fill_(1 / layer.weight[0].numel())  # random kernels are not symmetric
        layouts = [level.layout for level in backbone.levels]
        layouts.append(backbone.layout)
        offsets = dot_offsets(backbone.forward_levels, layouts, 161, 8)
    assert offsets.abs().max() < 1.5, f"{offsets.tolist()} pixels"


# --- small


def test_small_is_five_convolutions() -> None:
    backbone = small(channels=12)
    x = images(1, 3, 30, 41)
    weights = list(backbone.parameters())
    for layer, stride in enumerate((2, 2, 2, 1, 1)):
        weight, bias = weights[2 * layer : 2 * layer + 2]
        assert (bias == 0).all()
        x = functional.conv2d(x if layer == 0 else torch.relu(x), weight, bias, stride=stride, padding=1)
    assert_close(backbone(images(1, 3, 30, 41)), x)


def test_small_has_200_thousand_weights() -> None:
    assert round(sum(w.numel() for w in small().parameters()) / 1e6, 1) == 0.2


def test_every_second_position_of_small_with_stride_4_is_a_position_of_stride_8() -> None:
    """With the same weights, borders included."""
    coarse = small(channels=12)
    fine = small(channels=12, stride=4)
    fine.load_state_dict(coarse.state_dict())
    assert coarse.layout.stride == 8
    assert fine.layout.stride == 4
    pictures = images(2, 3, 48, 40)
    with torch.inference_mode():
        assert fine(pictures).shape == (2, 12, 12, 10)
        assert_close(fine(pictures)[:, :, ::2, ::2], coarse(pictures))


def test_small_refuses_other_strides() -> None:
    with pytest.raises(UserError, match="stride 16"):
        small(stride=16)


# --- VGG-16


def vgg16_by_hand(weights: dict[str, nn.Parameter], x: Tensor, pools: Sequence[tuple[int, int, int]]) -> Tensor:
    """Computes VGG-16's 13 convolutions with dilation 2 in conv5, each block followed by its pooling.

    Args:
        pools: Size, stride and padding of the poolings. Blocks without an entry have none.
    """
    index = 0
    for block, (layers, dilation) in enumerate([(2, 1), (2, 1), (3, 1), (3, 1), (3, 2)]):
        for _ in range(layers):
            weight = weights[f"features.{index}.weight"]
            bias = weights[f"features.{index}.bias"]
            x = torch.relu(functional.conv2d(x, weight, bias, padding=dilation, dilation=dilation))
            index += 2
        if block < len(pools):
            x = functional.max_pool2d(x, *pools[block])
        index += 1
    return x


def test_vgg16_computes_the_recipes_layers(built: dict[str, Backbone]) -> None:
    """Composed by hand: pool4 is 3x3 with stride 1, there is no pool5, and three more convolutions with ReLU follow."""
    backbone = built["vgg16"]
    weights = dict(backbone.body.named_parameters())
    assert len(weights) == 2 * (13 + 3)
    pictures = images(1, 3, 40, 56)
    with torch.inference_mode():
        x = vgg16_by_hand(weights, pictures, [(2, 2, 0)] * 3 + [(3, 1, 1)])
        for layer in (0, 2, 4):
            weight = weights[f"extra_convs.{layer}.weight"]
            bias = weights[f"extra_convs.{layer}.bias"]
            x = torch.relu(functional.conv2d(x, weight, bias, padding=1))
        assert_close(backbone(pictures), x)


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_vgg16_draws_the_weights_of_its_new_layers(built: dict[str, Backbone], layer: int) -> None:
    weights = dict(built["vgg16"].body.named_parameters())
    weight = weights[f"extra_convs.{layer}.weight"]
    assert weight.shape == (512, 512, 3, 3)
    assert weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
    assert (weights[f"extra_convs.{layer}.bias"] == 0).all()


def test_vgg16_largefov_computes_deeplab_largefovs_layers(built: dict[str, Backbone]) -> None:
    """Composed by hand: the 13 convolutions only, all poolings 3x3."""
    backbone = built["vgg16_largefov"]
    weights = dict(backbone.body.named_parameters())
    assert len(weights) == 2 * 13
    pictures = images(1, 3, 41, 57)
    with torch.inference_mode():
        x = vgg16_by_hand(weights, pictures, [(3, 2, 1)] * 3 + [(3, 1, 1)] * 2)
        assert x.shape[2:] == (6, 8)
        assert_close(backbone(pictures), x)


def test_vgg16_largefov_has_41_positions_for_321_pixels(built: dict[str, Backbone]) -> None:
    with torch.inference_mode():
        assert built["vgg16_largefov"](images(1, 3, 321, 321)).shape == (1, 512, 41, 41)


# --- ResNet


@pytest.mark.parametrize("name", RESNET_BLOCKS)
def test_resnet_has_dilation_instead_of_stride_in_all_blocks(built: dict[str, Backbone], name: str) -> None:
    """In the first block of a stage, too (paper-vs-code, "Segmentation network")."""
    layers = [getattr(built[name].body, f"layer{i}") for i in range(1, 5)]
    assert tuple(len(layer) for layer in layers) == RESNET_BLOCKS[name]
    assert [block.conv2.dilation[0] for block in layers[2]] == [2] * len(layers[2])
    assert [block.conv2.dilation[0] for block in layers[3]] == [4, 4, 4]
    for layer in layers:
        assert all(block.conv2.padding == block.conv2.dilation for block in layer)


@pytest.mark.parametrize("name", RESNET_BLOCKS)
def test_the_norms_of_resnet_are_frozen(built: dict[str, Backbone], name: str) -> None:
    assert not [module for module in built[name].modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert not [key for key, _ in built[name].named_parameters() if "bn" in key or "downsample.1" in key]


def test_resnet_with_stride_16_has_dilation_in_its_last_stage_only() -> None:
    """With the same weights its first level equals that of stride 8, because the dilation comes later."""
    fine = resnet50()
    coarse = resnet50(stride=16)
    coarse.load_state_dict(fine.state_dict())
    assert [coarse.body.get_submodule(f"layer{n}.0.conv2").dilation[0] for n in (3, 4)] == [1, 2]  # type: ignore[index]
    pictures = images(1, 3, 65, 97)
    with torch.inference_mode():
        level, *_, features = coarse.forward_levels(pictures)
        expected = fine.forward_levels(pictures)[0]
    assert features.shape == (1, 2048, 5, 7)
    assert torch.equal(level, expected)


def test_resnet_refuses_other_strides() -> None:
    with pytest.raises(UserError, match="resnet50 with stride 4"):
        resnet50(stride=4)

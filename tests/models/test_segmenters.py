"""Tests of segmentation networks, and of prediction compared with averages over windows, scales and flips by hand."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from mcis.datasets.errors import UserError
from mcis.models.backbones import Backbone, small
from mcis.models.dropout import seed_dropout
from mcis.models.grids import Layout
from mcis.models.registry import BACKBONES
from mcis.models.segmenters import (
    DeepLabV3,
    LargeFov,
    Pyramid,
    predict,
    restrict_to_tags,
    upsampled_labels,
    window_starts,
)
from mcis.models.timm_backbones import build_timm_backbone


def head_convolutions(model: LargeFov) -> list[nn.Conv2d]:
    """Returns the three convolutions of the head."""
    return [layer for layer in model.head if isinstance(layer, nn.Conv2d)]


def large_fov(stride: int = 8, dilation: int = 12, dropout: float = 0.0) -> LargeFov:
    """Builds a small LargeFov whose logits differ more than those of a new network."""
    torch.manual_seed(0)
    model = LargeFov(small(channels=6, stride=stride), labels=4, width=8, dilation=dilation, dropout=dropout)
    nn.init.normal_(head_convolutions(model)[-1].weight)
    return model


def deeplabv3() -> DeepLabV3:
    torch.manual_seed(0)
    return DeepLabV3(small(channels=6), labels=4, width=32, dilation=2, dropout=0.5)


def pyramid(backbone: Backbone | None = None, dilation: int = 1) -> Pyramid:
    """Builds a Pyramid whose logits differ more than those of a new network."""
    torch.manual_seed(0)
    model = Pyramid(backbone or small(channels=6), labels=4, width=8, dilation=dilation, dropout=0.0)
    last = model.last[-1]
    assert isinstance(last, nn.Conv2d)
    nn.init.normal_(last.weight)
    return model


def picture(height: int, width: int, batch: int | None = None) -> Tensor:
    shape = (3, height, width) if batch is None else (batch, 3, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(height * width))


class WindowDependent(nn.Module):
    """Logits depend on the pixel, on its place in the window and on the window's mean. Records the windows' sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        self.sizes.append((height, width))
        across = torch.linspace(0, 2, width).expand(height, width)
        down = torch.linspace(0, 1, height)[:, None].expand(height, width)
        mean = images.mean() + torch.zeros(height, width)
        return torch.stack([images[0, 0] + across, images[0, 1] - down, images[0, 2] + 3 * mean])[None]


# --- windows


@settings(max_examples=300)
@given(st.integers(1, 700), st.integers(1, 420))
def test_windows_cover_every_pixel_with_a_stride_of_at_most_two_thirds(length: int, window: int) -> None:
    starts = window_starts(length, window)
    size = min(window, length)
    stride = math.ceil(2 * window / 3)
    assert starts[0] == 0
    assert starts[-1] + size == length
    steps = [b - a for a, b in itertools.pairwise(starts)]
    assert all(1 <= step <= stride for step in steps)
    assert all(step == stride for step in steps[:-1]), "only the last window is moved back"


def test_the_recipes_windows() -> None:
    assert window_starts(750, 401) == [0, 268, 349]


@given(st.integers(1, 14), st.integers(1, 14), st.integers(1, 9))
def test_overlapping_windows_are_averaged(height: int, width: int, crop: int) -> None:
    image = picture(height, width)
    model = WindowDependent()
    probabilities = predict(model, image, crop=crop)

    total = np.zeros((3, height, width))
    count = np.zeros((height, width))
    for top in window_starts(height, crop):
        for left in window_starts(width, crop):
            window = image[None, :, top : top + crop, left : left + crop]
            with torch.inference_mode():
                part = torch.softmax(WindowDependent()(window), dim=1)[0].numpy()
            for y, x in np.ndindex(*part.shape[1:]):
                total[:, top + y, left + x] += part[:, y, x]
                count[top + y, left + x] += 1
    np.testing.assert_allclose(probabilities, total / count, atol=1e-5)
    assert set(model.sizes) == {(min(height, crop), min(width, crop))}


# --- scales and flips


def test_probabilities_are_averaged_over_scales_and_flips() -> None:
    image = picture(10, 14)
    model = WindowDependent()
    scales = (0.5, 1.0, 1.5)
    probabilities = predict(model, image, scales=scales, hflip=True)

    parts = []
    for scale in scales:
        size = (round(10 * scale), round(14 * scale))
        scaled = functional.interpolate(image[None], size=size, mode="bilinear", align_corners=False)
        original = torch.softmax(WindowDependent()(scaled), dim=1)
        flipped = torch.softmax(WindowDependent()(scaled.flip(3)), dim=1).flip(3)
        for part in (original, flipped):
            parts.append(functional.interpolate(part, size=(10, 14), mode="bilinear", align_corners=False)[0])
    torch.testing.assert_close(probabilities, torch.stack(parts).mean(dim=0))
    torch.testing.assert_close(probabilities.sum(dim=0), torch.ones(10, 14))
    assert model.sizes == [(5, 7), (5, 7), (10, 14), (10, 14), (15, 21), (15, 21)]


# --- logits of pixels


@pytest.mark.parametrize(
    "backbone", ["small", "vgg16_largefov", "resnet50", pytest.param("resnet101", marks=pytest.mark.slow)]
)  # resnet101 is resnet50 with more blocks
def test_321_pixels_have_41_positions_with_aligned_corners(backbone: str) -> None:
    """Every position is the logit of one pixel. The first and the last position are the first and the last pixel."""
    model = LargeFov(BACKBONES[backbone](), labels=3, width=4, dilation=12, dropout=0.5).eval()
    images = picture(321, 321, batch=1)
    with torch.inference_mode():
        coarse = model.head(model.backbone(images))
        fine = model(images)
    assert coarse.shape == (1, 3, 41, 41)
    aligned = functional.interpolate(coarse, size=(321, 321), mode="bilinear", align_corners=True)
    torch.testing.assert_close(fine, aligned, atol=1e-5 * aligned.abs().max().item(), rtol=0)


@pytest.mark.parametrize("size", [(24, 24), (17, 30), (1, 5)])
@pytest.mark.parametrize(
    "build",
    [lambda: large_fov(stride=4), large_fov, deeplabv3, pyramid],
    ids=["LargeFov with stride 4", "LargeFov", "DeepLabV3", "Pyramid"],
)
def test_logits_have_the_size_of_the_images(build: Callable[[], nn.Module], size: tuple[int, int]) -> None:
    assert build().eval()(picture(*size, batch=2)).shape == (2, 4, *size)


def test_images_of_other_sizes_are_padded_and_cropped_back() -> None:
    """A pixel has the logits that it has in the same image with padding on the right and at the bottom."""
    model = large_fov().eval()
    image = picture(30, 44, batch=1)
    padded = functional.pad(image, (0, 5, 0, 3))  # 33 and 49 pixels: 5 and 7 positions
    with torch.inference_mode():
        coarse = model.head(model.backbone(padded))
        expected = functional.interpolate(coarse, size=(33, 49), mode="bilinear", align_corners=True)
        torch.testing.assert_close(model(image), expected[:, :, :30, :44], atol=1e-5, rtol=0)


# --- LargeFov


def test_large_fov_draws_small_weights_for_its_last_layer_and_no_biases() -> None:
    torch.manual_seed(0)
    model = LargeFov(small(channels=6), labels=4, width=8, dilation=12, dropout=0.0)
    layers = head_convolutions(model)
    assert layers[-1].weight.std().item() == pytest.approx(0.01, rel=0.5)
    for layer in layers:
        assert layer.bias is not None
        assert not layer.bias.any()


def test_large_fov_computes_deeplab_largefovs_head() -> None:
    """Composed by hand: 3x3 with dilation, ReLU, 1x1, ReLU, 1x1 to the labels."""
    model = large_fov(dilation=3, dropout=0.5).eval()
    first, second, last = head_convolutions(model)
    assert [layer.weight.shape for layer in (first, second, last)] == [(8, 6, 3, 3), (8, 8, 1, 1), (4, 8, 1, 1)]
    for layer in (first, second, last):
        assert layer.bias is not None
        nn.init.normal_(layer.bias)
    features = picture(5, 7, batch=2).repeat(1, 2, 1, 1)
    hidden = torch.relu(functional.conv2d(features, first.weight, first.bias, padding=3, dilation=3))
    hidden = torch.relu(functional.conv2d(hidden, second.weight, second.bias))
    expected = functional.conv2d(hidden, last.weight, last.bias)
    torch.testing.assert_close(model.head(features), expected)


def test_large_fov_drops_units_in_training() -> None:
    features = picture(5, 7, batch=2).repeat(1, 2, 1, 1)
    model = large_fov(dilation=3, dropout=0.5)
    seed_dropout(model, [0, 1])
    assert not torch.allclose(model.train().head(features), model.eval().head(features))
    without_dropout = large_fov(dilation=3).train()
    torch.testing.assert_close(without_dropout.head(features), without_dropout.eval().head(features))


# --- DeepLabV3


def recipe_deeplabv3() -> DeepLabV3:
    """Builds DeepLabV3 with torchvision's options."""
    torch.manual_seed(0)
    return DeepLabV3(small(channels=6), labels=21, width=256, dilation=12, dropout=0.5).eval()


def remove_norms(network: nn.Module) -> None:
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.GroupNorm | nn.BatchNorm2d):
            network.set_submodule(name, nn.Identity())


def test_deeplabv3_has_group_norms_of_32_groups_instead_of_batch_norms() -> None:
    model = recipe_deeplabv3()
    norms = [layer for layer in model.modules() if isinstance(layer, nn.GroupNorm)]
    assert [layer.num_groups for layer in norms] == [32] * 7
    assert not [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def test_deeplabv3_computes_torchvisions_head() -> None:
    """Its tensors have the same names and shapes. Without norms on both sides it gives the same logits."""
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead

    model = recipe_deeplabv3()
    original = DeepLabHead(6, 21, (12, 24, 36)).eval()
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    state = {name: tensor for name, tensor in original.state_dict().items() if not name.endswith(statistics)}
    shapes = {name: tensor.shape for name, tensor in model.head.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in state.items()}

    model.head.load_state_dict(state)
    remove_norms(model.head)
    remove_norms(original)
    features = torch.randn(2, 6, 9, 11)
    with torch.inference_mode():
        torch.testing.assert_close(model.head(features), original(features))


def test_every_eighth_pixel_of_deeplabv3_is_a_position() -> None:
    """In images that need no padding."""
    model = deeplabv3().eval()
    images = picture(33, 49, batch=2)
    logits = model(images)
    torch.testing.assert_close(logits[:, :, ::8, ::8], model.head(model.backbone(images)), atol=1e-5, rtol=1e-4)


def test_logits_of_deeplabv3_do_not_depend_on_the_batch() -> None:
    """Also in training, where units after the pyramid are dropped."""
    model = deeplabv3()
    images = picture(24, 16, batch=3)
    seeds = [7, 8, 9]
    seed_dropout(model, seeds)
    together = model.train()(images)
    assert not torch.allclose(together, model.eval()(images))
    model.train()
    for b, seed in enumerate(seeds):
        seed_dropout(model, [seed])
        torch.testing.assert_close(model(images[b : b + 1])[0], together[b], atol=1e-6, rtol=1e-4)


# --- Pyramid


def block_by_hand(block: nn.Module, x: Tensor, dilation: int = 1) -> Tensor:
    """Computes a block of convolutions without bias, group norms and ReLUs."""
    for layer in block.children():
        if isinstance(layer, nn.Conv2d):
            padding = dilation * (layer.kernel_size[0] // 2)
            x = functional.conv2d(x, layer.weight, None, padding=padding, dilation=max(1, padding), groups=layer.groups)
        elif isinstance(layer, nn.GroupNorm):
            grouped = x.unflatten(1, (layer.num_groups, -1))
            mean = grouped.mean((2, 3, 4), keepdim=True)
            mean_square = grouped.square().mean((2, 3, 4), keepdim=True)
            x = ((grouped - mean) / (mean_square - mean.square() + layer.eps).sqrt()).flatten(1, 2)
            x = x * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)
        else:
            x = torch.relu(x)
    return x


def image_logits_by_hand(model: Pyramid, features: Tensor) -> Tensor:
    linear = model.image_head[-1]
    assert isinstance(linear, nn.Linear)
    return features.mean((2, 3)) @ linear.weight.T + linear.bias


def coarse_logits_by_hand(model: Pyramid, features: Tensor) -> Tensor:
    first, *_, second = model.coarse.children()
    assert isinstance(first, nn.Conv2d)
    assert isinstance(second, nn.Conv2d)
    hidden = torch.relu(functional.conv2d(features, first.weight, first.bias, padding=1))
    return functional.conv2d(hidden, second.weight, second.bias)


def test_every_fourth_pixel_of_a_pyramid_is_a_position_of_its_finest_level() -> None:
    """Composed by hand."""
    model = pyramid(dilation=2).eval()
    image = picture(33, 49, batch=1)
    assert [(level.layout.stride, level.channels) for level in model.finer] == [(4, 4)]
    with torch.inference_mode():
        finest, *_, features = model.backbone.forward_levels(image)
        x = block_by_hand(model.head, features, dilation=2)
        x = x + functional.conv2d(features.mean((2, 3), keepdim=True), model.whole.weight, model.whole.bias)
        assert x.shape[2:] == (5, 7)
        x = functional.interpolate(x, size=(9, 13), mode="bilinear", align_corners=True)
        x = block_by_hand(model.merge[0], torch.cat([x, block_by_hand(model.reduce[0], finest)], dim=1))

        coarse = coarse_logits_by_hand(model, features)
        logits = model.last[-1](x) + functional.interpolate(coarse, size=(9, 13), mode="bilinear", align_corners=True)
        image_logits = image_logits_by_hand(model, features)
        probabilities = torch.cat([torch.ones(1, 1), 1 / (1 + torch.exp(-image_logits))], dim=1)
        logits = logits + probabilities.log()[:, :, None, None]
        torch.testing.assert_close(model(image)[:, :, ::4, ::4], logits, atol=1e-4, rtol=1e-3)


def test_a_pyramid_returns_image_logits() -> None:
    model = pyramid(dilation=2).eval()
    image = picture(33, 49, batch=1)
    with torch.inference_mode():
        expected = image_logits_by_hand(model, model.backbone(image))
        _, image_logits = model(image, with_image_logits=True)
    torch.testing.assert_close(image_logits, expected, atol=1e-4, rtol=1e-3)


def test_a_pyramid_uses_one_level_per_stride() -> None:
    """Lite0 with stride 32 has levels with strides 4, 8 and 16. VGG-16's two levels with its features' stride are left
    out."""
    lite = pyramid(build_timm_backbone("tf_efficientnet_lite0", stride=32))
    assert [level.layout.stride for level in lite.finer] == [4, 8, 16]
    vgg = pyramid(BACKBONES["vgg16_largefov"]())
    assert [level.layout.stride for level in vgg.finer] == [4]
    with torch.inference_mode():
        assert lite.eval()(picture(65, 97, batch=1)).shape == (1, 4, 65, 97)


def prepare_for_dots(model: Pyramid) -> None:
    """Makes a dot raise activations symmetrically and everywhere: mean kernels, no norms, non-negative decoder."""
    for name, layer in list(model.named_modules()):  # norms have no positions
        if isinstance(layer, nn.GroupNorm) and not name.startswith("backbone"):
            model.set_submodule(name, nn.Identity())
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.weight.copy_(layer.weight.mean(dim=(2, 3), keepdim=True).expand_as(layer.weight))
    for layer in (*list(model.head)[1:], *model.merge.modules(), *model.last, *model.coarse):
        if isinstance(layer, nn.Conv2d):
            layer.weight.abs_()  # so that ReLUs do not cut the response off
    model.whole.weight.zero_()
    assert model.whole.bias is not None
    model.whole.bias.zero_()


@pytest.mark.parametrize("backbone", ["small", "vgg16_largefov", "timm/tf_efficientnet_lite0", "timm/convnext_atto"])
@pytest.mark.parametrize(
    "silenced", [("head.0.weight", "coarse.0.weight"), ("reduce.",)], ids=["levels only", "features only"]
)
def test_the_response_of_a_pyramid_to_a_dot_is_centered_at_its_pixel(
    backbone: str, silenced: tuple[str, ...], dot_offsets: Callable[..., Tensor]
) -> None:
    """Once through the finer levels only and once through the features only. The other path's weights are zero."""
    torch.manual_seed(0)
    if backbone.startswith("timm/"):
        built = build_timm_backbone(backbone.removeprefix("timm/"))
    else:
        built = BACKBONES[backbone]()
    model = pyramid(built).eval()
    stride = built.layout.stride
    side = 8 * stride + (1 if built.layout.offset == 0 else 0)
    with torch.inference_mode():
        prepare_for_dots(model)
        for name, parameter in model.named_parameters():
            if name.startswith(silenced):
                parameter.zero_()
        offsets = dot_offsets(lambda images: [model(images)], [Layout(1)], side, stride)
    assert offsets.abs().max() < 1.5


def test_a_backbone_without_a_finer_level_is_an_error() -> None:
    backbone = Backbone(nn.Conv2d(3, 4, 1), stage_channels=(4,), layout=Layout(1))
    with pytest.raises(UserError, match="no layer with a smaller stride") as raised:
        pyramid(backbone)
    assert "set network to" in raised.value.remedy


# --- probabilities and labels


@pytest.mark.parametrize("tags", [[], [1], [2, 0], [0, 1, 2]])
def test_probabilities_restricted_to_tags_sum_to_one(tags: list[int]) -> None:
    drawn = np.random.default_rng(0).dirichlet(np.ones(4), (5, 6)).transpose(2, 0, 1)
    probabilities = torch.from_numpy(drawn).float()
    probabilities[:, 0, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    restricted = restrict_to_tags(probabilities, tags)
    labels = [0, *sorted(tag + 1 for tag in tags)]
    other_labels = [label for label in range(4) if label not in labels]
    assert (restricted[other_labels] == 0).all()
    assert restricted[:, 0, 0].isfinite().all()
    torch.testing.assert_close(restricted.sum(dim=0), torch.ones(5, 6))
    expected = probabilities.double()[labels] / probabilities.double()[labels].sum(dim=0)
    torch.testing.assert_close(restricted[labels].double()[:, 1:], expected[:, 1:], atol=1e-6, rtol=1e-5)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.integers(4, 2000))
def test_upsampled_labels_are_the_most_probable(
    rows: int, columns: int, height: int, width: int, strip_bytes: int
) -> None:
    """In strips of any size, compared with float64 probabilities of the full size."""
    drawn = np.random.default_rng(rows * 100 + columns).dirichlet(np.full(9, 0.2), (rows, columns)).transpose(2, 0, 1)
    probabilities = torch.from_numpy(np.ascontiguousarray(drawn))
    full_size = functional.interpolate(probabilities[None], size=(height, width), mode="bilinear", align_corners=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mcis.models.segmenters.STRIP_BYTES", strip_bytes)
        labels = upsampled_labels(probabilities.float(), height, width)
    assert labels.dtype == torch.uint8
    assert labels.shape == (height, width)
    chosen = full_size[0].gather(0, labels.long()[None])[0]
    assert (full_size[0].amax(0) - chosen).max() < 1e-6

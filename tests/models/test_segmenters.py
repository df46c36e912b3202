"""The segmentation network's head, and prediction over windows, scales and mirror against averages made by hand."""

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


def convolutions(model: LargeFov) -> list[nn.Conv2d]:
    """The head's three."""
    return [layer for layer in model.head if isinstance(layer, nn.Conv2d)]


def network(stride: int = 8, dilation: int = 12, dropout: float = 0.0) -> LargeFov:
    """A small network that is surer of its labels than a fresh one."""
    torch.manual_seed(0)
    model = LargeFov(small(channels=6, stride=stride), labels=4, width=8, dilation=dilation, dropout=dropout)
    assert convolutions(model)[-1].weight.std().item() == pytest.approx(0.01, rel=0.5)
    nn.init.normal_(convolutions(model)[-1].weight)
    return model


def picture(height: int, width: int, batch: int | None = None) -> Tensor:
    shape = (3, height, width) if batch is None else (batch, 3, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(height * width))


class Windowed(nn.Module):
    """Logits that depend on a pixel, on its place in the window and on the window's mean, and count the calls."""

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
def test_windows_cover_every_pixel_with_at_most_two_thirds_between_them(length: int, crop: int) -> None:
    starts = window_starts(length, crop)
    size = min(crop, length)
    assert starts[0] == 0
    assert starts[-1] + size == length
    steps = [b - a for a, b in itertools.pairwise(starts)]
    assert all(1 <= step <= math.ceil(2 * crop / 3) for step in steps)
    assert all(step == math.ceil(2 * crop / 3) for step in steps[:-1]), "only the last window is moved back"
    assert window_starts(750, 401) == [0, 268, 349], "the recipe's"


@given(st.integers(1, 14), st.integers(1, 14), st.integers(1, 9))
def test_overlapping_windows_are_averaged(height: int, width: int, crop: int) -> None:
    image, model = picture(height, width), Windowed()
    got = predict(model, image, crop=crop)
    total, count = np.zeros((3, height, width)), np.zeros((height, width))
    for top in window_starts(height, crop):
        for left in window_starts(width, crop):
            with torch.inference_mode():
                part = torch.softmax(Windowed()(image[None, :, top : top + crop, left : left + crop]), dim=1)[0].numpy()
            for y, x in np.ndindex(*part.shape[1:]):
                total[:, top + y, left + x] += part[:, y, x]
                count[top + y, left + x] += 1
    np.testing.assert_allclose(got, total / count, atol=1e-5)
    assert set(model.sizes) == {(min(height, crop), min(width, crop))}


# --- scales and mirror


def test_scales_and_mirror_images_are_averaged_as_probabilities() -> None:
    image, model, scales = picture(10, 14), Windowed(), (0.5, 1.0, 1.5)
    got = predict(model, image, scales=scales, hflip=True)
    parts = []
    for scale in scales:
        size = (round(10 * scale), round(14 * scale))
        scaled = functional.interpolate(image[None], size=size, mode="bilinear", align_corners=False)
        for turn in (lambda t: t, lambda t: t.flip(3)):
            probabilities = turn(torch.softmax(Windowed()(turn(scaled)), dim=1))
            parts.append(functional.interpolate(probabilities, size=(10, 14), mode="bilinear", align_corners=False)[0])
    torch.testing.assert_close(got, torch.stack(parts).mean(dim=0))
    assert model.sizes == [(5, 7), (5, 7), (10, 14), (10, 14), (15, 21), (15, 21)]
    torch.testing.assert_close(got.sum(dim=0), torch.ones(10, 14))


# --- the network


@pytest.mark.parametrize(
    "backbone", ["small", "vgg16_largefov", "resnet50", pytest.param("resnet101", marks=pytest.mark.slow)]
)  # resnet101 is resnet50 with more blocks
def test_321_pixels_are_41_positions_with_aligned_corners(backbone: str) -> None:
    """Every position is the logit of a pixel of its own, the first of the first and the last of the last."""
    model = LargeFov(BACKBONES[backbone](), labels=3, width=4, dilation=12, dropout=0.5).eval()
    images = picture(321, 321, batch=1)
    with torch.inference_mode():
        coarse, fine = model.head(model.backbone(images)), model(images)
        assert coarse.shape == (1, 3, 41, 41)
        aligned = functional.interpolate(coarse, size=(321, 321), mode="bilinear", align_corners=True)
    torch.testing.assert_close(fine, aligned, atol=1e-5 * aligned.abs().max().item(), rtol=0)


@pytest.mark.parametrize("size", [(24, 24), (17, 30), (1, 5)])
@pytest.mark.parametrize("of", [lambda: network(4), network, lambda: deeplabv3(), lambda: pyramid()])
def test_logits_have_the_size_of_the_images(of: Callable[[], nn.Module], size: tuple[int, int]) -> None:
    assert of().eval()(picture(*size, batch=2)).shape == (2, 4, *size)


def test_other_sizes_are_padded_and_cut_back() -> None:
    """A pixel of a smaller image has the logits that it has in the same image with padding around it."""
    model = network().eval()
    image = picture(30, 44, batch=1)
    padded = functional.pad(image, (0, 5, 0, 3))  # 33 and 49 pixels: 5 and 7 positions
    with torch.inference_mode():
        coarse = model.head(model.backbone(padded))
        expected = functional.interpolate(coarse, size=(33, 49), mode="bilinear", align_corners=True)
        torch.testing.assert_close(model(image), expected[:, :, :30, :44], atol=1e-5, rtol=0)


def test_the_head_is_deeplab_largefov() -> None:
    """3x3 with dilation, ReLU, 1x1, ReLU, 1x1 to the labels; dropout after both hidden layers."""
    model = network(dilation=3, dropout=0.5)
    first, second, last = convolutions(model)
    assert [layer.weight.shape for layer in (first, second, last)] == [(8, 6, 3, 3), (8, 8, 1, 1), (4, 8, 1, 1)]
    for layer in (first, second, last):
        assert layer.bias is not None
        assert not layer.bias.any()
        nn.init.normal_(layer.bias)
    f = picture(5, 7, batch=2).repeat(1, 2, 1, 1)
    hidden = torch.relu(functional.conv2d(f, first.weight, first.bias, padding=3, dilation=3))
    hidden = torch.relu(functional.conv2d(hidden, second.weight, second.bias))
    expected = functional.conv2d(hidden, last.weight, last.bias)
    torch.testing.assert_close(model.eval().head(f), expected)
    seed_dropout(model, [0, 1])
    assert not torch.allclose(model.train().head(f), expected)
    without = network(dilation=3).train()
    torch.testing.assert_close(without.head(f), without.eval().head(f))


# --- DeepLab-V3


def deeplabv3() -> DeepLabV3:
    torch.manual_seed(0)
    return DeepLabV3(small(channels=6), labels=4, width=32, dilation=2, dropout=0.5)


def test_the_head_is_torchvisions_with_group_norm() -> None:
    """The same tensors by name; with the norms taken out of both, the same logits. No norm sees the batch."""
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead

    torch.manual_seed(0)
    model = DeepLabV3(small(channels=6), labels=21, width=256, dilation=12, dropout=0.5).eval()
    original = DeepLabHead(6, 21, (12, 24, 36)).eval()
    state = {name: t for name, t in original.state_dict().items() if not name.split(".")[-1].startswith(("run", "num"))}
    assert {name: t.shape for name, t in model.head.state_dict().items()} == {n: t.shape for n, t in state.items()}
    norms = [layer for layer in model.modules() if isinstance(layer, nn.GroupNorm)]
    assert [layer.num_groups for layer in norms] == [32] * 7
    assert not [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    model.head.load_state_dict(state)
    for head in (model.head, original):
        for name, layer in list(head.named_modules()):
            if isinstance(layer, (nn.GroupNorm, nn.BatchNorm2d)):
                parent, _, own = name.rpartition(".")
                setattr(head.get_submodule(parent), own, nn.Identity())
    features = torch.randn(2, 6, 9, 11)
    with torch.inference_mode():
        torch.testing.assert_close(model.head(features), original(features))


def test_logits_of_the_pyramid_lie_on_its_positions() -> None:
    """Without padding every eighth pixel is a position's own logit."""
    model, images = deeplabv3().eval(), picture(33, 49, batch=2)
    logits = model(images)
    torch.testing.assert_close(logits[:, :, ::8, ::8], model.head(model.backbone(images)), atol=1e-5, rtol=1e-4)


def test_logits_of_the_pyramid_do_not_depend_on_the_batch() -> None:
    """In training, too, where units behind the pyramid are dropped."""
    model, images = deeplabv3().train(), picture(24, 16, batch=3)
    seed_dropout(model, [7, 8, 9])
    together = model(images)
    assert not torch.allclose(together, model.eval()(images))
    for b, number in enumerate((7, 8, 9)):
        seed_dropout(model.train(), [number])
        torch.testing.assert_close(model(images[b : b + 1])[0], together[b], atol=1e-6, rtol=1e-4)


# --- the network with a finer level


def pyramid(backbone: Backbone | None = None, dilation: int = 1) -> Pyramid:
    torch.manual_seed(0)
    model = Pyramid(backbone or small(channels=6), labels=4, width=8, dilation=dilation, dropout=0.0)
    last = model.last[-1]
    assert isinstance(last, nn.Conv2d)
    nn.init.normal_(last.weight)
    return model


def by_hand(block: nn.Module, x: Tensor, dilation: int = 1) -> Tensor:
    """A block of convolutions, group norms and ReLUs."""
    for layer in block.children():
        if isinstance(layer, nn.Conv2d):
            reach = dilation * (layer.kernel_size[0] // 2)
            x = functional.conv2d(x, layer.weight, None, padding=reach, dilation=max(1, reach), groups=layer.groups)
        elif isinstance(layer, nn.GroupNorm):
            grouped = x.unflatten(1, (layer.num_groups, -1))
            mean, square = grouped.mean((2, 3, 4), keepdim=True), grouped.square().mean((2, 3, 4), keepdim=True)
            x = ((grouped - mean) / (square - mean.square() + layer.eps).sqrt()).flatten(1, 2)
            x = x * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)
        else:
            x = torch.relu(x)
    return x


def test_a_pyramids_logits_lie_on_the_positions_of_its_finest_level() -> None:
    """Composed by hand; every fourth pixel is a logit of a position of the finest level itself."""
    model = pyramid(dilation=2).eval()
    last = model.last[-1]
    image = picture(33, 49, batch=1)
    assert [(level.layout.stride, level.channels) for level in model.finer] == [(4, 4)]
    with torch.inference_mode():
        finest, *_, features = model.backbone.forward_levels(image)
        x = by_hand(model.head, features, dilation=2)
        x = x + functional.conv2d(features.mean((2, 3), keepdim=True), model.whole.weight, model.whole.bias)
        assert x.shape[2:] == (5, 7)
        x = functional.interpolate(x, size=(9, 13), mode="bilinear", align_corners=True)
        x = by_hand(model.merge[0], torch.cat([x, by_hand(model.reduce[0], finest)], dim=1))
        linear = model.image_head[-1]
        assert isinstance(linear, nn.Linear)
        image_logits = features.mean((2, 3)) @ linear.weight.T + linear.bias
        chances = torch.cat([torch.ones(1, 1), 1 / (1 + torch.exp(-image_logits))], dim=1)
        first, *_, second = model.coarse.children()
        assert isinstance(first, nn.Conv2d)
        assert isinstance(second, nn.Conv2d)
        coarse = torch.relu(functional.conv2d(features, first.weight, first.bias, padding=1))
        coarse = functional.conv2d(coarse, second.weight, second.bias)
        x = last(x) + functional.interpolate(coarse, size=(9, 13), mode="bilinear", align_corners=True)
        x = x + chances.log()[:, :, None, None]
        torch.testing.assert_close(model(image, with_image_logits=True)[1], image_logits, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(model(image)[:, :, ::4, ::4], x, atol=1e-4, rtol=1e-3)


def test_a_pyramid_has_each_stride_once_from_coarse_to_fine() -> None:
    """Lite0 with features at stride 32 has levels of 16, 8 and 4; VGG-16's two levels of its features' stride go."""
    lite = pyramid(build_timm_backbone("tf_efficientnet_lite0", stride=32))
    assert [level.layout.stride for level in lite.finer] == [4, 8, 16]
    assert [level.layout.stride for level in pyramid(BACKBONES["vgg16_largefov"]()).finer] == [4]
    with torch.inference_mode():
        assert lite.eval()(picture(65, 97, batch=1)).shape == (1, 4, 65, 97)


@pytest.mark.parametrize("backbone", ["small", "vgg16_largefov", "timm/tf_efficientnet_lite0", "timm/convnext_atto"])
def test_a_dot_moves_with_its_pixel_through_the_pyramid(backbone: str, dot_offsets: Callable[..., Tensor]) -> None:
    """Both ways: through the finer levels with the features silenced, and through the features alone."""
    torch.manual_seed(0)
    built = build_timm_backbone(backbone.removeprefix("timm/")) if "timm/" in backbone else BACKBONES[backbone]()
    model, stride = pyramid(built).eval(), built.layout.stride
    side = 8 * stride + (1 if built.layout.offset == 0 else 0)
    for name, layer in list(model.named_modules()):  # they have no place of their own, and what a dot raises stays
        if isinstance(layer, nn.GroupNorm) and not name.startswith("backbone"):
            model.set_submodule(name, nn.Identity())
    with torch.inference_mode():
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight.copy_(layer.weight.mean(dim=(2, 3), keepdim=True).expand_as(layer.weight))
        for layer in (*list(model.head)[1:], *model.merge.modules(), *model.last, *model.coarse):
            if isinstance(layer, nn.Conv2d):
                layer.weight.abs_()  # so that what a dot raises stays above zero
        for name in ("whole.weight", "whole.bias"):
            model.get_parameter(name).zero_()
        names = [name for name, _ in model.named_parameters()]
        for silent in (["head.0.weight", "coarse.0.weight"], [name for name in names if name.startswith("reduce")]):
            weights = [model.get_parameter(name) for name in silent]
            kept = [weight.clone() for weight in weights]
            for weight in weights:
                weight.zero_()
            off = dot_offsets(lambda images: [model(images)], [Layout(1)], side, stride)
            assert off.abs().max() < 1.5, silent
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)


def test_a_backbone_without_a_finer_level_has_no_pyramid() -> None:
    backbone = Backbone(nn.Conv2d(3, 4, 1), stage_channels=(4,), layout=Layout(1))
    with pytest.raises(UserError, match="no layer with a smaller stride") as raised:
        pyramid(backbone)
    assert "set network to" in raised.value.remedy


@pytest.mark.parametrize("tags", [[], [1], [2, 0], [0, 1, 2]])
def test_among_tags_only_these_classes_are_left_and_the_rest_sums_to_one(tags: list[int]) -> None:
    drawn = torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(4), (5, 6)).transpose(2, 0, 1)).float()
    drawn[:, 0, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    kept = restrict_to_tags(drawn, tags)
    there = [0, *sorted(tag + 1 for tag in tags)]
    others = [label for label in range(4) if label not in there]
    assert (kept[others] == 0).all()
    torch.testing.assert_close(kept.sum(dim=0), torch.ones(5, 6))
    expected = drawn.double()[there] / drawn.double()[there].sum(dim=0)
    torch.testing.assert_close(kept[there].double()[:, 1:], expected[:, 1:], atol=1e-6, rtol=1e-5)
    assert kept[:, 0, 0].isfinite().all()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.integers(4, 2000))
def test_labels_are_of_probabilities_resized_once(rows: int, columns: int, height: int, width: int, strip: int) -> None:
    """In strips of any number of bytes, against all probabilities at the image's size in float64."""
    drawn = np.random.default_rng(rows * 100 + columns).dirichlet(np.full(9, 0.2), (rows, columns)).transpose(2, 0, 1)
    planes = torch.from_numpy(np.ascontiguousarray(drawn))
    whole = functional.interpolate(planes[None], size=(height, width), mode="bilinear", align_corners=False)[0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mcis.models.segmenters.STRIP_BYTES", strip)
        labels = upsampled_labels(planes.float(), height, width)
    assert labels.dtype == torch.uint8
    assert labels.shape == (height, width)
    chosen = whole.gather(0, labels.long()[None])[0]
    assert (whole.amax(0) - chosen).max() < 1e-6

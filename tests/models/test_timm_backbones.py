"""timm's networks as backbones: what is asked of them, and where their positions lie."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mcis.models.torchvision_ops  # noqa: F401  (before timm, which imports torchvision)

import timm  # isort: skip
import timm.layers  # isort: skip
from torchvision.ops.misc import FrozenBatchNorm2d  # isort: skip

from mcis.datasets.errors import UserError
from mcis.models.backbones import Backbone, freeze_except_last
from mcis.models.grids import Layout
from mcis.models.pretrained import bundled_weights, load_pretrained
from mcis.models.timm_backbones import build_timm_backbone, timm_normalization

LITE0 = "tf_efficientnet_lite0"
VIT = "vit_tiny_patch16_224"
NETWORKS = ("resnet18", "convnext_atto", LITE0, VIT)
GROUPS = {"resnet18": (256, 512), "convnext_atto": (160, 320), LITE0: (112, 320), VIT: (192,)}
LAYOUTS = {
    "resnet18": Layout(16, 0.0), "convnext_atto": Layout(16, 7.5), LITE0: Layout(16, 0.0), VIT: Layout(16, None),
}  # fmt: skip
LEVELS = {
    "resnet18": [(64, Layout(4)), (128, Layout(8))],
    "convnext_atto": [(40, Layout(4, 1.5)), (80, Layout(8, 3.5))],
    LITE0: [(24, Layout(4)), (40, Layout(8))],
    VIT: [],
}
STAGES = {"resnet18": 4, "convnext_atto": 4, LITE0: 5, VIT: 12}


@pytest.fixture(scope="module")
def built() -> dict[str, Backbone]:
    """Each network with random weights, made once; tests leave these as they are."""
    torch.manual_seed(0)
    return {name: build_timm_backbone(name) for name in NETWORKS}


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def close(got: Tensor, expected: Tensor) -> None:
    """Equal to rounding, measured by the largest value."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


# --- what is asked of a network


@pytest.mark.parametrize("name", NETWORKS)
def test_the_features_are_the_stages_at_the_output_stride(built: dict[str, Backbone], name: str) -> None:
    backbone = built[name]
    assert backbone.stage_channels == GROUPS[name]
    assert backbone.channels == sum(GROUPS[name])
    assert backbone.layout == LAYOUTS[name]
    with torch.inference_mode():
        assert backbone(images(1, 3, 64, 96)).shape == (1, backbone.channels, 4, 6)
        assert name != VIT or backbone(images(1, 3, 75, 90)).shape == (1, 192, 5, 6), "of any size"


@pytest.mark.parametrize("name", NETWORKS)
def test_the_levels_come_from_the_same_pass(built: dict[str, Backbone], name: str) -> None:
    backbone, pictures = built[name].eval(), images(1, 3, 64, 96)
    levels = LEVELS[name]
    assert [(level.channels, level.layout) for level in backbone.levels] == levels
    with torch.inference_mode():
        *outputs, features = backbone.forward_levels(pictures)
        assert [tuple(output.shape) for output in outputs] == [
            (1, channels, 64 // layout.stride, 96 // layout.stride) for channels, layout in levels
        ]
        close(features, backbone(pictures))


@pytest.mark.parametrize("name", NETWORKS)
def test_an_images_features_depend_on_it_alone(built: dict[str, Backbone], name: str) -> None:
    """In training mode too: norms are frozen, nothing is dropped, and nothing remembers what it saw."""
    backbone = built[name].train()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    batch = images(2, 3, 32, 48) * torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    with torch.inference_mode():
        together = backbone(batch)
        for b in range(2):
            close(backbone(batch[b : b + 1])[0], together[b])
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())


def test_nothing_is_dropped_in_training() -> None:
    """timm gives this network a rate at which it drops paths."""
    rates = [m.drop_prob for m in timm.create_model("fasternet_t1").modules() if isinstance(m, timm.layers.DropPath)]
    assert any(rates)
    backbone, pictures = build_timm_backbone("fasternet_t1"), images(2, 3, 64, 64)
    with torch.inference_mode():
        close(backbone.train()(pictures), backbone.eval()(pictures))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_is_trained(built: dict[str, Backbone], name: str) -> None:
    """A parameter without a gradient would keep the workers of a training waiting."""
    backbone = built[name].train()
    backbone(images(1, 3, 32, 32)).square().sum().backward()
    assert not [key for key, parameter in backbone.named_parameters() if parameter.grad is None]
    backbone.zero_grad(set_to_none=True)


@pytest.mark.parametrize(("stride", "groups"), [(8, (40, 112, 320)), (32, (320,))])
def test_another_stride_has_other_stages(stride: int, groups: tuple[int, ...]) -> None:
    backbone = build_timm_backbone(LITE0, stride=stride)
    assert (backbone.stage_channels, backbone.layout) == (groups, Layout(stride, 0.0))


@pytest.mark.parametrize(
    ("name", "stride", "found", "remedy"),
    [
        ("resnet18", 12, "timm/resnet18 with stride 12", "backbone"),
        (VIT, 8, "with stride 8", "backbone"),
        ("densenet121", 16, "with stride 16", "backbone"),
        ("inception_v3", None, "do not follow from its strides and paddings", "backbone"),
        ("swin_tiny_patch4_window7_224", None, "merges patches", "backbone"),
        ("beit_base_patch16_224", None, "does not accept images of 256 x 256 pixels", "backbone"),
        ("resnett18", None, "timm has no network resnett18", "timm/resnet18"),  # the nearest
        ("resnet18.no_such_tag", None, "timm has no network resnet18.no_such_tag", "timm/resnet18"),
    ],
)
def test_what_a_network_cannot_be_is_said(name: str, stride: int | None, found: str, remedy: str) -> None:
    with pytest.raises(UserError, match=found) as raised:
        build_timm_backbone(name, stride=stride)
    assert remedy in raised.value.remedy


def test_a_patch_need_not_divide_the_side_of_other_networks_images() -> None:
    assert build_timm_backbone("eva02_tiny_patch14_224").layout == Layout(14, None)


def test_pixels_are_normalized_as_the_weights_want_them(built: dict[str, Backbone]) -> None:
    color = torch.rand(2, 3, 4, 5)
    close(built[LITE0].normalize(color), 2 * color - 1)
    assert timm_normalization("resnet18").mean == (0.485, 0.456, 0.406)
    assert timm_normalization(LITE0) == built[LITE0].normalize


# --- positions


@pytest.mark.parametrize(("name", "stride"), [*((name, None) for name in NETWORKS), ("convnext_atto", 8)])
def test_a_dot_moves_with_its_pixel(name: str, stride: int | None, dot_offsets: Callable[..., Tensor]) -> None:
    """What a dot changes is centered at its pixel, on average over a stride, in each stage and level."""
    torch.manual_seed(0)
    backbone = build_timm_backbone(name, stride=stride).eval()

    def stages(pictures: Tensor) -> list[Tensor]:
        *levels, features = backbone.forward_levels(pictures)
        return [*features.split(backbone.stage_channels, dim=1), *levels]

    with torch.inference_mode():
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d) and name != VIT:  # drawn ones lean to a side
                layer.weight.copy_(layer.weight.mean(dim=(2, 3), keepdim=True).expand_as(layer.weight))
            elif isinstance(layer, timm.layers.FrozenBatchNormAct2d | FrozenBatchNorm2d):
                layer.get_buffer("weight").fill_(1)  # a block's last one starts as zero: the shortcut alone
        layouts = [backbone.layout] * len(backbone.stage_channels) + [level.layout for level in backbone.levels]
        mean = dot_offsets(stages, layouts, 224 if name == VIT else 225, backbone.layout.stride)
    assert mean.abs().max() < 1.5, f"{mean.tolist()} pixels"


def test_padding_of_both_sides_moves_the_positions_and_nothing_else(built: dict[str, Backbone]) -> None:
    """In the interior, timm's own network computes the same of an image that is shifted by stride - 1 pixels."""
    side, stride = 1024, 16
    backbone = build_timm_backbone(LITE0)
    original = timm.create_model(LITE0, output_stride=stride).eval()
    load_pretrained(backbone, bundled_weights())
    state = torch.load(bundled_weights(), weights_only=True)
    original.load_state_dict(dict(zip(original.state_dict(), state.values(), strict=True)))
    picture = images(1, 3, side, side)
    shifted = picture.roll((stride - 1, stride - 1), dims=(2, 3))
    with torch.inference_mode():
        expected = original.forward_intermediates(  # type: ignore[operator]
            shifted, indices=[3, 4], intermediates_only=True
        )
        got = backbone(picture)
    assert got.shape[2:] == (64, 64)
    interior = slice(31, 33)
    close(got[:, :, interior, interior], torch.cat(expected, dim=1)[:, :, interior, interior])


def test_what_an_image_shows_is_what_efficientnet_makes_its_classes_of() -> None:
    """Behind its last stage, by the layers of the file; another network has the mean of its features."""
    backbone, original = build_timm_backbone(LITE0, stride=32), timm.create_model(LITE0).eval()
    assert backbone.keep_pretrained_head() == 1280
    load_pretrained(backbone, bundled_weights())
    state = torch.load(bundled_weights(), weights_only=True)
    original.load_state_dict(dict(zip(original.state_dict(), state.values(), strict=True)))
    with torch.inference_mode():
        features = backbone(images(2, 3, 97, 65))
        expected = original.bn2(original.conv_head(features)).mean((2, 3))  # type: ignore[operator]
        close(backbone.image_features(features), expected)
    other = build_timm_backbone("resnet18", stride=32)
    assert other.keep_pretrained_head() == other.channels == 512
    close(other.image_features(features), features.mean((2, 3)))


# --- stages


@pytest.mark.parametrize("name", NETWORKS)
def test_the_last_stages_are_trained(name: str) -> None:
    backbone = build_timm_backbone(name)
    assert len(backbone.stages) == STAGES[name]
    counts = []
    for count in range(len(backbone.stages) + 1):
        freeze_except_last(backbone, count)
        counts.append(sum(parameter.requires_grad for parameter in backbone.parameters()))
    assert counts[0] == 0
    assert counts == sorted(set(counts)), "each stage has parameters of its own"
    assert counts[-1] == len(list(backbone.parameters()))
    with pytest.raises(UserError, match=f"it has {STAGES[name]}") as raised:
        freeze_except_last(backbone, len(backbone.stages) + 1)
    assert "trainable_stages" in raised.value.remedy

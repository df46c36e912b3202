"""Tests of timm's networks as backbones: their measured structure and the locations of their positions."""

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
STAGE_CHANNELS = {"resnet18": (256, 512), "convnext_atto": (160, 320), LITE0: (112, 320), VIT: (192,)}
LAYOUTS = {"resnet18": Layout(16, 0.0), "convnext_atto": Layout(16, 7.5), LITE0: Layout(16, 0.0), VIT: Layout(16, None)}
LEVELS = {
    "resnet18": [(64, Layout(4)), (128, Layout(8))],
    "convnext_atto": [(40, Layout(4, 1.5)), (80, Layout(8, 3.5))],
    LITE0: [(24, Layout(4)), (40, Layout(8))],
    VIT: [],
}
STAGES = {"resnet18": 4, "convnext_atto": 4, LITE0: 5, VIT: 12}


@pytest.fixture(scope="module")
def built() -> dict[str, Backbone]:
    """Returns each network with random weights. Tests must not change them."""
    torch.manual_seed(0)
    return {name: build_timm_backbone(name) for name in NETWORKS}


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compares up to rounding relative to the largest value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


# --- structure


@pytest.mark.parametrize("name", NETWORKS)
def test_features_are_the_stages_at_the_output_stride(built: dict[str, Backbone], name: str) -> None:
    backbone = built[name]
    assert backbone.stage_channels == STAGE_CHANNELS[name]
    assert backbone.channels == sum(STAGE_CHANNELS[name])
    assert backbone.layout == LAYOUTS[name]
    with torch.inference_mode():
        assert backbone(images(1, 3, 64, 96)).shape == (1, backbone.channels, 4, 6)


def test_transformers_accept_images_of_any_size(built: dict[str, Backbone]) -> None:
    with torch.inference_mode():
        assert built[VIT](images(1, 3, 75, 90)).shape == (1, 192, 5, 6)


@pytest.mark.parametrize("name", NETWORKS)
def test_levels_come_from_the_same_forward_pass(built: dict[str, Backbone], name: str) -> None:
    backbone = built[name].eval()
    pictures = images(1, 3, 64, 96)
    levels = LEVELS[name]
    assert [(level.channels, level.layout) for level in backbone.levels] == levels
    with torch.inference_mode():
        *outputs, features = backbone.forward_levels(pictures)
        assert_close(features, backbone(pictures))
    expected_shapes = [(1, channels, 64 // layout.stride, 96 // layout.stride) for channels, layout in levels]
    assert [tuple(output.shape) for output in outputs] == expected_shapes


@pytest.mark.parametrize("name", NETWORKS)
def test_features_of_an_image_do_not_depend_on_its_batch(built: dict[str, Backbone], name: str) -> None:
    """Also in training mode: norms are frozen, dropout is off, and a forward pass does not change the state."""
    backbone = built[name].train()
    state_before = {key: value.clone() for key, value in backbone.state_dict().items()}
    batch = images(2, 3, 32, 48) * torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    with torch.inference_mode():
        together = backbone(batch)
        for b in range(2):
            assert_close(backbone(batch[b : b + 1])[0], together[b])
    assert all(torch.equal(value, state_before[key]) for key, value in backbone.state_dict().items())


def test_training_drops_nothing() -> None:
    """By default, timm drops paths of this network in training."""
    rates = [m.drop_prob for m in timm.create_model("fasternet_t1").modules() if isinstance(m, timm.layers.DropPath)]
    assert any(rates)
    backbone = build_timm_backbone("fasternet_t1")
    pictures = images(2, 3, 64, 64)
    with torch.inference_mode():
        assert_close(backbone.train()(pictures), backbone.eval()(pictures))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_gets_a_gradient(built: dict[str, Backbone], name: str) -> None:
    """Workers of a distributed training would wait for parameters without a gradient."""
    backbone = built[name].train()
    backbone(images(1, 3, 32, 32)).square().sum().backward()
    assert not [key for key, parameter in backbone.named_parameters() if parameter.grad is None]
    backbone.zero_grad(set_to_none=True)


@pytest.mark.parametrize(("stride", "stage_channels"), [(8, (40, 112, 320)), (32, (320,))])
def test_the_stride_determines_the_stages(stride: int, stage_channels: tuple[int, ...]) -> None:
    backbone = build_timm_backbone(LITE0, stride=stride)
    assert backbone.stage_channels == stage_channels
    assert backbone.layout == Layout(stride, 0.0)


@pytest.mark.parametrize(
    ("name", "stride", "found", "remedy"),
    [
        ("resnet18", 12, "timm/resnet18 with stride 12", "backbone"),
        (VIT, 8, "with stride 8", "backbone"),
        ("densenet121", 16, "with stride 16", "backbone"),
        ("inception_v3", None, "do not follow from its strides and paddings", "backbone"),
        ("swin_tiny_patch4_window7_224", None, "merges patches", "backbone"),
        ("beit_base_patch16_224", None, "does not accept images of 256 x 256 pixels", "backbone"),
        ("resnett18", None, "timm has no network resnett18", "timm/resnet18"),  # suggests the most similar name
        ("resnet18.no_such_tag", None, "timm has no network resnet18.no_such_tag", "timm/resnet18"),
    ],
)
def test_unsuitable_networks_are_errors(name: str, stride: int | None, found: str, remedy: str) -> None:
    with pytest.raises(UserError, match=found) as raised:
        build_timm_backbone(name, stride=stride)
    assert remedy in raised.value.remedy


def test_patches_may_have_a_side_that_does_not_divide_256() -> None:
    assert build_timm_backbone("eva02_tiny_patch14_224").layout == Layout(14, None)


def test_pixels_are_normalized_as_the_weights_expect(built: dict[str, Backbone]) -> None:
    color = torch.rand(2, 3, 4, 5)
    assert_close(built[LITE0].normalize(color), 2 * color - 1)
    assert timm_normalization("resnet18").mean == (0.485, 0.456, 0.406)
    assert timm_normalization(LITE0) == built[LITE0].normalize


# --- positions


def symmetrize_kernels(backbone: Backbone) -> None:
    """Replaces each kernel with its mean, because random kernels are not symmetric."""
    for layer in backbone.modules():
        if isinstance(layer, nn.Conv2d):
            layer.weight.copy_(layer.weight.mean(dim=(2, 3), keepdim=True).expand_as(layer.weight))


@pytest.mark.parametrize(("name", "stride"), [(name, None) for name in NETWORKS] + [("convnext_atto", 8)])
def test_the_response_to_a_dot_is_centered_at_its_pixel(
    name: str, stride: int | None, dot_offsets: Callable[..., Tensor]
) -> None:
    """On average over a stride, in each stage and level."""
    torch.manual_seed(0)
    backbone = build_timm_backbone(name, stride=stride).eval()

    def forward_stages(pictures: Tensor) -> list[Tensor]:
        *levels, features = backbone.forward_levels(pictures)
        return [*features.split(backbone.stage_channels, dim=1), *levels]

    with torch.inference_mode():
        if name != VIT:
            symmetrize_kernels(backbone)
        for layer in backbone.modules():
            if isinstance(layer, timm.layers.FrozenBatchNormAct2d | FrozenBatchNorm2d):
                layer.get_buffer("weight").fill_(1)  # blocks start with a last norm of zero: only the shortcut
        layouts = [backbone.layout] * len(backbone.stage_channels) + [level.layout for level in backbone.levels]
        offsets = dot_offsets(forward_stages, layouts, 224 if name == VIT else 225, backbone.layout.stride)
    assert offsets.abs().max() < 1.5, f"{offsets.tolist()} pixels"


def load_bundled_weights(network: nn.Module) -> None:
    """Loads the bundled EfficientNet-Lite0 weights into timm's own network."""
    state = torch.load(bundled_weights(), weights_only=True)
    network.load_state_dict(dict(zip(network.state_dict(), state.values(), strict=True)))


def test_symmetric_padding_only_moves_the_positions() -> None:
    """In the interior, timm's own network computes the same for an image that is shifted by stride - 1 pixels."""
    stride = 16
    backbone = build_timm_backbone(LITE0)
    load_pretrained(backbone, bundled_weights())
    original = timm.create_model(LITE0, output_stride=stride).eval()
    load_bundled_weights(original)
    picture = images(1, 3, 1024, 1024)
    shifted = picture.roll((stride - 1, stride - 1), dims=(2, 3))
    with torch.inference_mode():
        expected = original.forward_intermediates(  # type: ignore[operator]
            shifted, indices=[3, 4], intermediates_only=True
        )
        features = backbone(picture)
    assert features.shape[2:] == (64, 64)
    interior = slice(31, 33)
    assert_close(features[:, :, interior, interior], torch.cat(expected, dim=1)[:, :, interior, interior])


def test_image_features_of_efficientnet_are_the_inputs_of_its_classification_layer() -> None:
    backbone = build_timm_backbone(LITE0, stride=32)
    assert backbone.keep_pretrained_head() == 1280
    load_pretrained(backbone, bundled_weights())
    original = timm.create_model(LITE0).eval()
    load_bundled_weights(original)
    with torch.inference_mode():
        features = backbone(images(2, 3, 97, 65))
        expected = original.bn2(original.conv_head(features)).mean((2, 3))  # type: ignore[operator]
        assert_close(backbone.image_features(features), expected)


def test_image_features_of_other_networks_are_the_mean_of_the_features() -> None:
    backbone = build_timm_backbone("resnet18", stride=32)
    assert backbone.keep_pretrained_head() == backbone.channels == 512
    features = images(2, 512, 4, 3)
    assert_close(backbone.image_features(features), features.mean((2, 3)))


# --- stages


@pytest.mark.parametrize("name", NETWORKS)
def test_only_the_last_stages_are_trained(name: str) -> None:
    backbone = build_timm_backbone(name)
    assert len(backbone.stages) == STAGES[name]
    counts = []
    for count in range(len(backbone.stages) + 1):
        freeze_except_last(backbone, count)
        counts.append(sum(parameter.requires_grad for parameter in backbone.parameters()))
    assert counts[0] == 0
    assert counts == sorted(set(counts)), "each stage has parameters of its own"
    assert counts[-1] == len(list(backbone.parameters()))


@pytest.mark.parametrize("name", NETWORKS)
def test_more_stages_than_there_are_is_an_error(built: dict[str, Backbone], name: str) -> None:
    backbone = built[name]
    with pytest.raises(UserError, match=f"it has {STAGES[name]}") as raised:
        freeze_except_last(backbone, len(backbone.stages) + 1)
    assert "trainable_stages" in raised.value.remedy

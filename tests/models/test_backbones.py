"""Backbones: strides and structure against networks composed by hand, frozen norms, and loading pretrained weights."""

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision)
from mcis.datasets.errors import UserError
from mcis.models.backbones import (
    IMAGENET,
    Backbone,
    Vit,
    resnet50,
    small,
    to_unit,
    vgg16,
)
from mcis.models.dropout import number_samples
from mcis.models.grids import Layout
from mcis.models.networks import BACKBONES
from mcis.models.pretrained import PRETRAINED, load_pretrained, pretrained_url

WIDTHS = {
    "small": 96, "vgg16": 512, "vgg16_largefov": 512, "resnet50": 2048, "resnet101": 2048, "resnet38": 4096,
    "vit_b_16": 768,
}  # fmt: skip
STRIDES = dict.fromkeys(WIDTHS, 8) | {"vit_b_16": 16}
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
    unit = to_unit(pixels)
    assert unit.dtype == torch.float32
    assert unit.shape == (2, 3, 4, 5)
    assert unit[1, 2, 3, 4].item() == pytest.approx(pixels[1, 3, 4, 2].item() / 255)
    assert to_unit(torch.full((1, 1, 1, 3), 255, dtype=torch.uint8)).max() == 1


def test_normalizing_takes_imagenets_mean_and_deviation() -> None:
    color = torch.tensor([0.485 + 0.229, 0.456 - 0.224, 0.406 + 2 * 0.225]).view(1, 3, 1, 1).expand(2, 3, 4, 5)
    expected = torch.tensor([1.0, -1.0, 2.0]).view(1, 3, 1, 1).expand(2, 3, 4, 5)
    torch.testing.assert_close(IMAGENET(color), expected)


# --- every backbone


@pytest.mark.parametrize("name", BACKBONES)
def test_features_have_the_promised_width_and_stride(built: dict[str, Backbone], name: str) -> None:
    backbone = built[name]
    assert (backbone.channels, backbone.layout.stride) == (WIDTHS[name], STRIDES[name])
    with torch.inference_mode():
        features = backbone.eval()(images(1, 3, 48, 64))
    assert features.shape == (1, WIDTHS[name], 48 // STRIDES[name], 64 // STRIDES[name])
    assert features.isfinite().all()
    assert (features.min() == 0) == (name not in ("small", "vit_b_16")), "those two have no ReLU at their end"


@pytest.mark.parametrize("name", BACKBONES)
def test_an_images_features_do_not_depend_on_its_batch(built: dict[str, Backbone], name: str) -> None:
    """In training mode too, and nothing in the backbone remembers what it saw."""
    backbone = built[name].train()
    number_samples(backbone, range(3))
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    batch = images(3, 3, 24, 32) * torch.tensor([1.0, 5.0, 0.1]).view(3, 1, 1, 1)
    with torch.inference_mode():
        together = backbone(batch)
        for b in range(3):
            number_samples(backbone, [b])
            close(backbone(batch[b : b + 1])[0], together[b])
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("small", "body"),
        ("vgg16", "body.extra_convs"),
        ("vgg16_largefov", None),
        ("resnet50", None),
        ("vit_b_16", None),
    ],
)
def test_layers_without_pretrained_weights_are_named(built: dict[str, Backbone], name: str, new: str | None) -> None:
    assert built[name].new_layers == ((new,) if new else ())
    new_parameters = [key for key, _ in built[name].named_parameters() if new and key.startswith(new)]
    assert len(new_parameters) == {"small": 10, "vgg16": 6}.get(name, 0)


def slow_resnets(names: Iterable[str]) -> list[Any]:
    """ResNet-101 among the slow ones, which differs from ResNet-50 in its number of blocks alone, and the wide one."""
    slow = ("resnet101", "resnet38")
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


class Visible:
    """A dot's place in the levels and features of a backbone: the center of what it changes."""

    def __init__(self, backbone: Backbone, side: int):
        self.backbone, self.side = backbone, side
        self.empty = torch.zeros(1, 3, side, side)
        self.layouts = [*(level.layout for level in backbone.levels), backbone.layout]
        self.outputs = backbone.with_levels(self.empty)

    def places(self, y: int, x: int) -> list[tuple[float, float]]:
        """The center of the change in each level and the features, in pixels, for a dot at a pixel."""
        dotted = self.empty.clone()
        dotted[:, :, y, x] = 1
        outputs = zip(self.layouts, self.backbone.with_levels(dotted), self.outputs, strict=True)
        return [self._center(layout, (got - without)[0]) for layout, got, without in outputs]

    def _center(self, layout: Layout, changes: Tensor) -> tuple[float, float]:
        change = changes.double().square().sum(dim=0)
        change = change.where(change >= change.max() / 2, 0)  # a transformer's dot changes every position a little
        grids = layout.grids((self.side, self.side), (change.shape[0], change.shape[1]))
        places = (torch.tensor([grid.first + n * grid.step for n in range(grid.positions)]) for grid in grids)
        across, along = (change.sum(dim=1 - axis) for axis in (0, 1))
        y, x = (float((w * p).sum() / w.sum()) * self.side - 0.5 for w, p in zip((across, along), places, strict=True))
        return y, x


@pytest.mark.parametrize("name", slow_resnets(BACKBONES))
def test_a_dot_moves_with_its_pixel(name: str) -> None:
    """What a dot changes is centered at its pixel, on average over a stride: half a stride off is four to eight pixels.

    Kernels are made means over their inputs: drawn ones lean to a side.
    """
    torch.manual_seed(0)
    backbone = BACKBONES[name]().eval()
    with torch.inference_mode():
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d) and name != "vit_b_16":
                layer.weight.fill_(1 / layer.weight[0].numel())
        side, stride = (224, 16) if name == "vit_b_16" else (161, backbone.layout.stride)
        visible = Visible(backbone, side)
        errors = []
        for shift in range(0, stride, 2):
            y, x = (side // 2 - stride // 2 + moved for moved in (shift, 3 * shift % stride))
            errors.append([(place[0] - y, place[1] - x) for place in visible.places(y, x)])
    off = torch.tensor(errors).mean(dim=0)
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
    coarse, fine = small(channels=12), small(channels=12, stride=4)
    fine.load_state_dict(coarse.state_dict())
    assert (coarse.layout.stride, fine.layout.stride) == (8, 4)
    pictures = images(2, 3, 48, 40)
    with torch.inference_mode():
        assert fine(pictures).shape == (2, 12, 12, 10)
        close(fine(pictures)[:, :, ::2, ::2], coarse(pictures))


def test_small_has_no_other_stride() -> None:
    with pytest.raises(UserError, match="stride 16"):
        small(stride=16)


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


def test_resnet_of_stride_16_is_dilated_in_its_last_stage_alone() -> None:
    """With the same weights, its low level is that of stride 8, which the dilation comes behind."""
    fine, coarse = resnet50(), resnet50(stride=16)
    coarse.load_state_dict(fine.state_dict())
    assert [coarse.body.get_submodule(f"layer{n}.0.conv2").dilation[0] for n in (3, 4)] == [1, 2]  # type: ignore[index]
    pictures = images(1, 3, 65, 97)
    with torch.inference_mode():
        (low, *_, features), (expected, *_) = coarse.with_levels(pictures), fine.with_levels(pictures)
    assert features.shape == (1, 2048, 5, 7)
    assert torch.equal(low, expected)
    with pytest.raises(UserError, match="resnet50 with stride 4"):
        resnet50(stride=4)


@pytest.mark.parametrize("name", RESNET_BLOCKS)
def test_the_norms_of_resnet_are_frozen(built: dict[str, Backbone], name: str) -> None:
    assert not [m for m in built[name].modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert not [key for key, _ in built[name].named_parameters() if "bn" in key or "downsample.1" in key]
    assert all(p.requires_grad for p in built[name].parameters())


# --- ViT


def test_vit_is_torchvisions_transformer(built: dict[str, Backbone]) -> None:
    """At the trained size the class token, which attends to every position, is what torchvision's head would see."""
    from torchvision.models import vit_b_16 as torchvision_vit

    original = torchvision_vit(weights=None).eval()
    backbone = built["vit_b_16"].eval()
    assert original.load_state_dict(backbone.body.state_dict(), strict=False).missing_keys == [
        "heads.head.weight",
        "heads.head.bias",
    ]
    pictures = images(1, 3, 224, 224)
    with torch.inference_mode():
        tokens = original._process_input(pictures)
        tokens = original.encoder(torch.cat([original.class_token, tokens], dim=1))
        close(backbone(pictures), tokens[:, 1:].transpose(1, 2).view(1, 768, 14, 14))


def test_vit_takes_images_of_any_size(built: dict[str, Backbone]) -> None:
    """Position embeddings are resized whole: where all are the same, an image's size does not show in them."""
    backbone = built["vit_b_16"].eval()
    body = backbone.body
    assert isinstance(body, Vit)
    embeddings = body.position_embeddings(5, 3)
    assert embeddings.shape == (1, 16, 768)
    torch.testing.assert_close(embeddings[:, 0], body.encoder.pos_embedding[:, 0])
    with torch.inference_mode():
        assert backbone(images(1, 3, 75, 90)).shape == (1, 768, 5, 6)


# --- pretrained weights


def saved(state: Any, path: Path) -> Path:
    torch.save(state, path)
    return path


def test_resnet_takes_torchvisions_weights_and_computes_the_same(tmp_path: Path) -> None:
    """Every fourth position of the dilated network is torchvision's own, of stride 32, its batch norm in eval mode.

    That holds where the first block of a stage keeps the dilation of the stage before, as torchvision has it.
    """
    from torchvision.models import resnet50 as torchvision_resnet50

    torch.manual_seed(1)
    original = torchvision_resnet50(weights=None).eval()
    for norm in (m for m in original.modules() if isinstance(m, nn.BatchNorm2d)):
        for statistic in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            assert statistic is not None
            nn.init.uniform_(statistic, 0.4, 0.8)
    backbone = resnet50()
    load_pretrained(backbone, saved(original.state_dict(), tmp_path / "resnet50.pth"))
    for layer, dilation in (("layer3", 1), ("layer4", 2)):
        conv = backbone.body.get_submodule(f"{layer}.0.conv2")
        assert isinstance(conv, nn.Conv2d)
        conv.dilation = conv.padding = (dilation, dilation)
    pictures = images(1, 3, 70, 96)
    with torch.inference_mode():
        x = original.maxpool(original.relu(original.bn1(original.conv1(pictures))))
        x = original.layer4(original.layer3(original.layer2(original.layer1(x))))
        assert x.shape == (1, 2048, 3, 3)
        close(backbone(pictures)[:, :, ::4, ::4], x)


def test_vgg16_takes_torchvisions_convolutions_and_keeps_its_own(tmp_path: Path, built: dict[str, Backbone]) -> None:
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


class Evil:
    """What a hostile file would hold: reading it by pickle makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def state_of(backbone: Backbone) -> dict[str, Tensor]:
    return dict(backbone.body.state_dict())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as weights"),
        (b"not weights at all", "cannot be read as weights"),
        (b"PK\x03\x04 a damaged archive", "cannot be read as weights"),
        (pickle.dumps({"conv1.weight": 1}, 2), "cannot be read as weights"),
        ([torch.zeros(1)], "holds no state_dict"),
        ({"state_dict": {"conv1": {"weight": torch.zeros(1)}}}, "holds no state_dict"),
        (torch.zeros(3), "holds no state_dict"),
        ({}, "265 tensors missing, 0 of another shape"),
        ({"fc.weight": torch.zeros(2)}, "265 tensors missing, 0 of another shape"),
    ],
    ids=["empty", "text", "damaged", "pickle", "list", "nested", "tensor", "no tensors", "other tensors"],
)
def test_a_file_that_is_no_weights_is_named(
    tmp_path: Path, built: dict[str, Backbone], content: Any, message: str
) -> None:
    path = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        saved(content, path)
    before = state_of(built["resnet50"])["conv1.weight"].clone()
    with pytest.raises(UserError, match=message) as raised:
        load_pretrained(built["resnet50"], path)
    assert str(path) in raised.value.found
    assert "`path`" in raised.value.remedy
    assert torch.equal(state_of(built["resnet50"])["conv1.weight"], before)


@pytest.mark.parametrize("name", ["absent.pth", "."])
def test_a_file_that_is_absent_is_named(tmp_path: Path, built: dict[str, Backbone], name: str) -> None:
    with pytest.raises(UserError, match="no weights file") as raised:
        load_pretrained(built["resnet50"], tmp_path / name)
    assert str(tmp_path / name) in raised.value.found


def test_another_architecture_is_refused_and_changes_nothing(tmp_path: Path, built: dict[str, Backbone]) -> None:
    state = state_of(built["resnet50"]) | {"conv1.weight": torch.zeros(64, 4, 7, 7)}
    del state["bn1.weight"]
    before = state_of(built["resnet50"])["layer1.0.conv1.weight"].clone()
    state["layer1.0.conv1.weight"] = before + 1
    path = saved(state, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"1 tensors missing, 1 of another shape, 0 too many \(bn1.weight, conv1"):
        load_pretrained(built["resnet50"], path)
    assert torch.equal(state_of(built["resnet50"])["layer1.0.conv1.weight"], before)


def test_one_tensor_of_another_shape_is_enough_to_refuse(tmp_path: Path, built: dict[str, Backbone]) -> None:
    path = saved(state_of(built["resnet50"]) | {"conv1.weight": torch.zeros(64, 4, 7, 7)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"0 tensors missing, 1 of another shape, 0 too many \(conv1.weight\)"):
        load_pretrained(built["resnet50"], path)


def test_a_deeper_network_of_the_same_family_is_refused(tmp_path: Path, built: dict[str, Backbone]) -> None:
    """It has every tensor of the shallower one, of the same shape."""
    from torchvision.models import resnet101 as torchvision_resnet101

    path = saved(torchvision_resnet101(weights=None).state_dict(), tmp_path / "resnet101.pth")
    before = state_of(built["resnet50"])["layer3.0.conv1.weight"].clone()
    with pytest.raises(UserError, match=r"0 tensors missing, 0 of another shape, 255 too many \(layer3\.10\."):
        load_pretrained(built["resnet50"], path)
    assert torch.equal(state_of(built["resnet50"])["layer3.0.conv1.weight"], before)


def test_a_backbone_without_pretrained_layers_refuses_weights(tmp_path: Path, built: dict[str, Backbone]) -> None:
    """It would use nothing of the file."""
    path = saved(state_of(built["small"]), tmp_path / "small.pth")
    with pytest.raises(UserError, match="all of whose layers are new"):
        load_pretrained(built["small"], path)


def test_a_hostile_file_runs_nothing(tmp_path: Path, built: dict[str, Backbone]) -> None:
    trace, path = tmp_path / "trace", tmp_path / "evil.pth"
    saved({"conv1.weight": Evil(trace)}, path)
    with pytest.raises(UserError, match="cannot be read as weights"):
        load_pretrained(built["resnet50"], path)
    assert not trace.exists()
    torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
    assert trace.exists(), "the file was not hostile after all"


def test_pretrained_weights_have_an_address_with_their_hash() -> None:
    assert set(PRETRAINED) == set(BACKBONES) - {"small", "resnet38"}
    for name in PRETRAINED:
        url = pretrained_url(name)
        assert url.startswith("https://")
        file = url.rsplit("/", 1)[1]
        stem, _, digest = file.removesuffix(".pth").rpartition("-")
        assert stem == name.removesuffix("_largefov")
        assert int(digest, 16) > 0
        assert len(digest) == 8

"""Backbones: images (B, 3, H, W), ImageNet-normalized -> features (B, C, H / stride, W / stride).

No backbone uses statistics of the batch (batch norm is frozen, or there is no norm at all), so an image's features do
not depend on the other images of its batch or on the number of workers.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision)
from mcis.datasets.errors import UserError
from mcis.datasets.grids import Grid, pixels
from mcis.models.resampling import Grids

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def to_unit(images: Tensor) -> Tensor:
    """uint8 RGB (B, H, W, 3) -> float32 (B, 3, H, W) in [0, 1]."""
    return images.permute(0, 3, 1, 2).float() / 255


def normalize(images: Tensor) -> Tensor:
    """RGB (B, 3, H, W) in [0, 1] -> less ImageNet's mean, divided by its standard deviation, channel by channel."""
    mean, deviation = (images.new_tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (images - mean) / deviation


class Layout(NamedTuple):
    """Where the positions of a layer lie in its image.

    A strided convolution or pooling with odd kernels centers position i at pixel stride * i. Pooling of 2x2 pixels, and
    patches, center it at stride * i + (stride - 1) / 2.

    Attributes:
        stride: input pixels per position.
        offset: pixel at which position 0 is centered, where pixel 0 is the first one's center; None where the image is
            divided into equal parts, each with a position at its center.
    """

    stride: int
    offset: float | None = 0.0

    def grid(self, side: int, count: int) -> Grid:
        """Where `count` positions lie along a side of `side` pixels."""
        if self.offset is None:
            return pixels(count)
        return Grid((self.offset + 0.5) / side, self.stride / side, count)

    def grids(self, image: tuple[int, int], shape: tuple[int, int]) -> Grids:
        """Where the positions of a map of `shape` (h, w) lie in an image of (height, width) pixels."""
        return Grids(*(self.grid(side, count) for side, count in zip(image, shape, strict=True)))

    def padded(self, side: int) -> int:
        """The least side, at least `side`, whose outermost positions are as far from both edges."""
        edges = self.stride - 1 if self.offset is None else round(2 * self.offset)
        return edges + 1 + self.stride * -(-max(0, side - 1 - edges) // self.stride)


class Textures(NamedTuple):
    """The early layer of a backbone whose channels tell textures apart.

    Attributes:
        layer: its name in the backbone's body.
        channels: C' of its output.
        layout: of its positions.
    """

    layer: str
    channels: int
    layout: Layout


class Backbone(nn.Module):
    """A feature extractor with known width, and known places of its positions.

    Attributes:
        channels: C of the features.
        layout: of their positions.
        new_layers: prefixes of the names of parameters without pretrained weights, whose learning rate may be higher
            (RELEASED_RECIPE, "Classifier").
        textures: the layer of textures.
    """

    def __init__(
        self,
        body: nn.Module,
        *,
        channels: int,
        layout: Layout,
        new_layers: tuple[str, ...] = (),
        textures: Textures,
    ):
        super().__init__()
        self.body = body
        self.channels, self.layout, self.new_layers, self.textures = channels, layout, new_layers, textures

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images)
        return features

    def grids(self, images: Tensor, features: Tensor) -> Grids:
        """Where the positions of features (..., h, w) lie in their images (..., H, W)."""
        (height, width), (h, w) = images.shape[-2:], features.shape[-2:]
        return self.layout.grids((height, width), (h, w))

    @contextlib.contextmanager
    def watching_textures(self) -> Iterator[list[Tensor]]:
        """Collects the output of the texture layer, (B, C', h, w), in the first forward pass of the block.

        Yields:
            A list that holds that output once the pass is done.
        """
        outputs: list[Tensor] = []

        def watch(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            if not outputs:
                outputs.append(output)

        handle = self.body.get_submodule(self.textures.layer).register_forward_hook(watch)
        try:
            yield outputs
        finally:
            handle.remove()


def small(*, channels: int = 96, stride: int = 8) -> Backbone:
    """Five 3x3 convolutions with ReLU between them, 0.2 million weights: trains from scratch on a CPU.

    There are no normalization layers: group norm over an image's positions would remove how much of a pattern the image
    has, and that is what global average pooling hands to the class layer. There is no last ReLU: features of both signs
    tell positions apart by their cosine, which features that are all positive hardly do.

    Args:
        channels: C, a multiple of 3.
        stride: 8, or 4, where the last reduction becomes a dilation with the same weights.

    Raises:
        UserError: another stride.
    """
    if stride not in (4, 8):
        raise UserError(f"backbone small with stride {stride}", "stride 4 or 8", "set `stride` to 4 or 8")
    last, dilation = (2, 1) if stride == 8 else (1, 2)
    third = channels // 3
    layers: list[nn.Module] = []
    for inputs, outputs, step, dilated in (
        (3, third, 2, 1),
        (third, 2 * third, 2, 1),
        (2 * third, channels, last, 1),
        (channels, channels, 1, dilation),
        (channels, channels, 1, dilation),
    ):
        conv = nn.Conv2d(inputs, outputs, 3, stride=step, padding=dilated, dilation=dilated)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        layers += [conv, nn.ReLU(inplace=True)]
    return Backbone(
        nn.Sequential(*layers[:-1]),
        channels=channels,
        layout=Layout(stride),
        new_layers=("body",),
        textures=Textures("3", 2 * third, Layout(4)),  # behind the second ReLU
    )


def _vgg16_features() -> nn.Sequential:
    """VGG-16's layers with stride 8: pool4 3x3 with stride 1, conv5 dilated by 2, no pool5."""
    from torchvision.models import vgg16 as torchvision_vgg16

    features: Any = torchvision_vgg16(weights=None).features[:-1]
    features[23] = nn.MaxPool2d(3, stride=1, padding=1)
    for index in (24, 26, 28):
        features[index].dilation, features[index].padding = (2, 2), (2, 2)
    assert isinstance(features, nn.Sequential)
    return features


def vgg16() -> Backbone:
    """The classifier's VGG-16, stride 8, with three 3x3 convolutions of 512 in place of the fully connected layers.

    256x256 pixels -> 32x32x512 (section 3.3; strides and dilations: RELEASED_RECIPE, "Classifier").
    """
    extra_convs = nn.Sequential()
    for _ in range(3):
        conv = nn.Conv2d(512, 512, 3, padding=1)
        nn.init.normal_(conv.weight, std=(2 / (9 * 512)) ** 0.5)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        extra_convs.extend([conv, nn.ReLU(inplace=True)])
    halves = Layout(8, 3.5)  # three poolings of 2x2 pixels
    return Backbone(
        nn.Sequential(OrderedDict(features=_vgg16_features(), extra_convs=extra_convs)),
        channels=512,
        layout=halves,
        new_layers=("body.extra_convs",),
        textures=Textures("features.16", 256, halves),  # pool3
    )


def vgg16_largefov() -> Backbone:
    """The segmenter's VGG-16 as in DeepLab-LargeFOV (Chen et al., PAMI 2017): poolings of 3x3, stride 8, no new layer.

    321x321 pixels -> 41x41x512 (RELEASED_RECIPE, "Segmentation network").
    """
    features = _vgg16_features()
    for index in (4, 9, 16):  # pool1 to pool3
        features[index] = nn.MaxPool2d(3, stride=2, padding=1)
    features.append(nn.MaxPool2d(3, stride=1, padding=1))  # pool5
    return Backbone(
        nn.Sequential(OrderedDict(features=features)),
        channels=512,
        layout=Layout(8),
        textures=Textures("features.16", 256, Layout(8)),
    )


def _resnet(name: str) -> Backbone:
    from torchvision import models
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.ops import FrozenBatchNorm2d

    net = getattr(models, name)(
        weights=None, replace_stride_with_dilation=[False, True, True], norm_layer=FrozenBatchNorm2d
    )
    for stage, dilation in ((net.layer3, 2), (net.layer4, 4)):  # torchvision's first blocks keep the stage before's
        conv = stage[0].conv2
        conv.dilation, conv.padding = (dilation, dilation), (dilation, dilation)

    class Body(IntermediateLayerGetter):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)["out"]
            return out

    body = Body(net, {"layer4": "out"})
    return Backbone(body, channels=2048, layout=Layout(8), textures=Textures("layer2", 512, Layout(8)))


def resnet50() -> Backbone:
    """ResNet-50, stride 8, dilation 2 in all blocks of res4 and 4 in all of res5, batch norm frozen."""
    return _resnet("resnet50")


def resnet101() -> Backbone:
    """ResNet-101, stride 8, dilation 2 in all blocks of res4 and 4 in all of res5, batch norm frozen.

    The released segmentation network has it as its backbone (RELEASED_RECIPE, "Segmentation network").
    """
    return _resnet("resnet101")


class Vit(nn.Module):
    """torchvision's vision transformer without its head, for images of any size; parameters keep their names."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import vit_b_16 as torchvision_vit

        net = torchvision_vit(weights=None)
        self.class_token, self.conv_proj, self.encoder = net.class_token, net.conv_proj, net.encoder
        self.patch, self.trained_side = net.patch_size, net.image_size // net.patch_size

    def forward(self, images: Tensor) -> Tensor:
        height, width = (max(1, round(side / self.patch)) for side in images.shape[2:])
        whole = (height * self.patch, width * self.patch)
        if images.shape[2:] != whole:
            images = nn.functional.interpolate(images, size=whole, mode="bilinear", align_corners=False)
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        tokens = self.encoder.ln(self.encoder.layers(tokens + self.position_embeddings(height, width)))
        return tokens[:, 1:].transpose(1, 2).unflatten(2, (height, width))

    def position_embeddings(self, height: int, width: int) -> Tensor:
        """Position embeddings (1, 1 + height * width, C): those of the trained square, resized bicubically."""
        trained: Tensor = self.encoder.pos_embedding
        side = self.trained_side
        if (height, width) == (side, side):
            return trained
        square = trained[:, 1:].transpose(1, 2).unflatten(2, (side, side))
        resized = nn.functional.interpolate(square, size=(height, width), mode="bicubic", align_corners=False)
        return torch.cat([trained[:, :1], resized.flatten(2).transpose(1, 2)], dim=1)


def vit_b_16() -> Backbone:
    """Vision transformer B/16: stride 16, 768 channels of both signs; every position attends to the whole image.

    256x256 pixels -> 16x16x768. Images are resized to whole patches, and the position embeddings to the image.
    """
    patches = Layout(16, None)
    return Backbone(Vit(), channels=768, layout=patches, textures=Textures("conv_proj", 768, patches))


BACKBONES: Mapping[str, Callable[..., Backbone]] = {
    "small": small,
    "vgg16": vgg16,
    "vgg16_largefov": vgg16_largefov,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "vit_b_16": vit_b_16,
}
PRETRAINED = {
    "vit_b_16": ("ViT_B_16_Weights", "IMAGENET1K_V1"),
    "vgg16": ("VGG16_Weights", "IMAGENET1K_V1"),
    "vgg16_largefov": ("VGG16_Weights", "IMAGENET1K_V1"),
    "resnet50": ("ResNet50_Weights", "IMAGENET1K_V1"),
    "resnet101": ("ResNet101_Weights", "IMAGENET1K_V1"),
}


_HEADS = ("fc.", "classifier.", "heads.")  # torchvision's names of the classification layers


def pretrained_url(name: str) -> str:
    """The URL of torchvision's ImageNet weights of backbone `name`; its file name ends in the hash of the content."""
    from torchvision import models

    enum, member = PRETRAINED[name]
    return str(getattr(models, enum)[member].url)


def pretrained_bytes(name: str) -> int:
    """Size of the file behind `pretrained_url`."""
    from torchvision import models

    enum, member = PRETRAINED[name]
    return round(getattr(models, enum)[member].meta["_file_size"] * 2**20)


def read_state(path: Path, remedy: str) -> Mapping[str, Tensor]:
    """Reads the `state_dict` in a file, plain or under the key `state_dict`, and runs nothing that the file holds.

    Args:
        remedy: what the errors tell the user to do.

    Raises:
        UserError: there is no file, or it holds anything but named tensors.
    """
    if not path.is_file():
        raise UserError(f"no weights file {path}", "a state_dict file", remedy)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a hostile or damaged file makes the unpickler raise errors of any type
        raise UserError(f"{path} cannot be read as weights", "an undamaged file of tensors alone", remedy) from None
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} holds no state_dict", "a mapping of names to tensors", remedy)
    return state


def load_pretrained(backbone: Backbone, path: Path) -> None:
    """Loads torchvision's ImageNet weights, a `state_dict` file, into `backbone`.

    The classification layers of the file are not used, and the backbone's `new_layers` stay as initialized.

    Raises:
        UserError: the file is absent, is no plain `state_dict`, or is of another architecture; or all layers of the
            backbone are new, so that nothing of the file would be used.
    """
    remedy = "name torchvision's ImageNet state_dict file of this `backbone` by `path`"
    state = read_state(path, remedy)
    wanted = {
        k: v
        for k, v in backbone.body.state_dict().items()
        if not any(f"body.{k}".startswith(prefix) for prefix in backbone.new_layers)
    }
    if not wanted:
        raise UserError(
            f"{path} is given for a backbone all of whose layers are new",
            f"a backbone with pretrained weights: {', '.join(PRETRAINED)}",
            "choose such a `backbone`, or leave out `path` to train from scratch",
        )
    missing = [k for k in wanted if k not in state]
    unused = [k for k in state if k.startswith(_HEADS) or k.endswith("num_batches_tracked")]
    surplus = sorted(set(state) - set(backbone.body.state_dict()) - set(unused))
    misshapen = [k for k in wanted if k in state and state[k].shape != wanted[k].shape]
    if missing or misshapen or surplus:  # a deeper network of the same family has every tensor of a shallower one
        shown = ", ".join((missing + misshapen + surplus)[:5])
        raise UserError(
            f"{path} does not fit the backbone: "
            f"{len(missing)} tensors missing, {len(misshapen)} of another shape, {len(surplus)} too many ({shown})",
            f"the {len(wanted)} tensors of the architecture",
            remedy,
        )
    backbone.body.load_state_dict({k: state[k] for k in wanted}, strict=False)

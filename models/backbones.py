"""Backbones: images (B, 3, H, W), normalized as the backbone wants them -> features (B, C, H / stride, W / stride).

Here are the project's own and torchvision's; `timm_backbones` has timm's.

No backbone uses statistics of the batch (batch norm is frozen, or there is no norm at all), so an image's features do
not depend on the other images of its batch or on the number of workers.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision)
from mcis.datasets.errors import UserError
from mcis.models.grids import Grids, Layout


def to_float_images(images: Tensor) -> Tensor:
    """uint8 RGB (B, H, W, 3) -> float32 (B, 3, H, W) in [0, 1]."""
    return images.permute(0, 3, 1, 2).float() / 255


class Normalization(NamedTuple):
    """How a backbone wants its pixels: less `mean`, divided by `deviation`, both of RGB values in [0, 1]."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def __call__(self, images: Tensor) -> Tensor:
        """RGB (B, 3, H, W) in [0, 1] -> normalized channel by channel, (B, 3, H, W)."""
        mean, deviation = (images.new_tensor(values).view(1, 3, 1, 1) for values in self)
        return (images - mean) / deviation


IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Of the project's own backbones and torchvision's."""


class Layer(NamedTuple):
    """A layer inside a backbone whose output is read beside the features.

    Attributes:
        name: of the module in the backbone's body.
        channels: C' of its output.
        layout: of its positions.
    """

    name: str
    channels: int
    layout: Layout


class Backbone(nn.Module):
    """A feature extractor with known width, and known places of its positions.

    Attributes:
        stage_channels: channels of the stages whose outputs, one behind the other, are the features.
        channels: C of the features, the sum of `stage_channels`.
        layout: of their positions.
        normalize: images in [0, 1] -> as the body wants them.
        stages: for each stage, in forward order, the beginning of the name of its first parameter in the body. A
            stage's parameters are those up to the next one's first, in the order of the body's parameters.
        new_layers: prefixes of the names of parameters without pretrained weights, whose learning rate may be higher
            (RELEASED_RECIPE, "Classifier").
        unused_weights: prefixes of the names of tensors that files of pretrained weights have and the body lacks.
        levels: earlier layers, from the finest to the coarsest, that may be read beside the features. The first one of
            convolutional networks has stride 4.
    """

    def __init__(
        self,
        body: nn.Module,
        *,
        stage_channels: tuple[int, ...],
        layout: Layout,
        stages: tuple[str, ...] = (),
        normalization: Normalization = IMAGENET,
        new_layers: tuple[str, ...] = (),
        unused_weights: tuple[str, ...] = (),
        levels: tuple[Layer, ...] = (),
    ):
        super().__init__()
        self.body = body
        self.stage_channels, self.channels, self.layout, self.stages = (
            stage_channels,
            sum(stage_channels),
            layout,
            stages,
        )
        self.normalize, self.new_layers, self.unused_weights = normalization, new_layers, unused_weights
        self.levels = levels

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images)
        return features

    def forward_levels(self, images: Tensor) -> list[Tensor]:
        """The outputs of all levels, (B, C', h', w') each, and the features (B, C, h, w), of one forward pass."""
        with self.capture_outputs(*self.levels) as outputs:
            features = self(images)
        return [*outputs, features]

    def keep_pretrained_head(self) -> int:
        """Keeps the layers between features and classes that the pretrained weights have, if they have any.

        Returns:
            C' of `of_image`.
        """
        return self.channels

    def image_features(self, features: Tensor) -> Tensor:
        """What an image as a whole shows, (B, C'), of its features (B, C, h, w): their mean, behind the layers kept."""
        return features.mean(dim=(2, 3))

    @property
    def correlation_layers(self) -> tuple[Layer, ...]:
        """The last two levels at the features' positions, which pixel correlation compares (`seam`), if there are."""
        there = tuple(level for level in self.levels if level.layout == self.layout)
        return there[-2:] if len(there) > 1 else ()

    def grids(self, images: Tensor, features: Tensor) -> Grids:
        """Where the positions of features (..., h, w) lie in their images (..., H, W)."""
        return self.layout.grids(images.shape, features.shape)

    @contextlib.contextmanager
    def capture_outputs(self, *layers: Layer) -> Iterator[list[Tensor]]:
        """Fills a list with the layers' outputs, in forward order, of the first pass within the block."""
        outputs: list[Tensor] = []

        def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if len(outputs) < len(layers):
                outputs.append(output)

        handles = [self.body.get_submodule(layer.name).register_forward_hook(watch) for layer in layers]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


def freeze_except_last(backbone: Backbone, count: int) -> None:
    """Freezes a backbone but for its last `count` stages; 0 freezes all of it. UserError where it has fewer stages."""
    if count > len(backbone.stages):
        raise UserError(
            f"the last {count} stages of a backbone are to be trained, and it has {len(backbone.stages)}",
            f"at most {len(backbone.stages)} stages",
            "set trainable_stages to that, or to all",
        )
    first = backbone.stages[len(backbone.stages) - count] if count else None
    begun = False
    for name, parameter in backbone.body.named_parameters():
        begun = begun or (first is not None and name.startswith(first))
        parameter.requires_grad_(begun)


def convolutions(*sizes: tuple[int, int, int, int, int]) -> nn.Sequential:
    """Convolutions with ReLU between them and He's initial weights.

    Args:
        sizes: of each the channels that it takes and gives, kernel, stride and dilation.
    """
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride, dilation in sizes:
        padding = dilation * (kernel // 2)
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        layers += [conv, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


def small(*, channels: int = 96, stride: int = 8) -> Backbone:
    """Five 3x3 convolutions with ReLU between them, 0.2 million weights: trains from scratch on a CPU.

    There are no normalization layers: group norm over an image's positions would remove how much of a pattern the image
    has, and that is what global average pooling hands to the class layer. There is no last ReLU: features of both signs
    tell positions apart by their cosine, which features that are all positive hardly do.

    Args:
        channels: C, a multiple of 3.
        stride: 8, or 4, where the last reduction becomes a dilation with the same weights; UserError for others.
    """
    if stride not in (4, 8):
        raise UserError(f"backbone small with stride {stride}", "stride 4 or 8", "set stride to 4 or 8")
    last, dilation = (2, 1) if stride == 8 else (1, 2)
    third = channels // 3
    body = convolutions(
        (3, third, 3, 2, 1),
        (third, 2 * third, 3, 2, 1),
        (2 * third, channels, 3, last, 1),
        (channels, channels, 3, 1, dilation),
        (channels, channels, 3, 1, dilation),
    )
    early = Layer("3", 2 * third, Layout(4))  # behind the second ReLU
    return Backbone(
        body,
        stage_channels=(channels,),
        layout=Layout(stride),
        stages=("0.", "2.", "4.", "6.", "8."),
        new_layers=("body",),
        levels=(early, Layer("5", channels, Layout(stride)), Layer("7", channels, Layout(stride))),
    )


_HEADS = ("fc.", "classifier.")  # torchvision's names of the classification layers
_VGG16_STAGES = ("features.0.", "features.5.", "features.10.", "features.17.", "features.24.")


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
        stage_channels=(512,),
        layout=halves,
        stages=(*_VGG16_STAGES, "extra_convs."),
        new_layers=("body.extra_convs",),
        unused_weights=_HEADS,
        levels=(  # pool2, conv4_3 and conv5_3
            Layer("features.9", 128, Layout(4, 1.5)),
            Layer("features.22", 512, halves),
            Layer("features.29", 512, halves),
        ),
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
        stage_channels=(512,),
        layout=Layout(8),
        stages=_VGG16_STAGES,
        unused_weights=_HEADS,
        levels=(  # pool2, conv4_3 and conv5_3
            Layer("features.9", 128, Layout(4)),
            Layer("features.22", 512, Layout(8)),
            Layer("features.29", 512, Layout(8)),
        ),
    )


def _resnet(name: str, stride: int) -> Backbone:
    from torchvision import models
    from torchvision.ops import FrozenBatchNorm2d

    from mcis.models.frozen_norms import fold_frozen_norms

    if stride not in (8, 16):
        raise UserError(f"backbone {name} with stride {stride}", "stride 8 or 16", "set stride to 8 or 16")
    net = getattr(models, name)(
        weights=None, replace_stride_with_dilation=[False, stride == 8, True], norm_layer=FrozenBatchNorm2d
    )
    dilated = ((net.layer3, 2), (net.layer4, 4)) if stride == 8 else ((net.layer4, 2),)
    for stage, dilation in dilated:  # torchvision's first blocks keep the dilation of the stage before
        conv = stage[0].conv2
        conv.dilation, conv.padding = (dilation, dilation), (dilation, dilation)
    body = nn.Sequential(OrderedDict(list(net.named_children())[:-2]))  # up to layer4
    fold_frozen_norms(body)
    return Backbone(
        body,
        stage_channels=(2048,),
        layout=Layout(stride),
        stages=("conv1.", "layer2.", "layer3.", "layer4."),
        unused_weights=_HEADS,
        levels=(
            Layer("layer1", 256, Layout(4)),
            Layer("layer2", 512, Layout(8)),
            Layer("layer3", 1024, Layout(stride)),
        ),
    )


def resnet50(*, stride: int = 8) -> Backbone:
    """ResNet-50, stride 8, dilation 2 in all blocks of res4 and 4 in all of res5, batch norm frozen.

    Args:
        stride: 8, or 16, where res4 is not dilated and res5 by 2; UserError for others.
    """
    return _resnet("resnet50", stride)


def resnet101(*, stride: int = 8) -> Backbone:
    """As `resnet50`, with more blocks: the released segmenter's (RELEASED_RECIPE, "Segmentation network")."""
    return _resnet("resnet101", stride)


def resnet38() -> Backbone:
    """Wide ResNet-38 (Wu et al., Pattern Recognition 2019), stride 8, batch norm frozen: images -> 4,096 channels.

    Files of PSA (Ahn and Kwak, CVPR 2018) and SEAM (Wang et al., CVPR 2020) fit by the names of their tensors, whose
    class layers and affinity layers are left out.
    """
    from mcis.models.resnet38 import ResNet38

    return Backbone(
        ResNet38(),
        stage_channels=(4096,),
        layout=Layout(8),
        stages=("conv1a.", "b3.", "b4.", "b5.", "b6.", "b7."),
        unused_weights=("fc8.", "f8_", "f9."),
        levels=(
            Layer("b3_2", 256, Layout(4)),
            Layer("b5.bn_branch2a", 512, Layout(8)),
            Layer("b6.bn_branch2a", 1024, Layout(8)),
        ),
    )

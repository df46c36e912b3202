"""Backbones: map normalized images (B, 3, H, W) to features (B, C, H / stride, W / stride).

This module has the project's own backbones and torchvision's. `timm_backbones` has timm's.

No backbone uses batch statistics: batch norm is frozen, or there are no norms. The features of an image therefore do
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
    """Converts uint8 RGB images (B, H, W, 3) to float32 (B, 3, H, W) in [0, 1]."""
    return images.permute(0, 3, 1, 2).float() / 255


class Normalization(NamedTuple):
    """Mean and standard deviation by which a backbone's images are normalized, for RGB values in [0, 1]."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def __call__(self, images: Tensor) -> Tensor:
        """Normalizes each channel of RGB images (B, 3, H, W) in [0, 1]."""
        mean = images.new_tensor(self.mean).view(1, 3, 1, 1)
        deviation = images.new_tensor(self.deviation).view(1, 3, 1, 1)
        return (images - mean) / deviation


IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Normalization of the project's own backbones and torchvision's."""


class Layer(NamedTuple):
    """A layer inside a backbone whose output can be read together with the features.

    Attributes:
        name: Name of the module in the backbone's body.
        channels: Number of output channels.
        layout: Layout of the output's positions.
    """

    name: str
    channels: int
    layout: Layout


class Backbone(nn.Module):
    """Feature extractor with a known number of channels and known locations of its positions.

    Attributes:
        stage_channels: Channels of the stages whose concatenated outputs are the features.
        channels: Channels C of the features, the sum of `stage_channels`.
        layout: Layout of the features' positions.
        normalize: Normalization of the input images.
        stages: Prefix of the name of each stage's first parameter in the body, in forward order. A stage's parameters
            are the ones from there up to the first of the next stage, in the order of the body's parameters.
        new_layers: Name prefixes of parameters without pretrained weights. Their learning rate may be higher
            (paper-vs-code, "Classifier").
        unused_weights: Name prefixes of tensors that files of pretrained weights contain and the body does not use:
            classification layers.
        levels: Earlier layers that can be read together with the features, from the finest to the coarsest. The first
            level of a convolutional network has stride 4.
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
        self.stage_channels = stage_channels
        self.channels = sum(stage_channels)
        self.layout = layout
        self.stages = stages
        self.normalize = normalization
        self.new_layers = new_layers
        self.unused_weights = unused_weights
        self.levels = levels

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images)
        return features

    def forward_levels(self, images: Tensor) -> list[Tensor]:
        """Runs one forward pass and returns the outputs of all levels and then the features, (B, C', h', w') each."""
        with self.capture_outputs(*self.levels) as outputs:
            features = self(images)
        return [*outputs, features]

    def keep_pretrained_head(self) -> int:
        """Adds the pretrained layers between features and classification layer to the body, if the backbone has any.

        Call it before weights are loaded.

        Returns:
            Number of channels of `image_features`.
        """
        return self.channels

    def image_features(self, features: Tensor) -> Tensor:
        """Pools features (B, C, h, w) to one vector per image, (B, C'), after the layers of `keep_pretrained_head`."""
        return features.mean(dim=(2, 3))

    @property
    def correlation_layers(self) -> tuple[Layer, ...]:
        """The last two levels with the layout of the features, for pixel correlation (`seam`). Empty if fewer."""
        same_layout = tuple(level for level in self.levels if level.layout == self.layout)
        return same_layout[-2:] if len(same_layout) > 1 else ()

    def grids(self, images: Tensor, features: Tensor) -> Grids:
        """Returns the positions of features (..., h, w) in their images (..., H, W)."""
        return self.layout.grids(images.shape, features.shape)

    @contextlib.contextmanager
    def capture_outputs(self, *layers: Layer) -> Iterator[list[Tensor]]:
        """Yields a list that receives the layers' outputs, in forward order, of the first forward pass in the block."""
        outputs: list[Tensor] = []

        def capture(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if len(outputs) < len(layers):
                outputs.append(output)

        handles = [self.body.get_submodule(layer.name).register_forward_hook(capture) for layer in layers]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


def freeze_except_last(backbone: Backbone, count: int) -> None:
    """Freezes a backbone except for its last `count` stages. 0 freezes all of them.

    Raises:
        UserError: The backbone has fewer stages.
    """
    stages = backbone.stages
    if count > len(stages):
        raise UserError(
            f"the last {count} stages of a backbone are to be trained, but it has {len(stages)}",
            f"at most {len(stages)} stages",
            f"set trainable_stages to {len(stages)}, or to all",
        )

    first_trained = stages[len(stages) - count] if count else None
    trained = False
    for name, parameter in backbone.body.named_parameters():
        if first_trained is not None and name.startswith(first_trained):
            trained = True
        parameter.requires_grad_(trained)


def _conv_stack(*sizes: tuple[int, int, int, int, int]) -> nn.Sequential:
    """Builds convolutions with He initialization and ReLUs between them.

    Args:
        sizes: Input channels, output channels, kernel, stride and dilation of each convolution.
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
    """Builds five 3x3 convolutions with ReLUs between them: 0.2 million weights, trained from scratch on a CPU.

    There are no norms: group norm over an image's positions would remove how much of a pattern the image has, which is
    what global average pooling passes to the class layer. There is no final ReLU: features of both signs make positions
    distinguishable by their cosine, and non-negative features hardly do.

    Args:
        channels: Channels C of the features, a multiple of 3.
        stride: 8 or 4. For 4, the last stride becomes a dilation, with the same weights.

    Raises:
        UserError: The backbone does not support the stride.
    """
    if stride not in (4, 8):
        raise UserError(f"backbone small with stride {stride}", "stride 4 or 8", "set stride to 4 or 8")

    last_stride = 2 if stride == 8 else 1
    dilation = 1 if stride == 8 else 2
    third = channels // 3
    body = _conv_stack(
        (3, third, 3, 2, 1),
        (third, 2 * third, 3, 2, 1),
        (2 * third, channels, 3, last_stride, 1),
        (channels, channels, 3, 1, dilation),
        (channels, channels, 3, 1, dilation),
    )
    return Backbone(
        body,
        stage_channels=(channels,),
        layout=Layout(stride),
        stages=("0.", "2.", "4.", "6.", "8."),
        new_layers=("body",),
        levels=(
            Layer("3", 2 * third, Layout(4)),  # after the second ReLU
            Layer("5", channels, Layout(stride)),
            Layer("7", channels, Layout(stride)),
        ),
    )


_CLASSIFICATION_LAYERS = ("fc.", "classifier.")
"""Name prefixes of torchvision's classification layers."""
_VGG16_STAGES = ("features.0.", "features.5.", "features.10.", "features.17.", "features.24.")


def _vgg16_features() -> nn.Sequential:
    """Builds VGG-16's layers with stride 8: pool4 is 3x3 with stride 1, conv5 has dilation 2, pool5 is left out."""
    from torchvision.models import vgg16 as torchvision_vgg16

    features: Any = torchvision_vgg16(weights=None).features[:-1]
    features[23] = nn.MaxPool2d(3, stride=1, padding=1)
    for index in (24, 26, 28):
        features[index].dilation = (2, 2)
        features[index].padding = (2, 2)
    assert isinstance(features, nn.Sequential)
    return features


def vgg16() -> Backbone:
    """Builds the classifier's VGG-16: stride 8, three 3x3 convolutions of 512 channels instead of the linear layers.

    256x256 pixels give 32x32x512 features (section 3.3; strides and dilations: paper-vs-code, "Classifier").
    """
    extra_convs = nn.Sequential()
    for _ in range(3):
        conv = nn.Conv2d(512, 512, 3, padding=1)
        nn.init.normal_(conv.weight, std=(2 / (9 * 512)) ** 0.5)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        extra_convs.extend([conv, nn.ReLU(inplace=True)])

    layout = Layout(8, 3.5)  # after three poolings of 2x2 pixels
    return Backbone(
        nn.Sequential(OrderedDict(features=_vgg16_features(), extra_convs=extra_convs)),
        stage_channels=(512,),
        layout=layout,
        stages=(*_VGG16_STAGES, "extra_convs."),
        new_layers=("body.extra_convs",),
        unused_weights=_CLASSIFICATION_LAYERS,
        levels=(  # pool2, conv4_3 and conv5_3
            Layer("features.9", 128, Layout(4, 1.5)),
            Layer("features.22", 512, layout),
            Layer("features.29", 512, layout),
        ),
    )


def vgg16_largefov() -> Backbone:
    """Builds DeepLab-LargeFOV's VGG-16 (Chen et al., PAMI 2017) for the segmenter: 3x3 poolings, stride 8.

    321x321 pixels give 41x41x512 features (paper-vs-code, "Segmentation network").
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
        unused_weights=_CLASSIFICATION_LAYERS,
        levels=(  # pool2, conv4_3 and conv5_3
            Layer("features.9", 128, Layout(4)),
            Layer("features.22", 512, Layout(8)),
            Layer("features.29", 512, Layout(8)),
        ),
    )


def _resnet(name: str, stride: int) -> Backbone:
    """Builds one of torchvision's ResNets with frozen batch norm and output stride 8 or 16.

    Raises:
        UserError: The backbone does not support the stride.
    """
    from torchvision import models
    from torchvision.ops import FrozenBatchNorm2d

    from mcis.models.frozen_norms import fold_frozen_norms

    if stride not in (8, 16):
        raise UserError(f"backbone {name} with stride {stride}", "stride 8 or 16", "set stride to 8 or 16")

    resnet = getattr(models, name)(
        weights=None, replace_stride_with_dilation=[False, stride == 8, True], norm_layer=FrozenBatchNorm2d
    )
    dilated = ((resnet.layer3, 2), (resnet.layer4, 4)) if stride == 8 else ((resnet.layer4, 2),)
    for stage, dilation in dilated:  # torchvision gives a stage's first block the dilation of the previous stage
        conv = stage[0].conv2
        conv.dilation = (dilation, dilation)
        conv.padding = (dilation, dilation)

    body = nn.Sequential(OrderedDict(list(resnet.named_children())[:-2]))  # up to layer4
    fold_frozen_norms(body)
    return Backbone(
        body,
        stage_channels=(2048,),
        layout=Layout(stride),
        stages=("conv1.", "layer2.", "layer3.", "layer4."),
        unused_weights=_CLASSIFICATION_LAYERS,
        levels=(
            Layer("layer1", 256, Layout(4)),
            Layer("layer2", 512, Layout(8)),
            Layer("layer3", 1024, Layout(stride)),
        ),
    )


def resnet50(*, stride: int = 8) -> Backbone:
    """Builds ResNet-50 with frozen batch norm.

    Args:
        stride: 8: dilation 2 in all blocks of res4 and 4 in all blocks of res5. 16: no dilation in res4, 2 in res5.

    Raises:
        UserError: The backbone does not support the stride.
    """
    return _resnet("resnet50", stride)


def resnet101(*, stride: int = 8) -> Backbone:
    """Builds ResNet-101, the released segmenter's backbone (paper-vs-code, "Segmentation network").

    For `stride` see `resnet50`.
    """
    return _resnet("resnet101", stride)


def resnet38() -> Backbone:
    """Builds Wide ResNet-38 (Wu et al., Pattern Recognition 2019): stride 8, frozen batch norm, 4,096 channels.

    Weights files of PSA (Ahn and Kwak, CVPR 2018) and SEAM (Wang et al., CVPR 2020) load without renaming. Their class
    and affinity layers are ignored.
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

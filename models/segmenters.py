"""Segmentation networks: images (B, 3, H, W) -> logits (B, K + 1, H, W); prediction over scales and mirror images."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mcis.datasets.errors import UserError
from mcis.models.backbones import Backbone
from mcis.models.dropout import SampleDropout
from mcis.models.grids import Grids, pixel_grids
from mcis.models.resampling import resample


class Segmenter(nn.Module):
    """A backbone and what makes logits of its features.

    Args:
        backbone: features (B, C, h, w).
    """

    head: nn.Sequential

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.backbone = backbone

    def logits(self, images: Tensor) -> tuple[Tensor, Grids]:
        """Logits at some positions of the images, (B, K + 1, h, w), and where these lie."""
        logits = self.head(self.backbone(images))
        return logits, self.backbone.grids(images, logits)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images' pixels, (B, K + 1, H, W), bilinear between the positions.

        Images are padded on the right and at the bottom until the last position lies on the last pixel, 321 pixels for
        41 positions, where this is upsampling with aligned corners; the padding is cut off again.
        """
        (height, width), layout = images.shape[2:], self.backbone.layout
        padded = functional.pad(images, (0, layout.padded(width) - width, 0, layout.padded(height) - height))
        logits, source = self.logits(padded)
        rows, columns = pixel_grids(*padded.shape[2:])
        return resample(logits, source, Grids(rows._replace(positions=height), columns._replace(positions=width)))


class LargeFov(Segmenter):
    """DeepLab-LargeFOV (Chen et al., PAMI 2017): 3x3 convolution with a large dilation, 1x1, 1x1 to the labels.

    Args:
        backbone: features (B, C, h, w).
        labels: K + 1, background first.
        width: channels of the head.
        dilation: of the 3x3 convolution.
        dropout: fraction of units dropped after both hidden layers; 0.5 in the VGG-16 version.
    """

    def __init__(self, backbone: Backbone, *, labels: int, width: int, dilation: int, dropout: float):
        super().__init__(backbone)
        self.head = nn.Sequential(
            nn.Conv2d(backbone.channels, width, 3, padding=dilation, dilation=dilation),
            nn.ReLU(inplace=True),
            SampleDropout(dropout),
            nn.Conv2d(width, width, 1),
            nn.ReLU(inplace=True),
            SampleDropout(dropout),
            nn.Conv2d(width, labels, 1),
        )
        _initialize(self.head)


class DeepLabV3(Segmenter):
    """DeepLab-V3 (Chen et al., 2017) with torchvision's head: atrous spatial pyramid pooling, 3x3, 1x1 to the labels.

    In place of its batch norms are group norms (Wu and He, ECCV 2018), and its dropout is drawn per sample.

    Args:
        backbone: features (B, C, h, w); those of a ResNet have stride 8 or 16.
        labels: K + 1, background first.
        width: channels of the head.
        dilation: of the pyramid's first 3x3 convolution; the others have twice and three times as much. The paper has
            12 for stride 8 and 6 for stride 16.
        dropout: fraction of units dropped behind the pyramid; 0.5 in torchvision.
    """

    def __init__(self, backbone: Backbone, *, labels: int, width: int, dilation: int, dropout: float):
        super().__init__(backbone)
        from torchvision.models.segmentation.deeplabv3 import ASPP

        pyramid = ASPP(backbone.channels, (dilation, 2 * dilation, 3 * dilation), width)
        pyramid.project[-1] = SampleDropout(dropout)
        self.head = nn.Sequential(
            pyramid,
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, labels, 1),
        )
        _without_batch_norm(self.head)


def _without_batch_norm(network: nn.Module) -> None:
    """Puts group norms of 8 channels a group, of 256 channels 32 groups, in place of the batch norms below a network.

    Smaller groups would leave nothing of the image's mean, which has one position.
    """
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            parent, _, own = name.rpartition(".")
            channels = layer.num_features
            groups = 1 if channels % 8 else channels // 8
            setattr(network.get_submodule(parent), own, nn.GroupNorm(groups, channels))


class Skip(Segmenter):
    """A light decoder in the manner of DeepLab-v3+ (Chen et al., ECCV 2018), for small backbones of a coarse stride.

    The features pass a 1x1 and two dilated 3x3 convolutions, are resized to the positions of the backbone's finest
    level, and meet it there, reduced to 48 channels; two depthwise separable 3x3 convolutions and a 1x1 follow.

    Args:
        backbone: features (B, C, h, w), with a level of stride 4.
        labels: K + 1, background first.
        width: channels of the decoder.
        dilation: of the two 3x3 convolutions on the features.
        dropout: fraction of units dropped before the last layer.

    Raises:
        UserError: the backbone has no such level.
    """

    def __init__(self, backbone: Backbone, *, labels: int, width: int, dilation: int, dropout: float):
        super().__init__(backbone)
        if not backbone.levels:
            raise UserError(
                "the segmentation network skip with a backbone without a layer of stride 4",
                "a convolutional backbone",
                "choose another `backbone`, or set `network` to largefov",
            )
        finest = backbone.levels[0]
        self.finest_layout = finest.layout
        self.head = nn.Sequential(
            nn.Conv2d(backbone.channels, width, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation),
            nn.ReLU(inplace=True),
        )
        self.reduce = nn.Sequential(nn.Conv2d(finest.channels, _REDUCED, 1), nn.ReLU(inplace=True))
        self.decoder = nn.Sequential(
            *_separable(width + _REDUCED, width),
            *_separable(width, width),
            SampleDropout(dropout),
            nn.Conv2d(width, labels, 1),
        )
        _initialize(self.head, self.reduce, self.decoder)

    def logits(self, images: Tensor) -> tuple[Tensor, Grids]:
        """As of `Segmenter`, at the positions of the finest level."""
        finest, *_, features = self.backbone.with_levels(images)
        coarse = self.head(features)
        fine = self.finest_layout.grids(images.shape, finest.shape)
        upsampled = resample(coarse, self.backbone.grids(images, coarse), fine)
        return self.decoder(torch.cat([upsampled, self.reduce(finest)], dim=1)), fine


_REDUCED = 48  # channels of the finest level in the decoder, as in DeepLab-v3+


def _separable(inputs: int, outputs: int) -> list[nn.Module]:
    """A 3x3 convolution of each channel by itself, then a 1x1 over the channels (DeepLab-v3+)."""
    return [
        nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs),
        nn.Conv2d(inputs, outputs, 1),
        nn.ReLU(inplace=True),
    ]


def _initialize(*parts: nn.Sequential) -> None:
    """Weights for layers with ReLU, and small ones for the last layer of all, whose outputs are logits."""
    layers = [layer for part in parts for layer in part if isinstance(layer, nn.Conv2d)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    nn.init.normal_(layers[-1].weight, std=0.01)


def _windows(length: int, crop: int) -> list[int]:
    """Where windows of `crop` pixels start that cover `length` pixels with a stride of two thirds of a window."""
    if length <= crop:
        return [0]
    stride = -(-2 * crop // 3)
    count = -(-(length - crop) // stride) + 1
    return [min(i * stride, length - crop) for i in range(count)]


def _sliding(model: nn.Module, image: Tensor, crop: int | None) -> Tensor:
    """Probabilities (1, K + 1, H, W) of one image, averaged where windows overlap."""
    height, width = image.shape[2:]
    if crop is None or (height <= crop and width <= crop):
        return torch.softmax(model(image), dim=1)
    total: Tensor | None = None
    count = image.new_zeros(1, 1, height, width)
    for top in _windows(height, crop):
        for left in _windows(width, crop):
            rows, columns = slice(top, top + crop), slice(left, left + crop)
            part = torch.softmax(model(image[:, :, rows, columns]), dim=1)
            if total is None:
                total = part.new_zeros(1, part.shape[1], height, width)
            total[:, :, rows, columns] += part
            count[:, :, rows, columns] += 1
    assert total is not None
    return total / count


@torch.inference_mode()
def predict(
    model: nn.Module, image: Tensor, *, scales: Sequence[float] = (1.0,), mirror: bool = False, crop: int | None = None
) -> Tensor:
    """Label probabilities (K + 1, H, W) of one image (3, H, W), averaged over scales and mirror images.

    Args:
        scales: factors of the image's size, resized bilinearly.
        mirror: whether the mirror image is predicted as well, at every scale.
        crop: side of sliding windows with a stride of two thirds, pixels of the scaled image; None predicts the image
            as a whole.
    """
    height, width = image.shape[1:]
    total: Tensor | None = None
    for scale in scales:
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        scaled = functional.interpolate(image[None], size=size, mode="bilinear", align_corners=False)
        for flipped in (False, True) if mirror else (False,):
            out = _sliding(model, scaled.flip(3) if flipped else scaled, crop)
            out = out.flip(3) if flipped else out
            out = functional.interpolate(out, size=(height, width), mode="bilinear", align_corners=False)[0]
            total = out if total is None else total + out
    assert total is not None
    return total / (len(scales) * (2 if mirror else 1))


def labels_at(probabilities: Tensor, height: int, width: int) -> Tensor:
    """The likeliest label at each pixel of an image (height, width), uint8, from probabilities (L, h, w) of any size.

    Probabilities are resized bilinearly, a strip of rows at a time, so that no more than STRIP_BYTES of them exist at
    the size of the image. Ties go to the lower label.
    """
    if probabilities.shape[1:] == (height, width):
        return probabilities.argmax(0).to(torch.uint8)
    count, rows, _ = probabilities.shape
    labels = torch.empty(height, width, dtype=torch.uint8)
    at = ((torch.arange(height, dtype=torch.float64) + 0.5) * rows / height - 0.5).clamp(0, rows - 1)
    above = at.floor().long()
    below, share = (above + 1).clamp(max=rows - 1), (at - above).to(probabilities.dtype)
    strip = max(1, STRIP_BYTES // (count * width * probabilities.element_size()))
    for first in range(0, height, strip):
        part = slice(first, first + strip)
        lines = torch.lerp(probabilities[:, above[part]], probabilities[:, below[part]], share[part, None])
        wide = functional.interpolate(lines[None], size=(lines.shape[1], width), mode="bilinear", align_corners=False)
        labels[part] = wide[0].argmax(0)
    return labels


STRIP_BYTES = 2**24
"""Most bytes of probabilities at an image's size, at a time."""

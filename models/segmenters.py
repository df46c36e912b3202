"""Segmentation networks, which map images (B, 3, H, W) to logits (B, K + 1, H, W), and prediction with them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mcis.datasets.errors import UserError
from mcis.models.backbones import Backbone
from mcis.models.dropout import SampleDropout
from mcis.models.grids import Grids, pixel_grids
from mcis.models.resampling import resample


class SegmenterOutput(NamedTuple):
    """Outputs of a segmentation network at its own positions.

    Attributes:
        logits: Logits (B, K + 1, h, w).
        grids: Locations of the positions.
        image_logits: Logits (B, K) of each class being in the image. None: the network has no image-level head.
    """

    logits: Tensor
    grids: Grids
    image_logits: Tensor | None = None


class Segmenter(nn.Module):
    """A backbone and a head that computes logits from its features (B, C, h, w)."""

    head: nn.Sequential

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.backbone = backbone

    def decode(self, images: Tensor) -> SegmenterOutput:
        """Computes logits at the network's own positions for images (B, 3, H, W)."""
        logits = self.head(self.backbone(images))
        return SegmenterOutput(logits, self.backbone.grids(images, logits))

    def forward(self, images: Tensor, *, with_image_logits: bool = False) -> Tensor | tuple[Tensor, Tensor | None]:
        """Computes logits (B, K + 1, H, W) of all pixels by bilinear interpolation between positions.

        Images are padded on the right and at the bottom until the last position is on the last pixel, for example 321
        pixels for 41 positions. There, the interpolation is upsampling with aligned corners. The padding is cut off
        again.

        Args:
            with_image_logits: Whether to return the pair (logits, image_logits). See `SegmenterOutput`.
        """
        height, width = images.shape[2:]
        layout = self.backbone.layout
        right = layout.padded_side(width) - width
        bottom = layout.padded_side(height) - height
        padded = functional.pad(images, (0, right, 0, bottom))
        logits, source, image_logits = self.decode(padded)

        rows, columns = pixel_grids(*padded.shape[2:])
        target = Grids(rows._replace(num_positions=height), columns._replace(num_positions=width))
        pixel_logits = resample(logits.contiguous(), source, target)  # contiguous per label, which losses read faster
        return (pixel_logits, image_logits) if with_image_logits else pixel_logits


class LargeFov(Segmenter):
    """DeepLab-LargeFOV (Chen et al., PAMI 2017): a 3x3 convolution with a large dilation and two 1x1 convolutions.

    Args:
        backbone: Backbone with features (B, C, h, w).
        labels: Number of labels K + 1, background first.
        width: Channels of the head.
        dilation: Dilation of the 3x3 convolution.
        dropout: Fraction of units dropped after each hidden layer. The VGG-16 version uses 0.5.
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
    """DeepLab-V3 (Chen et al., 2017) with torchvision's head: atrous spatial pyramid pooling, 3x3 and 1x1 convolutions.

    Group norm (Wu and He, ECCV 2018) replaces batch norm, and dropout is drawn per sample.

    Args:
        backbone: Backbone with features (B, C, h, w). The paper uses ResNets with stride 8 or 16.
        labels: Number of labels K + 1, background first.
        width: Channels of the head.
        dilation: Dilation of the pyramid's first 3x3 convolution. The second and third have two and three times this
            dilation. The paper uses 12 for stride 8 and 6 for stride 16.
        dropout: Fraction of units dropped after the pyramid. torchvision uses 0.5.
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
        _replace_batch_norms(self.head)


def _replace_batch_norms(network: nn.Module) -> None:
    """Replaces all batch norms in a network with group norms."""
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            network.set_submodule(name, _group_norm(layer.num_features))


def _group_norm(channels: int) -> nn.GroupNorm:
    """Builds a group norm with 8 channels per group, or with one group if 8 does not divide the channels.

    Smaller groups would erase the pyramid's mean over the image, which has a single position.
    """
    groups = 1 if channels % 8 else channels // 8
    return nn.GroupNorm(groups, channels)


class Pyramid(Segmenter):
    """A light decoder over a feature pyramid (Lin et al., CVPR 2017; DeepLab-v3+) for backbones with a coarse stride.

    The features pass through a 1x1 convolution and a depthwise separable 3x3 convolution. A projection of their mean
    over the image is added at each position. Then, from coarse to fine, the result is resampled to the positions of
    each level of the backbone, concatenated with that level's outputs after a 1x1 convolution, and passed through a
    separable 3x3 convolution. Group norm follows each convolution. Norms hide how strongly an image shows a class, so
    the logits of two convolutions without norms (3x3 and 1x1) on the features are added.

    An image-level head, a linear layer on the pooled features of the pretrained network's own classification layer,
    predicts which classes the image contains. The log of each class's probability is added to its logits at every
    position.

    Args:
        backbone: Backbone with features (B, C, h, w) and at least one level with a smaller stride.
        labels: Number of labels K + 1, background first.
        width: Channels of the decoder.
        dilation: Dilation of the separable convolution on the features.
        dropout: Fraction of channels dropped before each last convolution, and of units before the image-level layer.

    Raises:
        UserError: The backbone has no level with a smaller stride.
    """

    def __init__(self, backbone: Backbone, *, labels: int, width: int, dilation: int, dropout: float):
        super().__init__(backbone)
        last_level_of_stride = {level.layout.stride: level for level in backbone.levels}
        self.finer = tuple(level for stride, level in last_level_of_stride.items() if stride < backbone.layout.stride)
        """Levels with a smaller stride than the features, from the finest to the coarsest."""
        if not self.finer:
            raise UserError(
                "the segmentation network pyramid with a backbone that has no layer with a smaller stride",
                "a convolutional backbone",
                "choose another backbone, or set network to largefov",
            )

        self.head = nn.Sequential(*_conv_norm_relu(backbone.channels, width), *_separable_conv(width, width, dilation))
        self.whole = nn.Conv2d(backbone.channels, width, 1)
        self.reduce = nn.ModuleList(
            nn.Sequential(*_conv_norm_relu(level.channels, _REDUCED_CHANNELS)) for level in self.finer
        )
        self.merge = nn.ModuleList(
            nn.Sequential(*_separable_conv(width + _REDUCED_CHANNELS, width)) for _ in self.finer
        )
        self.last = nn.Sequential(SampleDropout(dropout, channels=True), nn.Conv2d(width, labels, 1))
        self.image_head = nn.Sequential(SampleDropout(dropout), nn.Linear(backbone.keep_pretrained_head(), labels - 1))
        self.coarse = nn.Sequential(
            nn.Conv2d(backbone.channels, width, 3, padding=1),
            nn.ReLU(inplace=True),
            SampleDropout(dropout, channels=True),
            nn.Conv2d(width, labels, 1),
        )
        _initialize(self.last)
        _initialize(self.coarse)

    def decode(self, images: Tensor) -> SegmenterOutput:
        """Computes logits at the positions of the finest level for images (B, 3, H, W)."""
        with self.backbone.capture_outputs(*self.finer) as levels:
            features = self.backbone(images)
        feature_grids = self.backbone.grids(images, features)

        decoded = self.head(features)
        coarse_logits = self.coarse(features)
        decoded = decoded + self.whole(features.mean(dim=(2, 3), keepdim=True))

        grids = feature_grids
        for n in reversed(range(len(self.finer))):
            target = self.finer[n].layout.grids(images.shape, levels[n].shape)
            resampled = resample(decoded, grids, target)
            decoded = self.merge[n](torch.cat([resampled, self.reduce[n](levels[n])], dim=1))
            grids = target

        image_logits = self.image_head(self.backbone.image_features(features))
        log_probabilities = functional.pad(functional.logsigmoid(image_logits), (1, 0))  # background is in any image
        logits = self.last(decoded) + resample(coarse_logits, feature_grids, grids)
        return SegmenterOutput(logits + log_probabilities[:, :, None, None], grids, image_logits)


_REDUCED_CHANNELS = 48
"""Channels to which the decoder reduces each level, as in DeepLab-v3+."""


def _conv_norm_relu(inputs: int, outputs: int) -> list[nn.Module]:
    """Builds a 1x1 convolution, group norm and ReLU."""
    return [nn.Conv2d(inputs, outputs, 1, bias=False), _group_norm(outputs), nn.ReLU(inplace=True)]


def _separable_conv(inputs: int, outputs: int, dilation: int = 1) -> list[nn.Module]:
    """Builds a depthwise separable 3x3 convolution (DeepLab-v3+), followed by group norm and ReLU."""
    depthwise = nn.Conv2d(inputs, inputs, 3, padding=dilation, dilation=dilation, groups=inputs, bias=False)
    return [depthwise, *_conv_norm_relu(inputs, outputs)]


def _initialize(part: nn.Sequential) -> None:
    """Draws He initial weights for convolutions followed by ReLU, and small weights for the last one (logits)."""
    layers = [layer for layer in part if isinstance(layer, nn.Conv2d)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    nn.init.normal_(layers[-1].weight, std=0.01)


def window_starts(length: int, window: int) -> list[int]:
    """Returns the starts of sliding windows that cover `length` pixels with a stride of two thirds of a window."""
    if length <= window:
        return [0]
    stride = -(-2 * window // 3)
    count = -(-(length - window) // stride) + 1
    return [min(i * stride, length - window) for i in range(count)]


def _predict_windows(model: nn.Module, image: Tensor, window: int | None) -> Tensor:
    """Predicts probabilities (1, K + 1, H, W) of one image (1, 3, H, W), averaged where windows overlap.

    Args:
        window: Side of the windows in pixels. None: the whole image.
    """
    height, width = image.shape[2:]
    if window is None or (height <= window and width <= window):
        return torch.softmax(model(image), dim=1)

    total: Tensor | None = None
    count = image.new_zeros(1, 1, height, width)
    for top in window_starts(height, window):
        for left in window_starts(width, window):
            rows = slice(top, top + window)
            columns = slice(left, left + window)
            probabilities = torch.softmax(model(image[:, :, rows, columns]), dim=1)
            if total is None:
                total = probabilities.new_zeros(1, probabilities.shape[1], height, width)
            total[:, :, rows, columns] += probabilities
            count[:, :, rows, columns] += 1
    assert total is not None
    return total / count


@torch.inference_mode()
def predict(
    model: nn.Module, image: Tensor, *, scales: Sequence[float] = (1.0,), hflip: bool = False, crop: int | None = None
) -> Tensor:
    """Predicts label probabilities (K + 1, H, W) of one image (3, H, W), averaged over scales and horizontal flips.

    Args:
        scales: Factors of the image's size. The image is resized bilinearly.
        hflip: Whether to average over the flipped image as well, at every scale.
        crop: Side of sliding windows, in pixels of the resized image. Their stride is two thirds of a window. None: the
            whole image.
    """
    height, width = image.shape[1:]
    flips = (False, True) if hflip else (False,)
    total: Tensor | None = None
    for scale in scales:
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        scaled = functional.interpolate(image[None], size=size, mode="bilinear", align_corners=False)
        for flipped in flips:
            if flipped:
                probabilities = _predict_windows(model, scaled.flip(3), crop).flip(3)
            else:
                probabilities = _predict_windows(model, scaled, crop)
            resized = functional.interpolate(probabilities, size=(height, width), mode="bilinear", align_corners=False)
            total = resized[0] if total is None else total + resized[0]
    assert total is not None
    return total / (len(scales) * len(flips))


def restrict_to_tags(probabilities: Tensor, tags: Sequence[int]) -> Tensor:
    """Sets probabilities (K + 1, ...) of classes that are not tagged to 0, and rescales the others to a sum of 1.

    Args:
        tags: Class indices of the image, from 0. Background is always kept.
    """
    labels = [0]
    labels += [tag + 1 for tag in tags]
    restricted = torch.zeros_like(probabilities)
    restricted[labels] = probabilities[labels].clamp(min=torch.finfo(probabilities.dtype).tiny)
    return restricted / restricted.sum(dim=0)


STRIP_BYTES = 2**24
"""Maximum size in bytes of the full-size probabilities that `upsampled_labels` holds at a time."""


def upsampled_labels(probabilities: Tensor, height: int, width: int) -> Tensor:
    """Resizes probabilities (L, h, w) bilinearly to (height, width) and returns the most probable labels, uint8.

    Works on strips of rows of at most `STRIP_BYTES`, so memory stays bounded for large images. Ties go to the lower
    label.
    """
    if probabilities.shape[1:] == (height, width):
        return probabilities.max(0).indices.to(torch.uint8)  # argmax takes several times as long

    # The largest probability of a pixel is at least the mean over labels. Labels that are nowhere above it cannot win.
    threshold = 0.99 * probabilities.sum(0).min() / len(probabilities)
    candidates = (~(probabilities.flatten(1).amax(1) < threshold)).nonzero()[:, 0]
    probabilities = probabilities[candidates]
    count, rows, _ = probabilities.shape

    row_centers = torch.arange(height, dtype=torch.float64) + 0.5
    source_rows = (row_centers * rows / height - 0.5).clamp(0, rows - 1)
    above = source_rows.floor().long()
    below = (above + 1).clamp(max=rows - 1)
    weight_below = (source_rows - above).to(probabilities.dtype)

    labels = torch.empty(height, width, dtype=torch.uint8)
    strip_rows = max(1, STRIP_BYTES // (count * width * probabilities.element_size()))
    for first in range(0, height, strip_rows):
        strip = slice(first, first + strip_rows)
        lines = torch.lerp(probabilities[:, above[strip]], probabilities[:, below[strip]], weight_below[strip, None])
        size = (lines.shape[1], width)
        resized = functional.interpolate(lines[None], size=size, mode="bilinear", align_corners=False)
        labels[strip] = candidates[resized[0].max(0).indices]
    return labels

"""Segmentation networks: images (B, 3, H, W) -> logits (B, K + 1, H, W); prediction over scales and mirror images."""

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
    """What a network makes of images at some positions.

    Attributes:
        logits: (B, K + 1, h, w).
        grids: where the positions lie.
        image_logits: logits of each class being in the image, (B, K), where the network has a head for it.
    """

    logits: Tensor
    grids: Grids
    image_logits: Tensor | None = None


class Segmenter(nn.Module):
    """A backbone and what makes logits of its features.

    Args:
        backbone: features (B, C, h, w).
    """

    head: nn.Sequential

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.backbone = backbone

    def decode(self, images: Tensor) -> SegmenterOutput:
        """Logits at some positions of the images."""
        logits = self.head(self.backbone(images))
        return SegmenterOutput(logits, self.backbone.grids(images, logits))

    def forward(self, images: Tensor, *, with_image_logits: bool = False) -> Tensor | tuple[Tensor, Tensor | None]:
        """Logits of the images' pixels, (B, K + 1, H, W), bilinear between the positions; those of `image_logits`, too,
        where `with_image_logits` asks for them.

        Images are padded on the right and at the bottom until the last position lies on the last pixel, 321 pixels for
        41 positions, where this is upsampling with aligned corners; the padding is cut off again.
        """
        (height, width), layout = images.shape[2:], self.backbone.layout
        padded = functional.pad(images, (0, layout.padded_side(width) - width, 0, layout.padded_side(height) - height))
        logits, source, image_logits = self.decode(padded)
        rows, columns = pixel_grids(*padded.shape[2:])
        target = Grids(rows._replace(positions=height), columns._replace(positions=width))
        of_pixels = resample(logits.contiguous(), source, target)  # label by label, as losses read them
        return (of_pixels, image_logits) if with_image_logits else of_pixels


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
    """Puts group norms in place of the batch norms below a network."""
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, _group_norm(layer.num_features))


def _group_norm(channels: int) -> nn.GroupNorm:
    """Of 8 channels a group, of 256 channels 32 groups, or of one group where 8 does not divide them.

    Smaller groups would leave nothing of the image's mean, which has one position.
    """
    return nn.GroupNorm(1 if channels % 8 else channels // 8, channels)


class Pyramid(Segmenter):
    """A light decoder down a pyramid of levels (Lin et al., CVPR 2017; DeepLab-v3+), for backbones of a coarse stride.

    The features pass a 1x1 and a depthwise separable 3x3 convolution, and their mean over the image is added to each
    position: what the whole image shows. Then, from coarse to fine, they are resized to the positions of each of the
    backbone's levels, meet it there, reduced by a 1x1, and pass a separable 3x3. Group norm follows each convolution.
    Norms even out how strongly an image shows a class, so logits of a 3x3 and a 1x1 convolution without them are added.

    A linear layer says which classes are in the image at all, on the mean of what the pretrained network makes its own
    classes of. The log of that chance is added to the class's logits everywhere: what a part looks like is weighed with
    what the image is of.

    Args:
        backbone: features (B, C, h, w), with a level of a finer stride.
        labels: K + 1, background first.
        width: channels of the decoder.
        dilation: of the separable convolution on the features.
        dropout: fraction of channels dropped before the last layer, and before the image-level one.

    Raises:
        UserError: the backbone has no such level.
    """

    def __init__(self, backbone: Backbone, *, labels: int, width: int, dilation: int, dropout: float):
        super().__init__(backbone)
        strides = {level.layout.stride: level for level in backbone.levels}
        self.finer = tuple(level for stride, level in strides.items() if stride < backbone.layout.stride)
        """From the finest to the coarsest."""
        if not self.finer:
            raise UserError(
                "the segmentation network pyramid with a backbone without a layer of a finer stride",
                "a convolutional backbone",
                "choose another backbone, or set network to largefov",
            )
        self.head = nn.Sequential(*_normed(backbone.channels, width), *_separable(width, width, dilation))
        self.whole = nn.Conv2d(backbone.channels, width, 1)
        self.reduce = nn.ModuleList(nn.Sequential(*_normed(level.channels, _REDUCED)) for level in self.finer)
        self.merge = nn.ModuleList(nn.Sequential(*_separable(width + _REDUCED, width)) for _ in self.finer)
        self.last = nn.Sequential(SampleDropout(dropout, channels=True), nn.Conv2d(width, labels, 1))
        self.image_head = nn.Sequential(SampleDropout(dropout), nn.Linear(backbone.keep_pretrained_head(), labels - 1))
        hidden = nn.Conv2d(backbone.channels, width, 3, padding=1), nn.ReLU(inplace=True)
        self.coarse = nn.Sequential(*hidden, SampleDropout(dropout, channels=True), nn.Conv2d(width, labels, 1))
        _initialize(self.last)
        _initialize(self.coarse)

    def decode(self, images: Tensor) -> SegmenterOutput:
        """As of `Segmenter`, at the positions of the finest level."""
        with self.backbone.capture_outputs(*self.finer) as levels:
            features = self.backbone(images)
        merged, source = self.head(features), self.backbone.grids(images, features)
        logits, of_features = self.coarse(features), source
        merged = merged + self.whole(features.mean(dim=(2, 3), keepdim=True))
        for n in reversed(range(len(self.finer))):
            target = self.finer[n].layout.grids(images.shape, levels[n].shape)
            merged = self.merge[n](torch.cat([resample(merged, source, target), self.reduce[n](levels[n])], dim=1))
            source = target
        image_logits = self.image_head(self.backbone.image_features(features))
        chances = functional.pad(functional.logsigmoid(image_logits), (1, 0))  # background may be in any image
        logits = self.last(merged) + resample(logits, of_features, source)
        return SegmenterOutput(logits + chances[:, :, None, None], source, image_logits)


_REDUCED = 48  # channels of a level in the decoder, as in DeepLab-v3+


def _normed(inputs: int, outputs: int) -> list[nn.Module]:
    """A 1x1 convolution, group norm, ReLU."""
    return [nn.Conv2d(inputs, outputs, 1, bias=False), _group_norm(outputs), nn.ReLU(inplace=True)]


def _separable(inputs: int, outputs: int, dilation: int = 1) -> list[nn.Module]:
    """A 3x3 convolution of each channel by itself, then a 1x1 over the channels (DeepLab-v3+)."""
    depthwise = nn.Conv2d(inputs, inputs, 3, padding=dilation, dilation=dilation, groups=inputs, bias=False)
    return [depthwise, *_normed(inputs, outputs)]


def _initialize(part: nn.Sequential) -> None:
    """Weights for layers with ReLU, and small ones for the last layer of all, whose outputs are logits."""
    layers = [layer for layer in part if isinstance(layer, nn.Conv2d)]
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
    model: nn.Module, image: Tensor, *, scales: Sequence[float] = (1.0,), hflip: bool = False, crop: int | None = None
) -> Tensor:
    """Label probabilities (K + 1, H, W) of one image (3, H, W), averaged over scales and mirror images.

    Args:
        scales: factors of the image's size, resized bilinearly.
        mirror: whether the mirror image is predicted as well, at every scale.
        crop: side of sliding windows with a stride of two thirds, pixels of the scaled image; None: the whole image.
    """
    height, width = image.shape[1:]
    total: Tensor | None = None
    for scale in scales:
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        scaled = functional.interpolate(image[None], size=size, mode="bilinear", align_corners=False)
        for flipped in (False, True) if hflip else (False,):
            out = _sliding(model, scaled.flip(3) if flipped else scaled, crop)
            out = out.flip(3) if flipped else out
            out = functional.interpolate(out, size=(height, width), mode="bilinear", align_corners=False)[0]
            total = out if total is None else total + out
    assert total is not None
    return total / (len(scales) * (2 if hflip else 1))


def restrict_to_tags(probabilities: Tensor, tags: Sequence[int]) -> Tensor:
    """Probabilities (K + 1, ...) of an image whose classes are known: those of others are 0, and the rest sum to 1.

    Args:
        tags: the image's class indices, from 0; background may be in any image.
    """
    there = [0, *(tag + 1 for tag in tags)]
    kept = torch.zeros_like(probabilities)
    kept[there] = probabilities[there].clamp(min=torch.finfo(probabilities.dtype).tiny)
    return kept / kept.sum(dim=0)


def upsampled_labels(probabilities: Tensor, height: int, width: int) -> Tensor:
    """The likeliest label at each pixel of an image (height, width), uint8, from probabilities (L, h, w) of any size.

    Probabilities are resized bilinearly, a strip of rows at a time, so that no more than STRIP_BYTES of them exist at
    the size of the image. Ties go to the lower label.
    """
    if probabilities.shape[1:] == (height, width):
        return probabilities.max(0).indices.to(torch.uint8)  # argmax takes several times as long
    least = 0.99 * probabilities.sum(0).min() / len(probabilities)  # the likeliest has more, between positions too
    likely = (~(probabilities.flatten(1).amax(1) < least)).nonzero()[:, 0]
    probabilities = probabilities[likely]
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
        labels[part] = likely[wide[0].max(0).indices]
    return labels


STRIP_BYTES = 2**24
"""Most bytes of probabilities at an image's size, at a time."""

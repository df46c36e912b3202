"""Equivariant attention (SEAM, Wang et al., CVPR 2020): maps refined by pixel correlation, and two losses on maps.

An image and a smaller copy of it should have the same maps (equivariant regularization), and the refined maps of each
should equal the maps of the other (equivariant cross regularization). Formulas follow the public code, with one
difference: the public code computes maps of all K classes and multiplies them by the tags at the end. Functions here
take the maps of the T tagged classes only, since the others would be zero; means are still over K classes. Classes
without a tag therefore never compete with an image's tags in the refined maps, which matters for large K.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mcis.datasets.errors import UserError
from mcis.models.backbones import Layer

_EPSILON = 1e-5  # keeps divisors from zero, as in the public code


class Equivariance(NamedTuple):
    """Inputs of the classifier for a step with equivariant attention.

    Attributes:
        tags: Tags of the images, (B, K), float.
        max_tags: Largest number of tags of an image, at least 1. A Python number, so that no step waits for the GPU.
        scale: Sides of the copies as a fraction of the images' sides.
    """

    tags: Tensor
    max_tags: int
    scale: float


class RefinedMaps(NamedTuple):
    """Maps of the tagged classes of images, before and after pixel correlation.

    Attributes:
        maps: Activations, (B, T, H, W); zero for the missing tags of an image with fewer than T.
        refined: Scores of background and the tagged classes, (B, 1 + T, H, W).
    """

    maps: Tensor
    refined: Tensor


class EquivariantMaps(NamedTuple):
    """Maps of images and of their smaller copies, both at the copies' pixels."""

    images: RefinedMaps
    copies: RefinedMaps


def smaller_copies(images: Tensor, scale: float) -> Tensor:
    """Resizes images (B, 3, H, W) bilinearly to `scale` times their sides."""
    size = [max(1, int(side * scale)) for side in images.shape[2:]]
    return functional.interpolate(images, size=size, mode="bilinear", align_corners=False)


def tagged_maps(activations: Tensor, tags: Tensor, max_tags: int) -> Tensor:
    """Selects the maps of each image's tagged classes, in ascending order of the classes.

    Args:
        activations: (B, K, H, W).
        tags: (B, K) of 0 and 1.
        max_tags: Largest number of tags of an image, T.

    Returns:
        (B, T, H, W); an image with fewer tags has zeros after its maps.
    """
    order = torch.argsort(tags, dim=1, descending=True, stable=True)[:, :max_tags]

    maps = activations.gather(1, order[:, :, None, None].expand(-1, -1, *activations.shape[2:]))
    return maps * tags.gather(1, order)[:, :, None, None]


def min_max_normalized(maps: Tensor) -> Tensor:
    """Clips maps (..., H, W) at 0 and normalizes each to [0, 1] by its minimum and maximum."""
    positive = functional.relu(maps)
    low = positive.amin(dim=(-2, -1), keepdim=True)
    high = positive.amax(dim=(-2, -1), keepdim=True)
    return functional.relu(positive - low - _EPSILON) / (high - low + _EPSILON)


def keep_strongest(maps: Tensor) -> Tensor:
    """Sets all but the highest class score at each position to 0, and adds a background score.

    Args:
        maps: Class scores in [0, 1], (B, T, H, W).

    Returns:
        Scores (B, 1 + T, H, W); that of the background is 1 minus the highest class score.
    """
    highest = maps.amax(dim=1, keepdim=True)
    return torch.cat([1 - highest, maps.where(maps == highest, 0)], dim=1)


class PixelCorrelation(nn.Module):
    """Averages scores over the positions of an image that look alike (section "Pixel Correlation Module").

    Positions are compared by color and by two layers of the backbone, which receive no gradient.

    Args:
        layers: The two layers, `Backbone.correlation_layers`.

    Raises:
        UserError: The backbone does not have two layers at the positions of its features.
    """

    def __init__(self, layers: tuple[Layer, ...]):
        super().__init__()
        if len(layers) != 2:
            raise UserError(
                "equivariant attention with a backbone that has no layers at its features' positions to compare pixels",
                "a convolutional backbone of stride 8, such as resnet38, resnet50 or vgg16",
                "choose another backbone, or turn equivariant attention off",
            )

        self.f8_3 = nn.Conv2d(layers[0].channels, 64, 1, bias=False)
        self.f8_4 = nn.Conv2d(layers[1].channels, 128, 1, bias=False)
        self.f9 = nn.Conv2d(3 + 64 + 128, 192, 1, bias=False)

        for layer in (self.f8_3, self.f8_4):
            nn.init.kaiming_normal_(layer.weight)
        nn.init.xavier_uniform_(self.f9.weight, gain=4)

    def forward(self, activations: Tensor, colors: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Refines the maps of T classes.

        Args:
            activations: Activations of the classes, (B, T, H, W); they receive no gradient.
            colors: Normalized images resized to the same positions, (B, 3, H, W).
            low, high: Outputs of the two layers, (B, C, H, W).

        Returns:
            Scores of background and classes, (B, 1 + T, H, W).
        """
        low_features = functional.relu(self.f8_3(low.detach()))
        high_features = functional.relu(self.f8_4(high.detach()))
        features = self.f9(torch.cat([colors, low_features, high_features], dim=1))

        return propagated(keep_strongest(_max_normalized(activations.detach())), features)


def _max_normalized(maps: Tensor) -> Tensor:
    """Clips maps (B, T, H, W) at 0 and divides each by its maximum."""
    positive = functional.relu(maps)
    return functional.relu(positive - _EPSILON) / (positive.amax(dim=(2, 3), keepdim=True) + _EPSILON)


def propagated(scores: Tensor, features: Tensor) -> Tensor:
    """Averages scores over all positions, weighted by the cosine similarity of features, clipped at 0.

    Args:
        scores: (B, V, H, W).
        features: (B, C, H, W).

    Returns:
        Averages for each position, (B, V, H, W).
    """
    flat = features.flatten(2)
    unit = flat / (flat.norm(dim=1, keepdim=True) + _EPSILON)

    similarity = functional.relu(unit.transpose(1, 2) @ unit)
    weights = similarity / (similarity.sum(dim=1, keepdim=True) + _EPSILON)
    return (scores.flatten(2) @ weights).view_as(scores)


def equivariant_loss(maps: EquivariantMaps, *, classes: int) -> Tensor:
    """Computes the equivariant regularization: the mean difference between the maps of an image and its copy.

    Args:
        maps: Maps of B images and their copies.
        classes: Number of classes K. The mean is over K maps; those of classes without a tag count as zero.

    Returns:
        Losses, (B,).
    """
    image = min_max_normalized(maps.images.maps)
    copy = min_max_normalized(maps.copies.maps)
    return (image - copy).abs().sum(dim=(1, 2, 3)) / (classes * image[0, 0].numel())


def cross_equivariant_loss(maps: EquivariantMaps, *, classes: int, hard: float) -> Tensor:
    """Computes the equivariant cross regularization: refined maps of image and copy compared with the other's maps.

    Args:
        maps: Maps of B images and their copies. Maps that are not refined receive no gradient.
        classes: Number of classes K.
        hard: Fraction of the values of K + 1 maps, those with the largest differences, over which the mean is taken
            (online hard example mining).

    Returns:
        Losses, (B,).
    """
    image = min_max_normalized(maps.images.maps.detach())
    copy = min_max_normalized(maps.copies.maps.detach())
    count = max(1, int((classes + 1) * image[0, 0].numel() * hard))

    image_loss = _mean_of_largest(keep_strongest(copy) - min_max_normalized(maps.images.refined), count)
    copy_loss = _mean_of_largest(keep_strongest(image) - min_max_normalized(maps.copies.refined), count)
    return image_loss + copy_loss


def _mean_of_largest(differences: Tensor, count: int) -> Tensor:
    """Averages the `count` largest absolute values of each image, (B, ...) -> (B,); missing values count as zero."""
    sizes = differences.abs().flatten(1)
    return sizes.topk(min(count, sizes.shape[1]), dim=1, sorted=False).values.sum(dim=1) / count

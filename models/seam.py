"""Equivariant attention (SEAM, Wang et al., CVPR 2020): maps refined by pixel correlation, and their two losses.

An image and a smaller copy of it are to have the same maps (equivariant regularization), and the refined maps of each
those of the other (equivariant cross regularization). Formulas are those of the public code. Where that works on the
maps of all K classes and multiplies them by the tags in the end, the functions here take the maps of T tagged classes:
the others would be zero, and K stays the number that means are taken over. So no other class competes with the tags of
an image in what is refined, either, which matters where there are many.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mcis.datasets.errors import UserError
from mcis.models.backbones import Layer

_SMALL = 1e-5  # keeps divisors from zero, as in the public code


class Equivariance(NamedTuple):
    """What a step with equivariant attention needs.

    Attributes:
        tags: of the images, (B, K), float.
        most: the largest number of tags of an image, at least 1; a number, for which no GPU has to be waited for.
        scale: of the images' copies.
    """

    tags: Tensor
    most: int
    scale: float


class RefinedMaps(NamedTuple):
    """Maps of the tagged classes of images, and what pixel correlation makes of them.

    Attributes:
        maps: activations, (B, T, H, W); zero where an image has fewer than T tags.
        refined: of background and the tagged classes, (B, 1 + T, H, W).
    """

    maps: Tensor
    refined: Tensor


class EquivariantMaps(NamedTuple):
    """Maps of images and of their smaller copies, both at the copies' pixels."""

    images: RefinedMaps
    copies: RefinedMaps


def smaller_copies(images: Tensor, scale: float) -> Tensor:
    """Images (B, 3, H, W) at `scale` times their sides, bilinear."""
    size = [max(1, int(side * scale)) for side in images.shape[2:]]
    return functional.interpolate(images, size=size, mode="bilinear", align_corners=False)


def of_tags(activations: Tensor, tags: Tensor, most: int) -> Tensor:
    """The maps of each image's tagged classes in ascending order, (B, K, H, W), (B, K) -> (B, T, H, W).

    T is `most`, the largest number of tags; an image with fewer has zeros behind its maps.
    """
    order = torch.argsort(tags, dim=1, descending=True, stable=True)[:, :most]
    maps = activations.gather(1, order[:, :, None, None].expand(-1, -1, *activations.shape[2:]))
    return maps * tags.gather(1, order)[:, :, None, None]


def stretched(maps: Tensor) -> Tensor:
    """Maps (..., H, W) clipped at 0 and, less their minimum, divided by their range -> [0, 1]."""
    positive = functional.relu(maps)
    low, high = positive.amin(dim=(-2, -1), keepdim=True), positive.amax(dim=(-2, -1), keepdim=True)
    return functional.relu(positive - low - _SMALL) / (high - low + _SMALL)


def strongest(maps: Tensor) -> Tensor:
    """Scores (B, T, H, W) in [0, 1] -> those of background and classes, each position the strongest class's alone.

    The background's is what the strongest class leaves of 1; (B, 1 + T, H, W).
    """
    top = maps.amax(dim=1, keepdim=True)
    return torch.cat([1 - top, maps.where(maps == top, 0)], dim=1)


class PixelCorrelation(nn.Module):
    """Maps that each position takes from the positions which look like it (section "Pixel Correlation Module").

    Positions are compared by their color and by two layers of the backbone, which no gradient goes to.

    Args:
        layers: these two, `Backbone.middle`.

    Raises:
        UserError: the backbone has none.
    """

    def __init__(self, layers: tuple[Layer, ...]):
        super().__init__()
        if len(layers) != 2:
            raise UserError(
                "equivariant attention with a backbone without layers at its features' positions to compare pixels by",
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
        """Refined scores of background and classes, (B, 1 + T, H, W).

        Args:
            activations: of the classes, (B, T, H, W); no gradient goes to them.
            colors: of the normalized images at the same positions, (B, 3, H, W).
            low, high: the outputs of the two layers, (B, C, H, W).
        """
        features = torch.cat(
            [colors, functional.relu(self.f8_3(low.detach())), functional.relu(self.f8_4(high.detach()))], dim=1
        )
        scores = strongest(_relative(activations.detach()))
        return propagated(scores, self.f9(features))


def _relative(maps: Tensor) -> Tensor:
    """Maps (B, T, H, W) clipped at 0 and divided by their maximum -> [0, 1]."""
    positive = functional.relu(maps)
    return functional.relu(positive - _SMALL) / (positive.amax(dim=(2, 3), keepdim=True) + _SMALL)


def propagated(scores: Tensor, features: Tensor) -> Tensor:
    """Scores (B, V, H, W) averaged for each position over all, by the cosine of features (B, C, H, W) clipped at 0."""
    flat = features.flatten(2)
    unit = flat / (flat.norm(dim=1, keepdim=True) + _SMALL)
    alike = functional.relu(unit.transpose(1, 2) @ unit)
    weights = alike / (alike.sum(dim=1, keepdim=True) + _SMALL)
    return (scores.flatten(2) @ weights).view_as(scores)


def equivariant_losses(maps: EquivariantMaps, *, classes: int, hard: float) -> dict[str, Tensor]:
    """The loss terms of each image, (B,) each.

    Args:
        classes: K.
        hard: share of the K + 1 maps' values, those with the largest differences, that the cross term is the mean of
            (online hard example mining).

    Returns:
        `equivariant`: mean over K classes and all positions of the difference between the maps of image and copy.
        `cross`: the differences between the refined maps of each and the other's maps with their background.
    """
    image, copy = (stretched(view.maps) for view in maps)
    equivariant = (image - copy).abs().sum(dim=(1, 2, 3)) / (classes * image[0, 0].numel())
    count = max(1, int((classes + 1) * image[0, 0].numel() * hard))
    cross = _hardest(strongest(copy.detach()) - stretched(maps.images.refined), count)
    cross = cross + _hardest(strongest(image.detach()) - stretched(maps.copies.refined), count)
    return {"equivariant": equivariant, "cross": cross}


def _hardest(differences: Tensor, count: int) -> Tensor:
    """Mean of the `count` largest absolute values of each image, (B, ...) -> (B,), with zeros where it has fewer."""
    sizes = differences.abs().flatten(1)
    return sizes.topk(min(count, sizes.shape[1]), dim=1, sorted=False).values.sum(dim=1) / count

"""Affinities between neighboring positions of an image, learned from confident labels of its localization maps.

Affinities compare learned features (AffinityNet: Ahn and Kwak, CVPR 2018), or depend on class boundaries between two
positions (IRN: Ahn et al., CVPR 2019, class boundary branch). Both variants produce the planes of affinities that
`random_walk` reads, and are trained with the same losses.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mcis.datasets.classes import IGNORE
from mcis.models.backbones import Backbone
from mcis.models.grids import Grid, Grids
from mcis.models.random_walk import directions, pair_slices
from mcis.models.resampling import resample

AffinityKind = Literal["features", "boundaries"]
_EPSILON = 1e-5
"""Lower bound of probabilities before the logarithm."""
_GROUPS = 4
"""Number of groups of the group norms, which replace those of IRN."""


def semantic_affinities(features: Tensor, radius: int) -> Tensor:
    """Computes exp(-mean |f_i - f_j|) for neighboring positions (CVPR 2018, Eq. 1).

    The mean over channels replaces the sum of Eq. 1, as in the public code.

    Args:
        features: (B, C, h, w).
        radius: Radius of `directions`.

    Returns:
        Affinities in (0, 1], (B, D, h, w); 0 for pairs that extend beyond the map.
    """
    h, w = features.shape[2:]
    affinities = features.new_zeros(len(features), len(directions(radius)), h, w)
    for plane, direction in enumerate(directions(radius)):
        (rows, columns), (second_rows, second_columns) = pair_slices((h, w), direction)
        differences = features[:, :, rows, columns] - features[:, :, second_rows, second_columns]
        affinities[:, plane, rows, columns] = torch.exp(-differences.abs().mean(dim=1))
    return affinities


def line(direction: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns the positions on the line from (0, 0) to `direction`, inclusive: one per step along the longer side."""
    dy, dx = direction
    count = max(abs(dy), abs(dx))
    return [(round(dy * step / count), round(dx * step / count)) for step in range(count + 1)]


def boundary_affinities(boundaries: Tensor, radius: int) -> Tensor:
    """Computes 1 - the highest boundary probability on the line between neighboring positions (CVPR 2019, Eq. 3).

    Args:
        boundaries: Boundary probabilities in [0, 1], (B, 1, h, w).
        radius: Radius of `directions`.

    Returns:
        Affinities in [0, 1], (B, D, h, w); 0 for pairs that extend beyond the map.
    """
    h, w = boundaries.shape[2:]
    padded = nn.functional.pad(boundaries[:, 0], (radius, radius, 0, radius), value=1.0)
    planes = []
    for direction in directions(radius):
        shifted = [padded[:, y : y + h, radius + x : radius + x + w] for y, x in line(direction)]
        planes.append(1 - torch.stack(shifted).amax(dim=0))
    return torch.stack(planes, dim=1)


_PAIR_WEIGHTS = {"background": 0.25, "foreground": 0.25, "different": 0.5}
"""Kinds of labeled pairs, and weights of their losses, in the proportions of both papers."""


def affinity_losses(affinities: Tensor, labels: Tensor, radius: int) -> dict[str, Tensor]:
    """Computes cross entropies of the affinities of labeled pairs (CVPR 2018, Eq. 4 to 6).

    The target is 1 for pairs with the same label and 0 for pairs with different ones. The loss of an image is averaged
    separately over background pairs, over pairs of the same class, and over pairs with different labels.

    Args:
        affinities: (B, D, h, w).
        labels: (B, h, w); pairs with a label of 255 are ignored.
        radius: Radius of `directions`.

    Returns:
        Weighted losses `background`, `foreground` and `different`, scalars, summed over the images.
    """
    h, w = labels.shape[1:]
    zero = affinities.new_zeros(len(labels))
    sums = dict.fromkeys(_PAIR_WEIGHTS, zero)
    counts = dict.fromkeys(_PAIR_WEIGHTS, zero)
    for plane, direction in enumerate(directions(radius)):
        (rows, columns), (second_rows, second_columns) = pair_slices((h, w), direction)
        first = labels[:, rows, columns]
        second = labels[:, second_rows, second_columns]
        is_labeled = (first != IGNORE) & (second != IGNORE)
        is_same = first == second
        selected = {
            "background": is_labeled & is_same & (first == 0),
            "foreground": is_labeled & is_same & (first > 0),
            "different": is_labeled & ~is_same,
        }

        affinity = affinities[:, plane, rows, columns]
        for name, pairs in selected.items():
            probability = 1 - affinity if name == "different" else affinity
            loss = -torch.log(probability.clamp(min=_EPSILON))
            sums[name] = sums[name] + (loss * pairs).flatten(1).sum(dim=1)
            counts[name] = counts[name] + pairs.flatten(1).sum(dim=1)

    return {name: weight * (sums[name] / counts[name].clamp(min=1)).sum() for name, weight in _PAIR_WEIGHTS.items()}


def nearest_labels(labels: Tensor, grids: Grids) -> Tensor:
    """Returns the labels of the pixels nearest to positions, (B, H, W) -> (B, h, w).

    Args:
        labels: Labels of pixels.
        grids: Locations of the positions in the image.
    """
    height, width = labels.shape[1:]
    rows = _nearest_pixels(grids.rows, height)
    columns = _nearest_pixels(grids.columns, width)
    return labels[:, rows][:, :, columns]


def _nearest_pixels(grid: Grid, side: int) -> list[int]:
    """Returns, along one side of an image with `side` pixels, the pixel nearest to each position."""
    pixels = []
    for i in range(grid.num_positions):
        pixel = round((grid.first + i * grid.step) * side - 0.5)
        pixels.append(min(max(0, pixel), side - 1))
    return pixels


class Neighbors(NamedTuple):
    """Affinities between neighboring positions.

    Attributes:
        affinities: (B, D, h, w).
        grids: Locations of the positions in the images.
    """

    affinities: Tensor
    grids: Grids


class AffinityNet(nn.Module):
    """Reduces each level of a backbone by a 1x1 convolution and joins them at the resolution of the finest one.

    As in IRN, a group norm and a ReLU follow each convolution. AffinityNet's own layers differ only in their widths.

    Args:
        backbone: Network whose levels and features are read.
        kind: What affinities are computed from: the distance of `features`, or `boundaries`.
        width: Number of channels to which each level is reduced, a multiple of 4.
        embedding: Number of channels of the compared features (kind `features`).
        finest: Stride of the finest level that is read, pixels.
        radius: Positions at a distance below this are compared; in positions of the finest level.

    Attributes:
        layout: Layout of the positions.
    """

    def __init__(self, backbone: Backbone, *, kind: AffinityKind, width: int, embedding: int, finest: int, radius: int):
        super().__init__()
        self.backbone = backbone
        self.kind = kind
        self.radius = radius
        levels = [level for level in backbone.levels if level.layout.stride >= finest]
        self.layouts = [level.layout for level in levels]
        self.layouts.append(backbone.layout)
        self.layout = self.layouts[0]

        channels = [level.channels for level in levels]
        channels.append(backbone.channels)
        self.reduce = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.GroupNorm(_GROUPS, width), nn.ReLU(inplace=True))
            for inputs in channels
        )
        self.last = nn.Conv2d(width * len(channels), 1 if kind == "boundaries" else embedding, 1)
        nn.init.zeros_(self.last.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Neighbors:
        """Computes affinities for normalized images, (B, 3, H, W)."""
        outputs = self.backbone.forward_levels(images)[-len(self.layouts) :]
        grids = [layout.grids(images.shape, maps.shape) for layout, maps in zip(self.layouts, outputs, strict=True)]
        reduced = []
        for reduce, maps, source in zip(self.reduce, outputs, grids, strict=True):
            reduced.append(resample(reduce(maps), source, grids[0]))

        last = self.last(torch.cat(reduced, dim=1)).float()
        if self.kind == "boundaries":
            return Neighbors(boundary_affinities(torch.sigmoid(last), self.radius), grids[0])
        return Neighbors(semantic_affinities(torch.relu(last), self.radius), grids[0])

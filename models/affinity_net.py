"""Affinities between neighboring positions of an image, learnt from the confident labels of its localization maps.

Either learnt features are compared (AffinityNet: Ahn and Kwak, CVPR 2018), or a class boundary is looked for between
two positions (IRN: Ahn et al., CVPR 2019, class boundary branch). Both give planes of affinities as `random_walk` reads
them, and learn by the same losses.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mcis.datasets.classes import IGNORE
from mcis.models.backbones import Backbone
from mcis.models.grids import Grids
from mcis.models.random_walk import directions, pair_slices
from mcis.models.resampling import resample

AffinityKind = Literal["features", "boundaries"]
_EPSILON = 1e-5
"""Least probability before the logarithm."""
_GROUPS = 4
"""Groups of the group norms, which take the place of IRN's."""


def semantic_affinities(features: Tensor, radius: int) -> Tensor:
    """exp(-mean |f_i - f_j|) of neighboring positions (CVPR 2018, Eq. 1), (B, C, h, w) -> (B, D, h, w) in (0, 1].

    Pairs that reach beyond the map have 0.
    """
    h, w = features.shape[2:]
    out = features.new_zeros(len(features), len(directions(radius)), h, w)
    for plane, direction in enumerate(directions(radius)):
        (rows, columns), (other_rows, other_columns) = pair_slices((h, w), direction)
        distance = (features[:, :, rows, columns] - features[:, :, other_rows, other_columns]).abs().mean(dim=1)
        out[:, plane, rows, columns] = torch.exp(-distance)
    return out


def line(direction: tuple[int, int]) -> list[tuple[int, int]]:
    """The positions from (0, 0) to (dy, dx), both included, one per step along the longer side."""
    dy, dx = direction
    count = max(abs(dy), abs(dx))
    return [(round(dy * step / count), round(dx * step / count)) for step in range(count + 1)]


def boundary_affinities(boundaries: Tensor, radius: int) -> Tensor:
    """1 - the highest boundary on the line between neighboring positions (CVPR 2019, Eq. 3).

    Args:
        boundaries: (B, 1, h, w) in [0, 1].

    Returns:
        (B, D, h, w) in [0, 1]; pairs that reach beyond the map have 0.
    """
    h, w = boundaries.shape[2:]
    padded = nn.functional.pad(boundaries[:, 0], (radius, radius, 0, radius), value=1.0)
    planes = []
    for direction in directions(radius):
        parts = [padded[:, y : y + h, radius + x : radius + x + w] for y, x in line(direction)]
        planes.append(1 - torch.stack(parts).amax(dim=0))
    return torch.stack(planes, dim=1)


def affinity_losses(affinities: Tensor, labels: Tensor, radius: int) -> dict[str, Tensor]:
    """Losses of the affinities of labeled pairs, sums over the images (CVPR 2018, Eq. 4 to 6).

    Pairs of one label want 1, pairs of two labels 0. Over an image, pairs of background, pairs of one class and pairs
    of two labels are averaged each by themselves.

    Args:
        affinities: (B, D, h, w).
        labels: (B, h, w), 255 where unlabeled; pairs of these are left out.

    Returns:
        `background`, `foreground` and `different`, scalars; the papers' weights 1/4, 1/4 and 1/2 are applied.
    """
    (h, w), zero = labels.shape[1:], affinities.new_zeros(len(labels))
    names = ("background", "foreground", "different")
    sums = dict.fromkeys(names, zero)
    counts = dict.fromkeys(names, zero)
    for plane, direction in enumerate(directions(radius)):
        (rows, columns), (other_rows, other_columns) = pair_slices((h, w), direction)
        one, other = labels[:, rows, columns], labels[:, other_rows, other_columns]
        value = affinities[:, plane, rows, columns]
        labeled, same = (one != IGNORE) & (other != IGNORE), one == other
        kinds = labeled & same & (one == 0), labeled & same & (one > 0), labeled & ~same
        for name, kind in zip(names, kinds, strict=True):
            wanted = 1 - value if name == "different" else value
            loss = -torch.log(wanted.clamp(min=_EPSILON))
            sums[name] = sums[name] + (loss * kind).flatten(1).sum(dim=1)
            counts[name] = counts[name] + kind.flatten(1).sum(dim=1)
    weights = {"background": 0.25, "foreground": 0.25, "different": 0.5}
    return {name: weights[name] * (sums[name] / counts[name].clamp(min=1)).sum() for name in names}


def nearest_labels(labels: Tensor, grids: Grids) -> Tensor:
    """Labels of pixels (B, H, W) -> those of the pixels nearest to positions, (B, h, w)."""
    rows, columns = (
        [min(max(0, round((grid.first + i * grid.step) * side - 0.5)), side - 1) for i in range(grid.positions)]
        for grid, side in zip(grids, labels.shape[1:], strict=True)
    )
    return labels[:, rows][:, :, columns]


class Neighbors(NamedTuple):
    """Affinities between neighboring positions, (B, D, h, w), and where the positions lie in the images."""

    affinities: Tensor
    grids: Grids


class AffinityNet(nn.Module):
    """Backbone and, on each of its levels, a 1x1 convolution; what these give is joined at the finest level.

    As in IRN, a group norm and a ReLU follow each convolution. AffinityNet's own layers differ by their widths alone.

    Args:
        backbone: its levels and its features are read.
        kind: what affinities are of: `features`, by their distance, or `boundaries`.
        width: channels of each level.
        embedding: channels of the features that are compared.
        finest: stride of the finest level that is read.
        radius: positions closer than this are compared.

    Attributes:
        layout: of the positions.
    """

    def __init__(self, backbone: Backbone, *, kind: AffinityKind, width: int, embedding: int, finest: int, radius: int):
        super().__init__()
        self.backbone, self.kind, self.radius = backbone, kind, radius
        levels = [level for level in backbone.levels if level.layout.stride >= finest]
        self.layouts = [*(level.layout for level in levels), backbone.layout]
        self.layout = self.layouts[0]
        channels = [*(level.channels for level in levels), backbone.channels]
        self.reduce = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.GroupNorm(_GROUPS, width), nn.ReLU(inplace=True))
            for inputs in channels
        )
        self.last = nn.Conv2d(width * len(channels), 1 if kind == "boundaries" else embedding, 1)
        nn.init.zeros_(self.last.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Neighbors:
        """Affinities of normalized images (B, 3, H, W), and where the positions that they are of lie."""
        outputs = self.backbone.with_levels(images)[-len(self.layouts) :]
        grids = [layout.grids(images.shape, maps.shape) for layout, maps in zip(self.layouts, outputs, strict=True)]
        reduced = [
            resample(reduce(maps), source, grids[0])
            for reduce, maps, source in zip(self.reduce, outputs, grids, strict=True)
        ]
        last = self.last(torch.cat(reduced, dim=1)).float()
        if self.kind == "boundaries":
            return Neighbors(boundary_affinities(torch.sigmoid(last), self.radius), grids[0])
        return Neighbors(semantic_affinities(torch.relu(last), self.radius), grids[0])

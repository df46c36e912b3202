"""Localization maps of an image -> scores of its pixels, also by a walk over affinities, and pseudo masks of these."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mcis.datasets.images.decode import fitted
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.tables.shards import Shards
from mcis.models.backbones import to_unit
from mcis.models.grids import pixel_grids
from mcis.models.localization import normalize_maps, scale_maps, score_maps
from mcis.models.networks import normalization_of
from mcis.models.pseudo_masks import TaggedMaps
from mcis.models.random_walk import random_walk
from mcis.models.resampling import resample
from mcis.platform.config.sections import Config
from mcis.platform.networks.affinities import load_affinity_net
from mcis.platform.networks.build import move_channels_last
from mcis.platform.outputs.tables import image_maps


class PixelScores(NamedTuple):
    """Scores in [0, 1] of an image's pixels, (T, H, W), and the class indices of the T maps, (T,)."""

    values: NDArray[np.float32]
    classes: NDArray[np.int64]


def pixel_scores(row: dict[str, Any], table: Shards, scale: str, max_side: int | None) -> PixelScores:
    """Scores of the pixels of an image of the index, at the size at which it is read.

    Args:
        row: of the index.
        table: of localization maps.
        scale: how activations become scores, `maps.scale`.
        max_side: longest side at which images are read, pixels; None = as they are.
    """
    maps = image_maps(table, row["image_id"])
    assert maps is not None, f"localize wrote no map for the tagged image {row['image_id']}"
    size = fitted(row["height"], row["width"], max_side)
    return PixelScores(score_maps(torch.from_numpy(maps.maps), maps.grids, scale, *size).numpy(), maps.classes)


def tagged_maps(
    row: dict[str, Any],
    scores: PixelScores,
    scale: str,
    max_side: int | None,
    saliency: NDArray[np.uint8] | None = None,
) -> TaggedMaps:
    """What a rule makes an image's pseudo mask of; arguments as of `pixel_scores`."""
    return TaggedMaps(
        scores.values,
        scores.classes,
        functools.partial(read_rgb, row["uri"], max_side=max_side, content_hash=row["content_hash"]),
        saliency,
        one_scale=scale == "logarithm",
    )


class Walk:
    """A trained affinity network, and the walk of maps over what it says of an image.

    Args:
        weights: the folder of the trained network.
        gpu: whether the network and the walk run on one.
    """

    def __init__(self, config: Config, weights: Path, gpu: bool):
        self.scale, self.max_side, self.walk = config.maps.scale, config.data.max_side, config.pseudo_masks.walk
        self.device = torch.device("cuda" if gpu else "cpu")
        self.model = move_channels_last(load_affinity_net(config.affinity_net, weights), self.device)
        self.normalize = normalization_of(config.affinity_net.backbone)

    @torch.inference_mode()
    def pixel_scores(self, row: dict[str, Any], table: Shards) -> PixelScores:
        """As `pixel_scores`, of maps that have walked.

        Activations become scores at the network's positions, these walk, and each map is divided by its maximum.
        """
        maps = image_maps(table, row["image_id"])
        assert maps is not None, f"localize wrote no map for the tagged image {row['image_id']}"
        side = min(self.max_side or self.walk.max_side, self.walk.max_side)
        rgb = read_rgb(row["uri"], max_side=side, content_hash=row["content_hash"])
        image = self.normalize(to_unit(torch.from_numpy(rgb[None]).to(self.device)))
        neighbors = self.model.neighbors(image)
        activations = torch.from_numpy(maps.maps).to(self.device)
        start = scale_maps(resample(activations, maps.grids, neighbors.grids, "bicubic"), self.scale)
        steps = max(1, round(self.walk.steps * (max(rgb.shape) / self.walk.max_side) ** 2))
        walked = random_walk(start, neighbors.affinities[0], radius=self.model.radius, beta=self.walk.beta, steps=steps)
        size = fitted(row["height"], row["width"], self.max_side)
        scores = resample(normalize_maps(walked), neighbors.grids, pixel_grids(*size))
        return PixelScores(scores.cpu().numpy(), maps.classes)

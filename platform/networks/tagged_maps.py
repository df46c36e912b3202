"""Turns the localization maps of an image into scores of its pixels, from which pseudo masks are made."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.datasets.images.decode import fitted_size
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.tables.shards import Shards
from mcis.models.backbones import to_float_images
from mcis.models.grids import pixel_grids
from mcis.models.localization import normalize_maps, scale_maps, score_maps
from mcis.models.pseudo_masks import TaggedMaps
from mcis.models.random_walk import random_walk
from mcis.models.registry import backbone_normalization
from mcis.models.resampling import resample
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_affinity_net, load_trained
from mcis.platform.outputs.tables import MAPS_POSITION, ImageMaps, image_maps


class AffinityWalk:
    """Refines the maps of an image by a random walk over the affinities that a trained network predicts.

    Args:
        weights: Folder of the trained affinity network.
        gpu: Whether the network and the walk run on a GPU.
    """

    def __init__(self, config: Config, weights: Path, gpu: bool):
        self.scale = config.map_scale
        self.max_side = config.data.max_side
        self.value_range = config.data.value_range
        self.walk = config.pseudo_masks.walk
        self.device = torch.device("cuda" if gpu else "cpu")
        self.model = load_trained(build_affinity_net(config.affinity_net), weights, self.device)
        self.normalize = backbone_normalization(config.affinity_net.backbone)

    @torch.inference_mode()
    def __call__(self, row: dict[str, Any], maps: ImageMaps, size: tuple[int, int]) -> Tensor:
        """Returns the scores of an image's pixels after the walk, (T, H, W).

        Activations become scores at the positions of the affinity network. These walk, and each map is then divided by
        its maximum.

        Args:
            row: The image's row of the index.
            maps: Its T localization maps.
            size: H and W.
        """
        max_side = min(self.max_side or self.walk.max_side, self.walk.max_side)
        rgb = read_rgb(row["uri"], max_side=max_side, content_hash=row["content_hash"], value_range=self.value_range)
        image = self.normalize(to_float_images(torch.from_numpy(rgb[None]).to(self.device)))
        neighbors = self.model(image)

        activations = torch.from_numpy(maps.maps).to(self.device)
        start = scale_maps(resample(activations, maps.grids, neighbors.grids, "bicubic"), self.scale)
        steps = max(1, round(self.walk.steps * (max(rgb.shape) / self.walk.max_side) ** 2))
        walked = random_walk(start, neighbors.affinities[0], radius=self.model.radius, beta=self.walk.beta, steps=steps)
        return resample(normalize_maps(walked), neighbors.grids, pixel_grids(*size)).cpu()


def tagged_maps(
    row: dict[str, Any],
    table: Shards,
    config: Config,
    *,
    saliency: NDArray[np.uint8] | None = None,
    walk: AffinityWalk | None = None,
) -> TaggedMaps:
    """Returns the input of a rule for pseudo masks: the scores of an image's pixels, at the size at which it is read.

    Args:
        row: The image's row of the index. With the column MAPS_POSITION, its maps are found by it; otherwise by its id.
        table: The table of localization maps.
        saliency: Saliency map of the image, at that size.
        walk: Refines the maps before they become scores of pixels.
    """
    max_side = config.data.max_side
    maps = image_maps(table, row["image_id"], row.get(MAPS_POSITION))
    size = fitted_size(row["height"], row["width"], max_side)
    if walk:
        scores = walk(row, maps, size)
    else:
        scores = score_maps(torch.from_numpy(maps.maps), maps.grids, config.map_scale, *size)

    return TaggedMaps(
        scores.numpy(),
        maps.classes,
        functools.partial(
            read_rgb,
            row["uri"],
            max_side=max_side,
            content_hash=row["content_hash"],
            value_range=config.data.value_range,
        ),
        saliency,
        one_scale=config.map_scale == "logarithm",
    )

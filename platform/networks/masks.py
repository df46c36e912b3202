"""Localization maps of an image -> scores of its pixels, which pseudo masks are made of; a walk over affinities."""

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
from mcis.models.backbones import to_unit
from mcis.models.grids import pixel_grids
from mcis.models.localization import normalize_maps, scale_maps, score_maps
from mcis.models.networks import normalization_of
from mcis.models.pseudo_masks import TaggedMaps
from mcis.models.random_walk import random_walk
from mcis.models.resampling import resample
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_affinity_net, load_trained
from mcis.platform.outputs.tables import ImageMaps, image_maps


class Walk:
    """A trained affinity network, and the walk of maps over what it says of an image.

    Args:
        weights: the folder of the trained network.
        gpu: whether the network and the walk run on one.
    """

    def __init__(self, config: Config, weights: Path, gpu: bool):
        self.scale, self.max_side, self.walk = config.maps.scale, config.data.max_side, config.pseudo_masks.walk
        self.device = torch.device("cuda" if gpu else "cpu")
        self.model = load_trained(build_affinity_net(config.affinity_net), weights, self.device)
        self.normalize = normalization_of(config.affinity_net.backbone)

    @torch.inference_mode()
    def __call__(self, row: dict[str, Any], maps: ImageMaps, size: tuple[int, int]) -> Tensor:
        """Scores of an image's pixels at a size, (T, H, W), of maps that have walked.

        Activations become scores at the network's positions, these walk, and each map is divided by its maximum.
        """
        side = min(self.max_side or self.walk.max_side, self.walk.max_side)
        rgb = read_rgb(row["uri"], max_side=side, content_hash=row["content_hash"])
        image = self.normalize(to_unit(torch.from_numpy(rgb[None]).to(self.device)))
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
    walk: Walk | None = None,
) -> TaggedMaps:
    """What a rule makes an image's pseudo mask of, at the size at which the image is read.

    Args:
        row: of the index.
        table: of localization maps.
        saliency: of the image, at that size.
        walk: that the maps make before they are scores of pixels.
    """
    scale, side = config.maps.scale, config.data.max_side
    maps = image_maps(table, row["image_id"])
    size = fitted_size(row["height"], row["width"], side)
    scores = walk(row, maps, size) if walk else score_maps(torch.from_numpy(maps.maps), maps.grids, scale, *size)
    return TaggedMaps(
        scores.numpy(),
        maps.classes,
        functools.partial(read_rgb, row["uri"], max_side=side, content_hash=row["content_hash"]),
        saliency,
        one_scale=scale == "logarithm",
    )

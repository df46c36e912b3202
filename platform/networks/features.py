"""A backbone before its training -> its outputs of images, kept for a training that leaves it as it is."""

import functools
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import read_squares
from mcis.datasets.index import shown
from mcis.datasets.tables.memory_mapped import cache_table
from mcis.models.backbones import to_unit
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_backbone, move_channels_last
from mcis.platform.networks.pretrained import load_backbone

BATCH_ON_CPU, BATCH_ON_GPU = 2, 64
"""Images of a forward pass, mirror images among them; a CPU is faster while layers' outputs stay in its cache."""


@functools.cache
def features_shape(config: ClassifierConfig) -> tuple[int, int, int]:
    """(C, H, W) of the backbone's output of an image at the classifier's size."""
    with torch.device("meta"):
        backbone = build_backbone(config).eval()
    with torch.inference_mode():
        _, c, h, w = backbone(torch.zeros(1, 3, config.input_size, config.input_size, device="meta")).shape
    return c, h, w


class MakeFeatures:
    """Rows of an index -> a shard of features: of each image, and of its mirror image, (V, C, H, W) float16.

    Args:
        pretrained: file of the backbone's weights.
        gpu: whether there is one.
        views: V, 1 or 2; of one there are no mirror images.
    """

    def __init__(self, config: ClassifierConfig, pretrained: Path, gpu: bool, views: int):
        self.config, self.views, self.device = config, views, torch.device("cuda" if gpu else "cpu")
        backbone = build_backbone(config)
        load_backbone("classifier", backbone, pretrained)
        self.backbone = move_channels_last(backbone, self.device).eval()

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        batch = (BATCH_ON_GPU if self.device.type == "cuda" else BATCH_ON_CPU) // self.views
        parts = [self._batch(rows.slice(first, batch)) for first in range(0, len(rows), batch)]
        features = torch.cat(parts)
        if not features.isfinite().all():
            raise UserError(
                f"features beyond float16's range among the images {shown(rows['image_id'].to_pylist())}",
                "outputs of a sound backbone",
                "choose another backbone or other weights, or train all of it (classifier.trainable_stages=all)",
            )
        return cache_table(features.numpy())

    def _batch(self, rows: pa.Table) -> Tensor:
        pixels = read_squares(rows, self.config.input_size)
        images = self.backbone.normalize(to_unit(torch.from_numpy(pixels).to(self.device)))
        views = torch.cat([images, images.flip(3)][: self.views]).contiguous(memory_format=torch.channels_last)
        return torch.stack(self.backbone(views).chunk(self.views), dim=1).half().cpu()

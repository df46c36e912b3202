"""Computes the features that a frozen, pretrained backbone extracts from images, to be cached for its training."""

import functools
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.images.squares import read_squares
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.tables.memory_mapped import cache_table
from mcis.models.backbones import Backbone, to_float_images
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_backbone, move_channels_last
from mcis.platform.networks.pretrained import load_backbone

BATCH_ON_CPU = 2
"""Images in a forward pass on a CPU, flipped ones included. It is faster while layer outputs fit the CPU's cache."""
BATCH_ON_GPU = 64
"""Images in a forward pass on a GPU, flipped ones included."""


@functools.cache
def features_shape(config: ClassifierConfig) -> tuple[int, int, int]:
    """Returns the shape (C, H, W) of the backbone's output for an image at the classifier's input size."""
    with torch.device("meta"):
        backbone = build_backbone(config).eval()
    with torch.inference_mode():
        output = backbone(torch.zeros(1, 3, config.input_size, config.input_size, device="meta"))
    _, channels, height, width = output.shape
    return channels, height, width


def check_half_range(features: Tensor, rows: pa.Table, remedy: str) -> None:
    """Raises UserError if a feature of some images exceeds the range of float16.

    Args:
        features: The features as float16, in which such a value is infinite.
        rows: The images, with the column `image_id`.
        remedy: What the user can do.
    """
    if not features.isfinite().all():
        image_ids = rows["image_id"].to_pylist()
        raise UserError(
            f"features exceed the range of float16 for at least one of the images {join_shortened(image_ids)}",
            "finite features of at most 65,504",
            remedy,
        )


def forward_images(views: int, gpu: bool) -> int:
    """Returns the number of images in a forward pass of a frozen backbone, flipped ones not counted.

    Args:
        views: See `half_features`.
        gpu: Whether the backbone runs on a GPU.
    """
    return (BATCH_ON_GPU if gpu else BATCH_ON_CPU) // views


def half_features(backbone: Backbone, images: Tensor, views: int) -> Tensor:
    """Computes the features of a batch of images as they are cached, in one forward pass.

    Args:
        backbone: The frozen backbone.
        images: Normalized images, (B, 3, H, W).
        views: V. 1: the image; 2: the image and its horizontal flip.

    Returns:
        Features, (B, V, C, h, w) float16.
    """
    inputs = [images]
    if views == 2:
        inputs.append(images.flip(3))
    batch = torch.cat(inputs).contiguous(memory_format=torch.channels_last)
    return torch.stack(backbone(batch).chunk(views), dim=1).half()


class MakeFeatures:
    """Maps rows of an index to a shard of features, (V, C, H, W) float16 for each image.

    If memory runs out on a GPU, this batch and all later ones have half the size.

    Args:
        pretrained: File of the backbone's weights.
        gpu: Whether the backbone runs on a GPU.
        views: V. 1: the image; 2: the image and its horizontal flip.
        value_range: See `read_rgb`.

    Attributes:
        batch_size: Images in a forward pass, flipped ones not counted.
    """

    def __init__(
        self, config: ClassifierConfig, pretrained: Path, gpu: bool, views: int, value_range: ValueRange | None = None
    ):
        self.config = config
        self.value_range = value_range
        self.views = views
        self.device = torch.device("cuda" if gpu else "cpu")
        self.batch_size = forward_images(views, gpu)
        backbone = build_backbone(config)
        load_backbone("classifier", backbone, pretrained)
        self.backbone = move_channels_last(backbone, self.device).eval()

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        """Returns the features as a table of the cache. Raises UserError if a value exceeds the range of float16."""
        batches: list[Tensor] = []
        done = 0
        while done < len(rows):
            try:
                batches.append(self._features(rows.slice(done, self.batch_size)))
            except torch.OutOfMemoryError:
                if self.batch_size == 1:
                    raise
                self.batch_size //= 2
            else:
                done += len(batches[-1])

        features = torch.cat(batches)
        check_half_range(
            features,
            rows,
            "choose another backbone or other weights, or train all of it (classifier.trainable_stages=all)",
        )
        return cache_table(features.numpy())

    def _features(self, rows: pa.Table) -> Tensor:
        """Returns the features of a batch of images, (B, V, C, H, W) float16."""
        pixels = read_squares(rows, self.config.input_size, self.value_range)
        images = self.backbone.normalize(to_float_images(torch.from_numpy(pixels).to(self.device)))
        return half_features(self.backbone, images, self.views).cpu()

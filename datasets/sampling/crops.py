"""Random crops of training images and their labels: scaled, flipped, and padded where the image is too small."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.classes import IGNORE
from mcis.datasets.images.label_masks import resize_labels

CROP_DRAWS = 4
"""Number of random numbers that a crop takes: scale, flip, top, left."""
_PADDING = (124, 116, 104)  # mean color of ImageNet


class Crop(NamedTuple):
    """A crop of an image, (size, size, 3) uint8, and of its labels, (size, size) uint8."""

    image: NDArray[np.uint8]
    labels: NDArray[np.uint8]


def random_crop(
    rgb: NDArray[np.uint8],
    labels: NDArray[np.uint8],
    *,
    size: int,
    scales: Sequence[float],
    hflip: bool,
    draws: NDArray[np.float64],
) -> Crop:
    """Returns a training crop of an image (H, W, 3) and its labels (H, W).

    Padding has the mean color of ImageNet and the ignore label.

    Args:
        size: Side of the crop, pixels.
        scales: Factors to draw from. Images are resized with bilinear, labels with nearest interpolation.
        hflip: Whether to flip half of the crops horizontally.
        draws: Four numbers in [0, 1): scale, flip, top, left.
    """
    factor = scales[int(draws[0] * len(scales))]
    height, width = (max(1, round(side * factor)) for side in labels.shape)
    rgb = np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling.BILINEAR))
    labels = resize_labels(labels, height, width)

    if hflip and draws[1] < 0.5:
        rgb = rgb[:, ::-1]
        labels = labels[:, ::-1]

    image_crop = np.full((size, size, 3), _PADDING, np.uint8)
    labels_crop = np.full((size, size), IGNORE, np.uint8)
    from_rows, to_rows = _overlap(height, size, draws[2])
    from_columns, to_columns = _overlap(width, size, draws[3])
    image_crop[to_rows, to_columns] = rgb[from_rows, from_columns]
    labels_crop[to_rows, to_columns] = labels[from_rows, from_columns]
    return Crop(image_crop, labels_crop)


def _overlap(side: int, size: int, draw: float) -> tuple[slice, slice]:
    """Returns which pixels of an image's side are visible, and their place in a crop of `size` pixels.

    A smaller image is placed anywhere in the crop. A larger image is cropped anywhere.
    """
    offset = int(draw * (abs(side - size) + 1))
    whole = slice(0, min(side, size))
    shifted = slice(offset, offset + min(side, size))
    if side > size:
        return shifted, whole
    return whole, shifted

"""Counts of pixels by true and predicted label, of label masks and of maps. All scores are computed from them.

Labels: 0 is background, class index k is label k + 1, and 255 in the ground truth is not scored. Predictions have no
ignore label.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE
from mcis.models.max_with_index import max_with_index

MASK_PARTS = 4
"""Number of parts of a mask. A pixel's part is 2 if it is in the boundary region of the truth, plus 1 if it is in that
of the prediction."""


class Counts(NamedTuple):
    """Pixels of an image by true label, predicted label and part; (E,) each, without entries of 0 pixels.

    Attributes:
        truth, predicted: Labels.
        part: For label masks, 0 to MASK_PARTS - 1; for maps, the interval of the score.
        pixels: Number of pixels, at least 1.
    """

    truth: NDArray[np.uint8]
    predicted: NDArray[np.uint8]
    part: NDArray[np.uint16]
    pixels: NDArray[np.uint32]


def boundary_width(height: int, width: int) -> int:
    """Returns the width d of boundary regions: 2 % of the image's diagonal in pixels, rounded, at least 1."""
    return max(1, round(0.02 * math.hypot(height, width)))


def boundary_region(labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Finds the pixels within d rows and columns of another label or of the outside of the image.

    For label k these are G_d ∩ G of its mask (Cheng et al., "Boundary IoU", CVPR 2021, section 4.1): the mask minus its
    erosion by a square of side 2d + 1. Ignored pixels count as a label of their own.

    Args:
        labels: (H, W).

    Returns:
        (H, W) bool.
    """
    d = boundary_width(*labels.shape)
    region = np.ones(labels.shape, np.bool_)
    if min(labels.shape) > 2 * d:
        lowest = _over_windows(np.minimum, labels, 2 * d + 1)
        highest = _over_windows(np.maximum, labels, 2 * d + 1)
        region[d:-d, d:-d] = lowest != highest
    return region


def _over_windows(extreme: Callable[..., NDArray[np.uint8]], labels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Computes the minimum or maximum of each square window within the image.

    Windows grow by doubling, so each dimension takes log2(side) passes.

    Args:
        extreme: `numpy.minimum` or `numpy.maximum`.
        labels: (H, W).
        side: Side of the window, pixels.

    Returns:
        (H - side + 1, W - side + 1).
    """
    for _ in range(2):  # rows, then columns of the transposed array
        rows = labels
        length = 1
        while 2 * length <= side:
            rows = extreme(rows[:-length], rows[length:])
            length *= 2
        windows = len(labels) - side + 1
        labels = extreme(rows[:windows], rows[side - length : side - length + windows]).T
    return labels


def mask_counts(truth: NDArray[np.uint8], predictions: Iterable[NDArray[np.uint8]], classes: int) -> Iterator[Counts]:
    """Counts the pixels of predicted label masks of one image, without those ignored in the truth.

    Boundary regions are computed on whole masks: edges to ignored pixels are contours of the truth, and contours of a
    prediction may be at ignored pixels. Only scored pixels are counted.

    Args:
        truth: True labels, (H, W).
        predictions: Predicted labels, (H, W) each.
        classes: Number of classes K.

    Yields:
        Counts of each prediction.

    Raises:
        ValueError: A predicted label is above K.
    """
    sides = (256, classes + 1, 2, 2)
    truth_cells = truth.astype(np.min_scalar_type(np.prod(sides) - 1))
    truth_region = boundary_region(truth)
    for prediction in predictions:
        if prediction.max(initial=0) > classes:
            raise ValueError(f"label {prediction.max()} is above the number of classes, {classes}")

        cells = truth_cells.copy()
        columns = (prediction, truth_region, boundary_region(prediction))
        for side, values in zip(sides[1:], columns, strict=True):
            cells *= side
            cells += values
        yield _count_cells(cells, (256, classes + 1, MASK_PARTS))


def map_counts(truth: NDArray[np.uint8], maps: NDArray[np.float32], tags: NDArray[np.int64], bins: int) -> Counts:
    """Counts the pixels of maps by true label, label of the highest score, and interval of this score.

    `metrics.sweep` converts the sum of these over all images to the confusion matrix at each background threshold.

    Args:
        truth: True labels, (H, W).
        maps: Scores in [0, 1], one map per tag, (T, H, W).
        tags: Class indices, (T,).
        bins: Number of intervals of equal width in [0, 1].
    """
    score, index = max_with_index(maps)

    cells = truth.astype(np.int32) * len(tags)
    cells += index
    cells *= bins
    cells += intervals(score, bins)

    counts = _count_cells(cells, (256, len(tags), bins))
    return counts._replace(predicted=(tags[counts.predicted] + 1).astype(np.uint8))


def intervals(scores: NDArray[np.float32], bins: int) -> NDArray[np.int32]:
    """Returns, for scores in [0, 1], the number i < bins of the highest threshold i / bins that each score reaches."""
    scaled = np.multiply(scores, bins, dtype=np.float64)  # float32 would round some scores below i / bins up to it
    return np.minimum(scaled.astype(np.int32), bins - 1)


def _count_cells(cells: NDArray[np.integer], shape: tuple[int, int, int]) -> Counts:
    """Counts pixels by their cell in a table of true labels, predicted labels and parts with this shape."""
    pixels = np.bincount(cells.ravel(), minlength=int(np.prod(shape)))

    truth, predicted, part = np.unravel_index(np.flatnonzero(pixels), shape)
    scored = truth != IGNORE
    return Counts(
        truth[scored].astype(np.uint8),
        predicted[scored].astype(np.uint8),
        part[scored].astype(np.uint16),
        pixels[pixels > 0][scored].astype(np.uint32),
    )


def add_counts(total: NDArray[np.int64], counts: Counts) -> None:
    """Adds counts to a dense table (parts, K + 1, K + 1) in place. Counts of several images may be concatenated."""
    cells = np.ravel_multi_index((counts.part, counts.truth, counts.predicted), total.shape)
    np.add.at(total.reshape(-1), cells, counts.pixels.astype(np.int64))


def confusion(truth: NDArray[np.uint8], prediction: NDArray[np.uint8], classes: int) -> NDArray[np.int64]:
    """Computes the confusion matrix of a label mask, (K + 1, K + 1), with one row per true label.

    Raises:
        ValueError: A predicted label is above K = `classes`.
    """
    total = np.zeros((MASK_PARTS, classes + 1, classes + 1), np.int64)
    (counts,) = mask_counts(truth, [prediction], classes)
    add_counts(total, counts)
    return np.asarray(total.sum(axis=0))


class Overlaps(NamedTuple):
    """Pixels of each label in N images, (N, K + 1) each, from which the IoU is computed.

    Attributes:
        both: Pixels with the label in truth and prediction.
        truth: Pixels with the label in the truth.
        predicted: Pixels with the label in the prediction.
    """

    both: NDArray[np.int64]
    truth: NDArray[np.int64]
    predicted: NDArray[np.int64]


def overlaps(
    counts: Counts, images: NDArray[np.int64], count: int, classes: int, *, boundary: bool = False
) -> Overlaps:
    """Computes the overlaps of labels in N images.

    Args:
        counts: Counts of all images, concatenated.
        images: Position of the image to which each entry belongs, (E,).
        count: Number of images N.
        classes: Number of classes K.
        boundary: Whether to compute overlaps of boundary regions; the counts must then be of label masks.
    """
    in_truth = np.ones(len(images), np.bool_)
    in_prediction = np.ones(len(images), np.bool_)
    if boundary:
        in_truth = counts.part >= 2
        in_prediction = counts.part % 2 == 1

    def pixels_of(labels: NDArray[np.uint8], selected: NDArray[np.bool_]) -> NDArray[np.int64]:
        total = np.zeros((count, classes + 1), np.int64)
        cells = images[selected] * (classes + 1) + labels[selected]
        np.add.at(total.reshape(-1), cells, counts.pixels[selected].astype(np.int64))
        return total

    in_both = in_truth & in_prediction & (counts.truth == counts.predicted)
    return Overlaps(
        both=pixels_of(counts.truth, in_both),
        truth=pixels_of(counts.truth, in_truth),
        predicted=pixels_of(counts.predicted, in_prediction),
    )

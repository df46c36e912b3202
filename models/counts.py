"""Counts of pixels by true and predicted label, which every score follows from: of label masks, and of maps.

Labels: 0 is background, class index k is label k + 1, 255 in the truth is not scored. A prediction has no ignore label.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE
from mcis.models.max_with_index import max_with_index

MASK_PARTS = 4
"""Parts of a mask's pixels: 2 in the boundary region of the truth + 1 in that of the prediction."""


class Counts(NamedTuple):
    """Pixels of an image by true label, predicted label and part, entries without a pixel left out; (E,) each.

    Attributes:
        truth, predicted: labels.
        part: of a label mask, in 0..MASK_PARTS - 1; of maps, the interval of the score.
        pixels: how many there are, at least 1.
    """

    truth: NDArray[np.uint8]
    predicted: NDArray[np.uint8]
    part: NDArray[np.uint16]
    pixels: NDArray[np.uint32]


def boundary_width(height: int, width: int) -> int:
    """Width d of the boundary regions in an image of so many pixels: 2 % of its diagonal, rounded, at least 1."""
    return max(1, round(0.02 * math.hypot(height, width)))


def boundary_region(labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """The pixels within d rows and columns of one with another label, or of the outside of the image; (H, W) each.

    Those of label k are G_d ∩ G of the mask of k (Cheng et al., "Boundary IoU", CVPR 2021, section 4.1): a mask less
    what a (2d + 1) x (2d + 1) square leaves of it by erosion. Ignored pixels are a label of their own.
    """
    d = boundary_width(*labels.shape)
    region = np.ones(labels.shape, np.bool_)
    if min(labels.shape) > 2 * d:
        lowest, highest = (_over_windows(extreme, labels, 2 * d + 1) for extreme in (np.minimum, np.maximum))
        region[d:-d, d:-d] = lowest != highest
    return region


def _over_windows(extreme: Callable[..., NDArray[np.uint8]], labels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The extreme of each square window that lies within the image: (H, W) -> (H - side + 1, W - side + 1).

    Windows grow by doubling, so that a dimension takes log2(side) passes.
    """
    for _ in range(2):
        rows, length = labels, 1
        while 2 * length <= side:
            rows = extreme(rows[:-length], rows[length:])
            length *= 2
        windows = len(labels) - side + 1
        labels = extreme(rows[:windows], rows[side - length : side - length + windows]).T
    return labels


def mask_counts(truth: NDArray[np.uint8], predictions: Iterable[NDArray[np.uint8]], classes: int) -> Iterator[Counts]:
    """Counts the pixels of label masks of one image, (H, W) each, without the truth's ignored ones.

    The boundary regions are those of the whole masks: the edge to an ignored pixel is a contour of the truth, and the
    prediction's contours may lie on ignored pixels. What then counts are scored pixels alone.

    Raises:
        ValueError: a label of a prediction is above K = `classes`.
    """
    sides = (256, classes + 1, 2, 2)
    known, of_truth = truth.astype(np.min_scalar_type(np.prod(sides) - 1)), boundary_region(truth)
    for prediction in predictions:
        if prediction.max(initial=0) > classes:
            raise ValueError(f"label {prediction.max()} where at most {classes} is known")
        cells = known.copy()
        for side, values in zip(sides[1:], (prediction, of_truth, boundary_region(prediction)), strict=True):
            cells *= side
            cells += values
        yield _counted(cells, (256, classes + 1, MASK_PARTS))


def map_counts(truth: NDArray[np.uint8], maps: NDArray[np.float32], tags: NDArray[np.int64], bins: int) -> Counts:
    """Counts the pixels of maps by true label, label of the strongest tagged class, and its score's interval.

    `metrics.sweep` turns the sum of these over all images into the confusion matrix of every background threshold.

    Args:
        truth: (H, W).
        maps: (T, H, W) in [0, 1], one map per tag.
        tags: (T,) class indices.
        bins: number of intervals of equal width into which [0, 1] is divided.
    """
    (score, number), cells = max_with_index(maps), truth.astype(np.int32) * len(tags)
    cells += number
    cells *= bins
    cells += intervals(score, bins)
    counts = _counted(cells, (256, len(tags), bins))
    return counts._replace(predicted=(tags[counts.predicted] + 1).astype(np.uint8))


def intervals(scores: NDArray[np.float32], bins: int) -> NDArray[np.int32]:
    """The number of the highest threshold i / bins that each score in [0, 1] reaches."""
    scaled = np.multiply(scores, bins, dtype=np.float64)  # float32 would round some scores below i / bins up to it
    return np.minimum(scaled.astype(np.int32), bins - 1)


def _counted(cells: NDArray[np.integer], shape: tuple[int, int, int]) -> Counts:
    """Counts pixels by their cell of a table of true labels, predicted ones and parts."""
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
    """Adds counts to a dense table (parts, K + 1, K + 1) of them, in place; those of several images may be chained."""
    cells = np.ravel_multi_index((counts.part, counts.truth, counts.predicted), total.shape)
    np.add.at(total.reshape(-1), cells, counts.pixels.astype(np.int64))


def confusion(truth: NDArray[np.uint8], prediction: NDArray[np.uint8], classes: int) -> NDArray[np.int64]:
    """The confusion matrix (K + 1, K + 1) of a label mask, rows by the true label; raises as `mask_counts` does."""
    total = np.zeros((MASK_PARTS, classes + 1, classes + 1), np.int64)
    (counts,) = mask_counts(truth, [prediction], classes)
    add_counts(total, counts)
    return np.asarray(total.sum(axis=0))


class Overlaps(NamedTuple):
    """Pixels by label of N images, (N, K + 1) each: what an IoU is made of, image by image.

    Attributes:
        both: in truth and prediction.
        truth, predicted: in either of them.
    """

    both: NDArray[np.int64]
    truth: NDArray[np.int64]
    predicted: NDArray[np.int64]


def overlaps(
    counts: Counts, images: NDArray[np.int64], count: int, classes: int, *, boundary: bool = False
) -> Overlaps:
    """The overlaps of labels in so many images.

    Args:
        counts: of all images, chained.
        images: position of the image that each entry is of, (E,).
        count: how many images there are.
        boundary: whether those of the labels' boundary regions are meant; the counts are then of label masks.
    """
    of_truth, of_prediction = np.ones((2, len(images)), np.bool_)
    if boundary:
        of_truth, of_prediction = counts.part >= 2, counts.part % 2 == 1

    def summed(labels: NDArray[np.uint8], chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        total = np.zeros((count, classes + 1), np.int64)
        cells = images[chosen] * (classes + 1) + labels[chosen]
        np.add.at(total.reshape(-1), cells, counts.pixels[chosen].astype(np.int64))
        return total

    both = of_truth & of_prediction & (counts.truth == counts.predicted)
    return Overlaps(summed(counts.truth, both), summed(counts.truth, of_truth), summed(counts.predicted, of_prediction))

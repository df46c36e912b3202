"""Metrics of confusion matrices (IoU, precision, recall, boundary IoU, error shares), baselines, average precision."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.registry import Registry


def iou(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """Computes the intersection over union of each label in percent.

    Args:
        matrix: Confusion matrices, (..., K + 1, K + 1), with one row per true label.

    Returns:
        (..., K + 1); NaN for labels that occur in neither truth nor prediction.
    """
    hits, truth, predicted = _marginals(matrix)
    return iou_of(hits, truth, predicted)


def iou_of(both: NDArray[Any], truth: NDArray[Any], predicted: NDArray[Any]) -> NDArray[np.float64]:
    """Computes the IoU in percent from the sizes of intersection, truth and prediction; NaN if all are 0."""
    return _percent(both, truth + predicted - both)


def precision(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """Computes the precision of each label in percent, (K + 1,); NaN for labels that are never predicted."""
    hits, _, predicted = _marginals(matrix)
    return _percent(hits, predicted)


def recall(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """Computes the recall of each label in percent, (K + 1,); NaN for labels that do not occur in the truth."""
    hits, truth, _ = _marginals(matrix)
    return _percent(hits, truth)


LABEL_SCORES = Registry[Callable[[NDArray[np.int64]], NDArray[np.float64]]](
    "scores", {"precision": precision, "recall": recall}
)
"""Scores of labels in addition to IoU, by name. A score is a function from a confusion matrix (K + 1, K + 1), with one
row per true label and background first, to percentages (K + 1,), NaN for labels without a value. Packages add to them
by entry points of `mcis.scores`."""


def boundary_iou(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Computes the boundary IoU of each label in percent (Cheng et al., CVPR 2021, section 4.1).

    It is the IoU of the label's boundary regions in truth and prediction, with intersections and unions summed over the
    images. Next to ignored pixels, even a prediction that equals the truth at all scored pixels can score below 100,
    because the contours of the ignored area are not contours of the prediction.

    Args:
        counts: Counts of label masks, (MASK_PARTS, K + 1, K + 1).

    Returns:
        (K + 1,); NaN for labels that occur in neither truth nor prediction.
    """
    both = np.diagonal(counts[3])
    truth = counts[2:].sum(axis=(0, 2))
    predicted = counts[1::2].sum(axis=(0, 1))
    return iou_of(both, truth, predicted)


def mean(values: NDArray[np.float64]) -> float:
    """Computes the mean over the labels that have a value; NaN if none has."""
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else float("nan")


class ErrorShares(NamedTuple):
    """What reduces the IoU of each label, in percent of its union, (K + 1,) each. Their sum with the IoU is 100.

    Attributes:
        missed: Pixels of a class that are predicted as background. They reduce the IoU of both.
        spurious: Background pixels that are predicted as a class. They reduce the IoU of both.
        confused: Pixels of a class that are predicted as another class; 0 for the background.
    """

    missed: NDArray[np.float64]
    spurious: NDArray[np.float64]
    confused: NDArray[np.float64]


def error_shares(matrix: NDArray[np.int64]) -> ErrorShares:
    """Computes the error shares of each label from a confusion matrix (K + 1, K + 1); NaN for labels without an IoU."""
    hits, truth, predicted = _marginals(matrix)
    union = truth + predicted - hits

    missed = matrix[:, 0].copy()
    missed[0] = matrix[1:, 0].sum()

    spurious = matrix[0].copy()
    spurious[0] = matrix[0, 1:].sum()
    confused = union - hits - missed - spurious

    return ErrorShares(_percent(missed, union), _percent(spurious, union), _percent(confused, union))


def _marginals(matrix: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the pixels of each label in truth and prediction, in truth, and in prediction, (..., K + 1) each."""
    return np.diagonal(matrix, axis1=-2, axis2=-1), matrix.sum(axis=-1), matrix.sum(axis=-2)


def _percent(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * part.astype(np.float64) / whole


def sweep(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Computes the confusion matrix at each background threshold i / bins from counts of maps.

    At threshold t a pixel is assigned to its tagged class with the highest score if this score is at least t, else to
    the background.

    Args:
        counts: Sums of `counts.map_counts`, (bins, K + 1, K + 1).

    Returns:
        Confusion matrices, (bins, K + 1, K + 1).
    """
    matrices = counts[::-1].cumsum(axis=0)[::-1].copy()  # pixels with a score of at least i / bins
    matrices[:, :, 0] = (counts.sum(axis=0) - matrices).sum(axis=-1)
    return matrices


def random_tag_mask(salient: NDArray[np.bool_], tags: NDArray[np.int64], draw: float) -> NDArray[np.uint8]:
    """Makes the mask of the baseline without a classifier: a random tag of the image on all its salient pixels.

    Args:
        salient: Whether a pixel is salient, (H, W).
        tags: Class indices, (T,).
        draw: Random number in [0, 1) that selects the tag.

    Returns:
        Labels, (H, W).
    """
    tag = tags[int(draw * len(tags))]
    return np.where(salient, tag + 1, 0).astype(np.uint8)


def best_tag_mask(salient: NDArray[np.bool_], tags: NDArray[np.int64], truth: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Makes the mask of the baseline with a perfect classifier: the true tag on each salient pixel.

    Args:
        salient: Whether a pixel is salient, (H, W).
        tags: Class indices, (T,). The first is used at salient pixels whose true label is not a tag.
        truth: True labels, (H, W).

    Returns:
        Labels, (H, W).
    """
    is_tagged = np.isin(truth, tags + 1)
    foreground = np.where(is_tagged, truth, tags[0] + 1)
    return np.where(salient, foreground, 0).astype(np.uint8)


def average_precision(scores: NDArray[np.float64], tags: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Computes the average precision of each class in percent.

    Among images with equal scores, those without the class are ranked first, so constant scores gain nothing.

    Args:
        scores: Scores of N images, (N, K).
        tags: Whether an image has a class, (N, K).

    Returns:
        (K,); NaN for classes without a positive image.
    """
    order = np.lexsort((tags, -scores), axis=0)
    hits = np.take_along_axis(tags, order, axis=0)
    ranks = np.arange(1, len(hits) + 1)[:, None]

    precisions = hits.cumsum(axis=0) / ranks
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * (precisions * hits).sum(axis=0) / hits.sum(axis=0)

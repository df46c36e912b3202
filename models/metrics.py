"""Metrics of confusion matrices: IoU, precision, recall, boundary IoU, what is lost; thresholds, baselines, tags."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.registry import Registry


def iou(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """Intersection over union of each label in percent, (..., K + 1), from confusion matrices (..., K + 1, K + 1).

    It is NaN for a label that occurs in neither truth nor prediction.
    """
    hits, truth, predicted = _marginals(matrix)
    return iou_of(hits, truth, predicted)


def iou_of(both: NDArray[Any], truth: NDArray[Any], predicted: NDArray[Any]) -> NDArray[np.float64]:
    """Intersection over union in percent, from sizes of an intersection and of the two sets; NaN where these are 0."""
    return _percent(both, truth + predicted - both)


def precision(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of the pixels predicted as each label that are of it, in percent, (K + 1,); NaN where there are none."""
    hits, _, predicted = _marginals(matrix)
    return _percent(hits, predicted)


def recall(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of the pixels of each label that are predicted as it, in percent, (K + 1,); NaN where there are none."""
    hits, truth, _ = _marginals(matrix)
    return _percent(hits, truth)


LABEL_SCORES = Registry[Callable[[NDArray[np.int64]], NDArray[np.float64]]](
    "scores", {"precision": precision, "recall": recall}
)
"""What is scored beside IoU: confusion matrix (K + 1, K + 1), true by predicted label, background first -> a figure of
each label in percent, (K + 1,), NaN where it has none; packages add to them by entry points of `mcis.scores`."""


def boundary_iou(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Boundary IoU of each label in percent, (K + 1,), from the counts of label masks (MASK_PARTS, K + 1, K + 1).

    That is the IoU of the boundary regions of the label in truth and prediction (Cheng et al., CVPR 2021, section 4.1),
    intersections and unions summed over the images; NaN where a label occurs in neither. A prediction that is the truth
    where that is known reaches less than 100 next to ignored pixels, since its own contour is not theirs.
    """
    return iou_of(np.diagonal(counts[3]), counts[2:].sum(axis=(0, 2)), counts[1::2].sum(axis=(0, 1)))


def mean(values: NDArray[np.float64]) -> float:
    """Mean over the labels that have a value; NaN where none has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


class ErrorShares(NamedTuple):
    """What each label lacks to an IoU of 100, in percent of its union, (K + 1,) each; with the IoU they sum to 100.

    Attributes:
        missed: pixels of a class predicted as background, which lack to the class and are too many of the background.
        spurious: pixels of the background predicted as a class, likewise.
        confused: pixels of a class predicted as another class; none of the background's.
    """

    missed: NDArray[np.float64]
    spurious: NDArray[np.float64]
    confused: NDArray[np.float64]


def error_shares(matrix: NDArray[np.int64]) -> ErrorShares:
    """What a confusion matrix (K + 1, K + 1) lacks, label by label; NaN for one that has no IoU."""
    hits, truth, predicted = _marginals(matrix)
    missed, spurious = matrix[:, 0].copy(), matrix[0].copy()
    missed[0], spurious[0] = matrix[1:, 0].sum(), matrix[0, 1:].sum()
    union = truth + predicted - hits
    return ErrorShares(*(_percent(part, union) for part in (missed, spurious, union - hits - missed - spurious)))


def _marginals(matrix: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Pixels of each label in both, in the truth, and in the prediction, (..., K + 1) each."""
    return np.diagonal(matrix, axis1=-2, axis2=-1), matrix.sum(axis=-1), matrix.sum(axis=-2)


def _percent(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * part.astype(np.float64) / whole


def sweep(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counts of maps (bins, K + 1, K + 1) -> confusion matrices (bins, K + 1, K + 1) at thresholds i / bins.

    At threshold t a pixel gets the label of its strongest tagged class if that class's score is at least t, else 0.
    """
    out = counts[::-1].cumsum(axis=0)[::-1].copy()  # pixels with a score of at least i / bins
    out[:, :, 0] = (counts.sum(axis=0) - out).sum(axis=-1)
    return out


def random_tag_mask(salient: NDArray[np.bool_], tags: NDArray[np.int64], draw: float) -> NDArray[np.uint8]:
    """The baseline without a classifier: one tag of the image on its salient pixels, (H, W), background elsewhere.

    Args:
        salient: (H, W).
        tags: (T,) class indices.
        draw: a random number in [0, 1), which chooses the tag.
    """
    return np.where(salient, tags[int(draw * len(tags))] + 1, 0).astype(np.uint8)


def best_tag_mask(salient: NDArray[np.bool_], tags: NDArray[np.int64], truth: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The baseline of a perfect classifier: the true tag on each salient pixel, (H, W), background elsewhere.

    Args:
        salient: (H, W).
        tags: (T,) class indices; the first is taken where none is true.
        truth: (H, W).
    """
    tagged = np.isin(truth, tags + 1)
    return np.where(salient, np.where(tagged, truth, tags[0] + 1), 0).astype(np.uint8)


def average_precision(scores: NDArray[np.float64], tags: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Average precision of every class in percent, (N, K), (N, K) -> (K,); NaN for a class without a positive image.

    Of images with the same score those without the class come first: scores that tell nothing earn nothing.
    """
    order = np.lexsort((tags, -scores), axis=0)
    hits = np.take_along_axis(tags, order, axis=0)
    precision = hits.cumsum(axis=0) / np.arange(1, len(hits) + 1)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * (precision * hits).sum(axis=0) / hits.sum(axis=0)

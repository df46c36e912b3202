"""Metrics: confusion matrices over pixels, IoU, and all background thresholds in one pass over the pixels.

Labels: 0 is background, class index k is label k + 1, 255 in the truth is not scored. A prediction has no ignore label.
"""

import numpy as np
from numpy.typing import NDArray

IGNORE = 255


def confusion(truth: NDArray[np.uint8], prediction: NDArray[np.uint8], classes: int) -> NDArray[np.int64]:
    """Counts of pixels by (true label, predicted label), (K + 1, K + 1), without the truth's ignored pixels.

    Raises:
        ValueError: the shapes differ, or a label is above K.
    """
    if truth.shape != prediction.shape:
        raise ValueError(f"truth {truth.shape} and prediction {prediction.shape} differ in size")
    labels = classes + 1
    scored = truth != IGNORE
    t, p = truth[scored].astype(np.int64), prediction[scored].astype(np.int64)
    if t.size and max(t.max(), p.max()) > classes:
        raise ValueError(f"label {max(t.max(), p.max())} where at most {classes} is known")
    return np.bincount(t * labels + p, minlength=labels * labels).reshape(labels, labels)


def iou(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """Intersection over union of each label in percent, (..., K + 1), from confusion matrices (..., K + 1, K + 1).

    It is NaN for a label that occurs in neither truth nor prediction.
    """
    hits = np.diagonal(matrix, axis1=-2, axis2=-1).astype(np.float64)
    union = matrix.sum(axis=-1) + matrix.sum(axis=-2) - hits
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * hits / union


def mean_iou(matrix: NDArray[np.int64]) -> float:
    """Mean IoU in percent over the labels that occur in truth or prediction."""
    return float(np.nanmean(iou(matrix)))


def map_histogram(
    truth: NDArray[np.uint8], maps: NDArray[np.float32], tags: NDArray[np.int64], classes: int, bins: int
) -> NDArray[np.int64]:
    """Counts of pixels by (true label, strongest tagged class, its score's bin), (K + 1, K, bins).

    `sweep` turns the sum of these over all images into the confusion matrix of every background threshold at once.

    Args:
        truth: (H, W).
        maps: (T, H, W) in [0, 1], one map per tag.
        tags: (T,) class indices.
        classes: K.
        bins: number of intervals of equal width into which [0, 1] is divided.
    """
    scored = truth != IGNORE
    best = maps.argmax(axis=0)[scored]
    score = maps.max(axis=0)[scored].astype(np.float64)  # float32 would round some scores below i / bins up to it
    level = np.minimum((score * bins).astype(np.int64), bins - 1)
    index = (truth[scored].astype(np.int64) * classes + tags[best]) * bins + level
    return np.bincount(index, minlength=(classes + 1) * classes * bins).reshape(classes + 1, classes, bins)


def sweep(histogram: NDArray[np.int64]) -> NDArray[np.int64]:
    """(K + 1, K, bins) -> confusion matrices (bins, K + 1, K + 1) at thresholds i / bins.

    At threshold t a pixel gets the label of its strongest tagged class if that class's score is at least t, else 0.
    """
    labels, _, bins = histogram.shape
    kept = histogram[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]  # pixels with a score of at least i / bins
    out = np.zeros((bins, labels, labels), np.int64)
    out[:, :, 1:] = kept.transpose(2, 0, 1)
    out[:, :, 0] = (histogram.sum(axis=2, keepdims=True) - kept).sum(axis=1).T
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

    Of images with the same score those without the class come first: scores that tell nothing earn nothing, whatever
    the order of the images.
    """
    order = np.lexsort((tags, -scores), axis=0)
    hits = np.take_along_axis(tags, order, axis=0)
    precision = hits.cumsum(axis=0) / np.arange(1, len(hits) + 1)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * (precision * hits).sum(axis=0) / hits.sum(axis=0)

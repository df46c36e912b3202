"""Paired bootstrap over images: how far the difference of two predictions' mIoU would move with other images.

Images are drawn with replacement, the same ones for both predictions (Efron and Tibshirani, "An Introduction to the
Bootstrap", 1993, chapters 8 and 13). An mIoU is not a mean over images, so it is computed anew from each draw's sums.
"""

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.draws import Draw, uniforms
from mcis.models.counts import Overlaps
from mcis.models.metrics import iou_of

_MOST_NUMBERS = 2**22
"""Numbers that are drawn at a time."""


def bootstrap_differences(first: Overlaps, second: Overlaps, *, resamples: int, seed: int) -> NDArray[np.float64]:
    """mIoU of the second prediction less that of the first, in points of percent, for each resample, (resamples,).

    Args:
        first, second: overlaps of the same N images, (N, K + 1).

    Raises:
        ValueError: the images or labels differ in number, or there are none.
    """
    if first.both.shape != second.both.shape or not first.both.size:
        raise ValueError(f"overlaps of (images, labels) {first.both.shape} and {second.both.shape}")
    images, at_a_time = len(first.both), max(1, _MOST_NUMBERS // len(first.both))
    differences = []
    for start in range(0, resamples, at_a_time):
        times = times_drawn(images, np.arange(start, min(start + at_a_time, resamples)), seed)
        mious = (_mious(times, prediction) for prediction in (first, second))
        differences.append(-np.subtract(*mious))
    return np.concatenate(differences)


def times_drawn(images: int, resamples: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """How often each resample draws each image, (len(resamples), images); rows sum to the number of images."""
    turns, rows = np.tile(np.arange(images), len(resamples)), np.repeat(np.arange(len(resamples)), images)
    drawn = (uniforms(Draw.BOOTSTRAP, seed, resamples[rows], turns)[:, 0] * images).astype(np.int64)
    return np.bincount(rows * images + drawn, minlength=len(resamples) * images).reshape(len(resamples), images)


def _mious(times: NDArray[np.int64], overlaps: Overlaps) -> NDArray[np.float64]:
    """mIoU of each resample; sums of whole numbers below 2^53 are exact in float64, whose products are fast."""
    weights = times.astype(np.float64)
    values = iou_of(*(weights @ part.astype(np.float64) for part in overlaps))
    return np.asarray(np.nanmean(values, axis=1))


def percentile_interval(values: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """The percentile interval of bootstrapped values that holds so large a share of them, in (0, 1)."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)

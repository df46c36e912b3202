"""Paired bootstrap: how far the difference of mIoU would move with other images, and with other seeds.

Images are drawn with replacement, the same ones for everything that is compared (Efron and Tibshirani, "An Introduction
to the Bootstrap", 1993, chapters 8 and 13). An mIoU is not a mean over images, so it is computed anew from each draw's
sums.
"""

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.models.counts import Overlaps
from mcis.models.metrics import iou_of

_MOST_NUMBERS = 2**22
"""Numbers that are drawn at a time."""


def bootstrap_differences(
    first: Overlaps, second: Overlaps, *, paired: bool, resamples: int, seed: int
) -> NDArray[np.float64]:
    """Mean mIoU over seeds of the second configuration less that of the first, for each resample of images and seeds.

    A resample draws N images, the same ones for all seeds: with a draw for each seed, S seeds would pass for S times as
    many images. Seeds are drawn beside them (Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 2007).

    Of S seeds S - 1 are drawn, since S draws of S values have (S - 1) / S of the variance that the mean of S has, a
    third too little for three (Rao and Wu, "Resampling inference with complex survey data", JASA 1988). Of one
    seed nothing is known of others: it is taken in every resample.

    Args:
        first, second: overlaps of the same N images, (S, N, K + 1) of S seeds, which may be more of one than of the
            other. Images without a scored pixel are left out of the draws.
        paired: whether seed s of both is the same one, so that both get the same draw of seeds and what seeds share
            cancels out; else seeds are drawn for each of them.

    Returns:
        Differences in points of percent, (resamples,); all NaN where fewer than two images have a scored pixel.

    Raises:
        ValueError: the images or labels differ in number, or the seeds of a pair; or there are none.
    """
    shapes = [prediction.both.shape for prediction in (first, second)]
    if shapes[0][1:] != shapes[1][1:] or (paired and shapes[0] != shapes[1]) or not all(map(np.prod, shapes)):
        raise ValueError(f"overlaps of (seeds, images, labels) {shapes[0]} and {shapes[1]}")
    scored = sum(np.asarray(part).sum(axis=(0, 2)) for prediction in (first, second) for part in prediction) > 0
    if scored.sum() < 2:
        return np.full(resamples, np.nan)
    first, second = (Overlaps(*(part[:, scored] for part in prediction)) for prediction in (first, second))
    images, at_a_time = int(scored.sum()), max(1, _MOST_NUMBERS // int(scored.sum()))
    differences = []
    for start in range(0, resamples, at_a_time):
        rows = np.arange(start, min(start + at_a_time, resamples))
        times = times_drawn(images, rows, seed)
        of_first, of_second = (_mious(times, prediction) for prediction in (first, second))
        shares = seed_shares(shapes[0][0], rows, seed)
        others = shares if paired else seed_shares(shapes[1][0], rows, seed, turn=shapes[0][0])
        differences.append((of_second * others).sum(axis=1) - (of_first * shares).sum(axis=1))
    return np.concatenate(differences)


def times_drawn(images: int, resamples: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """How often each resample draws each image, (len(resamples), images); rows sum to the number of images."""
    return _times(Draw.BOOTSTRAP, images, images, resamples, seed)


def seed_shares(seeds: int, resamples: NDArray[np.int64], seed: int, *, turn: int = 0) -> NDArray[np.float64]:
    """The share that each of S `seeds` has of the S - 1 that a resample draws, (len(resamples), S); all of one seed's.

    Args:
        seed: of the draws.
        turn: number of a resample's first draw; other ones give draws of their own.
    """
    if seeds == 1:
        return np.ones((len(resamples), 1))
    return _times(Draw.BOOTSTRAP_SEEDS, seeds, seeds - 1, resamples, seed, turn) / (seeds - 1)


def _times(
    purpose: Draw, things: int, turns: int, resamples: NDArray[np.int64], seed: int, first: int = 0
) -> NDArray[np.int64]:
    """How often each resample draws each thing in so many turns, the first of which has the number `first`."""
    turn, rows = np.tile(np.arange(first, first + turns), len(resamples)), np.repeat(np.arange(len(resamples)), turns)
    drawn = (uniforms(purpose, seed, resamples[rows], turn)[:, 0] * things).astype(np.int64)
    return np.bincount(rows * things + drawn, minlength=len(resamples) * things).reshape(len(resamples), things)


def _mious(times: NDArray[np.int64], overlaps: Overlaps) -> NDArray[np.float64]:
    """mIoU of each resample and seed, (R, S); sums of whole numbers below 2^53 are exact in float64, and fast."""
    weights = times.astype(np.float64)
    values = iou_of(*(weights @ part.astype(np.float64) for part in overlaps))  # (S, R, K + 1)
    return np.asarray(np.nanmean(values, axis=2).T)


def percentile_interval(values: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """The percentile interval of bootstrapped values that holds so large a share of them, in (0, 1)."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)

"""Paired bootstrap: how far the difference of mIoU would move with other images, and with other seeds.

Images are drawn with replacement, the same ones for everything that is compared (Efron and Tibshirani, "An Introduction
to the Bootstrap", 1993, chapters 8 and 13). An mIoU is no mean over images, so it is computed anew from each draw.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.models.counts import Overlaps
from mcis.models.metrics import iou_of

_MOST_NUMBERS = 2**22
"""Numbers that are drawn at a time."""


def bootstrap_differences(
    first: Overlaps, second: Overlaps, *, paired: bool, resamples: int, seed: int
) -> NDArray[np.float64]:
    """Mean mIoU over seeds of the second configuration less that of the first, for each resample of images and seeds.

    A resample draws N images, the same ones for all seeds: with a draw for each seed, S seeds would pass for S times as
    many images. Seeds are weighed beside them by Student's t (`seed_shares`): the few that there are resampled would
    stay between the lowest and the highest, and three of them hold no difference in three of four cases rather than in
    19 of 20. Of one seed nothing is known of others: it is taken in every resample.

    Args:
        first, second: overlaps of the same N images, (S, N, K + 1) of S seeds, which may be more of one than of the
            other. Images without a scored pixel are left out of the draws.
        paired: whether seed s of both is the same one, so that both get the same draw of seeds and what seeds share
            cancels out; else seeds are drawn for each of them.

    Returns:
        Differences in points of percent, (resamples,); all NaN where fewer than two images have a scored pixel.
    """
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
        shares = seed_shares(len(first.both), rows, seed)
        others = shares if paired else seed_shares(len(second.both), rows, seed, turn=len(first.both) + 1)
        differences.append((of_second * others).sum(axis=1) - (of_first * shares).sum(axis=1))
    return np.concatenate(differences)


def times_drawn(images: int, resamples: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """How often each resample draws each image, (len(resamples), images); rows sum to the number of images."""
    drawn = (_draws(DrawPurpose.BOOTSTRAP, images, resamples, seed) * images).astype(np.int64)
    of_resample = drawn + np.arange(len(resamples))[:, None] * images
    return np.bincount(of_resample.ravel(), minlength=drawn.size).reshape(drawn.shape)


def seed_shares(seeds: int, resamples: NDArray[np.int64], seed: int, *, turn: int = 0) -> NDArray[np.float64]:
    """The weight of each of S `seeds` in each resample, (len(resamples), S); rows sum to 1, some are negative.

    S values so weighed are distributed about their mean as t times its standard error is, with S - 1 degrees of
    freedom: z, S normal draws less their mean, over the root of S times a draw of chi squared.

    Args:
        seed: of the draws.
        turn: number of a resample's first draw, of S + 1; other ones give draws of their own.
    """
    if seeds == 1:
        return np.ones((len(resamples), 1))
    draws = _draws(DrawPurpose.BOOTSTRAP_SEEDS, seeds + 1, resamples, seed, turn).clip(min=1e-12)
    z, squares = stats.norm.ppf(draws[:, :-1]), stats.chi2.ppf(draws[:, -1:], seeds - 1)
    return np.asarray(1 / seeds + (z - z.mean(axis=1, keepdims=True)) / np.sqrt(seeds * squares))


def _draws(
    purpose: DrawPurpose, turns: int, resamples: NDArray[np.int64], seed: int, first: int = 0
) -> NDArray[np.float64]:
    """Draws in [0, 1) of each resample in so many turns, the first of which has the number `first`."""
    turn, rows = np.tile(np.arange(first, first + turns), len(resamples)), np.repeat(resamples, turns)
    return uniforms(purpose, seed, rows, turn)[:, 0].reshape(-1, turns)


def _mious(times: NDArray[np.int64], overlaps: Overlaps) -> NDArray[np.float64]:
    """mIoU of each resample and seed, (R, S); sums of whole numbers below 2^53 are exact in float64, and fast."""
    weights = times.astype(np.float64)
    values = iou_of(*(weights @ part.astype(np.float64) for part in overlaps))  # (S, R, K + 1)
    return np.asarray(np.nanmean(values, axis=2).T)


def percentile_interval(values: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """The percentile interval of bootstrapped values that holds so large a share of them, in (0, 1)."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)

"""Paired bootstrap: how much a difference of mIoU, or of another score, would vary with other images and other seeds.

Images are drawn with replacement, the same ones for both compared configurations (Efron and Tibshirani, "An
Introduction to the Bootstrap", 1993, chapters 8 and 13). mIoU is not a mean over images, so it is recomputed for each
resample.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, special

from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.models.counts import Overlaps
from mcis.models.metrics import iou_of, mean

_MAX_NUMBERS = 2**22
"""Largest number of random numbers that are drawn at a time."""


def bootstrap_differences(
    first: Overlaps, second: Overlaps, *, paired: bool, resamples: int, seed: int
) -> NDArray[np.float64]:
    """Computes, for each resample, the mean mIoU over seeds of the second configuration minus that of the first.

    A resample draws N images, the same ones for all seeds; with separate draws, S seeds would count like S times as
    many images. Seeds are not resampled but weighted randomly by Student's t (`seed_weights`). Resampling a few seeds
    would never leave the range of their values: with three seeds, an interval of 95 % would contain the true difference
    in three of four cases only. With one seed, nothing is known about others, and it has weight 1 in every resample.

    Args:
        first, second: Overlaps of the same N images, (S, N, K + 1), for S seeds; the numbers of seeds may differ.
            Images without a scored pixel are excluded.
        paired: Whether both configurations have the same seeds. Both then get the same weights of seeds, so effects
            that seeds share cancel out.
        resamples: Number of resamples.
        seed: Seed of the draws.

    Returns:
        Differences in percentage points, (resamples,); all NaN if fewer than two images have a scored pixel.
    """
    is_scored = _scored_pixels(first) + _scored_pixels(second) > 0
    images = int(is_scored.sum())
    if images < 2:
        return np.full(resamples, np.nan)

    first = _select_images(first, is_scored)
    second = _select_images(second, is_scored)
    return _resample(
        lambda times: _mious(times, first),
        lambda times: _mious(times, second),
        images=images,
        chunk=max(1, _MAX_NUMBERS // images),
        paired=paired,
        resamples=resamples,
        seed=seed,
    )


def bootstrap_score_differences(
    first: Sequence[sparse.csr_array],
    second: Sequence[sparse.csr_array],
    score: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    *,
    paired: bool,
    resamples: int,
    seed: int,
) -> NDArray[np.float64]:
    """Computes the differences of `bootstrap_differences` for the mean of another score over the labels.

    The resamples draw the same images and weigh the seeds alike.

    Args:
        first, second: Confusion matrices of the same N images, for each seed a matrix of pixels (N, (K + 1)^2) whose
            rows are flattened (K + 1, K + 1) matrices. Images without a scored pixel are excluded.
        score: Function from a confusion matrix to percentages of labels, an entry of `metrics.LABEL_SCORES`.
        paired, resamples, seed: See `bootstrap_differences`.

    Returns:
        Differences in percentage points, (resamples,); NaN in resamples where no label has a value, and all NaN if
        fewer than two images have a scored pixel.
    """
    pixels = np.sum([matrix.sum(axis=1) for matrix in (*first, *second)], axis=0)
    scored = np.flatnonzero(pixels)
    if len(scored) < 2:
        return np.full(resamples, np.nan)

    first_scored = [matrix[scored] for matrix in first]
    second_scored = [matrix[scored] for matrix in second]
    numbers_per_resample = max(len(scored), first[0].shape[1])
    return _resample(
        lambda times: _mean_scores(times, first_scored, score),
        lambda times: _mean_scores(times, second_scored, score),
        images=len(scored),
        chunk=max(1, _MAX_NUMBERS // numbers_per_resample),
        paired=paired,
        resamples=resamples,
        seed=seed,
    )


def _resample(
    first_values: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    second_values: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    *,
    images: int,
    chunk: int,
    paired: bool,
    resamples: int,
    seed: int,
) -> NDArray[np.float64]:
    """Computes the difference of two configurations in each resample, (resamples,).

    Args:
        first_values, second_values: Functions from how often R resamples draw each image, (R, images), to the values
            of the configuration, (R, S) for S seeds.
        images: Number of images.
        chunk: Number of resamples that are computed at a time.
        paired, resamples, seed: See `bootstrap_differences`.
    """
    differences = []
    for start in range(0, resamples, chunk):
        rows = np.arange(start, min(start + chunk, resamples))
        times = times_drawn(images, rows, seed)
        values_of_first = first_values(times)
        values_of_second = second_values(times)
        first_seeds = values_of_first.shape[1]
        second_seeds = values_of_second.shape[1]

        first_weights = seed_weights(first_seeds, rows, seed)
        if paired:
            second_weights = first_weights
        else:
            second_weights = seed_weights(second_seeds, rows, seed, turn=first_seeds + 1)

        second_means = (values_of_second * second_weights).sum(axis=1)
        first_means = (values_of_first * first_weights).sum(axis=1)
        differences.append(second_means - first_means)

    return np.concatenate(differences)


def _select_images(overlaps: Overlaps, selected: NDArray[np.bool_]) -> Overlaps:
    """Returns the overlaps (S, M, K + 1) of M selected images."""
    both, truth, predicted = (part[:, selected] for part in overlaps)
    return Overlaps(both, truth, predicted)


def _scored_pixels(overlaps: Overlaps) -> NDArray[np.int64]:
    """Counts each image's pixels of `overlaps` over seeds and labels, (N,); 0 if and only if no pixel is scored."""
    totals = [np.asarray(part).sum(axis=(0, 2)) for part in overlaps]
    return np.sum(totals, axis=0)


def times_drawn(images: int, resamples: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Returns how often each resample draws each image.

    Args:
        images: Number of images.
        resamples: Numbers of the resamples, (R,).
        seed: Seed of the draws.

    Returns:
        (R, images); rows sum to the number of images.
    """
    drawn = (_draws(DrawPurpose.BOOTSTRAP, images, resamples, seed) * images).astype(np.int64)
    cells = drawn + np.arange(len(resamples))[:, None] * images
    return np.bincount(cells.ravel(), minlength=drawn.size).reshape(drawn.shape)


def seed_weights(seeds: int, resamples: NDArray[np.int64], seed: int, *, turn: int = 0) -> NDArray[np.float64]:
    """Draws weights of S seeds for each resample; they can be negative.

    The weighted sum of S values is distributed around their mean like t times its standard error, with t from Student's
    distribution with S - 1 degrees of freedom: S normal draws minus their mean, divided by the square root of S times a
    draw from the chi-squared distribution.

    Args:
        seeds: Number of seeds S.
        resamples: Numbers of the resamples, (R,).
        seed: Seed of the draws.
        turn: Number of the first of S + 1 draws of a resample. Different numbers give independent draws.

    Returns:
        (R, S); rows sum to 1.
    """
    if seeds == 1:
        return np.ones((len(resamples), 1))

    draws = _draws(DrawPurpose.BOOTSTRAP_SEEDS, seeds + 1, resamples, seed, turn).clip(min=1e-12)
    normal = special.ndtri(draws[:, :-1])
    chi_squared = 2 * special.gammaincinv((seeds - 1) / 2, draws[:, -1:])
    deviations = (normal - normal.mean(axis=1, keepdims=True)) / np.sqrt(seeds * chi_squared)
    return np.asarray(1 / seeds + deviations)


def _draws(
    purpose: DrawPurpose, count: int, resamples: NDArray[np.int64], seed: int, first: int = 0
) -> NDArray[np.float64]:
    """Returns `count` draws in [0, 1) for each resample, (R, count), numbered from `first`."""
    turns = np.tile(np.arange(first, first + count), len(resamples))
    rows = np.repeat(resamples, count)
    return uniforms(purpose, seed, rows, turns)[:, 0].reshape(-1, count)


def _mious(times: NDArray[np.int64], overlaps: Overlaps) -> NDArray[np.float64]:
    """Computes the mIoU of each resample and seed, (R, S).

    Products are computed in float64, which is fast, and exact for whole numbers below 2^53.
    """
    weights = times.astype(np.float64)
    both, truth, predicted = (weights @ part.astype(np.float64) for part in overlaps)
    values = iou_of(both, truth, predicted)  # (S, R, K + 1)
    return np.asarray(np.nanmean(values, axis=2).T)


def _mean_scores(
    times: NDArray[np.int64],
    confusions: Sequence[sparse.csr_array],
    score: Callable[[NDArray[np.int64]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Computes the mean of a score over the labels for each resample and seed, (R, S)."""
    weights = times.astype(np.float64)
    side = round(confusions[0].shape[1] ** 0.5)
    values = np.empty((len(times), len(confusions)))
    for number, confusion in enumerate(confusions):
        matrices = (confusion.T @ weights.T).T.reshape(-1, side, side).astype(np.int64)
        values[:, number] = [mean(score(matrix)) for matrix in matrices]
    return values


def percentile_interval(values: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """Returns the central interval that contains the fraction `confidence`, in (0, 1), of bootstrapped values."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)

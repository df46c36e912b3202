"""The paired bootstrap against a loop over drawn images, and the coverage of its intervals."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import sparse, stats

from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.models.bootstrap import (
    bootstrap_differences,
    bootstrap_score_differences,
    percentile_interval,
    seed_weights,
    times_drawn,
)
from mcis.models.counts import Counts, Overlaps, overlaps
from mcis.models.metrics import iou

seeds = st.integers(0, 2**31 - 1)


def drawn_overlaps(rng: np.random.Generator, images: int, labels: int, skill: float = 0.7) -> Overlaps:
    """Overlaps of images with about half of the labels each, predicted with about the recall `skill`."""
    truth = rng.integers(1, 1000, (images, labels)) * (rng.random((images, labels)) < 0.5)
    both = (truth * np.clip(rng.normal(skill, 0.2, truth.shape), 0, 1)).astype(np.int64)
    return Overlaps(both, truth, both + (truth * rng.random(truth.shape) * 0.3).astype(np.int64))


def stacked_seeds(*predictions: Overlaps) -> Overlaps:
    """Stacks the overlaps of several seeds, (S, N, K + 1)."""
    both, truth, predicted = (np.stack(part) for part in zip(*predictions, strict=True))
    return Overlaps(both, truth, predicted)


def map_parts(overlaps: Overlaps, change: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> Overlaps:
    """Applies a function to each array of overlaps."""
    return Overlaps(change(overlaps.both), change(overlaps.truth), change(overlaps.predicted))


def mean_iou(overlaps: Overlaps, images: Sequence[int]) -> float:
    """mIoU of some images, which may contain repetitions, in float64."""
    values = []
    for label in range(overlaps.both.shape[1]):
        both, truth, predicted = (sum(float(part[i, label]) for i in images) for part in overlaps)
        if truth + predicted - both:
            values.append(100 * both / (truth + predicted - both))
    return sum(values) / len(values)


@given(seeds, st.integers(2, 12), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_resamples_are_weighted_means_over_seeds(seed: int, images: int, one: int, other: int, paired: bool) -> None:
    """Against loops: all seeds have the same drawn images, and their mIoU is averaged with the weights."""
    rng = np.random.default_rng(seed)
    predictions = []
    for count in (one, one if paired else other):
        group = [drawn_overlaps(rng, images, 3) for _ in range(count)]
        for seed_overlaps in group:
            seed_overlaps.truth[:, 0] += 1  # a label that all images have
        predictions.append(group)
    stacked = [stacked_seeds(*group) for group in predictions]
    actual = bootstrap_differences(*stacked, paired=paired, resamples=10, seed=seed)

    for resample in range(10):
        draws = [uniforms(DrawPurpose.BOOTSTRAP, seed, resample, np.array([turn]))[0, 0] for turn in range(images)]
        drawn_images = [int(draw * images) for draw in draws]
        means = []
        first_turn = 0
        for group in predictions:
            weights = seed_weights(len(group), np.array([resample]), seed, turn=first_turn)[0]
            mious = [mean_iou(run, drawn_images) for run in group]
            means.append(float(weights @ mious))
            first_turn = 0 if paired else one + 1
        assert actual[resample] == pytest.approx(means[1] - means[0])


def two_configurations() -> tuple[Overlaps, Overlaps]:
    """Overlaps of two configurations with one seed each, on 30 images."""
    rng = np.random.default_rng(0)
    return stacked_seeds(drawn_overlaps(rng, 30, 3)), stacked_seeds(drawn_overlaps(rng, 30, 3))


def drawn_confusions(rng: np.random.Generator, images: int, labels: int) -> NDArray[np.int64]:
    """Confusion matrices of images with about half of the labels each, (images, labels, labels)."""
    matrices = rng.integers(0, 50, (images, labels, labels))
    matrices[:, range(labels), range(labels)] += rng.integers(0, 200, (images, labels))
    return np.where(rng.random((images, labels, 1)) < 0.5, matrices, 0)


def overlaps_of(matrices: NDArray[np.int64]) -> Overlaps:
    """Overlaps of the images of confusion matrices, (images, labels) each."""
    return Overlaps(np.diagonal(matrices, axis1=1, axis2=2), matrices.sum(axis=2), matrices.sum(axis=1))


@pytest.mark.parametrize("paired", [True, False])
def test_iou_as_a_label_score_has_the_differences_of_miou(paired: bool) -> None:
    rng = np.random.default_rng(0)
    groups = [[drawn_confusions(rng, 20, 4) for _ in range(2)] for _ in range(2)]
    by_overlaps = [stacked_seeds(*map(overlaps_of, group)) for group in groups]
    first, second = ([sparse.csr_array(matrices.reshape(20, 16)) for matrices in group] for group in groups)

    expected = bootstrap_differences(*by_overlaps, paired=paired, resamples=40, seed=2)
    found = bootstrap_score_differences(first, second, iou, paired=paired, resamples=40, seed=2)
    np.testing.assert_allclose(found, expected)


def test_drawing_in_parts_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two_configurations()
    whole = bootstrap_differences(first, second, paired=True, resamples=50, seed=3)
    monkeypatch.setattr("mcis.models.bootstrap._MAX_NUMBERS", 70)
    np.testing.assert_array_equal(bootstrap_differences(first, second, paired=True, resamples=50, seed=3), whole)


def test_differences_depend_on_the_seed_and_the_order_of_the_configurations() -> None:
    first, second = two_configurations()
    differences = bootstrap_differences(first, second, paired=True, resamples=50, seed=3)
    swapped = bootstrap_differences(second, first, paired=False, resamples=50, seed=3)
    np.testing.assert_array_equal(-swapped, differences)
    assert not np.array_equal(bootstrap_differences(first, second, paired=True, resamples=50, seed=4), differences)
    assert not bootstrap_differences(first, first, paired=True, resamples=50, seed=3).any()


def test_all_images_are_drawn_equally_often() -> None:
    times = times_drawn(20, np.arange(4000), seed=1)
    assert (times.sum(axis=1) == 20).all()
    np.testing.assert_allclose(times.mean(axis=0), 1, atol=5 * np.sqrt(0.95 / 4000))
    assert times.var() == pytest.approx(0.95, rel=0.03)  # binomial: 20 draws with probability 1/20


def test_intervals_contain_the_true_difference_with_the_stated_frequency() -> None:
    """90 % intervals of 300 samples of 80 images, drawn from a population with a known difference."""
    rng = np.random.default_rng(5)
    population = [drawn_overlaps(rng, 20_000, 3, skill) for skill in (0.66, 0.7)]
    totals = [map_parts(overlaps, lambda part: part.sum(axis=0, keepdims=True)) for overlaps in population]
    true_difference = mean_iou(totals[1], [0]) - mean_iou(totals[0], [0])
    hits = 0
    for sample in range(300):
        images = rng.integers(0, 20_000, 80)
        first, second = (
            Overlaps(overlaps.both[None, images], overlaps.truth[None, images], overlaps.predicted[None, images])
            for overlaps in population
        )
        values = bootstrap_differences(first, second, paired=True, resamples=200, seed=sample)
        low, high = percentile_interval(values, 0.9)
        hits += low <= true_difference <= high
    assert 0.9 - 0.06 < hits / 300 < 0.9 + 0.06  # 3.5 standard errors


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_interval_of_a_mean_over_seeds_is_that_of_students_t(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    weights = seed_weights(count, np.arange(40_000), seed=1)
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    for confidence in (0.5, 0.8, 0.95):
        expected = stats.t.interval(confidence, count - 1, values.mean(), stats.sem(values))
        assert percentile_interval(weights @ values, confidence) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_weights_of_different_turns_are_independent(count: int) -> None:
    first = seed_weights(count, np.arange(40_000), seed=1)
    second = seed_weights(count, np.arange(40_000), seed=1, turn=count + 1)
    assert abs(stats.spearmanr(first[:, 0], second[:, 0]).statistic) < 0.03


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("paired", [True, False])
def test_intervals_over_seeds_contain_0_with_the_stated_frequency(count: int, paired: bool) -> None:
    """Two configurations without a difference, whose seeds vary more than their images; 200 samples of 40 images."""
    rng = np.random.default_rng(7)
    hits = 0
    single_seed_hits = 0
    for sample in range(200):
        truth = rng.integers(1, 1000, (40, 3)) * (rng.random((40, 3)) < 0.7)
        groups = []
        for _ in range(2):
            skills = [rng.normal(0.7, 0.03) * rng.uniform(0.9, 1, truth.shape) for _ in range(count)]
            correct = [(truth * skill).astype(int) for skill in skills]
            groups.append(stacked_seeds(*[Overlaps(both, truth, both) for both in correct]))
        values = bootstrap_differences(*groups, paired=paired, resamples=200, seed=sample)
        low, high = percentile_interval(values, 0.9)
        hits += low <= 0 <= high

        single = [map_parts(group, lambda part: part[:1]) for group in groups]
        values = bootstrap_differences(*single, paired=True, resamples=200, seed=sample)
        low, high = percentile_interval(values, 0.9)
        single_seed_hits += low <= 0 <= high
    assert 0.9 - 0.07 < hits / 200 <= 1
    assert single_seed_hits / 200 < 0.5, "intervals of one seed each cover the images only"


def test_images_without_a_scored_pixel_are_excluded() -> None:
    """A resample of such images alone would have no mIoU."""
    rng = np.random.default_rng(3)
    scored = [stacked_seeds(drawn_overlaps(rng, 3, 4, skill)) for skill in (0.9, 0.4)]
    padded = [map_parts(overlaps, lambda part: np.pad(part, ((0, 0), (0, 2), (0, 0)))) for overlaps in scored]
    expected = bootstrap_differences(*scored, paired=True, resamples=300, seed=1)
    found = bootstrap_differences(*padded, paired=True, resamples=300, seed=1)
    assert np.isfinite(found).all()
    assert np.array_equal(found, expected)


def test_a_single_image_gives_no_differences() -> None:
    rng = np.random.default_rng(3)
    single = [stacked_seeds(drawn_overlaps(rng, 1, 4, skill)) for skill in (0.9, 0.4)]
    assert np.isnan(bootstrap_differences(*single, paired=True, resamples=10, seed=1)).all()


@given(seeds)
def test_overlaps_are_the_pixels_of_each_image(seed: int) -> None:
    rng = np.random.default_rng(seed)
    entries = 40
    count = 3
    classes = 2
    counts = Counts(
        rng.integers(0, classes + 1, entries).astype(np.uint8),
        rng.integers(0, classes + 1, entries).astype(np.uint8),
        rng.integers(0, 4, entries).astype(np.uint16),
        rng.integers(1, 9, entries).astype(np.uint32),
    )
    images = np.sort(rng.integers(0, count, entries))
    for boundary, true_parts, predicted_parts in ((False, (0, 1, 2, 3), (0, 1, 2, 3)), (True, (2, 3), (1, 3))):
        expected = np.zeros((3, count, classes + 1), np.int64)
        for t, p, part, pixels, i in zip(*counts, images, strict=True):
            if t == p and part in true_parts and part in predicted_parts:
                expected[0, i, t] += pixels
            if part in true_parts:
                expected[1, i, t] += pixels
            if part in predicted_parts:
                expected[2, i, p] += pixels
        np.testing.assert_array_equal(overlaps(counts, images, count, classes, boundary=boundary), expected)

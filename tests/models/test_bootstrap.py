"""The paired bootstrap against a loop that draws images one by one, and its intervals where the truth is known."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.models.bootstrap import bootstrap_differences, percentile_interval, seed_weights, times_drawn
from mcis.models.counts import Counts, Overlaps, overlaps

seeds = st.integers(0, 2**31 - 1)


def drawn_overlaps(rng: np.random.Generator, images: int, labels: int, skill: float = 0.7) -> Overlaps:
    """Overlaps of images of which each has some labels, predicted with about so large an IoU."""
    truth = rng.integers(1, 1000, (images, labels)) * (rng.random((images, labels)) < 0.5)
    both = (truth * np.clip(rng.normal(skill, 0.2, truth.shape), 0, 1)).astype(np.int64)
    return Overlaps(both, truth, both + (truth * rng.random(truth.shape) * 0.3).astype(np.int64))


def of_seeds(*predictions: Overlaps) -> Overlaps:
    """The overlaps of several seeds, (S, N, K + 1)."""
    return Overlaps(*(np.stack(part) for part in zip(*predictions, strict=True)))


def mean_iou(of: Overlaps, images: Sequence[int]) -> float:
    """mIoU of some images, of which one may be named several times, in float64."""
    values = []
    for label in range(of.both.shape[1]):
        both, truth, predicted = (sum(float(part[i, label]) for i in images) for part in of)
        if truth + predicted - both:
            values.append(100 * both / (truth + predicted - both))
    return sum(values) / len(values)


@given(seeds, st.integers(2, 12), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_seeds_are_weighed_beside_images(seed: int, images: int, one: int, other: int, paired: bool) -> None:
    """Against loops: the same images for every seed, and the weighted mean of their mIoU."""
    rng = np.random.default_rng(seed)
    predictions = [[drawn_overlaps(rng, images, 3) for _ in range(count)] for count in (one, one if paired else other)]
    for of in (of for group in predictions for of in group):
        of.truth[:, 0] += 1  # a label that every image has
    stacked = [of_seeds(*group) for group in predictions]
    got = bootstrap_differences(*stacked, paired=paired, resamples=10, seed=seed)

    for resample in range(10):
        draws = [uniforms(DrawPurpose.BOOTSTRAP, seed, resample, np.array([turn]))[0, 0] for turn in range(images)]
        means, first_turn = [], 0
        for group in predictions:
            shares = seed_weights(len(group), np.array([resample]), seed, turn=first_turn)[0]
            mious = [mean_iou(run, [int(draw * images) for draw in draws]) for run in group]
            means.append(float(shares @ mious))
            first_turn = 0 if paired else one + 1
        assert got[resample] == pytest.approx(means[1] - means[0])


def test_resamples_are_drawn_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    first, second = (of_seeds(drawn_overlaps(rng, 30, 3)) for _ in range(2))
    whole = bootstrap_differences(first, second, paired=True, resamples=50, seed=3)
    monkeypatch.setattr("mcis.models.bootstrap._MAX_NUMBERS", 70)
    np.testing.assert_array_equal(bootstrap_differences(first, second, paired=True, resamples=50, seed=3), whole)
    np.testing.assert_array_equal(-bootstrap_differences(second, first, paired=False, resamples=50, seed=3), whole)
    assert not np.array_equal(bootstrap_differences(first, second, paired=True, resamples=50, seed=4), whole)
    assert not bootstrap_differences(first, first, paired=True, resamples=50, seed=3).any()


def test_every_image_is_drawn_as_often_as_every_other_one() -> None:
    times = times_drawn(20, np.arange(4000), seed=1)
    assert (times.sum(axis=1) == 20).all()
    np.testing.assert_allclose(times.mean(axis=0), 1, atol=5 * np.sqrt(0.95 / 4000))
    assert times.var() == pytest.approx(0.95, rel=0.03)  # binomial: 20 turns, one in twenty each


def test_intervals_hold_the_true_difference_about_as_often_as_they_say() -> None:
    """Images drawn from a population of which the difference is known; 90 % intervals of 300 samples of 80 images."""
    rng = np.random.default_rng(5)
    population = [drawn_overlaps(rng, 20_000, 3, skill) for skill in (0.66, 0.7)]
    totals = [Overlaps(*(part.sum(axis=0, keepdims=True) for part in of)) for of in population]
    true = mean_iou(totals[1], [0]) - mean_iou(totals[0], [0])
    held = 0
    for sample in range(300):
        images = rng.integers(0, 20_000, 80)
        chosen = [Overlaps(*(part[None, images] for part in of)) for of in population]
        values = bootstrap_differences(*chosen, paired=True, resamples=200, seed=sample)
        low, high = percentile_interval(values, 0.9)
        held += low <= true <= high
    assert 0.9 - 0.06 < held / 300 < 0.9 + 0.06  # three and a half standard errors


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_interval_of_a_mean_over_seeds_is_that_of_student(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    shares = seed_weights(count, np.arange(40_000), seed=1)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    for confidence in (0.5, 0.8, 0.95):
        expected = stats.t.interval(confidence, count - 1, values.mean(), stats.sem(values))
        assert percentile_interval(shares @ values, confidence) == pytest.approx(expected, rel=0.06)
    others = seed_weights(count, np.arange(40_000), seed=1, turn=count + 1)
    assert abs(stats.spearmanr(shares[:, 0], others[:, 0]).statistic) < 0.03


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("paired", [True, False])
def test_intervals_over_seeds_hold_no_difference_about_as_often_as_they_say(count: int, paired: bool) -> None:
    """Two configurations of the same skill whose seeds differ more than their images; 200 samples of 40 images."""
    rng = np.random.default_rng(7)
    held, held_alone = 0, 0
    for sample in range(200):
        truth = rng.integers(1, 1000, (40, 3)) * (rng.random((40, 3)) < 0.7)
        groups = []
        for _ in range(2):
            skills = [rng.normal(0.7, 0.03) * rng.uniform(0.9, 1, truth.shape) for _ in range(count)]
            boths = [(truth * skill).astype(int) for skill in skills]
            groups.append(of_seeds(*(Overlaps(both, truth, both) for both in boths)))
        values = bootstrap_differences(*groups, paired=paired, resamples=200, seed=sample)
        low, high = percentile_interval(values, 0.9)
        held += low <= 0 <= high
        single = [Overlaps(*(part[:1] for part in group)) for group in groups]
        low, high = percentile_interval(bootstrap_differences(*single, paired=True, resamples=200, seed=sample), 0.9)
        held_alone += low <= 0 <= high
    assert 0.9 - 0.07 < held / 200 <= 1
    assert held_alone / 200 < 0.5, "over the images alone, with one seed each"


def test_images_without_a_scored_pixel_are_left_out_of_the_draws() -> None:
    """Else a resample of such images alone would have no mIoU; of one scored image nothing is told of others."""
    rng = np.random.default_rng(3)
    scored = [of_seeds(drawn_overlaps(rng, 3, 4, skill)) for skill in (0.9, 0.4)]
    padded = [Overlaps(*(np.pad(part, ((0, 0), (0, 2), (0, 0))) for part in of)) for of in scored]
    expected, found = (bootstrap_differences(*of, paired=True, resamples=300, seed=1) for of in (scored, padded))
    assert np.isfinite(found).all()
    assert np.array_equal(found, expected)
    one = [Overlaps(*(part[:, :1] for part in of)) for of in scored]
    assert np.isnan(bootstrap_differences(*one, paired=True, resamples=10, seed=1)).all()


@given(seeds)
def test_overlaps_are_the_pixels_of_each_image(seed: int) -> None:
    rng = np.random.default_rng(seed)
    entries, count, classes = 40, 3, 2
    counts = Counts(
        rng.integers(0, classes + 1, entries).astype(np.uint8),
        rng.integers(0, classes + 1, entries).astype(np.uint8),
        rng.integers(0, 4, entries).astype(np.uint16),
        rng.integers(1, 9, entries).astype(np.uint32),
    )
    images = np.sort(rng.integers(0, count, entries))
    for boundary, of_truth, of_prediction in ((False, (0, 1, 2, 3), (0, 1, 2, 3)), (True, (2, 3), (1, 3))):
        expected = np.zeros((3, count, classes + 1), np.int64)
        for t, p, part, pixels, i in zip(*counts, images, strict=True):
            expected[0, i, t] += pixels * (t == p and part in of_truth and part in of_prediction)
            expected[1, i, t] += pixels * (part in of_truth)
            expected[2, i, p] += pixels * (part in of_prediction)
        np.testing.assert_array_equal(overlaps(counts, images, count, classes, boundary=boundary), expected)

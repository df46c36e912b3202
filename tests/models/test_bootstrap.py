"""The paired bootstrap against a loop that draws images one by one, and its intervals where the truth is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcis.datasets.draws import Draw, uniforms
from mcis.models.bootstrap import bootstrap_differences, percentile_interval, times_drawn
from mcis.models.counts import Counts, Overlaps, boundary_overlaps, overlaps

quick = settings(deadline=None, max_examples=30)
seeds = st.integers(0, 2**31 - 1)


def drawn_overlaps(rng: np.random.Generator, images: int, labels: int, skill: float = 0.7) -> Overlaps:
    """Overlaps of images of which each has some labels, predicted with about so large an IoU."""
    truth = rng.integers(1, 1000, (images, labels)) * (rng.random((images, labels)) < 0.5)
    both = (truth * np.clip(rng.normal(skill, 0.2, truth.shape), 0, 1)).astype(np.int64)
    return Overlaps(both, truth, both + (truth * rng.random(truth.shape) * 0.3).astype(np.int64))


def mean_iou(of: Overlaps, images: list[int]) -> float:
    """mIoU of some images, of which one may be named several times, in float64."""
    values = []
    for label in range(of.both.shape[1]):
        both, truth, predicted = (sum(float(part[i, label]) for i in images) for part in of)
        if truth + predicted - both:
            values.append(100 * both / (truth + predicted - both))
    return sum(values) / len(values)


@quick
@given(seeds, st.integers(2, 12), st.integers(1, 4))
def test_differences_are_of_the_images_that_each_resample_draws(seed: int, images: int, labels: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = (drawn_overlaps(rng, images, labels) for _ in range(2))
    for of in (first, second):
        of.truth[:, 0] += 1  # a label that every image has
    got = bootstrap_differences(first, second, resamples=20, seed=seed)
    for resample in range(20):
        drawn = [
            int(uniforms(Draw.BOOTSTRAP, seed, resample, np.array([turn]))[0, 0] * images) for turn in range(images)
        ]
        assert got[resample] == pytest.approx(mean_iou(second, drawn) - mean_iou(first, drawn))


def test_resamples_are_drawn_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    first, second = (drawn_overlaps(rng, 30, 3) for _ in range(2))
    whole = bootstrap_differences(first, second, resamples=50, seed=3)
    monkeypatch.setattr("mcis.models.bootstrap._MOST_NUMBERS", 70)
    np.testing.assert_array_equal(bootstrap_differences(first, second, resamples=50, seed=3), whole)
    np.testing.assert_array_equal(-bootstrap_differences(second, first, resamples=50, seed=3), whole)
    assert not np.array_equal(bootstrap_differences(first, second, resamples=50, seed=4), whole)


def test_every_image_is_drawn_as_often_as_every_other_one() -> None:
    times = times_drawn(20, np.arange(4000), seed=1)
    assert (times.sum(axis=1) == 20).all()
    np.testing.assert_allclose(times.mean(axis=0), 1, atol=5 * np.sqrt(0.95 / 4000))
    assert times.var() == pytest.approx(0.95, rel=0.03)  # binomial: 20 turns, one in twenty each


def test_a_run_compared_with_itself_has_no_difference() -> None:
    of = drawn_overlaps(np.random.default_rng(0), 10, 3)
    assert not bootstrap_differences(of, of, resamples=100, seed=0).any()


def test_other_images_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"overlaps of \(images, labels\) \(4, 3\) and \(5, 3\)"):
        bootstrap_differences(drawn_overlaps(rng, 4, 3), drawn_overlaps(rng, 5, 3), resamples=10, seed=0)


def test_intervals_hold_the_true_difference_about_as_often_as_they_say() -> None:
    """Images drawn from a population of which the difference is known; 90 % intervals of 300 samples of 80 images."""
    rng = np.random.default_rng(5)
    population = [drawn_overlaps(rng, 20_000, 3, skill) for skill in (0.66, 0.7)]

    def chosen(of: Overlaps, images: np.ndarray) -> Overlaps:
        return Overlaps(*(part[images] for part in of))

    totals = [Overlaps(*(part.sum(axis=0, keepdims=True) for part in of)) for of in population]
    true = mean_iou(totals[1], [0]) - mean_iou(totals[0], [0])
    held = 0
    for sample in range(300):
        images = rng.integers(0, 20_000, 80)
        first, second = (chosen(of, images) for of in population)
        low, high = percentile_interval(bootstrap_differences(first, second, resamples=200, seed=sample), 0.9)
        held += low <= true <= high
    assert 0.9 - 0.06 < held / 300 < 0.9 + 0.06  # three and a half standard errors


@quick
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
    for got, of_truth, of_prediction in (
        (overlaps(counts, images, count, classes), range(4), range(4)),
        (boundary_overlaps(counts, images, count, classes), (2, 3), (1, 3)),
    ):
        expected = np.zeros((3, count, classes + 1), np.int64)
        for t, p, part, pixels, i in zip(*counts, images, strict=True):
            expected[0, i, t] += pixels * (t == p and part in of_truth and part in of_prediction)
            expected[1, i, t] += pixels * (part in of_truth)
            expected[2, i, p] += pixels * (part in of_prediction)
        np.testing.assert_array_equal(got, expected)

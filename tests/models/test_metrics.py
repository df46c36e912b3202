"""Scores against counting pixel by pixel: confusion, IoU, thresholds, baselines, average precision, boundaries."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE
from mcis.models import counts, metrics

seeds = st.integers(0, 2**32 - 1)
side = st.integers(1, 5)


def labels(rng: np.random.Generator, classes: int, shape: tuple[int, ...], ignored: bool = False) -> NDArray[np.uint8]:
    values = [*range(classes + 1), IGNORE] if ignored else [*range(classes + 1)]
    return rng.choice(values, shape).astype(np.uint8)


def counted(truth: np.ndarray, prediction: np.ndarray, classes: int) -> NDArray[np.int64]:
    matrix = np.zeros((classes + 1, classes + 1), np.int64)
    for t, p in zip(truth.ravel().tolist(), prediction.ravel().tolist(), strict=True):
        if t != IGNORE:
            matrix[t, p] += 1
    return matrix


# --- confusion and IoU


@given(seeds, st.integers(1, 4), side, side)
def test_confusion_counts_each_scored_pixel(seed: int, classes: int, height: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    truth = labels(rng, classes, (height, width), ignored=True)
    prediction = labels(rng, classes, (height, width))
    actual = counts.confusion(truth, prediction, classes)
    assert actual.dtype == np.int64
    np.testing.assert_array_equal(actual, counted(truth, prediction, classes))


@pytest.mark.parametrize("label", [3, IGNORE])
def test_confusion_refuses_unknown_labels(label: int) -> None:
    with pytest.raises(ValueError, match=f"label {label} is above the number of classes, 2"):
        counts.confusion(np.zeros((1, 1), np.uint8), np.full((1, 1), label, np.uint8), 2)


def test_iou_takes_a_stack_of_matrices() -> None:
    stack = np.random.default_rng(0).integers(1, 9, (4, 3, 3))
    np.testing.assert_array_equal(metrics.iou(stack), [metrics.iou(matrix) for matrix in stack])


def shares(truth: np.ndarray, prediction: np.ndarray, label: int) -> tuple[float, float, list[float]]:
    """Precision, recall, and [IoU, missed, spurious, confused] of one label, pixel by pixel; NaN if undefined."""
    pixels = [(t, p) for t, p in zip(truth.flat, prediction.flat, strict=True) if t != IGNORE]
    hits = sum(t == p == label for t, p in pixels)
    predicted = sum(p == label for _, p in pixels)
    true = sum(t == label for t, _ in pixels)
    wrong = [(t, p) for t, p in pixels if label in (t, p) and t != p]
    missed = sum(p == 0 for _, p in wrong)
    spurious = sum(t == 0 for t, _ in wrong)
    confused = sum(t > 0 and p > 0 for t, p in wrong)

    def percent(part: int, whole: int) -> float:
        return 100 * part / whole if whole else math.nan

    union = predicted + true - hits
    union_shares = [percent(count, union) for count in (hits, missed, spurious, confused)]
    return percent(hits, predicted), percent(hits, true), union_shares


@given(seeds, st.integers(1, 4))
def test_scores_of_labels_are_shares_of_pixels(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    truth = labels(rng, classes, (3, 4), ignored=True)
    prediction = labels(rng, classes, (3, 4))
    matrix = counts.confusion(truth, prediction, classes)
    iou = metrics.iou(matrix)
    errors = metrics.error_shares(matrix)
    for label in range(classes + 1):
        precision, recall, union_shares = shares(truth, prediction, label)
        assert metrics.precision(matrix)[label] == pytest.approx(precision, nan_ok=True)
        assert metrics.recall(matrix)[label] == pytest.approx(recall, nan_ok=True)
        assert [part[label] for part in (iou, *errors)] == pytest.approx(union_shares, nan_ok=True)
    np.testing.assert_allclose(iou + sum(errors), np.where(np.isnan(iou), np.nan, 100))


@pytest.mark.parametrize(
    ("values", "expected"), [([50.0, math.nan, 100.0], 75.0), ([math.nan, math.nan], math.nan), ([0.0], 0.0)]
)
def test_the_mean_leaves_out_labels_without_a_value(values: list[float], expected: float) -> None:
    assert metrics.mean(np.array(values)) == pytest.approx(expected, nan_ok=True)


# --- the sweep


def labeled_at(threshold: float, maps: np.ndarray, tags: np.ndarray) -> NDArray[np.uint8]:
    """The tag with the highest score at each pixel if this score is at least the threshold, else background."""
    above = maps.max(axis=0).astype(np.float64) >= threshold
    return np.where(above, tags[maps.argmax(axis=0)] + 1, 0).astype(np.uint8)


@settings(max_examples=100)
@given(seeds, st.integers(1, 5), st.sampled_from([2, 3, 7, 10, 16, 49, 64, 100]), st.data())
def test_the_sweep_is_the_confusion_at_every_threshold(seed: int, classes: int, bins: int, data: st.DataObject) -> None:
    """Over two images whose scores include values at and next to the thresholds, where rounding matters."""
    rng = np.random.default_rng(seed)
    total = np.zeros((bins, classes + 1, classes + 1), np.int64)
    images = []
    for _ in range(2):
        shape = data.draw(st.tuples(side, side))
        tags = rng.permutation(classes)[: rng.integers(1, classes + 1)]
        thresholds = (rng.integers(0, bins + 1, (len(tags), *shape)) / bins).astype(np.float32)
        directions = rng.choice(np.array([-1, 2], np.float32), thresholds.shape)
        neighbors = np.nextafter(thresholds, directions).clip(0, 1)
        uniform = rng.random(thresholds.shape, np.float32)
        maps = np.choose(rng.integers(0, 3, thresholds.shape), [thresholds, neighbors, uniform])
        truth = labels(rng, classes, shape, ignored=True)
        images.append((truth, maps, tags))
        counts.add_counts(total, counts.map_counts(truth, maps, tags, bins))
    matrices = metrics.sweep(total)
    assert matrices.shape == (bins, classes + 1, classes + 1)
    for i in range(bins):
        expected = sum(counted(truth, labeled_at(i / bins, maps, tags), classes) for truth, maps, tags in images)
        np.testing.assert_array_equal(matrices[i], expected)


# --- the baselines without a classifier


def test_a_random_tag_covers_the_salient_pixels() -> None:
    salient = np.array([[True, False], [False, True]])
    tags = np.array([4, 7, 2])
    for draw, tag in ((0.0, 4), (0.33, 4), (0.34, 7), (0.66, 7), (0.67, 2), (np.nextafter(1, 0), 2)):
        mask = metrics.random_tag_mask(salient, tags, draw)
        assert mask.dtype == np.uint8
        assert mask.tolist() == [[tag + 1, 0], [0, tag + 1]]


@given(seeds, st.integers(1, 4))
def test_the_best_tag_is_the_true_label_of_each_salient_pixel(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    truth = labels(rng, classes, (3, 4), ignored=True)
    salient = rng.random((3, 4)) < 0.6
    tags = rng.permutation(classes)[: rng.integers(1, classes + 1)]
    mask = metrics.best_tag_mask(salient, tags, truth)
    assert mask.dtype == np.uint8
    for y, x in np.ndindex(3, 4):
        true = int(truth[y, x])
        best = true if true in [tag + 1 for tag in tags] else tags[0] + 1
        assert mask[y, x] == (best if salient[y, x] else 0)

    hits = np.diagonal(counted(truth, mask, classes))[1:].sum()
    for draw in (0.0, 0.5, 0.9):
        random_mask = metrics.random_tag_mask(salient, tags, draw)
        assert hits >= np.diagonal(counted(truth, random_mask, classes))[1:].sum()


# --- average precision


@given(seeds, st.integers(1, 8), st.integers(1, 3))
def test_average_precision_is_the_mean_precision_at_the_hits(seed: int, count: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.permutation(count * classes).reshape(count, classes).astype(float)
    tags = rng.random((count, classes)) < 0.5
    actual = metrics.average_precision(scores, tags)
    assert actual.shape == (classes,)
    for k in range(classes):
        precisions = []
        for i in range(count):
            if tags[i, k]:
                above = [j for j in range(count) if scores[j, k] >= scores[i, k]]
                precisions.append(sum(tags[j, k] for j in above) / len(above))
        expected = 100 * sum(precisions) / len(precisions) if precisions else math.nan
        assert actual[k] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_the_order_of_images_with_equal_scores_has_no_effect(order: list[int]) -> None:
    tags = np.array([[1], [1], [0], [0]], bool)[order]
    assert metrics.average_precision(np.zeros((4, 1)), tags).tolist() == [pytest.approx(100 * (1 / 3 + 2 / 4) / 2)]


# --- boundaries, by their definition: masks eroded by one pixel at a time

long_side = st.integers(1, 130)


def blocks(rng: np.random.Generator, height: int, width: int, values: list[int]) -> NDArray[np.uint8]:
    """A mask of large patches, (height, width), so that some pixels are far from all contours."""
    cells = rng.choice(values, (height // 30 + 1, width // 30 + 1)).astype(np.uint8)
    top, left = rng.integers(0, 30, 2)
    return np.roll(cells.repeat(30, axis=0).repeat(30, axis=1), (top, left), axis=(0, 1))[:height, :width].copy()


def eroded_edge(mask: NDArray[np.bool_], width: int) -> NDArray[np.bool_]:
    """A mask minus its erosion by `width` squares of 3 x 3 pixels; outside of the image is outside of the mask."""
    shifts = list(itertools.product((-1, 0, 1), repeat=2))
    inner = np.pad(mask, 1)
    for _ in range(width):
        padded = np.pad(inner, 1)
        inner = np.all([np.roll(padded, shift, (0, 1)) for shift in shifts], axis=0)[1:-1, 1:-1]
    return mask & ~inner[1:-1, 1:-1]


@given(seeds, long_side, long_side)
def test_boundary_regions_are_masks_minus_their_erosions(seed: int, height: int, width: int) -> None:
    labels = blocks(np.random.default_rng(seed), height, width, [0, 1, 2, IGNORE])
    distance = max(1, round(0.02 * np.sqrt(height**2 + width**2)))
    assert counts.boundary_width(height, width) == distance
    region = counts.boundary_region(labels)
    assert region.shape == labels.shape
    for label in (0, 1, 2, IGNORE):
        np.testing.assert_array_equal(region & (labels == label), eroded_edge(labels == label, distance))


@given(seeds, st.integers(1, 3))
def test_boundary_iou_sums_the_scored_pixels_of_regions_over_images(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    total = np.zeros((counts.MASK_PARTS, classes + 1, classes + 1), np.int64)
    both = np.zeros(classes + 1)
    either = np.zeros(classes + 1)
    for _ in range(2):
        height, width = rng.integers(20, 120, 2)
        truth = blocks(rng, height, width, [*range(classes + 1), IGNORE])
        prediction = np.roll(truth, rng.integers(-9, 9, 2), (0, 1))
        prediction[prediction == IGNORE] = rng.integers(0, classes + 1)
        counts.add_counts(total, next(counts.mask_counts(truth, [prediction], classes)))
        distance = counts.boundary_width(height, width)
        scored = truth != IGNORE
        for label in range(classes + 1):
            true_region = eroded_edge(truth == label, distance) & scored
            predicted_region = eroded_edge(prediction == label, distance) & scored
            both[label] += (true_region & predicted_region).sum()
            either[label] += (true_region | predicted_region).sum()
    expected = [100 * b / e if e else math.nan for b, e in zip(both, either, strict=True)]
    assert metrics.boundary_iou(total).tolist() == pytest.approx(expected, nan_ok=True)

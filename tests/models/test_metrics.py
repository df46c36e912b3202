"""Scores against counting pixel by pixel: confusion, IoU, thresholds, baselines, average precision, boundaries."""

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
    return rng.choice([*range(classes + 1), *[IGNORE] * ignored], shape).astype(np.uint8)


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
    truth, prediction = labels(rng, classes, (height, width), ignored=True), labels(rng, classes, (height, width))
    got = counts.confusion(truth, prediction, classes)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, counted(truth, prediction, classes))


@pytest.mark.parametrize("label", [3, IGNORE])
def test_confusion_refuses_what_it_cannot_count(label: int) -> None:
    with pytest.raises(ValueError, match=f"label {label} is above the number of classes, 2"):
        counts.confusion(np.zeros((1, 1), np.uint8), np.full((1, 1), label, np.uint8), 2)


def test_iou_takes_a_stack_of_matrices() -> None:
    stack = np.random.default_rng(0).integers(1, 9, (4, 3, 3))
    np.testing.assert_array_equal(metrics.iou(stack), [metrics.iou(matrix) for matrix in stack])


def shares(truth: np.ndarray, prediction: np.ndarray, label: int) -> tuple[float, float, list[float]]:
    """Precision, recall, and IoU, missed, spurious and confused of one label, pixel by pixel; NaN for none."""
    pixels = [(t, p) for t, p in zip(truth.flat, prediction.flat, strict=True) if t != IGNORE]
    hits = sum(t == p == label for t, p in pixels)
    predicted, true = sum(p == label for _, p in pixels), sum(t == label for t, _ in pixels)
    wrong = [(t, p) for t, p in pixels if label in (t, p) and t != p]
    missed, spurious = sum(p == 0 for _, p in wrong), sum(t == 0 for t, _ in wrong)
    confused = sum(t > 0 and p > 0 for t, p in wrong)

    def percent(part: int, whole: int) -> float:
        return 100 * part / whole if whole else math.nan

    union = predicted + true - hits
    of_union = [percent(n, union) for n in (hits, missed, spurious, confused)]
    return percent(hits, predicted), percent(hits, true), of_union


@given(seeds, st.integers(1, 4))
def test_iou_precision_recall_and_losses_are_shares_of_pixels(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    truth, prediction = labels(rng, classes, (3, 4), ignored=True), labels(rng, classes, (3, 4))
    matrix = counts.confusion(truth, prediction, classes)
    whole, values = (metrics.iou(matrix), *metrics.error_shares(matrix)), []
    for label in range(classes + 1):
        of_predicted, of_true, parts = shares(truth, prediction, label)
        assert metrics.precision(matrix)[label] == pytest.approx(of_predicted, nan_ok=True)
        assert metrics.recall(matrix)[label] == pytest.approx(of_true, nan_ok=True)
        assert [part[label] for part in whole] == pytest.approx(parts, nan_ok=True)
        values += [parts[0]] * (not math.isnan(parts[0]))
    np.testing.assert_allclose(sum(whole), np.where(np.isnan(whole[0]), np.nan, 100))
    assert metrics.mean(whole[0]) == pytest.approx(sum(values) / len(values) if values else math.nan, nan_ok=True)


# --- the sweep


def labeled_at(threshold: float, maps: np.ndarray, tags: np.ndarray) -> NDArray[np.uint8]:
    """The strongest tag of each pixel where its score is at least the threshold, else background."""
    above = maps.max(axis=0).astype(np.float64) >= threshold
    return np.where(above, tags[maps.argmax(axis=0)] + 1, 0).astype(np.uint8)


@settings(max_examples=100)
@given(seeds, st.integers(1, 5), st.sampled_from([2, 3, 7, 10, 16, 49, 64, 100]), st.data())
def test_the_sweep_is_the_confusion_at_every_threshold(seed: int, classes: int, bins: int, data: st.DataObject) -> None:
    """Over two images, with scores at and beside the thresholds, where rounding would show."""
    rng = np.random.default_rng(seed)
    total, images = np.zeros((bins, classes + 1, classes + 1), np.int64), []
    for _ in range(2):
        shape = data.draw(st.tuples(side, side))
        tags = rng.permutation(classes)[: rng.integers(1, classes + 1)]
        at = (rng.integers(0, bins + 1, (len(tags), *shape)) / bins).astype(np.float32)
        beside = np.nextafter(at, rng.choice(np.array([-1, 2], np.float32), at.shape)).clip(0, 1)
        between = rng.random(at.shape, np.float32)
        maps = np.choose(rng.integers(0, 3, at.shape), [at, beside, between])
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
    salient, tags = np.array([[True, False], [False, True]]), np.array([4, 7, 2])
    for draw, tag in ((0.0, 4), (0.33, 4), (0.34, 7), (0.66, 7), (0.67, 2), (np.nextafter(1, 0), 2)):
        mask = metrics.random_tag_mask(salient, tags, draw)
        assert mask.dtype == np.uint8
        assert mask.tolist() == [[tag + 1, 0], [0, tag + 1]]


@given(seeds, st.integers(1, 4))
def test_the_best_tag_is_the_true_one_on_each_salient_pixel(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    truth, salient = labels(rng, classes, (3, 4), ignored=True), rng.random((3, 4)) < 0.6
    tags = rng.permutation(classes)[: rng.integers(1, classes + 1)]
    mask = metrics.best_tag_mask(salient, tags, truth)
    assert mask.dtype == np.uint8
    for y, x in np.ndindex(3, 4):
        true = int(truth[y, x])
        best = true if true in [tag + 1 for tag in tags] else tags[0] + 1
        assert mask[y, x] == (best if salient[y, x] else 0)
    hits = [
        np.diagonal(counted(truth, metrics.random_tag_mask(salient, tags, d), classes))[1:].sum()
        for d in (0.0, 0.5, 0.9)
    ]
    assert np.diagonal(counted(truth, mask, classes))[1:].sum() >= max(hits)


# --- average precision


@given(seeds, st.integers(1, 8), st.integers(1, 3))
def test_average_precision_is_the_mean_precision_at_the_hits(seed: int, count: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.permutation(count * classes).reshape(count, classes).astype(float)
    tags = rng.random((count, classes)) < 0.5
    got = metrics.average_precision(scores, tags)
    assert got.shape == (classes,)
    for k in range(classes):
        precisions = []
        for i in range(count):
            if tags[i, k]:
                above = [j for j in range(count) if scores[j, k] >= scores[i, k]]
                precisions.append(sum(tags[j, k] for j in above) / len(above))
        expected = 100 * sum(precisions) / len(precisions) if precisions else math.nan
        assert got[k] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_equal_scores_earn_nothing_by_the_order_of_the_images(order: list[int]) -> None:
    tags = np.array([[1], [1], [0], [0]], bool)[order]
    assert metrics.average_precision(np.zeros((4, 1)), tags).tolist() == [pytest.approx(100 * (1 / 3 + 2 / 4) / 2)]


# --- boundaries, by the authors' definition: masks eroded by one pixel at a time

long_side = st.integers(1, 130)


def blocks(rng: np.random.Generator, height: int, width: int, values: list[int]) -> NDArray[np.uint8]:
    """A mask of patches, so that some pixels are far from every contour; (height, width)."""
    cells = rng.choice(values, (height // 30 + 1, width // 30 + 1)).astype(np.uint8)
    top, left = rng.integers(0, 30, 2)
    return np.roll(cells.repeat(30, axis=0).repeat(30, axis=1), (top, left), axis=(0, 1))[:height, :width].copy()


def eroded_edge(mask: NDArray[np.bool_], width: int) -> NDArray[np.bool_]:
    """A mask less its erosion by a square of 3 x 3 pixels, so many times, within a frame that is not of the mask."""
    inner = np.pad(mask, 1)
    for _ in range(width):
        inner = np.pad(inner, 1)
        inner = np.all([np.roll(inner, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)], axis=0)[1:-1, 1:-1]
    return mask & ~inner[1:-1, 1:-1]


@given(seeds, long_side, long_side)
def test_a_region_is_each_mask_less_its_erosion(seed: int, height: int, width: int) -> None:
    labels = blocks(np.random.default_rng(seed), height, width, [0, 1, 2, IGNORE])
    distance = max(1, round(0.02 * np.sqrt(height**2 + width**2)))
    assert counts.boundary_width(height, width) == distance
    region = counts.boundary_region(labels)
    assert region.shape == labels.shape
    for label in (0, 1, 2, IGNORE):
        np.testing.assert_array_equal(region & (labels == label), eroded_edge(labels == label, distance))


@given(seeds, st.integers(1, 3))
def test_boundary_iou_is_that_of_the_regions_of_scored_pixels_summed_over_images(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    total = np.zeros((counts.MASK_PARTS, classes + 1, classes + 1), np.int64)
    both, either = np.zeros(classes + 1), np.zeros(classes + 1)
    for _ in range(2):
        height, width = rng.integers(20, 120, 2)
        truth = blocks(rng, height, width, [*range(classes + 1), IGNORE])
        prediction = np.roll(truth, rng.integers(-9, 9, 2), (0, 1))
        prediction[prediction == IGNORE] = rng.integers(0, classes + 1)
        counts.add_counts(total, next(counts.mask_counts(truth, [prediction], classes)))
        distance, scored = counts.boundary_width(height, width), truth != IGNORE
        for label in range(classes + 1):
            regions = [eroded_edge(mask == label, distance) & scored for mask in (truth, prediction)]
            both[label] += (regions[0] & regions[1]).sum()
            either[label] += (regions[0] | regions[1]).sum()
    expected = [100 * b / e if e else math.nan for b, e in zip(both, either, strict=True)]
    assert metrics.boundary_iou(total).tolist() == pytest.approx(expected, nan_ok=True)

"""Boundary regions and boundary IoU against the authors' definition: masks eroded by one pixel at a time."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE
from mcis.models.counts import MASK_PARTS, add_counts, boundary_region, boundary_width, mask_counts
from mcis.models.metrics import boundary_iou

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)
sides = st.integers(1, 130)


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


@quick
@given(seeds, sides, sides)
def test_a_region_is_each_mask_less_its_erosion(seed: int, height: int, width: int) -> None:
    labels = blocks(np.random.default_rng(seed), height, width, [0, 1, 2, IGNORE])
    distance = max(1, round(0.02 * np.sqrt(height**2 + width**2)))
    assert boundary_width(height, width) == distance
    region = boundary_region(labels)
    assert region.shape == labels.shape
    for label in (0, 1, 2, IGNORE):
        np.testing.assert_array_equal(region & (labels == label), eroded_edge(labels == label, distance))


def test_the_width_is_two_percent_of_the_diagonal_and_at_least_a_pixel() -> None:
    assert [boundary_width(*shape) for shape in ((375, 500), (1, 1), (300, 400))] == [12, 1, 10]


@quick
@given(seeds, st.integers(1, 3))
def test_boundary_iou_is_that_of_the_regions_of_scored_pixels_summed_over_images(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    total = np.zeros((MASK_PARTS, classes + 1, classes + 1), np.int64)
    both, either = np.zeros(classes + 1), np.zeros(classes + 1)
    for _ in range(2):
        height, width = rng.integers(20, 120, 2)
        truth = blocks(rng, height, width, [*range(classes + 1), IGNORE])
        prediction = np.roll(truth, rng.integers(-9, 9, 2), (0, 1))
        prediction[prediction == IGNORE] = rng.integers(0, classes + 1)
        add_counts(total, next(mask_counts(truth, [prediction], classes)))
        distance, scored = boundary_width(height, width), truth != IGNORE
        for label in range(classes + 1):
            regions = [eroded_edge(mask == label, distance) & scored for mask in (truth, prediction)]
            both[label] += (regions[0] & regions[1]).sum()
            either[label] += (regions[0] | regions[1]).sum()
    expected = [100 * b / e if e else math.nan for b, e in zip(both, either, strict=True)]
    assert boundary_iou(total).tolist() == pytest.approx(expected, nan_ok=True)


def test_a_shift_costs_more_at_the_boundary_than_inside() -> None:
    truth = np.zeros((200, 200), np.uint8)
    truth[40:160, 40:160] = 1
    total = np.zeros((MASK_PARTS, 2, 2), np.int64)
    add_counts(total, next(mask_counts(truth, [np.roll(truth, 3, 1)], 1)))
    matrix = total.sum(axis=0)
    assert 100 * matrix[1, 1] / (matrix[1].sum() + matrix[:, 1].sum() - matrix[1, 1]) > 95
    assert boundary_iou(total)[1] < 75
    perfect = np.zeros_like(total)
    add_counts(perfect, next(mask_counts(truth, [truth], 1)))
    assert boundary_iou(perfect).tolist() == [100, 100]

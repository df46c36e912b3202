"""Tests of random crops against loops over pixels and a triangle filter in float64."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.sampling.crops import random_crop

PADDING = [124, 116, 104]
Array = NDArray[np.uint8]


def picture(height: int, width: int) -> tuple[Array, Array]:
    """Returns an image whose red channel equals its labels and whose other channels identify each pixel."""
    rows, columns = np.mgrid[:height, :width]
    labels = ((rows * 7 + columns * 3) % 200).astype(np.uint8)
    return np.stack([labels, rows, columns], -1).astype(np.uint8), labels


def slow_crop(rgb: Array, labels: Array, size: int, top: float, left: float) -> tuple[Array, Array]:
    """Crops pixel by pixel: position y of the crop shows position y + shift of the image, or padding."""

    def shift(side: int, draw: float) -> int:
        offset = int(draw * (abs(side - size) + 1))
        return offset if side >= size else -offset

    out = np.empty((size, size, 3), np.uint8)
    out_labels = np.empty((size, size), np.uint8)
    for y in range(size):
        for x in range(size):
            row = y + shift(labels.shape[0], top)
            column = x + shift(labels.shape[1], left)
            inside = 0 <= row < labels.shape[0] and 0 <= column < labels.shape[1]
            out[y, x] = rgb[row, column] if inside else PADDING
            out_labels[y, x] = labels[row, column] if inside else 255
    return out, out_labels


def crop(rgb: Array, labels: Array, size: int, draws: Sequence[float], **options: Any) -> tuple[Array, Array]:
    given: dict[str, Any] = {"scales": (1.0,), "hflip": False, **options}
    return random_crop(rgb, labels, size=size, draws=np.array(draws), **given)


draws_in_unit = st.floats(0, 1 - 2**-53)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), draws_in_unit, draws_in_unit, draws_in_unit)
def test_crops_match_a_slow_reference(height: int, width: int, size: int, turn: float, top: float, left: float) -> None:
    rgb, labels = picture(height, width)
    expected = slow_crop(rgb, labels, size, top, left)
    for actual, reference in zip(crop(rgb, labels, size, [0, turn, top, left]), expected, strict=True):
        assert (actual.shape, actual.dtype) == (reference.shape, np.uint8)
        np.testing.assert_array_equal(actual, reference)
    turned = expected if turn >= 0.5 else slow_crop(rgb[:, ::-1], labels[:, ::-1], size, top, left)
    for actual, reference in zip(crop(rgb, labels, size, [0, turn, top, left], hflip=True), turned, strict=True):
        np.testing.assert_array_equal(actual, reference)


@pytest.mark.parametrize(("side", "positions"), [(9, 5), (2, 4)])
def test_crops_take_every_position(side: int, positions: int) -> None:
    """A side of 9 has five positions for a crop of 5; a side of 2 has four positions inside of one."""
    rgb, labels = picture(side, side)
    found = {crop(rgb, labels, 5, [0, 0, top, 0])[1].tobytes() for top in np.linspace(0, 1, 50, endpoint=False)}
    assert len(found) == positions
    for end in (0.0, 1 - 2**-53):
        assert crop(rgb, labels, 5, [0, 0, end, 0])[1].tobytes() in found


@given(st.integers(2, 9), st.integers(2, 9), st.sampled_from([0.5, 0.7, 1.3, 2.0]), st.booleans())
def test_scaled_crops_are_bilinear_and_labels_nearest(height: int, width: int, scale: float, mirrored: bool) -> None:
    """Compares with a triangle filter and nearest centers in float64. The crop has the size of the scaled image."""
    rng = np.random.default_rng(height * 10 + width)
    rgb = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
    labels = rng.integers(0, 21, (height, width)).astype(np.uint8)

    def weights(old: int) -> NDArray[np.float64]:
        new = max(1, round(old * scale))
        step = old / new
        centers = (np.arange(new) + 0.5) * step
        triangle = np.clip(1 - np.abs(np.arange(old) + 0.5 - centers[:, None]) / max(step, 1), 0, None)
        return triangle / triangle.sum(1, keepdims=True)

    rows = weights(height)
    columns = weights(width)
    size = max(len(rows), len(columns))
    smooth = np.einsum("yr,xc,rcb->yxb", rows, columns, rgb.astype(float))
    # A pixel center may be on the border of two pixels; then both are nearest.
    y = (np.arange(len(rows)) + 0.5) * height / len(rows)
    x = (np.arange(len(columns)) + 0.5) * width / len(columns)
    borders = itertools.product((-1e-6, 1e-6), repeat=2)
    nearest = [labels[(y + dy).astype(int)][:, (x + dx).astype(int)] for dy, dx in borders]
    draws = [0.0, 0.0 if mirrored else 0.9, 0.0, 0.0]
    image, taught = crop(rgb, labels, size, draws, scales=[scale], hflip=True)
    turn = -1 if mirrored else 1

    assert np.abs(image[: len(rows), : len(columns)] - smooth[:, ::turn]).max() <= 1.5
    assert np.any([taught[: len(rows), : len(columns)] == choice[:, ::turn] for choice in nearest], axis=0).all()
    assert (taught != 255).sum() == len(rows) * len(columns)


def test_scales_are_equally_likely() -> None:
    rgb, labels = picture(4, 4)
    scales = (0.5, 1.0, 1.5, 2.0)
    for part, scale in enumerate(scales):
        for chosen in (part / 4, (part + 1) / 4 - 2**-53):
            assert (crop(rgb, labels, 8, [chosen, 0, 0, 0], scales=scales)[1] != 255).sum() == (4 * scale) ** 2

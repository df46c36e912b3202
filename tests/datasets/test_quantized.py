"""Tests of features in 8 bits: errors against float64, extreme channels, several images, and wrong shapes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from mcis.datasets.tables.quantized import dequantize, quantize, quantized_bytes

SHAPE = (6, 5, 7)


def drawn_features(images: int) -> NDArray[np.float32]:
    """Features (images, *SHAPE) whose channels have magnitudes from 0.001 to 100."""
    rng = np.random.default_rng(0)
    magnitudes = 10.0 ** rng.uniform(-3, 2, (images, SHAPE[0], 1, 1))
    return (magnitudes * rng.normal(size=(images, *SHAPE))).astype(np.float32)


def test_values_are_the_nearest_multiples_of_the_scale_of_their_channel() -> None:
    features = drawn_features(3)
    restored = dequantize(quantize(features), SHAPE)
    assert restored.dtype == np.float32

    rounding = 1e-4  # of scales, quotients and products to float32, in steps
    for image, channel in np.ndindex(3, SHAPE[0]):
        values = features[image, channel].astype(np.float64)
        scale = np.abs(values).max() / 127
        steps = restored[image, channel].astype(np.float64) / scale
        assert np.abs(steps - np.rint(steps)).max() < rounding
        assert np.abs(steps).max() == pytest.approx(127)
        assert np.abs(steps - values / scale).max() <= 0.5 + rounding


def test_extreme_channels() -> None:
    """Zeros, the limits of float16, equal values, and one value that is much larger than the others."""
    channels: list[list[float]] = [[0, 0, 0], [65504, -65504, 300], [6e-8, -6e-8, 0], [5, 5, 5], [100, 0.3, -0.5]]
    step = 65504 / 127
    expected: list[list[float]] = [[0, 0, 0], [65504, -65504, step], [6e-8, -6e-8, 0], [5, 5, 5], [100, 0, -100 / 127]]
    features = np.array(channels, np.float32).reshape(1, 5, 1, 3)
    restored = dequantize(quantize(features), (5, 1, 3))
    np.testing.assert_allclose(restored.reshape(5, 3), expected, rtol=1e-6)


def test_subnormal_values_keep_their_sign() -> None:
    """Their scale, 190 / 127 of the smallest number, is rounded to 1 of it."""
    smallest = 2.0**-149
    features = np.array([190 * smallest, -190 * smallest], np.float32).reshape(1, 1, 1, 2)
    restored = dequantize(quantize(features), (1, 1, 2))
    assert (restored.ravel().astype(np.float64) / smallest).tolist() == [127, -127]


def test_rows_of_images_do_not_depend_on_each_other() -> None:
    features = drawn_features(4)
    rows = quantize(features)
    assert rows.dtype == np.uint8
    assert rows.shape == (4, quantized_bytes(SHAPE)) == (4, 6 * 4 + 6 * 5 * 7)
    for image in range(4):
        np.testing.assert_array_equal(quantize(features[image : image + 1])[0], rows[image])
        np.testing.assert_array_equal(dequantize(rows[image : image + 1], SHAPE)[0], dequantize(rows, SHAPE)[image])


def test_wrong_shapes_are_refused() -> None:
    features = drawn_features(1)
    with pytest.raises(ValueError, match="out of bounds"):
        quantize(features[0])
    for shape in ((5, 5, 7), (7, 5, 7), (6, 5, 8)):
        with pytest.raises(ValueError, match="cannot reshape"):
            dequantize(quantize(features), shape)

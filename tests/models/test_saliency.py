"""Input and output of salient object detectors, against the same arithmetic pixel by pixel."""

import numpy as np
import pytest
from PIL import Image

from mcis.models.saliency import detector_input, saliency_map

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def test_input_is_divided_by_its_maximum_and_normalized() -> None:
    rgb = np.random.default_rng(0).integers(0, 201, (4, 6, 3)).astype(np.uint8)
    rgb[0, 0, 1] = 200

    batch = detector_input(rgb, 4, 6, MEAN, STD)

    assert batch.shape == (1, 3, 4, 6)
    assert batch.dtype == np.float32
    for y, x, channel in np.ndindex(4, 6, 3):
        expected = (rgb[y, x, channel] / 200 - MEAN[channel]) / STD[channel]
        assert batch[0, channel, y, x] == pytest.approx(expected, abs=1e-5)


def test_input_is_resized_before_it_is_divided() -> None:
    rgb = np.zeros((8, 8, 3), np.uint8)
    rgb[0, 0] = 255  # averaged with darker pixels, so that no value of the smaller image is 255
    smaller = np.asarray(Image.fromarray(rgb).resize((4, 2), Image.Resampling.BILINEAR), np.float64)

    batch = detector_input(rgb, 2, 4, (0, 0, 0), (1, 1, 1))

    np.testing.assert_allclose(batch[0].transpose(1, 2, 0), smaller / smaller.max(), atol=1e-6)
    assert batch.max() == 1


def test_black_image_stays_black() -> None:
    assert not detector_input(np.zeros((3, 3, 3), np.uint8), 2, 2, (0, 0, 0), (1, 1, 1)).any()


def test_output_is_min_max_normalized() -> None:
    output = np.array([[0.2, 0.4], [0.8, 1.0]], np.float32)
    assert saliency_map(output, 2, 2).tolist() == [[0, 64], [191, 255]]  # 255 / 4 = 63.75, 255 * 3 / 4 = 191.25


def test_sigmoid_is_applied_before_normalization() -> None:
    logits = np.array([[-2.0, 0.0, 1.0, 4.0]], np.float32)
    values = 1 / (1 + np.exp(-logits.astype(float)))
    expected = np.rint(255 * (values - values.min()) / np.ptp(values))
    np.testing.assert_array_equal(saliency_map(logits, 1, 4, sigmoid=True), expected)


def test_constant_output_is_no_object() -> None:
    assert not saliency_map(np.full((3, 3), 0.7, np.float32), 5, 4).any()


def test_map_has_the_size_of_the_image() -> None:
    result = saliency_map(np.eye(4, dtype=np.float32), 30, 17)
    assert result.shape == (30, 17)
    assert result.dtype == np.uint8
    assert (result.min(), result.max()) == (0, 255)

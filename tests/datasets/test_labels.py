"""Masks and saliency maps: labels are indices whatever their colors, saliency is gray of any kind."""

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image

from mcis.datasets.classes import palette
from mcis.datasets.images.decode import (
    RejectedImage,
    decode_labels,
    decode_rgb,
    decode_saliency,
    encode_labels,
    resize_labels,
)

H, W = 40, 48
RAMP = np.stack(np.broadcast_arrays(np.arange(H)[:, None] * 5, np.arange(W) * 4, 77), -1).astype(np.uint8)


def encoded(image: Image.Image | np.ndarray, form: str = "PNG", **options: object) -> bytes:
    stream = BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, form, **options)
    return stream.getvalue()


def test_labels_are_indices_with_any_colors():
    labels = np.random.default_rng(0).choice(np.array([0, 1, 7, 255], np.uint8), (30, 20))
    image = Image.fromarray(labels)
    image.putpalette([90] * 768)  # all colors alike: by way of RGB every label would be lost
    np.testing.assert_array_equal(decode_labels(encoded(image)), labels)
    np.testing.assert_array_equal(decode_labels(encoded(image, transparency=0)), labels)
    np.testing.assert_array_equal(decode_labels(encoded(labels)), labels)  # 8-bit gray


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_small_palettes_keep_their_indices(bits: int):
    labels = np.random.default_rng(0).integers(0, 2**bits, (33, 21), dtype=np.uint8)
    image = Image.fromarray(labels)
    image.putpalette(palette()[: 2**bits].tobytes())
    data = encoded(image, bits=bits)
    assert data[24] == bits
    np.testing.assert_array_equal(decode_labels(data), labels)


@pytest.mark.parametrize(
    ("data", "kind", "detail"),
    [
        (encoded(RAMP), "unsupported", "mode RGB"),
        (encoded(Image.new("RGBA", (W, H))), "unsupported", "mode RGBA"),
        (encoded(Image.new("LA", (W, H))), "unsupported", "mode LA"),
        (encoded(np.zeros((H, W), np.uint16)), "unsupported", "16 bits"),
        (encoded(Image.new("1", (W, H))), "unsupported", "1 bits"),
        (encoded(RAMP[..., 0], "JPEG"), "not an image", "expected PNG"),
        (encode_labels(RAMP[..., 0])[:-200], "truncated", ""),
        (b"", "empty", "0 bytes"),
    ],
)
def test_a_mask_that_holds_no_labels_is_rejected(data: bytes, kind: str, detail: str):
    with pytest.raises(RejectedImage, match=f"{kind}.*{detail}"):
        decode_labels(data)


@settings(max_examples=50, deadline=None)
@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=40)))
def test_labels_survive_the_round_trip(labels: np.ndarray):
    np.testing.assert_array_equal(decode_labels(encode_labels(labels)), labels)


def test_encoded_labels_have_the_colors_of_pascal_and_are_small():
    labels = np.zeros((366, 500), np.uint8)
    rows, columns = np.indices(labels.shape)
    labels[np.hypot(rows - 180, columns - 200) < 120] = 15
    labels[np.hypot(rows - 240, columns - 330) < 90] = 255
    data = encode_labels(labels)
    np.testing.assert_array_equal(decode_rgb(data), palette()[labels])
    image = Image.fromarray(labels)
    image.putpalette(palette().tobytes())
    assert len(data) < len(encoded(image, compress_level=1))
    assert encode_labels(labels[:, ::-1])  # a view is as good as a copy


@pytest.mark.parametrize(
    "labels", [np.zeros((4, 4), np.int64), np.zeros((4, 4, 3), np.uint8), np.zeros((0, 4), np.uint8)]
)
def test_encode_labels_refuses_values_that_would_wrap_around(labels: np.ndarray):
    with pytest.raises(ValueError, match="expected uint8"):
        encode_labels(labels)


def test_saliency_of_every_kind_of_gray():
    gray = RAMP[..., 0]
    as_rgb = np.repeat(gray[..., None], 3, -1)
    wide = gray.astype(np.uint16) * 257
    image = Image.fromarray(gray[::-1])
    image.putpalette(np.repeat(np.arange(255, -1, -1), 3).astype(np.uint8).tobytes())
    for data in (encoded(gray), encoded(as_rgb), encoded(wide), encoded(gray, "TIFF")):
        saliency = decode_saliency(data)
        assert saliency.dtype == np.uint8
        np.testing.assert_array_equal(saliency, gray)
    np.testing.assert_array_equal(decode_saliency(encoded(image)), 255 - gray[::-1])  # a palette's colors do count here
    assert np.abs(decode_saliency(encoded(as_rgb, "JPEG", quality=95)).astype(int) - gray).max() <= 4
    np.testing.assert_array_equal(decode_saliency(encoded(Image.fromarray(gray > 9))), np.where(gray > 9, 255, 0))
    assert decode_saliency(encoded(np.full((1, 1), 9, np.uint8))).tolist() == [[9]]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (encoded(RAMP), "unsupported"),
        (encoded(Image.new("LA", (W, H))), "unsupported"),
        (encoded(RAMP[..., 0], transparency=0), "unsupported"),
        (encoded(RAMP[..., 0])[:60], "truncated"),
        (b"", "empty"),
        (b"<html>", "not an image"),
    ],
)
def test_a_saliency_map_with_color_or_alpha_is_rejected(data: bytes, kind: str):
    with pytest.raises(RejectedImage, match=kind):
        decode_saliency(data)


@settings(max_examples=50, deadline=None)
@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=20)), st.integers(1, 50), st.integers(1, 50))
def test_resized_labels_are_the_nearest(labels: np.ndarray, height: int, width: int):
    resized = resize_labels(labels, height, width)
    assert resized.shape == (height, width)
    for row in range(height):
        for column in range(width):
            y, x = (row + 0.5) * labels.shape[0] / height, (column + 0.5) * labels.shape[1] / width
            near = {labels[int(y + e), int(x + f)] for e in (-1e-6, 1e-6) for f in (-1e-6, 1e-6)}  # ties: either
            assert resized[row, column] in near

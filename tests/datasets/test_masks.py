"""Masks and saliency maps: labels whatever their colors, gray of any kind, and each way in which a file is wrong."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image

from mcis.datasets.classes import palette
from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import (
    RejectedImage,
    decode_labels,
    decode_picture,
    decode_saliency,
    encode_labels,
    resize_labels,
)
from mcis.datasets.images.masks import read_saliency, read_truth, tags_of_mask

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
    ("decode", "data", "found"),
    [
        (decode_labels, encoded(RAMP), "unsupported.*mode RGB"),
        (decode_labels, encoded(Image.new("RGBA", (W, H))), "unsupported.*mode RGBA"),
        (decode_labels, encoded(Image.new("LA", (W, H))), "unsupported.*mode LA"),
        (decode_labels, encoded(np.zeros((H, W), np.uint16)), "unsupported.*16 bits"),
        (decode_labels, encoded(Image.new("1", (W, H))), "unsupported.*1 bits"),
        (decode_labels, encoded(RAMP[..., 0], "JPEG"), "not an image.*expected PNG"),
        (decode_labels, encode_labels(RAMP[..., 0])[:-200], "truncated"),
        (decode_labels, b"", "empty.*0 bytes"),
        (decode_saliency, encoded(RAMP), "unsupported"),
        (decode_saliency, encoded(Image.new("LA", (W, H))), "unsupported"),
        (decode_saliency, encoded(RAMP[..., 0], transparency=0), "unsupported"),
        (decode_saliency, encoded(RAMP[..., 0])[:60], "truncated"),
        (decode_saliency, b"", "empty"),
        (decode_saliency, b"<html>", "not an image"),
    ],
)
def test_a_mask_without_labels_and_a_map_with_color_or_alpha_are_rejected(decode, data: bytes, found: str):
    with pytest.raises(RejectedImage, match=found):
        decode(data)


@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=40)))
def test_labels_survive_the_round_trip(labels: np.ndarray):
    np.testing.assert_array_equal(decode_labels(encode_labels(labels)), labels)


def test_encoded_labels_have_the_colors_of_pascal_and_are_small():
    labels = np.zeros((366, 500), np.uint8)
    rows, columns = np.indices(labels.shape)
    labels[np.hypot(rows - 180, columns - 200) < 120] = 15
    labels[np.hypot(rows - 240, columns - 330) < 90] = 255
    data = encode_labels(labels)
    np.testing.assert_array_equal(decode_picture(data).rgb, palette()[labels])
    image = Image.fromarray(labels)
    image.putpalette(palette().tobytes())
    assert len(data) < len(encoded(image, compress_level=1))
    assert encode_labels(labels[:, ::-1])  # a view is as good as a copy


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


@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=20)), st.integers(1, 50), st.integers(1, 50))
def test_resized_labels_are_the_nearest(labels: np.ndarray, height: int, width: int):
    resized = resize_labels(labels, height, width)
    assert resized.shape == (height, width)
    for row in range(height):
        for column in range(width):
            y, x = (row + 0.5) * labels.shape[0] / height, (column + 0.5) * labels.shape[1] / width
            near = {labels[int(y + e), int(x + f)] for e in (-1e-6, 1e-6) for f in (-1e-6, 1e-6)}  # ties: either
            assert resized[row, column] in near


# --- what is read for a run

LABELS = np.array([[0, 2, 255], [1, 1, 0]], np.uint8)


def write(path: Path, labels: np.ndarray) -> str:
    path.write_bytes(encode_labels(labels))
    return str(path)


def test_truth_is_read_from_png_and_from_sbd(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    np.testing.assert_array_equal(read_truth(uri, (2, 3), 2), LABELS)
    scipy.io.savemat(tmp_path / "a.mat", {"GTcls": {"Segmentation": LABELS}})
    np.testing.assert_array_equal(read_truth(str(tmp_path / "a.mat"), (2, 3), 2), LABELS)


def test_a_saliency_map_is_read_as_gray(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(LABELS))
    saliency = read_saliency(str(tmp_path / "a.png"), (2, 3))
    np.testing.assert_array_equal(saliency, LABELS)
    assert saliency.dtype == np.uint8


@pytest.mark.parametrize("content", [None, b"", b"<html>404</html>", encoded(np.zeros((4, 4, 3), np.uint8))[:40]])
def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.png"
    if content is not None:
        path.write_bytes(content)
    found = "no {} .*a[.]png .*No such file" if content is None else "the {} .*a[.]png cannot be read: "
    with pytest.raises(UserError, match=found.format("ground-truth mask")) as caught:
        read_truth(str(path), (2, 3), 2)
    assert caught.value.expected.startswith("a palette PNG")
    with pytest.raises(UserError, match=found.format("saliency map")) as caught:
        read_saliency(str(path), (2, 3))
    assert caught.value.expected == "a gray PNG"


def test_files_of_another_size_than_their_image_are_named(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    with pytest.raises(UserError, match=r"the ground-truth mask .* has 2x3 pixels \(height x width\)") as caught:
        read_truth(uri, (3, 2), 2)
    assert caught.value.expected == "3x2 as its image"
    (tmp_path / "b.png").write_bytes(encoded(LABELS))
    with pytest.raises(UserError, match=r"the saliency map .* has 2x3 pixels") as caught:
        read_saliency(str(tmp_path / "b.png"), (2, 4))
    assert caught.value.expected == "2x4 as its image"


def test_labels_above_the_number_of_classes_name_the_argument(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    with pytest.raises(UserError, match=r"a\.png: label 2; expected 0\.\.1 and 255") as caught:
        read_truth(uri, (2, 3), 1)
    assert "`classes`" in caught.value.remedy


def test_tags_of_a_mask_are_its_labels_less_one() -> None:
    assert tags_of_mask(np.array([[0, 255], [20, 1]], np.uint8), 20, "m.png") == [0, 19]
    assert tags_of_mask(np.zeros((2, 2), np.uint8), 20, "m.png") == []
    with pytest.raises(UserError, match=r"m\.png: label 21"):
        tags_of_mask(np.full((2, 2), 21, np.uint8), 20, "m.png")

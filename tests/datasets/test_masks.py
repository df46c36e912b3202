"""Masks and saliency maps: labels of any color, gray of any kind, and each way in which a file can be wrong."""

import itertools
import tracemalloc
import zlib
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
from mcis.datasets.images.decode import MAX_PIXELS, RejectedImage, decode_picture
from mcis.datasets.images.label_masks import (
    decode_colored_labels,
    decode_labels,
    encode_labels,
    read_label_mask,
    resize_labels,
)
from mcis.datasets.images.masks import decode_mask, read_saliency, read_truth, tags_of_mask
from mcis.datasets.images.saliency_maps import decode_saliency

H = 40
W = 48
RAMP = np.stack(np.broadcast_arrays(np.arange(H)[:, None] * 5, np.arange(W) * 4, 77), -1).astype(np.uint8)


def encoded(image: Image.Image | np.ndarray, form: str = "PNG", **options: object) -> bytes:
    stream = BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, form, **options)
    return stream.getvalue()


def random_labels() -> np.ndarray:
    return np.random.default_rng(0).choice(np.array([0, 1, 7, 255], np.uint8), (30, 20))


@pytest.mark.parametrize("options", [{}, {"transparency": 0}])
def test_labels_are_palette_indices_whatever_their_colors(options: dict):
    labels = random_labels()
    image = Image.fromarray(labels)
    image.putpalette([90] * 768)  # all colors are equal: a conversion to RGB would lose every label
    np.testing.assert_array_equal(decode_labels(encoded(image, **options)), labels)


def test_labels_are_the_values_of_gray():
    labels = random_labels()
    np.testing.assert_array_equal(decode_labels(encoded(labels)), labels)


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
def test_masks_without_labels_and_maps_with_color_or_alpha_are_rejected(decode, data: bytes, found: str):
    with pytest.raises(RejectedImage, match=found):
        decode(data)


def test_labels_of_images_above_the_default_limit_are_decoded():
    """`data.max_pixels` may be larger than its default, and masks are as large as their images."""
    labels = np.zeros((7_100, 7_100), np.uint8)
    assert labels.size > MAX_PIXELS
    data = encode_labels(labels)
    assert decode_labels(data).shape == labels.shape
    assert decode_mask(data).shape == labels.shape


@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=40)))
def test_labels_survive_the_round_trip(labels: np.ndarray):
    np.testing.assert_array_equal(decode_labels(encode_labels(labels)), labels)


def with_palette(indices: np.ndarray, colors: np.ndarray) -> bytes:
    """A palette PNG."""
    image = Image.fromarray(indices)
    image.putpalette(colors.astype(np.uint8).tobytes())
    return encoded(image)


def test_colors_of_pascal_are_labels_in_every_kind_of_picture():
    labels = random_labels()
    reordered = np.array([1, 255, 0, 7])
    indices = np.argsort(reordered)[np.searchsorted(np.sort(reordered), labels)].astype(np.uint8)
    adaptive = Image.fromarray(palette()[labels]).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    assert (np.array(adaptive) != labels).any()

    for data, differs_from_indices in (
        (encode_labels(labels), False),
        (encoded(labels), False),
        (encoded(palette()[labels]), False),
        (encoded(adaptive), True),
        (with_palette(indices, palette()[reordered]), True),
    ):
        mask = decode_colored_labels(data, 30, 20)
        np.testing.assert_array_equal(mask.labels, labels)
        assert mask.differs_from_indices == differs_from_indices


GRAYS = np.repeat(np.arange(256)[:, None], 3, axis=1)


@pytest.mark.parametrize(
    ("used", "colors"),
    [
        ([0, 64, 128, 192], GRAYS),  # also the colors of labels 0, 56, 7 and 63
        ([0, 1, 2], np.array([[0, 0, 0], [128, 0, 0], [255, 255, 255]])),
        ([0, 1], np.array([[0, 0, 0], [0, 128, 0], [255, 0, 0]])),  # color of label 2; the last one is of none
        ([0, 1, 2], np.full((256, 3), 90)),
    ],
    ids=["grays", "an unknown color", "an unknown color that is not used", "equal colors"],
)
def test_indices_of_other_palettes_are_labels(used: list[int], colors: np.ndarray):
    labels = np.random.default_rng(0).choice(np.array(used, np.uint8), (30, 20))
    mask = decode_colored_labels(with_palette(labels, colors), 30, 20)
    np.testing.assert_array_equal(mask.labels, labels)
    assert not mask.differs_from_indices


def test_colors_are_read_with_little_memory():
    labels = np.random.default_rng(0).integers(0, 21, (1000, 1000), dtype=np.uint8)
    data = encoded(palette()[labels])

    tracemalloc.start()
    decoded = decode_colored_labels(data, 1000, 1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    np.testing.assert_array_equal(decoded.labels, labels)
    assert peak < 8_000_000  # twice the 3 MB of colors, while Pillow's picture is copied


def bomb(side: int) -> bytes:
    """A gray PNG whose header states side x side pixels."""
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    checksum = zlib.crc32(header).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + header + checksum + encoded(GRAY)[33:]


def test_the_size_of_a_mask_is_checked_before_it_is_decoded(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(bomb(13_377))
    tracemalloc.start()
    with pytest.raises(UserError, match=r"the mask .*a\.png cannot be read \(.* of 13377x13377 pixels\)") as caught:
        read_label_mask(str(tmp_path / "a.png"), (30, 20), 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert caught.value.expected == "a label PNG of 30x20 pixels (height x width), the size of its image"
    assert peak < 10_000_000


def test_ignored_pixels_of_predictions_are_refused_with_a_remedy_for_their_split(tmp_path: Path):
    """`--as masks` scores masks of training images only, and predictions are usually those of val."""
    labels = np.array([[0, 1], [20, 255]], np.uint8)
    (tmp_path / "a.png").write_bytes(encode_labels(labels))
    np.testing.assert_array_equal(read_label_mask(str(tmp_path / "a.png"), (2, 2), 20).labels, labels)
    with pytest.raises(UserError, match="has pixels that are ignored, 255") as caught:
        read_label_mask(str(tmp_path / "a.png"), (2, 2), 20, may_ignore=False)
    assert "masks of training images, not those of other splits" in caught.value.remedy


@pytest.fixture
def two_disks() -> np.ndarray:
    """Labels (366, 500) of two overlapping disks, 15 and 255."""
    labels = np.zeros((366, 500), np.uint8)
    rows, columns = np.indices(labels.shape)
    labels[np.hypot(rows - 180, columns - 200) < 120] = 15
    labels[np.hypot(rows - 240, columns - 330) < 90] = 255
    return labels


def test_encoded_labels_have_the_colors_of_pascal(two_disks: np.ndarray):
    np.testing.assert_array_equal(decode_picture(encode_labels(two_disks)).rgb, palette()[two_disks])


def test_encoded_labels_are_smaller_than_by_the_fastest_level_of_zlib(two_disks: np.ndarray):
    image = Image.fromarray(two_disks)
    image.putpalette(palette().tobytes())
    assert len(encode_labels(two_disks)) < len(encoded(image, compress_level=1))


def test_a_view_of_labels_can_be_encoded(two_disks: np.ndarray):
    assert encode_labels(two_disks[:, ::-1])


GRAY = RAMP[..., 0]
GRAY_RGB = np.repeat(GRAY[..., None], 3, -1)


@pytest.mark.parametrize(
    "data",
    [encoded(GRAY), encoded(GRAY_RGB), encoded(GRAY.astype(np.uint16) * 257), encoded(GRAY, "TIFF")],
    ids=["gray", "rgb", "16 bits", "tiff"],
)
def test_saliency_of_lossless_gray(data: bytes):
    saliency = decode_saliency(data)
    assert saliency.dtype == np.uint8
    np.testing.assert_array_equal(saliency, GRAY)


def test_saliency_of_a_palette_is_its_colors():
    image = Image.fromarray(GRAY)
    image.putpalette(np.repeat(np.arange(255, -1, -1), 3).astype(np.uint8).tobytes())
    np.testing.assert_array_equal(decode_saliency(encoded(image)), 255 - GRAY)


def test_saliency_of_a_color_jpeg_of_gray():
    saliency = decode_saliency(encoded(GRAY_RGB, "JPEG", quality=95))
    assert np.abs(saliency.astype(int) - GRAY).max() <= 4


def test_saliency_of_black_and_white():
    np.testing.assert_array_equal(decode_saliency(encoded(Image.fromarray(GRAY > 9))), np.where(GRAY > 9, 255, 0))


def test_saliency_of_a_single_pixel():
    assert decode_saliency(encoded(np.full((1, 1), 9, np.uint8))).tolist() == [[9]]


@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=20)), st.integers(1, 50), st.integers(1, 50))
def test_resized_labels_are_the_nearest(labels: np.ndarray, height: int, width: int):
    resized = resize_labels(labels, height, width)

    assert resized.shape == (height, width)
    for row, column in np.ndindex(height, width):
        y = (row + 0.5) * labels.shape[0] / height
        x = (column + 0.5) * labels.shape[1] / width
        shifts = itertools.product((-1e-6, 1e-6), repeat=2)  # at a tie, either neighbor is correct
        nearest = {labels[int(y + down), int(x + right)] for down, right in shifts}
        assert resized[row, column] in nearest


# --- reading files

LABELS = np.array([[0, 2, 255], [1, 1, 0]], np.uint8)


def write(path: Path, labels: np.ndarray) -> str:
    path.write_bytes(encode_labels(labels))
    return str(path)


def test_truth_is_read_from_png(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    np.testing.assert_array_equal(read_truth(uri, (2, 3), 2), LABELS)


def test_truth_is_read_from_a_file_of_sbd(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "a.mat", {"GTcls": {"Segmentation": LABELS}})
    np.testing.assert_array_equal(read_truth(str(tmp_path / "a.mat"), (2, 3), 2), LABELS)


def test_saliency_map_is_read_as_gray(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(LABELS))
    saliency = read_saliency(str(tmp_path / "a.png"), (2, 3))
    np.testing.assert_array_equal(saliency, LABELS)
    assert saliency.dtype == np.uint8


def test_missing_files_are_named(tmp_path: Path) -> None:
    path = str(tmp_path / "a.png")

    with pytest.raises(UserError, match=r"the ground-truth mask .*a[.]png cannot be opened .*No such file") as caught:
        read_truth(path, (2, 3), 2)
    assert caught.value.expected.startswith("a palette PNG")

    with pytest.raises(UserError, match=r"the saliency map .*a[.]png cannot be opened .*No such file") as caught:
        read_saliency(path, (2, 3))
    assert caught.value.expected == "a gray PNG"


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", encoded(np.zeros((4, 4, 3), np.uint8))[:40]])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)

    with pytest.raises(UserError, match=r"the ground-truth mask .*a[.]png cannot be read: "):
        read_truth(str(path), (2, 3), 2)
    with pytest.raises(UserError, match=r"the saliency map .*a[.]png cannot be read: "):
        read_saliency(str(path), (2, 3))


def test_truth_of_another_size_than_its_image_is_named(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    with pytest.raises(UserError, match=r"the ground-truth mask .* has 2x3 pixels \(height x width\)") as caught:
        read_truth(uri, (3, 2), 2)
    assert caught.value.expected == "3x2, the size of its image"


def test_saliency_map_of_another_size_than_its_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(encoded(LABELS))
    with pytest.raises(UserError, match=r"the saliency map .* has 2x3 pixels") as caught:
        read_saliency(str(tmp_path / "b.png"), (2, 4))
    assert caught.value.expected == "2x4, the size of its image"


def test_labels_above_the_number_of_classes_are_reported(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    with pytest.raises(UserError, match=r"a\.png has label 2\n") as caught:
        read_truth(uri, (2, 3), 1)
    assert caught.value.expected.endswith("0..1 and 255")
    assert "data.classes" in caught.value.remedy


def test_tags_of_a_mask_are_its_labels_minus_one() -> None:
    assert tags_of_mask(np.array([[0, 255], [20, 1]], np.uint8), 20, "m.png") == [0, 19]
    assert tags_of_mask(np.zeros((2, 2), np.uint8), 20, "m.png") == []


def test_tags_of_a_mask_with_an_unknown_label() -> None:
    with pytest.raises(UserError, match=r"m\.png has label 21"):
        tags_of_mask(np.full((2, 2), 21, np.uint8), 20, "m.png")

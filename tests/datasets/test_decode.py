"""Decoding pictures: the array of each kind, reasons of rejections, and hostile bytes, which only raise rejections."""

import itertools
import pickle
import re
import struct
import time
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, TiffTags
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from mcis.datasets.images.decode import (
    MAX_PIXELS,
    READS_HEIF,
    PictureCheck,
    RejectedImage,
    check_picture,
    decode_picture,
    decode_square,
    fit_picture,
    fitted_size,
    is_upright_jpeg,
)
from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.images.masks import decode_mask
from mcis.datasets.images.matlab import decode_mat_labels
from mcis.datasets.images.saliency_maps import decode_saliency
from mcis.datasets.images.value_range import likely_range

H = 40
W = 48
BITS = 258
PHOTOMETRIC = 262
BANDS = 277
RAMP = np.stack(np.broadcast_arrays(np.arange(H)[:, None] * 5, np.arange(W) * 4, 77), -1).astype(np.uint8)
"""(H, W, 3); every pixel has another color, so that flips and rotations are visible."""


def encoded(image: Image.Image | np.ndarray, form: str = "PNG", **options: object) -> bytes:
    stream = BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, form, **options)
    return stream.getvalue()


def png(width: int, height: int, bits: int, color: int, rows: bytes, *extra: bytes) -> bytes:
    """Builds a PNG from its parts; `rows` are uncompressed, each with its filter byte."""
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), *extra, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def with_tag(tiff: bytes, tag: int, value: int) -> bytes:
    """Returns a TIFF with another value of a tag that has one short integer."""
    entry = struct.pack("<HHI", tag, TiffTags.SHORT, 1)
    begin, found, end = tiff.partition(entry)
    assert found
    return begin + entry + struct.pack("<H", value) + end[2:]


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def decode_rgb(data: bytes, **options: Any) -> np.ndarray:
    return decode_picture(data, **options).rgb


def rejection(call, *arguments: object, **options: object) -> RejectedImage:
    """Returns the RejectedImage that a call raises."""
    with pytest.raises(RejectedImage) as raised:
        call(*arguments, **options)
    return raised.value


def without_bytes(parameter: object) -> str | None:
    """Leaves bytes out of the names of test cases."""
    return "" if isinstance(parameter, bytes) else None


# --- decode_picture: the array of each kind of picture


@pytest.mark.parametrize(
    ("form", "options"),
    [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("PPM", {}), ("WEBP", {"lossless": True}), ("JPEG2000", {})],
)
def test_lossless_rgb_is_unchanged(form: str, options: dict):
    rgb = decode_rgb(encoded(RAMP, form, **options))

    assert rgb.dtype == np.uint8
    assert rgb.flags.c_contiguous
    assert rgb.flags.writeable
    np.testing.assert_array_equal(rgb, RAMP)


# Position where the pixel stored at (r, c) of an (h, w) array is shown. The EXIF standard says: "the 0th row is the
# visual top / right / ..., the 0th column the visual left / ...".
SHOWN_AT = {
    1: lambda r, c, h, w: (r, c),
    2: lambda r, c, h, w: (r, w - 1 - c),
    3: lambda r, c, h, w: (h - 1 - r, w - 1 - c),
    4: lambda r, c, h, w: (h - 1 - r, c),
    5: lambda r, c, h, w: (c, r),
    6: lambda r, c, h, w: (c, h - 1 - r),
    7: lambda r, c, h, w: (w - 1 - c, h - 1 - r),
    8: lambda r, c, h, w: (w - 1 - c, r),
}


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", [*SHOWN_AT, 99])
def test_exif_orientation_is_applied(form: str, orientation: int):
    shown_at = SHOWN_AT.get(orientation, SHOWN_AT[1])
    expected = np.zeros((W, H, 3) if 5 <= orientation <= 8 else (H, W, 3), np.uint8)
    for row, column in np.ndindex(H, W):
        expected[shown_at(row, column, H, W)] = RAMP[row, column]

    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(decode_rgb(encoded(RAMP, form, exif=exif)), expected)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize("exif", [b"Exif\0\0no EXIF data", b"Exif\0\0II*\0"], ids=["no header", "truncated"])
def test_picture_with_unreadable_exif_is_upright(form: str, exif: bytes):
    options: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    expected = encoded(RAMP, form, **options)
    data = encoded(RAMP, form, exif=exif, **options)

    np.testing.assert_array_equal(decode_rgb(data), decode_rgb(expected))
    np.testing.assert_array_equal(decode_rgb(data, max_side=20), decode_rgb(expected, max_side=20))
    assert check_picture(data) == check_picture(expected)
    assert is_upright_jpeg(data) == (form == "JPEG")


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
@pytest.mark.parametrize(
    ("ink", "color"), [((0, 0, 0, 0), (255, 255, 255)), ((255, 0, 0, 0), (0, 255, 255)), ((0, 0, 0, 255), (0, 0, 0))]
)
def test_cmyk_is_ink_on_white(form: str, ink: tuple, color: tuple):
    rgb = decode_rgb(encoded(Image.new("CMYK", (W, H), ink), form))
    assert np.abs(rgb.astype(int) - color).max() <= 2


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bit_gray_is_rounded_to_nearest(form: str):
    values = np.linspace(0, 65535, H * W).astype(np.uint16).reshape(H, W)
    expected = np.rint(values / 257).astype(np.uint8)
    np.testing.assert_array_equal(decode_rgb(encoded(values, form)), expected[..., None].repeat(3, axis=2))


def test_thirty_two_bit_gray_of_sixteen_bit_values_is_rounded_to_nearest():
    values = np.linspace(0, 65535, H * W).astype(np.int32).reshape(H, W)
    expected = np.rint(values / 257).astype(np.uint8)
    np.testing.assert_array_equal(decode_rgb(encoded(values, "TIFF"))[..., 0], expected)


def test_sixteen_bit_color_is_scaled():
    values = np.random.default_rng(0).integers(0, 65536, (H, W, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    assert np.abs(decode_rgb(png(W, H, 16, 2, rows)) - values / 257).max() <= 1


def test_transparent_value_of_sixteen_bit_gray_becomes_white():
    values = np.tile(np.array([0, 1000], ">u2"), (H, W // 2))
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    rgb = decode_rgb(png(W, H, 16, 0, rows, chunk(b"tRNS", struct.pack(">H", 0))))
    assert rgb[0, :2].tolist() == [[255] * 3, [4] * 3]


WIDE = np.full((H, W), 70_000, np.int32)


@pytest.mark.parametrize("values", [WIDE, -WIDE, WIDE.astype(np.float32)], ids=["large", "negative", "float"])
def test_integers_and_floats_of_unknown_range_are_rejected(values: np.ndarray):
    assert rejection(decode_rgb, encoded(values, "TIFF")).reason.startswith("unsupported: ")


# --- gray of more than 8 bits: data.value_range


@pytest.mark.parametrize("orientation", [1, 3])
def test_gray_of_16_bits_whose_zero_is_white_is_inverted(orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    values = RAMP[..., 0].astype(np.uint16) * 257
    data = with_tag(encoded(65535 - values, "TIFF", exif=exif), PHOTOMETRIC, 0)

    expected = RAMP[..., 0] if orientation == 1 else RAMP[::-1, ::-1, 0]
    np.testing.assert_array_equal(decode_rgb(data)[..., 0], expected)
    assert check_picture(data)[2:] == ("integers", 0, values.max())
    np.testing.assert_array_equal(decode_saliency(data), expected)


TWELVE_BITS = np.linspace(0, 4095, H * W).astype(np.uint16).reshape(H, W)
DEEP_GRAY: dict[str, tuple[bytes, tuple[float, float]]] = {
    "png": (encoded(TWELVE_BITS), (0, 4095)),
    "tiff": (encoded(TWELVE_BITS, "TIFF"), (0, 4095)),
    "jpeg 2000": (encoded(TWELVE_BITS, "JPEG2000"), (0, 4095)),
    "32 bits": (encoded(TWELVE_BITS.astype(np.int32) - 100, "TIFF"), (-100, 3995)),
    "float": (encoded(TWELVE_BITS.astype(np.float32) / 4095, "TIFF"), (0, 1)),
    "part": (encoded(TWELVE_BITS), (1000, 2000)),
}


@pytest.mark.parametrize("name", DEEP_GRAY)
def test_value_range_becomes_black_to_white(name: str):
    data, value_range = DEEP_GRAY[name]
    black, white = (1000, 2000) if name == "part" else (0, 4095)
    expected = np.rint(np.clip((TWELVE_BITS.astype(float) - black) / (white - black), 0, 1) * 255)

    rgb = decode_rgb(data, value_range=value_range)

    assert rgb.dtype == np.uint8
    assert np.abs(rgb - expected[..., None]).max() <= (name == "float")  # float32 may round the other way
    square = decode_square(data, 32, value_range=value_range)
    np.testing.assert_array_equal(square, resized(rgb, 32, 32))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
@pytest.mark.parametrize("pixels", [RAMP, RAMP[..., 0]], ids=["color", "gray"])
def test_value_range_does_not_change_pixels_of_8_bits(form: str, pixels: np.ndarray):
    data = encoded(pixels, form)
    np.testing.assert_array_equal(decode_rgb(data, value_range=(0, 10)), decode_rgb(data))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (WIDE, "unsupported: integer pixels from 70000 to 70000, .* data.value_range=70000,70001"),
        (WIDE - 70_005, "unsupported: integer pixels from -5 to -5, .* data.value_range=-5,255"),
        (RAMP[..., 0] / np.float32(255), "unsupported: floating-point pixels from 0 to 0.7.*, .* data.value_range=0,1"),
    ],
    ids=["large", "negative", "float"],
)
def test_values_of_unknown_range_are_rejected_with_a_setting(values: np.ndarray, reason: str):
    assert re.match(reason, rejection(decode_rgb, encoded(values, "TIFF")).reason)


@pytest.mark.parametrize("decode", [decode_rgb, check_picture, decode_saliency])
def test_pixels_that_are_not_numbers_are_rejected(decode: Any):
    values = np.full((H, W), np.nan, np.float32)
    assert rejection(decode, encoded(values, "TIFF")).reason == "unsupported: pixels that are not finite numbers"


def test_floating_point_saliency_is_rejected():
    reason = rejection(decode_saliency, encoded(np.zeros((H, W), np.float32), "TIFF")).reason
    assert reason == "unsupported: a saliency map with values from 0 to 0; expected gray of 1, 8 or 16 bits"


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("integers", 0, 4095, (0, 4095)),
        ("integers", 3, 900, (0, 1023)),
        ("integers", 7_000, 9_000, (7_000, 16383)),
        ("integers", 0, 0, (0, 255)),
        ("floats", 0.1, 0.9, (0, 1)),
        ("floats", -1, 1, (-1, 1)),
        ("floats", 290, 310, (290, 310)),
    ],
)
def test_likely_range(kind: str, low: float, high: float, expected: tuple[float, float]):
    assert likely_range(kind, low, high) == expected


# --- check_picture

HALF_TRANSPARENT = np.dstack([RAMP, np.where(np.arange(W) < W // 2, 0, 255) + np.zeros((H, 1))]).astype(np.uint8)
MOSTLY_TRANSPARENT = np.dstack([RAMP, np.where(np.arange(W) < W // 2 + 1, 0, 255) + np.zeros((H, 1))]).astype(np.uint8)
DEEP_ROWS = b"".join(b"\0" + row.tobytes() for row in (RAMP.astype(np.uint16) * 10).astype(">u2"))
CHECKED: dict[str, tuple[bytes, tuple[str | None, float | None, float | None]]] = {
    "jpeg": (encoded(RAMP, "JPEG"), (None, None, None)),
    "palette": (encoded(Image.fromarray(RAMP).quantize(16)), (None, None, None)),
    "half transparent": (encoded(HALF_TRANSPARENT), (None, None, None)),
    "mostly transparent": (encoded(MOSTLY_TRANSPARENT), ("transparent", None, None)),
    "transparent palette": (
        encoded(Image.fromarray(RAMP).quantize(16), transparency=bytes(16)),
        ("transparent", None, None),
    ),
    "12 bits": (encoded(TWELVE_BITS), ("integers", 0, 4095)),
    "float": (encoded(TWELVE_BITS.astype(np.float32) / 4095, "TIFF"), ("floats", 0, 1)),
    "beyond 16 bits": (encoded(WIDE, "TIFF"), ("integers", 70_000, 70_000)),
    "color of 16 bits": (png(W, H, 16, 2, DEEP_ROWS), ("deep color", 0, 2047)),
    "labels": (encoded(RAMP[..., 0] // 10), ("black", None, None)),
    "dark": (encoded(np.full((H, W), 32, np.uint8)), (None, None, None)),
    "white": (encoded(np.full((H, W), 224, np.uint8)), ("white", None, None)),
    "white on transparent": (encoded(np.full((H, W, 4), (255, 255, 255, 200), np.uint8)), ("white", None, None)),
}


@pytest.mark.parametrize("name", CHECKED)
def test_unclear_pixels_are_found(name: str):
    data, expected = CHECKED[name]
    assert check_picture(data) == PictureCheck(H, W, *expected)


def test_gray_is_repeated_in_all_channels():
    gray = RAMP[..., 0]
    np.testing.assert_array_equal(decode_rgb(encoded(gray)), np.repeat(gray[..., None], 3, -1))


def test_black_and_white_becomes_0_and_255():
    white = RAMP[..., 0] > 50
    rgb = decode_rgb(encoded(Image.fromarray(white)))
    np.testing.assert_array_equal(rgb[..., 1], np.where(white, 255, 0))


@pytest.fixture
def palette_image() -> Image.Image:
    """A checkerboard of two palette colors."""
    image = Image.fromarray((np.indices((H, W)).sum(0) % 2).astype(np.uint8))
    image.putpalette([10, 20, 30, 200, 100, 50])
    return image


def test_palette_indices_become_colors(palette_image: Image.Image):
    assert decode_rgb(encoded(palette_image))[0, :2].tolist() == [[10, 20, 30], [200, 100, 50]]


def test_transparent_palette_color_becomes_white(palette_image: Image.Image):
    rgb = decode_rgb(encoded(palette_image, transparency=0))
    assert rgb[0, :2].tolist() == [[255, 255, 255], [200, 100, 50]]


def test_partly_transparent_palette_color_is_mixed_with_white(palette_image: Image.Image):
    rgb = decode_rgb(encoded(palette_image, transparency=bytes([51, 255])))  # a fifth of (10, 20, 30), the rest white
    assert np.abs(rgb[0, 0].astype(int) - [206, 208, 210]).max() <= 1


def test_alpha_is_composed_over_white():
    rgba = np.zeros((H, W, 4), np.uint8)
    rgba[:, 0] = (200, 0, 0, 255)
    rgba[:, 1] = (200, 0, 0, 51)
    rgba[:, 2] = (200, 0, 0, 0)

    rgb = decode_rgb(encoded(rgba))

    assert np.abs(rgb[0, :3].astype(int) - [[200, 0, 0], [244, 204, 204], [255, 255, 255]]).max() <= 1


def test_transparent_gray_becomes_white():
    gray = Image.merge("LA", [Image.new("L", (W, H), 100), Image.new("L", (W, H), 0)])
    assert (decode_rgb(encoded(gray)) == 255).all()


def test_transparent_rgb_color_becomes_white():
    rgb = decode_rgb(encoded(RAMP, transparency=(0, 0, 77)))
    assert rgb[0, 0].tolist() == [255] * 3
    np.testing.assert_array_equal(rgb[1:], RAMP[1:])


# --- decode_picture: resizing


@settings(max_examples=100)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 3000))
def test_fitted_size_keeps_the_aspect_ratio(height: int, width: int, max_side: int):
    fitted = fitted_size(height, width, max_side)

    assert fitted_size(width, height, max_side) == fitted[::-1]
    if max(height, width) <= max_side:
        assert fitted == (height, width) == fitted_size(height, width, None)
    else:
        scale = max_side / max(height, width)
        assert max(fitted) == max_side
        assert abs(fitted[0] - height * scale) <= 1
        assert abs(fitted[1] - width * scale) <= 1


def large_picture(form: str, orientation: int) -> bytes:
    """Returns a smooth picture of 301x450 pixels with an EXIF orientation."""
    rows, columns = np.indices((301, 450))
    picture = Image.fromarray(np.stack([rows // 2, columns // 2, (rows + columns) // 4], axis=-1).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture, form, exif=exif)


def resized(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling.BILINEAR))


TOLERANCE = {"JPEG": 6, "PNG": 0, "TIFF": 0}
"""Difference between a picture that was decoded at a fraction of its size and one that was resized, 0 to 255."""
every_form_and_orientation = pytest.mark.parametrize(
    ("form", "orientation"), list(itertools.product(["JPEG", "PNG", "TIFF"], [1, 3, 6]))
)


@every_form_and_orientation
def test_large_picture_is_resized_and_upright(form: str, orientation: int):
    data = large_picture(form, orientation)
    whole = decode_rgb(data)
    height, width = fitted_size(len(whole), len(whole[0]), 100)

    smaller = decode_picture(data, max_side=100)

    assert smaller.rgb.shape == (height, width, 3)
    assert np.abs(smaller.rgb.astype(int) - resized(whole, height, width)).max() <= TOLERANCE[form]
    assert (smaller.height, smaller.width) == whole.shape[:2]


@every_form_and_orientation
def test_picture_within_the_limit_is_unchanged(form: str, orientation: int):
    data = large_picture(form, orientation)
    whole = decode_rgb(data)

    picture = decode_picture(data, max_side=450)

    np.testing.assert_array_equal(picture.rgb, whole)
    assert (picture.height, picture.width) == whole.shape[:2]


@every_form_and_orientation
def test_large_picture_becomes_an_upright_square(form: str, orientation: int):
    data = large_picture(form, orientation)
    expected = resized(decode_rgb(data), 60, 60)
    assert np.abs(decode_square(data, 60).astype(int) - expected).max() <= TOLERANCE[form]


def test_fit_picture_resizes_an_array():
    whole = decode_rgb(large_picture("PNG", 1))

    picture = fit_picture(whole, 100)

    np.testing.assert_array_equal(picture.rgb, resized(whole, *fitted_size(301, 450, 100)))
    assert (picture.height, picture.width) == whole.shape[:2]


@pytest.mark.parametrize("array", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)])
def test_fit_picture_refuses_an_array_that_is_no_picture(array: np.ndarray):
    with pytest.raises(ValueError, match=r"expected uint8 \(H, W, 3\), not empty"):
        fit_picture(array, 10)


def test_large_jpeg_is_not_decoded_at_its_full_size(monkeypatch: pytest.MonkeyPatch):
    data = encoded(Image.new("RGB", (900, 600)), "JPEG")
    sizes = []
    load = ImageFile.ImageFile.load

    def record_size(image: ImageFile.ImageFile) -> object:
        sizes.append(image.size)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", record_size)
    decode_rgb(data, max_side=200)
    assert set(sizes) == {(225, 150)}

    sizes.clear()
    decode_square(data, 100)
    assert set(sizes) == {(225, 150)}


@pytest.mark.parametrize("form", ["AVIF", "HEIF"])
def test_photographs_of_phones_and_browsers_are_read(form: str):
    if form == "HEIF":
        pytest.importorskip("pillow_heif", reason="the extra `heif` is not installed")
    smooth = np.asarray(Image.fromarray(RAMP).resize((96, 64), Image.Resampling.BILINEAR))

    rgb = decode_rgb(encoded(smooth, form, quality=95))

    assert rgb.shape == smooth.shape
    assert np.abs(rgb.astype(int) - smooth).mean() < 6


# --- decode_picture: rejections


FOREIGN = {
    "an HEIC photograph": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "a raw photograph (Canon CR3)": b"\0\0\0\x18ftypcrx \0\0\0\1",
    "a raw photograph (Canon CR2)": b"II*\0\x10\0\0\0CR\2\0",
    "a raw photograph (Fujifilm)": b"FUJIFILMCCD-RAW 0201",
    "a Photoshop file": b"8BPS\0\1",
    "a DICOM picture": bytes(128) + b"DICM",
    "an AVIF picture that is damaged or of an unknown kind": b"\0\0\0\x18ftypavif\0\0\0\0",
    "an SVG drawing": b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>",
    "a PDF": b"%PDF-1.7\n",
    "a JPEG XL picture": b"\xff\x0a\xfa\x1f",
    "a video": b"\0\0\0\x20ftypisom\0\0\2\0",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_named_with_a_command_that_converts_them(name: str):
    if name == "an HEIC photograph" and READS_HEIF:
        pytest.skip("HEIC photographs are read here")

    reason = rejection(decode_rgb, FOREIGN[name] + bytes(200)).reason

    assert reason.startswith(f"unsupported: {name}; convert it, for example by: ")
    assert "FILE" in reason


@pytest.mark.parametrize(
    "data",
    [
        with_tag(encoded(RAMP, "TIFF"), BANDS, 8),
        with_tag(encoded(RAMP[..., 0].astype(np.float32), "TIFF"), BITS, 64),
        encoded(RAMP, "TIFF")[:20],
    ],
    ids=["8 bands", "64 bits", "cut off"],
)
def test_a_tiff_of_an_unknown_kind_is_named_with_a_command_that_converts_it(data: bytes):
    reason = rejection(check_picture, data).reason
    assert reason.startswith("unsupported: a TIFF that is damaged or of an unknown kind")
    assert "gdal_translate" in reason


@pytest.mark.parametrize(
    ("tags", "is_raw"),
    [({254: 1, 330: 8}, True), ({50706: b"\1\4\0\0"}, True), ({254: 1}, False), ({254: 0, 330: 8}, False)],
    ids=["NEF", "DNG", "thumbnail", "pyramid"],
)
def test_the_thumbnail_of_a_raw_photograph_is_not_read(tags: dict[int, int | bytes], is_raw: bool):
    directory = ImageFileDirectory_v2()
    for number, value in tags.items():
        directory.tagtype[number] = TiffTags.BYTE if isinstance(value, bytes) else TiffTags.LONG
        directory[number] = value
    data = encoded(RAMP, "TIFF", tiffinfo=directory)

    if is_raw:
        reason = rejection(check_picture, data).reason
        assert reason == "unsupported: a raw photograph; convert it, for example by: darktable-cli FILE FILE.png"
    else:
        np.testing.assert_array_equal(decode_rgb(data), RAMP)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"),
        (b"\n<!DOCTYPE html><html>403 Forbidden</html>", "not an image: seems to be HTML or XML; expected JPEG, "),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "not an image: seems to be a Git LFS pointer, which `git lfs",
        ),
        (b"\xff\xd8\xff", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n", "unsupported: PostScript; convert it"),
        (bytes(1000), "not an image"),
        (encoded(np.zeros((31, 99, 3), np.uint8), "JPEG"), "too small"),
        (encoded(np.zeros((1, 1, 3), np.uint8), "JPEG"), "too small"),
    ],
    ids=without_bytes,
)
def test_unusable_pictures_are_rejected_with_a_reason(data: bytes, kind: str):
    rejected = rejection(decode_rgb, data)

    assert str(rejected) == rejected.reason
    assert rejected.reason.startswith(kind)


@pytest.mark.parametrize(
    "data",
    [
        b"hunter2",
        b"MATLAB 4.0 hunter2" + bytes(200),
        b"P5 hunter2 40 255\n" + bytes(99),
        b"P5 40 40 hunter2\n" + bytes(99),
        png(40, 40, 8, 2, b"", chunk(b"hunt", b"hunter2")),
        b"\x89PNG\r\n\x1a\n" + bytes(3) + b"\7huntr2" + b"hunter2" * 9,
    ],
    ids=without_bytes,
)
def test_content_of_a_file_is_not_quoted(data: bytes):
    for decode in (decode_rgb, decode_labels, decode_saliency, decode_mask, decode_mat_labels):
        assert "hunt" not in rejection(decode, data).reason


@pytest.mark.parametrize(
    ("form", "options"),
    [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("GIF", {}), ("BMP", {}), ("TIFF", {}), ("PPM", {})],
)
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_truncated_file_is_rejected(form: str, options: dict, share: float):
    noise = np.random.default_rng(0).integers(0, 256, (H, W, 3), dtype=np.uint8)
    data = encoded(noise, form, **options)
    assert rejection(decode_rgb, data[: int(len(data) * share)]).reason.startswith("truncated: ")


@pytest.mark.filterwarnings("error")
def test_sizes_are_limited_by_the_header_before_decoding():
    # There is only a header: if pixels were decoded, the reason would be a truncated file.
    rejected = rejection(decode_rgb, png(10_000, 10_001, 8, 2, b""))

    assert rejected.reason == f"too large: 10000x10001 pixels, more than {MAX_PIXELS}"
    assert rejection(decode_rgb, png(200_000, 200_000, 8, 2, b"")).reason.startswith("too large: ")
    assert rejection(decode_labels, png(20_000, 20_000, 8, 3, b"")).reason.startswith("too large: ")
    assert rejection(decode_saliency, png(10_000, 10_001, 8, 0, b"")).reason.startswith("too large: ")


def test_limits_are_arguments_and_inclusive():
    data = encoded(RAMP)
    assert decode_rgb(data, min_side=H, max_pixels=H * W).shape == RAMP.shape
    assert rejection(decode_rgb, data, min_side=H + 1).reason.startswith("too small: 48x40 pixels, ")
    assert rejection(decode_rgb, data, max_pixels=H * W - 1).reason.startswith("too large: ")


def with_scans(scans: int, side: int = 300) -> bytes:
    """Returns a progressive JPEG that repeats its last scan, of about ten bytes, until it has `scans` scans."""
    data = encoded(np.zeros((side, side, 3), np.uint8), "JPEG", progressive=True)
    starts = [match.start() for match in re.finditer(b"\xff\xda", data)]
    last_scan = data[starts[-1] : -2]
    return data[:-2] + last_scan * (scans - len(starts)) + data[-2:]


@pytest.mark.parametrize("decode", [decode_rgb, decode_saliency, is_upright_jpeg])
def test_jpeg_of_many_scans_is_rejected_before_it_is_decoded(decode):
    """50,000 scans of 90,000 pixels would take ten seconds; those of a large picture would take hours."""
    data = with_scans(50_000)
    started = time.monotonic()
    reason = rejection(decode, data).reason

    assert reason == "too large: 50000 scans of 300x300 pixels, more than 11111"
    assert time.monotonic() - started < 2


def test_limit_of_scans_is_inclusive():
    assert rejection(decode_rgb, with_scans(11_112)).reason.startswith("too large: ")
    assert decode_rgb(with_scans(11_111)).shape == (300, 300, 3)


def test_jpeg_of_a_hundred_scans_is_decoded():
    assert decode_rgb(with_scans(100)).shape == (300, 300, 3)


def test_scans_of_a_film_and_a_thumbnail_do_not_count():
    """Phones write a film after the picture; thumbnails are within it."""
    film = b"\xff\xda\0\0" * 100_000
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + 60_000) + b"\xff\xda" * 30_000
    picture = with_scans(10)
    assert decode_rgb(picture[:2] + thumbnail + picture[2:] + film).shape == (300, 300, 3)


SEQUENTIAL = encoded(np.zeros((48, 48, 3), np.uint8), "JPEG", subsampling=0)
"""A JPEG with one scan of all three components, as Pillow writes them."""
SCAN_OF_COMPONENT = b"\xff\xda\0\x08\x01%c\x00\0\x3f\0" + bytes(40)


def test_scans_of_single_components_count_in_a_sequential_picture():
    """Each component has a scan of its own, and the last component has many."""
    header = SEQUENTIAL[: SEQUENTIAL.index(b"\xff\xda")]
    scans = b"".join(SCAN_OF_COMPONENT % component for component in (1, 2, 3))
    data = header + scans + SCAN_OF_COMPONENT % 3 * 500_000 + b"\xff\xd9"

    assert rejection(decode_rgb, data).reason == "too large: 500003 scans of 48x48 pixels, more than 434027"


def test_scans_after_one_of_all_components_are_not_read():
    data = SEQUENTIAL[:-2] + SCAN_OF_COMPONENT % 3 * 500_000 + b"\xff\xd9"
    started = time.monotonic()
    reason = rejection(decode_rgb, data).reason

    assert reason.startswith("corrupt: ")
    assert time.monotonic() - started < 1


def test_endless_padding_is_skipped_at_once():
    data = with_scans(10)
    first_scan_data = data.index(b"\xff\xda") + 14
    padded = data[:first_scan_data] + b"\xff" * 2_000_000
    started = time.monotonic()

    assert rejection(decode_rgb, padded).reason.startswith(("truncated", "corrupt"))
    assert time.monotonic() - started < 2


def test_padding_between_markers_hides_no_scan():
    scan = with_scans(11)[len(with_scans(10)) - 2 : -2]
    hidden = with_scans(10)[:-2] + (b"\xff\x01" + scan + b"\0\0\xff\xff") * 50_000 + b"\xff\xd9"
    assert rejection(decode_rgb, hidden).reason.startswith("too large: ")


@pytest.mark.parametrize("raised", [struct.error, SyntaxError, OverflowError, zlib.error, RecursionError, KeyError])
@pytest.mark.parametrize("decode", [decode_rgb, decode_labels, decode_saliency])
def test_any_exception_of_a_decoder_becomes_a_rejection(monkeypatch: pytest.MonkeyPatch, raised: type, decode):
    def load(self: ImageFile.ImageFile) -> None:
        raise raised("deep inside")

    data = encoded(RAMP[..., 0])
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)  # no file is known that raises each of these
    rejected = rejection(decode, data)

    assert rejected.reason.startswith("corrupt: ")
    assert raised.__name__ in rejected.reason
    assert isinstance(rejected.__cause__, raised)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_interrupt_and_lack_of_memory_are_no_rejection(monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]):
    def load(self: ImageFile.ImageFile) -> None:
        raise raised

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(raised):
        decode_rgb(encoded(RAMP))


def test_rejection_can_be_pickled():
    rejected = pickle.loads(pickle.dumps(rejection(decode_rgb, b"")))
    assert isinstance(rejected, RejectedImage)
    assert rejected.reason == "empty: 0 bytes"


def picture_of_mode(mode: str) -> bytes:
    """Returns a picture of noise with an EXIF orientation."""
    rng = np.random.default_rng(0)
    if mode == "I;16":
        picture = Image.fromarray(rng.integers(0, 65536, (50, 70), np.uint16))
    else:
        picture = Image.fromarray(rng.integers(0, 256, (50, 70, 3), np.uint8)).convert(mode)

    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture, "TIFF" if mode == "CMYK" else "PNG", exif=exif)


every_mode = pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "1", "I;16"])


@every_mode
def test_decode_square_equals_decoding_and_resizing(mode: str) -> None:
    data = picture_of_mode(mode)
    np.testing.assert_array_equal(decode_square(data, 33), resized(decode_rgb(data), 33, 33))


@every_mode
def test_decode_square_rejects_truncated_data(mode: str) -> None:
    data = picture_of_mode(mode)
    with pytest.raises(RejectedImage, match=r"truncated|corrupt"):
        decode_square(data[: len(data) // 2], 33)

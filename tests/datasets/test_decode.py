"""Bytes to arrays: the array of each kind of picture, rejections, reasons; hostile bytes raise nothing else."""

import pickle
import re
import struct
import time
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from mcis.datasets.images.decode import (
    MAX_PIXELS,
    RejectedImage,
    decode_labels,
    decode_picture,
    decode_saliency,
    decode_square,
    fit_picture,
    fitted_size,
    is_upright_jpeg,
)
from mcis.datasets.images.masks import decode_mask
from mcis.datasets.images.matlab import decode_mat_labels

H, W = 40, 48
RAMP = np.stack(np.broadcast_arrays(np.arange(H)[:, None] * 5, np.arange(W) * 4, 77), -1).astype(np.uint8)
"""(H, W, 3): every pixel another color, so a flip or a turn shows."""


def encoded(image: Image.Image | np.ndarray, form: str = "PNG", **options: object) -> bytes:
    stream = BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, form, **options)
    return stream.getvalue()


def png(width: int, height: int, bits: int, color: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG by the letter of its specification; `rows` before compression, each with its filter byte."""
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), *extra, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def decode_rgb(data: bytes, **options: int) -> np.ndarray:
    return decode_picture(data, **options).rgb


def rejection(call, *arguments: object, **options: object) -> RejectedImage:
    with pytest.raises(RejectedImage) as raised:
        call(*arguments, **options)
    return raised.value


def without_bytes(parameter: object) -> str | None:
    """Names of test cases: a picture's bytes say nothing."""
    return "" if isinstance(parameter, bytes) else None


# --- decode_picture: what becomes of each kind


@pytest.mark.parametrize(
    ("form", "options"), [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("PPM", {}), ("WEBP", {"lossless": True})]
)
def test_lossless_rgb_is_kept(form: str, options: dict):
    rgb = decode_rgb(encoded(RAMP, form, **options))
    assert rgb.dtype == np.uint8
    assert rgb.flags.c_contiguous
    assert rgb.flags.writeable
    np.testing.assert_array_equal(rgb, RAMP)


# Where the pixel stored at (r, c) of an (h, w) array is shown, from the EXIF standard's words: "the 0th row is the
# visual top / right / ..., the 0th column the visual left / ...".
SHOWN = {
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
@pytest.mark.parametrize("orientation", [*SHOWN, 99])
def test_exif_orientation_is_applied(form: str, orientation: int):
    expected = np.zeros((W, H, 3) if 5 <= orientation <= 8 else (H, W, 3), np.uint8)
    for r, c in np.ndindex(H, W):
        expected[SHOWN.get(orientation, SHOWN[1])(r, c, H, W)] = RAMP[r, c]
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(decode_rgb(encoded(RAMP, form, exif=exif)), expected)


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
@pytest.mark.parametrize(
    ("ink", "color"), [((0, 0, 0, 0), (255, 255, 255)), ((255, 0, 0, 0), (0, 255, 255)), ((0, 0, 0, 255), (0, 0, 0))]
)
def test_cmyk_is_ink_on_white(form: str, ink: tuple, color: tuple):
    assert np.abs(decode_rgb(encoded(Image.new("CMYK", (W, H), ink), form)).astype(int) - color).max() <= 2


def test_sixteen_bit_gray_is_scaled_to_the_nearest():
    values = np.linspace(0, 65535, H * W).astype(np.uint16).reshape(H, W)
    expected = np.rint(values / 257).astype(np.uint8)
    for form in ("PNG", "TIFF"):
        np.testing.assert_array_equal(decode_rgb(encoded(values, form)), expected[..., None].repeat(3, axis=2))
    np.testing.assert_array_equal(decode_rgb(encoded(values.astype(np.int32), "TIFF"))[..., 0], expected)


def test_sixteen_bit_color_is_scaled():
    values = np.random.default_rng(0).integers(0, 65536, (H, W, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    assert np.abs(decode_rgb(png(W, H, 16, 2, rows)) - values / 257).max() <= 1


def test_sixteen_bit_gray_keeps_its_transparent_value_white():
    values = np.tile(np.array([0, 1000], ">u2"), (H, W // 2))
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    rgb = decode_rgb(png(W, H, 16, 0, rows, chunk(b"tRNS", struct.pack(">H", 0))))
    assert rgb[0, :2].tolist() == [[255] * 3, [4] * 3]


def test_integers_and_floats_of_unknown_range_are_rejected():
    wide = np.full((H, W), 70_000, np.int32)
    for values in (wide, -wide, wide.astype(np.float32)):
        assert rejection(decode_rgb, encoded(values, "TIFF")).reason.startswith("unsupported: ")


def test_gray_and_black_and_white():
    gray = RAMP[..., 0]
    np.testing.assert_array_equal(decode_rgb(encoded(gray)), np.repeat(gray[..., None], 3, -1))
    rgb = decode_rgb(encoded(Image.fromarray(gray > 50)))
    np.testing.assert_array_equal(rgb[..., 1], np.where(gray > 50, 255, 0))


def test_palette_becomes_its_colors():
    image = Image.fromarray((np.indices((H, W)).sum(0) % 2).astype(np.uint8))
    image.putpalette([10, 20, 30, 200, 100, 50])
    assert decode_rgb(encoded(image))[0, :2].tolist() == [[10, 20, 30], [200, 100, 50]]
    assert decode_rgb(encoded(image, transparency=0))[0, :2].tolist() == [[255, 255, 255], [200, 100, 50]]
    half = decode_rgb(encoded(image, transparency=bytes([51, 255])))  # a fifth of (10, 20, 30), the rest white
    assert np.abs(half[0, 0].astype(int) - [206, 208, 210]).max() <= 1


def test_alpha_is_laid_on_white():
    rgba = np.zeros((H, W, 4), np.uint8)
    rgba[:, 0], rgba[:, 1], rgba[:, 2] = (200, 0, 0, 255), (200, 0, 0, 51), (200, 0, 0, 0)
    rgb = decode_rgb(encoded(rgba))
    assert np.abs(rgb[0, :3].astype(int) - [[200, 0, 0], [244, 204, 204], [255, 255, 255]]).max() <= 1
    gray = Image.merge("LA", [Image.new("L", (W, H), 100), Image.new("L", (W, H), 0)])
    assert (decode_rgb(encoded(gray)) == 255).all()
    key = decode_rgb(encoded(RAMP, transparency=(0, 0, 77)))
    assert key[0, 0].tolist() == [255] * 3
    np.testing.assert_array_equal(key[1:], RAMP[1:])


# --- decode_picture: pictures that are made smaller


@settings(max_examples=100)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 3000))
def test_a_picture_is_fitted_with_its_shape(height: int, width: int, most: int):
    fit = fitted_size(height, width, most)
    assert fitted_size(width, height, most) == fit[::-1]
    if max(height, width) <= most:
        assert fit == (height, width) == fitted_size(height, width, None)
    else:
        assert max(fit) == most
        assert all(abs(a - b * most / max(height, width)) <= 1 for a, b in zip(fit, (height, width), strict=True))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_large_picture_is_read_smaller_and_upright(form: str, orientation: int):
    rows, columns = np.indices((301, 450))
    picture = Image.fromarray(np.stack([rows // 2, columns // 2, (rows + columns) // 4], axis=-1).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture, form, exif=exif)
    whole, smaller = decode_rgb(data), decode_rgb(data, max_side=100)
    height, width, _ = whole.shape
    assert smaller.shape == (*fitted_size(height, width, 100), 3)
    wanted = np.asarray(Image.fromarray(whole).resize(smaller.shape[1::-1], Image.Resampling.BILINEAR))
    assert np.abs(smaller.astype(int) - wanted).max() <= (6 if form == "JPEG" else 0)
    square = Image.fromarray(whole).resize((60, 60), Image.Resampling.BILINEAR)
    assert np.abs(decode_square(data, 60).astype(int) - np.asarray(square)).max() <= (6 if form == "JPEG" else 0)
    np.testing.assert_array_equal(decode_rgb(data, max_side=450), whole)
    for side in (100, 450):
        assert decode_picture(data, max_side=side)[1:] == whole.shape[:2]
    array = fit_picture(whole, 100)
    np.testing.assert_array_equal(array.rgb, wanted)
    assert array[1:] == whole.shape[:2]


@pytest.mark.parametrize("array", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)])
def test_an_array_that_is_no_picture_is_refused(array: np.ndarray):
    with pytest.raises(ValueError, match=r"expected uint8 \(H, W, 3\), not empty"):
        fit_picture(array, 10)


def test_a_large_jpeg_is_not_decoded_at_its_full_size(monkeypatch: pytest.MonkeyPatch):
    data, sizes = encoded(Image.new("RGB", (900, 600)), "JPEG"), []

    def watch(image: Image.Image) -> np.ndarray:
        sizes.append(image.size)
        return np.asarray(image)

    monkeypatch.setattr("mcis.datasets.images.decode._rgb", watch)
    decode_rgb(data, max_side=200)
    assert sizes == [(225, 150)]
    monkeypatch.setattr("mcis.datasets.images.decode._upright", lambda image: Image.fromarray(watch(image)))
    decode_square(data, 100)
    assert sizes[1:] == [(225, 150)]


# --- decode_picture: what is rejected


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"),
        (b"\n<!DOCTYPE html><html>403 Forbidden</html>", "not an image: seems to be HTML, XML or SVG; expected JPEG, "),
        (b"\xff\xd8\xff", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n", "not an image"),
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
def test_what_a_file_holds_is_not_quoted(data: bytes):
    for decode in (decode_rgb, decode_labels, decode_saliency, decode_mask, decode_mat_labels):
        assert "hunt" not in rejection(decode, data).reason


@pytest.mark.parametrize(
    ("form", "options"),
    [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("GIF", {}), ("BMP", {}), ("TIFF", {}), ("PPM", {})],
)
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_truncated_file_is_rejected(form: str, options: dict, share: float):
    noise = np.random.default_rng(0).integers(0, 256, (H, W, 3), dtype=np.uint8)
    data = encoded(noise, form, **options)
    assert rejection(decode_rgb, data[: int(len(data) * share)]).reason.startswith("truncated: ")


@pytest.mark.filterwarnings("error")
def test_sizes_are_limited_by_the_header_before_decoding():
    # The header alone is there: had anything been decoded, the reason would be that the file is cut.
    rejected = rejection(decode_rgb, png(10_000, 10_001, 8, 2, b""))
    assert rejected.reason == f"too large: 10000x10001 pixels, more than {MAX_PIXELS}"
    assert rejection(decode_rgb, png(200_000, 200_000, 8, 2, b"")).reason.startswith("too large: ")
    assert rejection(decode_labels, png(10_000, 10_001, 8, 3, b"")).reason.startswith("too large: ")
    assert rejection(decode_saliency, png(10_000, 10_001, 8, 0, b"")).reason.startswith("too large: ")


def test_limits_are_arguments_and_inclusive():
    data = encoded(RAMP)
    assert decode_rgb(data, min_side=H, max_pixels=H * W).shape == RAMP.shape
    assert rejection(decode_rgb, data, min_side=H + 1).reason.startswith("too small: 48x40 pixels, ")
    assert rejection(decode_rgb, data, max_pixels=H * W - 1).reason.startswith("too large: ")


def with_scans(scans: int, side: int = 300) -> bytes:
    """A progressive JPEG with further scans of the kind that it ends with, of some ten bytes each."""
    data = encoded(np.zeros((side, side, 3), np.uint8), "JPEG", progressive=True)
    starts = [match.start() for match in re.finditer(b"\xff\xda", data)]
    return data[:-2] + data[starts[-1] : -2] * (scans - len(starts)) + data[-2:]


def test_a_jpeg_of_many_scans_is_rejected_before_it_is_decoded():
    """50,000 scans of 90,000 pixels would take ten seconds, those of a large picture hours."""
    began = time.monotonic()
    for decode in (decode_rgb, decode_saliency, is_upright_jpeg):
        reason = rejection(decode, with_scans(50_000)).reason
        assert reason == "too large: 50000 scans of 300x300 pixels, more than 11111"
    assert time.monotonic() - began < 2
    assert rejection(decode_rgb, with_scans(11_112)).reason.startswith("too large: ")
    assert decode_rgb(with_scans(100)).shape == (300, 300, 3)


def test_scans_that_are_none_of_the_picture_do_not_count():
    """A film behind the picture, as telephones write it, and a thumbnail within."""
    film = b"\xff\xda\0\0" * 100_000
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + 60_000) + b"\xff\xda" * 30_000
    picture = with_scans(10)
    assert decode_rgb(picture[:2] + thumbnail + picture[2:] + film).shape == (300, 300, 3)


def test_scans_of_a_sequential_picture_count_where_they_do_not_have_all_components():
    """Pillow writes one scan of all components; here each component has one, and the last has many."""
    data = encoded(np.zeros((48, 48, 3), np.uint8), "JPEG", subsampling=0)
    start = data.index(b"\xff\xda")
    one = b"\xff\xda\0\x08\x01%c\x00\0\x3f\0" + bytes(40)
    many = data[:start] + b"".join(one % component for component in (1, 2, 3)) + one % 3 * 500_000 + b"\xff\xd9"
    assert rejection(decode_rgb, many).reason == "too large: 500003 scans of 48x48 pixels, more than 434027"
    behind = data[:-2] + one % 3 * 500_000 + b"\xff\xd9"
    began = time.monotonic()
    reason = rejection(decode_rgb, behind).reason
    assert reason.startswith("corrupt: "), "libjpeg reads no scan behind one of all components"
    assert time.monotonic() - began < 1


def test_endless_padding_is_passed_over_at_once():
    began = time.monotonic()
    data = with_scans(10)
    at = data.index(b"\xff\xda") + 14
    assert rejection(decode_rgb, data[:at] + b"\xff" * 2_000_000).reason.startswith(("truncated", "corrupt"))
    assert time.monotonic() - began < 2


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
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)  # no bytes are known for each of these
    rejected = rejection(decode, data)
    assert rejected.reason.startswith("corrupt: ")
    assert raised.__name__ in rejected.reason
    assert isinstance(rejected.__cause__, raised)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_what_says_nothing_of_a_picture_is_no_rejection(monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]):
    def load(self: ImageFile.ImageFile) -> None:
        raise raised

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(raised):
        decode_rgb(encoded(RAMP))


def test_a_rejection_travels_between_processes():
    rejected = pickle.loads(pickle.dumps(rejection(decode_rgb, b"")))
    assert (type(rejected), rejected.reason) == (RejectedImage, "empty: 0 bytes")


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_decoding_squashed_is_decoding_then_squashing(mode: str) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8))
    if mode == "I;16":
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (50, 70), np.uint16))
    else:
        picture = picture.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(picture, "TIFF" if mode == "CMYK" else "PNG", exif=exif)
    whole = Image.fromarray(decode_picture(data).rgb).resize((33, 33), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(decode_square(data, 33), np.asarray(whole))
    with pytest.raises(RejectedImage, match=r"truncated|corrupt"):
        decode_square(data[: len(data) // 2], 33)

"""Bytes -> uint8 arrays, or a RejectedImage that says why; and arrays -> PNG. No other module opens pictures.

Bytes come from crawls and old archives, so every decoder here takes hostile input: any exception of Pillow becomes a
RejectedImage, but for a lack of memory, which is no verdict; no pixel is decoded before the header's size is checked,
and only the formats below are tried (Pillow knows others that run programs, such as EPS).
"""

import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from mcis.datasets.classes import palette
from mcis.datasets.errors import one_line, unquoted

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
"""The formats that are tried, by Pillow's names; a file's name does not matter. JPEG includes MPO."""

MAX_PIXELS = 50_000_000
"""Largest width x height that is decoded where nothing else is asked for: 150 MB as RGB, and at most 20 bytes a pixel,
1 GB, while it is decoded and transparency is removed."""

PILLOW_MAX_PIXELS = 178_956_970
"""Largest width x height that Pillow decodes, for files that an index has let in under a limit of its own."""

_MAX_SCANS, _MAX_WORK = 20, 1_000_000_000
"""Most scans of a JPEG, or so many pixels in all scans where that is more: cameras write 1 and web pages 10 or so. Each
scan goes over the whole picture, 2 to 12 ns a pixel, however few bytes it has; 50 KB can take minutes."""
_MARKER = re.compile(rb"\xff([^\xff\0\xd0-\xd7])")
"""A marker behind entropy-coded data, in which 0xff is followed by 0 or begins a restart marker (ITU T.81, B.1.1)."""

DECODER_VERSION = 3
"""Version of the decoders, raised when the same bytes give other pixels or another verdict, so that what earlier
versions have kept of them is not used."""

_OTHERS = {b"<": "HTML, XML or SVG", b"%PDF": "a PDF", b"%!PS": "PostScript", b"PK\3\4": "a ZIP archive"}
"""How files begin that often lie where an image is expected. What a file holds is never quoted: it may be a secret."""

MAX_REASON = 400
"""Longest reason of a rejection, characters."""

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> the operation that turns the picture upright (EXIF 2.32, tag 0x0112); none for other values."""
_ORIENTATION = 0x0112
_LYING = (5, 6, 7, 8)
"""Orientations of pictures whose width and height are exchanged."""

_GRAY_TOLERANCE = 8
"""Largest difference between channels, of 255, that still counts as gray: JPEG moves them by a few."""


class RejectedImage(ValueError):
    """Bytes that give no usable picture.

    Attributes:
        reason: one line of at most 400 characters for a person, "<kind>: <detail>", of the kinds "empty", "not an
            image", "too large", "too small", "truncated", "unsupported" and "corrupt", by which they are counted.
    """

    def __init__(self, reason: str):
        self.reason = one_line(reason, MAX_REASON)
        super().__init__(self.reason)


def fitted_size(height: int, width: int, max_side: int | None) -> tuple[int, int]:
    """Height and width of a picture once its longer side is at most `max_side` pixels; None = as it is."""
    longest = max(height, width)
    if max_side is None or longest <= max_side:
        return height, width
    return max(1, round(height * max_side / longest)), max(1, round(width * max_side / longest))


class Picture(NamedTuple):
    """A picture that may have been made smaller.

    Attributes:
        rgb: (h, w, 3) uint8.
        height, width: of the whole picture, pixels, orientation applied.
    """

    rgb: np.ndarray
    height: int
    width: int


def fit_picture(rgb: np.ndarray, max_side: int | None) -> Picture:
    """A picture (H, W, 3) uint8, made to fit where its longer side exceeds `max_side` pixels; None = as it is.
    ValueError for another shape or type."""
    if rgb.ndim != 3 or rgb.shape[2] != 3 or rgb.dtype != np.uint8 or not rgb.size:
        raise ValueError(f"an image is {rgb.dtype} of shape {rgb.shape}; expected uint8 (H, W, 3), not empty")
    height, width = rgb.shape[:2]
    smaller = fitted_size(height, width, max_side)
    return Picture(rgb if smaller == (height, width) else _resized(rgb, *smaller), height, width)


def decode_picture(
    data: bytes, *, min_side: int = 32, max_pixels: int = MAX_PIXELS, max_side: int | None = None
) -> Picture:
    """Bytes of a picture -> RGB, as a person would see it, and the size of the whole picture.

    EXIF orientation is applied. Of an animation, the first frame. Gray, palette and CMYK become RGB (CMYK by the plain
    formula; embedded color profiles are not applied). 16 bits per channel are scaled to 8, not clipped. A transparent
    picture is composed over white, the page that such pictures are drawn for.

    Args:
        data: the content of a file in one of FORMATS.
        min_side: least width and height, pixels.
        max_pixels: greatest width x height, checked before decoding; PILLOW_MAX_PIXELS also applies.
        max_side: longest side, pixels; a larger picture is resized to fit (`fitted_size`), bilinear, averaging. A JPEG
            is then decoded at 1/2, 1/4 or 1/8 of its size, where that is no smaller.

    Raises:
        RejectedImage: for any content that gives no such array.
        MemoryError: the machine is short of it, as every decoder here may raise; nothing else is raised for bytes.
    """
    with _opened(data, FORMATS, min_side, max_pixels) as image:
        width, height = image.size
        smaller = fitted_size(height, width, max_side)
        if smaller == (height, width):
            rgb = _rgb(_upright(image))
            return Picture(rgb, *rgb.shape[:2])
        image.draft(None, smaller[::-1])  # of other formats than JPEG this changes nothing
        upright = _upright(image)
        turn = -1 if image.getexif().get(_ORIENTATION) in _LYING else 1
        return Picture(_resized(_rgb(upright), *smaller[::turn]), *(height, width)[::turn])


def is_upright_jpeg(data: bytes) -> bool:
    """Whether bytes are a JPEG in gray or RGB without an EXIF orientation, which any reader shows alike; RejectedImage
    where they have no header of a picture."""
    with _opened(data, FORMATS, 1, PILLOW_MAX_PIXELS) as image:
        upright = image.getexif().get(_ORIENTATION, 1) not in _UPRIGHT
        return image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB") and upright


def decode_square(data: bytes, size: int, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """A picture at size x size pixels, (size, size, 3) uint8, without its aspect ratio: bilinear, averaging where it
    shrinks, a JPEG as in `decode_picture`; RejectedImage as there."""
    with _opened(data, FORMATS, 1, max_pixels) as image:
        image.draft(None, (size, size))  # of other formats than JPEG this changes nothing
        image = _upright(image)
        if image.mode != "RGB" or image.has_transparency_data:
            image = Image.fromarray(_rgb(image))
        return np.array(image.resize((size, size), Image.Resampling.BILINEAR))


def decode_labels(data: bytes, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Bytes of a mask -> (H, W) uint8 labels: the indices of a palette PNG or the values of an 8-bit gray one.

    Colors are never looked at. EXIF orientation is not applied: indices are stored as they lie on the image.

    Args:
        max_pixels: greatest width x height, checked before decoding.

    Raises:
        RejectedImage: not a PNG, damaged, or of a kind whose values are no labels: color, alpha, 16 bits; gray of
            fewer than 8 bits too, because writers disagree whether its 1 means 1 or white.
    """
    with _opened(data, ("PNG",), 1, max_pixels) as image:
        bits = data[24]  # the IHDR chunk comes first in every PNG, with the bit depth in this byte
        if image.mode != "P" and (image.mode, bits) != ("L", 8):
            mode = f"unsupported: a mask of mode {image.mode} with {bits} bits per channel"
            raise RejectedImage(f"{mode}; labels are read from palette or 8-bit gray PNG")
        return np.array(image)


def decode_saliency(data: bytes, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Bytes of a saliency map -> (H, W) uint8: 0 is background, 255 certainly an object.

    Gray of 1, 8 or 16 bits; palette and RGB too where every color is gray.

    Raises:
        RejectedImage: not an image, damaged, or holding color or transparency, whose brightness would mean nothing.
    """
    with _opened(data, FORMATS, 1, max_pixels) as image:
        if image.has_transparency_data:
            raise RejectedImage(f"unsupported: a saliency map with transparency (mode {image.mode}); expected gray")
        if image.mode == "L":
            return np.array(image)
        rgb = _rgb(image)
        spread = int(np.ptp(rgb, axis=-1).max())
        if spread > _GRAY_TOLERANCE:
            raise RejectedImage(f"unsupported: a saliency map in color, channels differ by {spread}; expected gray")
        return rgb[..., 1].copy()


def encode_labels(labels: np.ndarray) -> bytes:
    """Labels (H, W) uint8 -> a palette PNG in PASCAL's colors; `decode_labels` gives the same array back.

    Run-length matching suits masks, which are flat: it takes as long as zlib's fastest level, less than half of level
    6, for up to a quarter more bytes.
    """
    image = Image.fromarray(labels)
    image.putpalette(palette().tobytes())
    stream = BytesIO()
    image.save(stream, "PNG", compress_type=zlib.Z_RLE)
    return stream.getvalue()


def resize_labels(labels: np.ndarray, height: int, width: int) -> np.ndarray:
    """(H, W) uint8 -> (height, width) uint8: nearest, so that no new label appears."""
    return np.array(Image.fromarray(labels).resize((width, height), Image.Resampling.NEAREST))


def _resized(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    """(H, W, 3) uint8 -> (height, width, 3) uint8: bilinear, averaging where it shrinks."""
    return np.array(Image.fromarray(rgb).resize((width, height), Image.Resampling.BILINEAR))


@contextmanager
def _opened(data: bytes, formats: tuple[str, ...], min_side: int, max_pixels: int) -> Iterator[Image.Image]:
    """The picture with its header read and nothing else; any exception raised inside becomes a RejectedImage."""
    stream = BytesIO(data)  # outside: anything but bytes is the caller's mistake and raises TypeError
    with rejecting():
        yield _header(stream, formats, min_side, max_pixels)


@contextmanager
def rejecting() -> Iterator[None]:
    """Any exception that a decoder raises inside becomes a RejectedImage.

    Hostile bytes reach struct, zlib, memory and more, so every Exception counts. A warning of Pillow is no reason to
    reject, not even under `-W error`. The filter is set each time, because a caller may have changed the filters, and
    it stays set: images are decoded in threads, and a thread that restored the filters would do so for all.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        yield
    except (RejectedImage, MemoryError):  # a lack of memory says nothing of the picture
        raise
    except Image.DecompressionBombError as error:
        raise RejectedImage(f"too large: {error}") from error
    except Exception as error:
        cut = isinstance(error, EOFError) or "truncated" in str(error).lower()
        what = unquoted(error).partition(":")[0]  # behind a colon Pillow quotes without marks
        raise RejectedImage(f"{'truncated' if cut else 'corrupt'}: {type(error).__name__}: {what}") from error


def _header(stream: BytesIO, formats: tuple[str, ...], min_side: int, max_pixels: int) -> Image.Image:
    """Recognizes the format and checks the size that the header claims."""
    start = bytes(stream.getbuffer()[:24]).lstrip()
    if not stream.getbuffer().nbytes:
        raise RejectedImage("empty: 0 bytes")
    try:
        image = Image.open(stream, formats=formats)
    except UnidentifiedImageError as error:
        seems = next((f"seems to be {name}; " for begins, name in _OTHERS.items() if start.startswith(begins)), "")
        raise RejectedImage(f"not an image: {seems}expected {', '.join(formats)}") from error
    width, height = image.size
    if reason := size_problem(height, width, min_side, max_pixels):
        raise RejectedImage(reason)
    if image.format in ("JPEG", "MPO"):
        most = max(_MAX_SCANS, _MAX_WORK // (width * height))
        scans = _scans(stream.getvalue())
        if scans > most:
            raise RejectedImage(f"too large: {scans} scans of {width}x{height} pixels, more than {most}")
    return image


def size_problem(height: int, width: int, min_side: int, max_pixels: int) -> str | None:
    """Why a picture of so many pixels is rejected, None where it is not."""
    if width * height > max_pixels:
        return f"too large: {width}x{height} pixels, more than {max_pixels}"
    if min(width, height) < min_side:
        return f"too small: {width}x{height} pixels, both sides must be at least {min_side}"
    return None


def _scans(data: bytes) -> int:
    """The scans of a JPEG's first picture; thumbnails within its segments and what lies behind it do not count.

    Where the first scan has all components and the picture is not progressive, a decoder reads no further.
    """
    scans, offset, components = 0, 2, 0
    while marker := _MARKER.search(data, offset):
        kind, offset = marker[1][0], marker.end()
        if kind == 0xD9 or offset + 8 > len(data):  # the end of the picture, or of the file
            break
        if kind in (0xC0, 0xC1):
            components = data[offset + 7]
        if kind == 0xDA:
            scans += 1
            if data[offset + 2] == components:
                break
        if kind != 0x01:  # the one marker left that has no length
            offset += struct.unpack_from(">H", data, offset)[0]
    return scans


def _upright(image: Image.Image) -> Image.Image:
    """The decoded picture, turned as its EXIF orientation says."""
    image.load()
    turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def _rgb(image: Image.Image) -> np.ndarray:
    """A decoded picture of any mode -> (H, W, 3) uint8."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return np.repeat(_eight_bits(image)[..., None], 3, axis=-1)
    if image.mode == "F":
        raise RejectedImage("unsupported: pixels are floating point, whose range is unknown")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return np.array(image.convert("RGB"))


def _eight_bits(image: Image.Image) -> np.ndarray:
    """Gray of 16 bits, 0..65535, -> (H, W) uint8, 0..255 to the nearest; a transparent value is white."""
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise RejectedImage(f"unsupported: integer pixels from {low} to {high}; expected 0..65535")
    gray = ((values + 128) // 257).astype(np.uint8)
    transparent = image.info.get("transparency")
    return gray if transparent is None else np.where(values == transparent, np.uint8(255), gray)

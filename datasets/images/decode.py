"""Decodes photographs to uint8 arrays, or raises a RejectedImage with the reason.

`opened` opens all pictures, also label masks and saliency maps. The data comes from crawls and old archives, so every
decoder takes hostile input:

- Any exception of Pillow becomes a RejectedImage, except for MemoryError, which says nothing about the picture.
- The size in the header is checked before any pixel is decoded.
- Only the formats in FORMATS are tried. Pillow knows others that run programs, such as EPS. Other known formats are
  rejected by their names, with a command that converts them (`foreign_formats.py`).
"""

import importlib.util
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import NamedTuple

import numpy as np
import PIL
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from mcis.datasets.errors import one_line, unquoted
from mcis.datasets.images.foreign_formats import CONVERT_RAW, recognize
from mcis.datasets.images.value_range import ValueRange, range_problem, scaled_to_bytes

READS_HEIF = importlib.util.find_spec("pillow_heif") is not None
"""Whether HEIC photographs are read, by the optional library pillow-heif (extra `heif`)."""

if READS_HEIF:
    import pillow_heif

    pillow_heif.register_heif_opener()

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000", *(("HEIF",) if READS_HEIF else ()))
"""Formats that are tried, by Pillow's names, whatever the file name. JPEG includes MPO."""

MAX_PIXELS = 50_000_000
"""Default limit on width x height: 150 MB as RGB, and at most 20 bytes per pixel, 1 GB, while a picture is decoded and
its transparency is removed."""

PILLOW_MAX_PIXELS = 178_956_970
"""Largest width x height that Pillow decodes; the limit for files that an index accepted under a limit of its own, and
for their masks."""

_MAX_SCANS = 20
"""Maximum number of scans of a JPEG, unless _MAX_SCAN_PIXELS allows more. Cameras write 1, web pages about 10."""
_MAX_SCAN_PIXELS = 1_000_000_000
"""Maximum number of pixels in all scans of a JPEG together, unless _MAX_SCANS allows more. Each scan visits the whole
picture, at 2 to 12 ns per pixel, however few bytes it has, so that 50 KB can take minutes."""
_MARKER = re.compile(rb"\xff([^\xff\0\xd0-\xd7])")
"""A marker after entropy-coded data, in which 0xff is followed by 0 or begins a restart marker (ITU T.81, B.1.1)."""
_END_OF_IMAGE = 0xD9
_SEQUENTIAL_FRAMES = (0xC0, 0xC1)
_START_OF_SCAN = 0xDA
_TEMPORARY = 0x01  # the only marker matched by _MARKER that no length follows

DECODER_VERSION = f"4-{PIL.__version__}"
"""Version of the decoders, with that of Pillow. Raise it when the same bytes give other pixels, so that cached images
and features are computed again."""

CHECKS_VERSION = f"9-{PIL.__version__}" + ("-heif" if READS_HEIF else "")
"""Version of the image checks, with that of Pillow. Raise it when the check of the same bytes gives another result.
It depends on the optional decoder, so that a rejected HEIC photograph is read as soon as the decoder is installed."""

MAX_REASON = 400
"""Maximum length of the reason of a rejection, characters."""

_ORIENTATION = 0x0112
"""EXIF tag of the orientation (EXIF 2.32)."""
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> operation that turns the picture upright. Other values need none."""
_SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations that exchange width and height."""

_NEW_SUBFILE_TYPE = 254
"""TIFF tag whose bit 0 marks a version of reduced resolution (TIFF 6.0)."""
_PHOTOMETRIC = 262
"""TIFF tag that is 0, WhiteIsZero, in gray pictures whose value 0 is white."""
_SUB_IFDS = 330
"""TIFF tag of the directories of further pictures."""
_DNG_VERSION = 50706
"""TIFF tag that every DNG has."""

_DARK = 32
"""Pictures without a value of at least this, 0 to 255, are almost black."""
_BRIGHT = 223
"""Pictures without a value of at most this, 0 to 255, are almost white."""


class RejectedImage(ValueError):
    """Raised for bytes that give no usable picture.

    Attributes:
        reason: One line, "<kind>: <detail>", of at most MAX_REASON characters. Rejections are counted by kind: "empty",
            "not an image", "too large", "too small", "truncated", "unsupported" or "corrupt".
    """

    def __init__(self, reason: str):
        self.reason = one_line(reason, MAX_REASON)
        super().__init__(self.reason)


def fitted_size(height: int, width: int, max_side: int | None) -> tuple[int, int]:
    """Returns height and width of a picture after its longer side is limited to `max_side` pixels; None: no limit."""
    longest = max(height, width)
    if max_side is None or longest <= max_side:
        return height, width
    return max(1, round(height * max_side / longest)), max(1, round(width * max_side / longest))


class DecodedImage(NamedTuple):
    """A decoded image: its pixels as read, and the size of its file.

    Attributes:
        rgb: (h, w, 3) uint8. It is smaller than the original picture if that was resized.
        height: Height of the original picture, pixels, EXIF orientation applied.
        width: Width of the original picture, pixels, EXIF orientation applied.
    """

    rgb: np.ndarray
    height: int
    width: int


class PictureCheck(NamedTuple):
    """Size of a picture, and what may be wrong with its pixels.

    Attributes:
        height: Height, pixels, EXIF orientation applied.
        width: Width, pixels, EXIF orientation applied.
        pixels: Kind of unclear pixels, None for ordinary ones: "integers" or "floats" for gray of more than 8 bits,
            "deep color" for color of more than 8 bits, "transparent" if most pixels are more transparent than opaque,
            or "black" or "white" if a picture is almost that.
        low: Smallest value of pixels of more than 8 bits; None for others.
        high: Largest value of pixels of more than 8 bits; None for others.
    """

    height: int
    width: int
    pixels: str | None = None
    low: float | None = None
    high: float | None = None


def fit_picture(rgb: np.ndarray, max_side: int | None) -> DecodedImage:
    """Resizes a picture (H, W, 3) uint8 if its longer side exceeds `max_side` pixels; None: no limit.

    Raises:
        ValueError: The array has another shape or type, or is empty.
    """
    if rgb.ndim != 3 or rgb.shape[2] != 3 or rgb.dtype != np.uint8 or not rgb.size:
        raise ValueError(f"an image is {rgb.dtype} of shape {rgb.shape}; expected uint8 (H, W, 3), not empty")

    height, width = rgb.shape[:2]
    target_size = fitted_size(height, width, max_side)
    if target_size != (height, width):
        rgb = _resized(rgb, *target_size)
    return DecodedImage(rgb, height, width)


def decode_picture(
    data: bytes,
    *,
    min_side: int = 32,
    max_pixels: int = MAX_PIXELS,
    max_side: int | None = None,
    value_range: ValueRange | None = None,
) -> DecodedImage:
    """Decodes a picture to RGB as a person would see it.

    EXIF orientation is applied. An animation gives its first frame. Gray, palette and CMYK become RGB (CMYK by the
    plain formula; embedded color profiles are ignored). More than 8 bits per channel are scaled to 8, not clipped.
    Transparent pictures are composed over white, the page that they are usually drawn for.

    Args:
        data: Content of a file in one of FORMATS.
        min_side: Smallest width and height, pixels.
        max_pixels: Largest width x height, checked before decoding; PILLOW_MAX_PIXELS also applies.
        max_side: Longest side, pixels. A larger picture is resized to fit (`fitted_size`) by bilinear interpolation
            with averaging. A JPEG is then decoded at 1/2, 1/4 or 1/8 of its size, if that is not smaller. None: no
            limit.
        value_range: Values that become black and white in gray of more than 8 bits; values outside are clipped. None:
            0 to 65535 for integers; floating-point pixels are rejected.

    Raises:
        RejectedImage: The content is not a picture in one of FORMATS, is damaged, is too large or too small, or has
            pixels whose range is not known.
        MemoryError: Not enough memory. No content raises any other exception. Both errors apply to every decoder that
            uses `opened`.
    """
    with opened(data, FORMATS, min_side, max_pixels) as image:
        width, height = image.size
        fitted_height, fitted_width = fitted_size(height, width, max_side)

        if (fitted_height, fitted_width) == (height, width):
            rgb = to_rgb(_upright(image), value_range)
            return DecodedImage(rgb, *rgb.shape[:2])

        image.draft(None, (fitted_width, fitted_height))  # changes nothing for formats other than JPEG
        rgb = to_rgb(_upright(image), value_range)
        if _orientation(image) in _SIDEWAYS:
            return DecodedImage(_resized(rgb, fitted_width, fitted_height), width, height)
        return DecodedImage(_resized(rgb, fitted_height, fitted_width), height, width)


def check_picture(data: bytes, *, min_side: int = 32, max_pixels: int = MAX_PIXELS) -> PictureCheck:
    """Decodes a picture as `decode_picture` does, and checks whether the meaning of its pixels is clear.

    Pixels of an unknown range are no reason to reject; `range_problem` tells whether a range is needed.
    """
    with opened(data, FORMATS, min_side, max_pixels) as image:
        has_deep_color = any(";16" in str(tile.args) for tile in getattr(image, "tile", ()))
        image = _upright(image)
        if is_deep_gray(image):
            values = finite_values(image)
            return PictureCheck(image.height, image.width, gray_kind(image), float(values.min()), float(values.max()))

        rgb = to_rgb(image)
        if image.has_transparency_data and _is_mostly_transparent(image):
            return PictureCheck(image.height, image.width, "transparent")
        if has_deep_color:  # Pillow keeps the upper 8 of 16 bits
            low = 256 * int(rgb.min())
            high = 256 * int(rgb.max()) + 255
            return PictureCheck(image.height, image.width, "deep color", low, high)
        return PictureCheck(image.height, image.width, almost_uniform(rgb))


def almost_uniform(rgb: np.ndarray) -> str | None:
    """Returns "black" or "white" if a picture (H, W, 3) is almost that, else None."""
    if rgb.max() < _DARK:
        return "black"
    return "white" if rgb.min() > _BRIGHT else None


def is_upright_jpeg(data: bytes) -> bool:
    """Returns whether bytes are a JPEG in gray or RGB that needs no rotation. Every reader shows such a file alike.

    Raises:
        RejectedImage: The bytes have no header of a picture.
    """
    with opened(data, FORMATS, 1, PILLOW_MAX_PIXELS) as image:
        upright = _orientation(image) not in _UPRIGHT
        return image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB") and upright


def decode_square(
    data: bytes, size: int, *, max_pixels: int = MAX_PIXELS, value_range: ValueRange | None = None
) -> np.ndarray:
    """Decodes a picture and resizes it to a square, ignoring its aspect ratio.

    Bilinear interpolation with averaging. A JPEG is decoded at a fraction of its size, as in `decode_picture`.

    Args:
        size: Side of the square, pixels.
        max_pixels: Largest width x height of the picture.
        value_range: See `decode_picture`.

    Returns:
        (size, size, 3) uint8.

    Raises:
        RejectedImage: See `decode_picture`.
    """
    with opened(data, FORMATS, 1, max_pixels) as image:
        image.draft(None, (size, size))  # changes nothing for formats other than JPEG
        image = _upright(image)
        if image.mode != "RGB" or image.has_transparency_data:
            image = Image.fromarray(to_rgb(image, value_range))
        return np.array(image.resize((size, size), Image.Resampling.BILINEAR))


def _resized(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes (H, W, 3) uint8 to (height, width, 3) by bilinear interpolation with averaging."""
    return np.array(Image.fromarray(rgb).resize((width, height), Image.Resampling.BILINEAR))


@contextmanager
def opened(data: bytes, formats: tuple[str, ...], min_side: int, max_pixels: int) -> Iterator[Image.Image]:
    """Opens a picture and reads only its header. Any exception raised inside becomes a RejectedImage, see `rejecting`.

    Args:
        data: Content of a file.
        formats: The formats that are tried, by Pillow's names.
        min_side: Smallest width and height, pixels.
        max_pixels: Largest width x height.
    """
    stream = BytesIO(data)  # outside of `rejecting`: an argument that is not bytes is the caller's mistake
    with rejecting():
        yield _header(stream, formats, min_side, max_pixels)


@contextmanager
def rejecting() -> Iterator[None]:
    """Turns any exception that a decoder raises inside into a RejectedImage, except for MemoryError.

    Hostile bytes reach struct, zlib, memory and more, so every Exception counts. Pillow's warnings are no reason to
    reject, not even under `-W error`. The filter is set on every call, because a caller may have changed the filters.
    It is not restored: images are decoded in threads, and restoring would affect all of them.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        yield
    except (RejectedImage, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise RejectedImage(f"too large: {error}") from error
    except Exception as error:
        truncated = isinstance(error, EOFError) or "truncated" in str(error).lower()
        kind = "truncated" if truncated else "corrupt"
        detail = unquoted(error).partition(":")[0]  # after a colon, Pillow quotes content without quotation marks
        raise RejectedImage(f"{kind}: {type(error).__name__}: {detail}") from error


def _header(stream: BytesIO, formats: tuple[str, ...], min_side: int, max_pixels: int) -> Image.Image:
    """Recognizes the format, and checks the size in the header and the number of scans."""
    if not stream.getbuffer().nbytes:
        raise RejectedImage("empty: 0 bytes")

    try:
        image = Image.open(stream, formats=formats)
    except UnidentifiedImageError as error:
        raise RejectedImage(_unknown_format(stream.getvalue(), formats)) from error

    if isinstance(image, TiffImageFile) and _is_raw_photograph(image):
        raise RejectedImage(_conversion_needed("a raw photograph", CONVERT_RAW))

    width, height = image.size
    problem = size_problem(height, width, min_side, max_pixels)
    if problem:
        raise RejectedImage(problem)

    if image.format in ("JPEG", "MPO"):
        max_scans = max(_MAX_SCANS, _MAX_SCAN_PIXELS // (width * height))
        scans = _count_scans(stream.getvalue())
        if scans > max_scans:
            raise RejectedImage(f"too large: {scans} scans of {width}x{height} pixels, more than {max_scans}")
    return image


def _is_raw_photograph(image: TiffImageFile) -> bool:
    """Returns whether a TIFF is a raw photograph, such as NEF or DNG, of which Pillow reads a small thumbnail.

    Its first picture is a version of reduced resolution, and the full picture is in another directory.
    """
    tags = image.tag_v2
    is_thumbnail = bool(tags.get(_NEW_SUBFILE_TYPE, 0) & 1)
    return _DNG_VERSION in tags or (is_thumbnail and _SUB_IFDS in tags)


def _unknown_format(data: bytes, formats: tuple[str, ...]) -> str:
    """Returns why a file in none of these formats is rejected. Its content is not quoted, because it may be secret."""
    expected = f"expected {', '.join(formats)}"
    foreign = recognize(data)
    if foreign is None:
        return f"not an image: {expected}"
    if foreign.convert is None:
        return f"not an image: seems to be {foreign.name}; {expected}"
    return _conversion_needed(foreign.name, foreign.convert)


def _conversion_needed(name: str, convert: str) -> str:
    """Returns why a file of a format that is not read is rejected.

    Args:
        name: Name of the format with its article.
        convert: Command that converts the file.
    """
    return f"unsupported: {name}; convert it, for example by: {convert}"


def size_problem(height: int, width: int, min_side: int, max_pixels: int) -> str | None:
    """Returns why a picture of this size is rejected, or None if it is accepted.

    Args:
        min_side: Smallest width and height, pixels.
        max_pixels: Largest width x height.
    """
    if width * height > max_pixels:
        return f"too large: {width}x{height} pixels, more than {max_pixels}"
    if min(width, height) < min_side:
        return f"too small: {width}x{height} pixels, both sides must be at least {min_side}"
    return None


def _count_scans(data: bytes) -> int:
    """Counts the scans of a JPEG's first picture that a decoder reads.

    Thumbnails within its segments, and what follows the picture, do not count. If the first scan of a sequential
    picture has all components, decoders read no further scan.
    """
    scans = 0
    components = 0
    offset = 2

    while True:
        marker = _MARKER.search(data, offset)
        if marker is None:
            break
        kind = marker[1][0]
        offset = marker.end()

        end_of_file = offset + 8 > len(data)
        if kind == _END_OF_IMAGE or end_of_file:
            break
        if kind in _SEQUENTIAL_FRAMES:
            components = data[offset + 7]
        if kind == _START_OF_SCAN:
            scans += 1
            if data[offset + 2] == components:
                break
        if kind != _TEMPORARY:
            (segment_length,) = struct.unpack_from(">H", data, offset)
            offset += segment_length

    return scans


def _upright(image: Image.Image) -> Image.Image:
    """Decodes a picture and turns it by its EXIF orientation."""
    image.load()
    turn = _UPRIGHT.get(_orientation(image))
    image = black_is_zero(image)
    return image if turn is None else image.transpose(turn)


def black_is_zero(image: Image.Image) -> Image.Image:
    """Inverts a TIFF of gray of 16 bits whose value 0 is white. Pillow does this for at most 8 bits."""
    if isinstance(image, TiffImageFile) and image.mode == "I;16" and image.tag_v2.get(_PHOTOMETRIC) == 0:
        return Image.fromarray(~np.asarray(image))
    return image


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation of a picture; 1, upright, if it has none or its EXIF data cannot be read."""
    try:
        orientation: int = image.getexif().get(_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:  # damaged EXIF data raises errors of many kinds, and says nothing about the pixels
        return 1
    return orientation


def is_deep_gray(image: Image.Image) -> bool:
    """Returns whether pixels are gray of more than 8 bits: integers of 16 or 32 bits, or floating point."""
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def _is_mostly_transparent(image: Image.Image) -> bool:
    """Returns whether most pixels are more transparent than opaque."""
    alpha = np.asarray(image.convert("RGBA").getchannel("A"))
    return bool(np.mean(alpha < 128) > 0.5)


def to_rgb(image: Image.Image, value_range: ValueRange | None = None) -> np.ndarray:
    """Converts a decoded picture of any mode to (H, W, 3) uint8. Transparent pixels become white.

    Raises:
        RejectedImage: The picture has gray pixels of more than 8 bits whose range is not known.
    """
    if is_deep_gray(image):
        return np.repeat(_eight_bits(image, value_range)[..., None], 3, axis=-1)

    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return np.array(image.convert("RGB"))


def _eight_bits(image: Image.Image, value_range: ValueRange | None) -> np.ndarray:
    """Scales gray of more than 8 bits to (H, W) uint8, rounded to nearest. A transparent value becomes white."""
    values = finite_values(image)
    problem = range_problem(gray_kind(image), float(values.min()), float(values.max()), value_range)
    if problem:
        raise RejectedImage(problem)

    gray = scaled_to_bytes(values, value_range)
    transparent = image.info.get("transparency")
    return gray if transparent is None else np.where(values == transparent, np.uint8(255), gray)


def finite_values(image: Image.Image) -> np.ndarray:
    """Returns the values of gray of more than 8 bits, (H, W).

    Raises:
        RejectedImage: A value is infinite or not a number.
    """
    values = np.asarray(image)
    if not np.isfinite(values).all():
        raise RejectedImage("unsupported: pixels that are not finite numbers")
    return values


def gray_kind(image: Image.Image) -> str:
    """Returns the kind of gray of more than 8 bits, see `PictureCheck.pixels`: "floats" or "integers"."""
    return "floats" if image.mode == "F" else "integers"

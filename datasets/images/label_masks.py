"""Decodes, encodes and resizes label masks, and reads those that other programs wrote."""

import functools
import zlib
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image

from mcis.datasets.classes import IGNORE, palette
from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import PILLOW_MAX_PIXELS, RejectedImage, opened
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import read_decoded


class LabelMask(NamedTuple):
    """A label mask of another program.

    Attributes:
        labels: (H, W) uint8.
        differs_from_indices: Whether the labels are those of the colors of a palette, and its indices differ from them.
    """

    labels: np.ndarray
    differs_from_indices: bool = False


def decode_labels(data: bytes, *, max_pixels: int = PILLOW_MAX_PIXELS) -> np.ndarray:
    """Decodes a label mask, (H, W) uint8: the indices of a palette PNG, or the values of an 8-bit gray one.

    Colors are ignored. EXIF orientation is not applied, because the indices are stored in the orientation of the image.

    Args:
        max_pixels: Largest width x height, checked before decoding.

    Raises:
        RejectedImage: The data is no PNG, is damaged, or its values are no labels: color, alpha or 16 bits. Gray of
            fewer than 8 bits is rejected too, because writers disagree whether its 1 means 1 or white.
    """
    with opened(data, ("PNG",), 1, max_pixels) as image:
        bits = data[24]  # every PNG begins with the chunk IHDR, whose bit depth is this byte
        if image.mode != "P" and (image.mode, bits) != ("L", 8):
            raise RejectedImage(
                f"unsupported: a mask of mode {image.mode} with {bits} bits per channel; "
                "labels are read from palette or 8-bit gray PNG"
            )
        return np.array(image)


def decode_colored_labels(data: bytes, height: int, width: int) -> LabelMask:
    """Decodes a label mask of another program: as `decode_labels`, or in the colors of PASCAL VOC.

    Colors are read from RGB, and from a palette if all of its colors are those of labels (`classes.palette`). Editors
    and converters to a palette number colors in an order of their own.

    Args:
        height: Height that the mask must have, pixels; checked before decoding.
        width: Width that the mask must have, pixels.

    Raises:
        RejectedImage: See `decode_labels`; or the size is another, or an RGB picture has a color that is no label's.
    """
    with opened(data, ("PNG",), 1, PILLOW_MAX_PIXELS) as image:
        if image.size != (width, height):
            raise RejectedImage(f"unsupported: a mask of {image.height}x{image.width} pixels")
        if image.mode == "RGB":
            return LabelMask(_labels_of_colors(np.array(image)))
        if image.mode == "P":
            return _labels_of_palette(image)
    return LabelMask(decode_labels(data))


def _labels_of_palette(image: Image.Image) -> LabelMask:
    """Returns the labels of a palette picture: of its colors if all of them are colors of labels, else its indices.

    Unused colors of the palette count too, so that all pictures with the same palette are read in the same way. If
    each used index i has the gray (i, i, i), the picture was a gray one, and its labels are the indices.
    """
    indices = np.array(image)
    used = np.unique(indices)
    colors = np.reshape(image.getpalette() or [], (-1, 3)).astype(np.uint8)
    if used[-1] >= len(colors) or (colors[used] == used[:, None]).all():
        return LabelMask(indices)

    try:
        (label_of_index,) = _labels_of_colors(colors[None])
    except RejectedImage:
        return LabelMask(indices)
    return LabelMask(label_of_index[indices], bool((label_of_index[used] != used).any()))


def _labels_of_colors(rgb: np.ndarray) -> np.ndarray:
    """Returns the labels of colors (H, W, 3). Works row by row, because it takes about 40 bytes per color."""
    weights = np.array([1 << 16, 1 << 8, 1])
    known = palette().astype(np.int64) @ weights
    order = np.argsort(known)
    labels = np.empty(rgb.shape[:2], np.uint8)

    for row, row_labels in zip(rgb, labels, strict=True):
        colors = row.astype(np.int64) @ weights
        positions = np.searchsorted(known, colors, sorter=order).clip(max=len(order) - 1)
        row_labels[:] = order[positions]
        if (known[row_labels] != colors).any():
            raise RejectedImage("unsupported: a mask in RGB with colors that are not those of PASCAL VOC's labels")
    return labels


def encode_labels(labels: np.ndarray) -> bytes:
    """Encodes labels (H, W) uint8 as a palette PNG in PASCAL's colors. `decode_labels` returns the same array.

    Run-length matching suits flat masks: it is as fast as zlib's level 1 and more than twice as fast as level 6, with
    at most a quarter more bytes.
    """
    image = Image.fromarray(labels)
    image.putpalette(palette().tobytes())
    stream = BytesIO()
    image.save(stream, "PNG", compress_type=zlib.Z_RLE)
    return stream.getvalue()


def resize_labels(labels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes labels (H, W) uint8 to (height, width) by nearest neighbor, so that no new label appears."""
    return np.array(Image.fromarray(labels).resize((width, height), Image.Resampling.NEAREST))


def read_label_mask(file: str, shape: tuple[int, int], classes: int, *, may_ignore: bool = True) -> LabelMask:
    """Reads a label mask.

    Args:
        file: A palette or 8-bit gray PNG, or one in the colors of PASCAL VOC, see `decode_colored_labels`.
        shape: Height and width of its image, pixels.
        classes: K; labels are 0..K, and 255 for ignored pixels.
        may_ignore: Whether pixels may be ignored.

    Raises:
        UserError: The file is unreadable, has another size than its image, a label above K, or ignored pixels that it
            may not have.
    """
    height, width = shape
    remedy = "replace the file, or remove it from the folder"
    try:
        mask = read_decoded(file, functools.partial(decode_colored_labels, height=height, width=width))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the mask {file} cannot be read ({error_text(error)})",
            f"a label PNG of {height}x{width} pixels (height x width), the size of its image",
            remedy,
        ) from None

    labels = mask.labels
    unknown = labels[(labels > classes) & (labels != IGNORE)]
    if unknown.size:
        found = f"the mask {file} has label {int(unknown.max())}"
        raise UserError(found, f"labels of the {classes} classes: 0..{classes} and {IGNORE}", remedy)
    if not may_ignore and (labels == IGNORE).any():
        raise UserError(
            f"the mask {file} has pixels that are ignored, {IGNORE}",
            f"predictions with a label 0..{classes} at every pixel",
            "write a label at every pixel; masks of training images, not those of other splits, may also be scored as "
            "pseudo masks: mcis evaluate DIR --as masks",
        )
    return mask

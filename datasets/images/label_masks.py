"""Reads label masks that other programs wrote, and checks them against the size of their image and the classes."""

import functools

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import LabelMask, decode_colored_labels
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import read_decoded


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
            "write them without ignored pixels; or score the files as pseudo masks: mcis evaluate DIR --as masks",
        )
    return mask

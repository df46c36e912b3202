"""Writes label masks of images as objects in the formats of other tools."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mcis.datasets.errors import UserError
from mcis.datasets.formats.data_set import ExportRequest, LabeledImage
from mcis.datasets.formats.importing import FORMATS

EXPORT_FORMATS = tuple(name for name, format in FORMATS.items() if format.write)
"""Names of the formats that can be written."""
COPYING_FORMATS = tuple(name for name in EXPORT_FORMATS if FORMATS[name].copies_images)
"""Names of the formats that are written with copies of the images."""


def export_data_set(
    format: str, classes: Sequence[str], images: Iterable[LabeledImage], out: Path, min_area: int = 1
) -> int:
    """Writes images with their label masks; every connected region of a class becomes an object.

    Args:
        format: One of EXPORT_FORMATS.
        classes: The K class names; class index k is label k + 1.
        images: The images.
        out: Folder to write to.
        min_area: Smallest number of pixels of an object; smaller regions are left out.

    Returns:
        The number of objects.

    Raises:
        UserError: The format cannot be written, or an image cannot be read.
    """
    write = FORMATS[format].write if format in FORMATS else None
    if write is None:
        raise UserError(f"format {format}", f"one of {', '.join(EXPORT_FORMATS)}", "choose another format")
    return write(ExportRequest(classes, images, out, min_area))

"""Reads segments of images that know no classes: arrays of numbers, or masks of SAM's automatic mask generator."""

import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.formats.outlines import coco_pixels
from mcis.datasets.sources.lists import LeftOut, files_below, left_out_notes, source_folder
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import read_bytes

_EXPECTED = (
    "<image id>.npy, an array of integers (H, W), or <image id>.json, a list of masks with `segmentation` in COCO's "
    "run lengths"
)
_SUFFIXES = (".npy", ".json")


def find_segment_files(folder: Path) -> dict[str, str]:
    """Finds the files of segments below a folder: paths by the name of their image.

    A name is the relative path without suffix, in the Unicode form NFC.

    Raises:
        UserError: The folder is missing or has no such file, something in it would be left out, or an image has two
            files.
    """
    remedy = "correct pseudo_masks.segments.folder"
    root = source_folder(folder, _EXPECTED, remedy)
    left_out = LeftOut()
    paths: dict[str, str] = {}
    for file in files_below(root, left_out):
        stem, suffix = file.rsplit(".", 1) if "." in file else (file, "")
        if f".{suffix.lower()}" not in _SUFFIXES:
            continue
        name = unicodedata.normalize("NFC", stem)
        if name in paths:
            raise UserError(f"two files of segments of {name}: {paths[name]} and {root}/{file}", "one", "remove one")
        paths[name] = f"{root}/{file}"

    if left_out.total():
        raise UserError(
            "; ".join(left_out_notes(str(root), left_out)), _EXPECTED, "copy the files, or remove the links"
        )
    if not paths:
        raise UserError(f"no segments in {folder}", _EXPECTED, remedy)
    return paths


def read_segments(file: str, height: int, width: int) -> NDArray[np.int32]:
    """Reads the segments of an image.

    Args:
        file: Path of its file.
        height: Height of the image, pixels.
        width: Width of the image, pixels.

    Returns:
        Segment of each pixel, negative where there is none, (H, W).

    Raises:
        UserError: The file cannot be read, is in another format, or its segments are of another size.
        MemoryError: Not enough memory.
    """
    read = _read_masks if file.lower().endswith(".json") else _read_array
    try:
        return read(read_bytes(file), height, width)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a file of another program may contain anything
        reason = error_text(error) if isinstance(error, OSError) else f"{type(error).__name__}: {unquoted(error)[:200]}"
        raise UserError(
            f"the segments {file} cannot be read ({reason})",
            f"{_EXPECTED}, of {height}x{width} pixels (height x width), the size of the image",
            "write the file again, or correct pseudo_masks.segments.folder",
        ) from None


def _read_array(content: bytes, height: int, width: int) -> NDArray[np.int32]:
    """Reads an array; its header is checked before memory is allocated. Pickles are not read."""
    stream = io.BytesIO(content)
    version = npy.read_magic(stream)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    if dtype.kind not in "iu" or shape != (height, width):
        raise ValueError(f"an array of {dtype} with the shape {shape}")
    stream.seek(0)
    segments = npy.read_array(stream, allow_pickle=False)

    # Numbers of any size are counted from 0, so that they fit 32 bits.
    _, numbers = np.unique(segments, return_inverse=True)
    return np.where(segments < 0, -1, numbers.reshape(segments.shape)).astype(np.int32)


def _read_masks(content: bytes, height: int, width: int) -> NDArray[np.int32]:
    """Reads masks and draws them from the largest to the smallest, so that parts are on top of the whole.

    Of equal areas, the later one is on top. One drawn mask at a time is in memory.
    """
    masks: Any = json.loads(content)
    if isinstance(masks, dict):  # the files of SA-1B
        masks = masks["annotations"]
    size = (height, width)
    outlines = [mask["segmentation"] for mask in masks]
    areas = [np.count_nonzero(coco_pixels(outline, size, height, width)) for outline in outlines]

    segments = np.full(size, -1, np.int32)
    largest_first = np.argsort(np.negative(areas), kind="stable")
    for number, position in enumerate(largest_first.tolist()):
        pixels = coco_pixels(outlines[position], size, height, width)
        segments[pixels] = number
    return segments

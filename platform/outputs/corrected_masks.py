"""Matches masks of training images that people drew or corrected (`data.corrected_masks`) to their images."""

import collections
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import fitted_size, resize_labels
from mcis.datasets.index import shown
from mcis.datasets.sources.lists import map_paths, relative_name, without_image_suffix
from mcis.platform.outputs.read_index import truth_of_row

CORRECTED = "corrected"
"""Name of the column with the file of a corrected mask, and value of the column `cue` of such a mask."""


def with_corrected(rows: pa.Table, folder: Path | None) -> pa.Table:
    """Adds a column `corrected` to rows of an index or a listing: the file of the image's corrected mask, or null.

    A mask has the name that `mcis export masks` gives it: the image's id without the suffix of an image file, and
    `.png`. It may also be named `<id>.png` or `<id>.jpg.png`, or after the image's file without its folders, if
    no other image has that name.

    Args:
        rows: Rows with a column `image_id`.
        folder: The folder of masks, or None.

    Raises:
        UserError: The folder is missing or empty, or contains a mask that belongs to none of the images.
    """
    if folder is None:
        return rows.append_column(CORRECTED, pa.nulls(len(rows), pa.string()))

    files = map_paths(folder, "corrected mask")
    if not files:
        raise UserError(
            f"no PNG in {folder}", "corrected masks, <image id>.png", "set --corrected-masks to their folder"
        )

    masks = _match(rows["image_id"].to_pylist(), files)
    unmatched = sorted(set(files.values()).difference(masks))
    if unmatched:
        raise UserError(
            f"{len(unmatched)} of {len(files)} masks in {folder} match no training image with a tag, nor a negative: "
            f"{shown(unmatched)}",
            "masks named <image id>.png, as by `mcis export masks`, or after the image's file",
            "rename them, or move them out of the folder; tag their images, with none if they show none of the classes",
        )
    return rows.append_column(CORRECTED, pa.array(masks, pa.string()))


def _match(image_ids: Sequence[str], files: Mapping[str, str]) -> list[str | None]:
    """Returns the path of the mask of each image, or None.

    Args:
        files: Paths of masks by their name: the path relative to the folder, without `.png`.
    """
    paths = [PurePosixPath(unicodedata.normalize("NFC", relative_name(image_id) or "")) for image_id in image_ids]
    images_by_stem = collections.Counter(path.stem for path in paths)
    images_by_short_path = collections.Counter(without_image_suffix(str(path)) for path in paths)

    masks = []
    for path in paths:
        names = [str(path), f"{path}.jpg"]
        short_path = without_image_suffix(str(path))
        if images_by_short_path[short_path] == 1:
            names += [short_path, f"{short_path}.jpg"]
        if images_by_stem[path.stem] == 1:
            names += [path.name, path.stem]
        matching = (files[name] for name in names if name in files)
        masks.append(next(matching, None))
    return masks


def given_mask(row: dict[str, Any], uri: str, classes: int, max_side: int | None) -> NDArray[np.uint8]:
    """Reads a corrected or ground-truth mask, resized by nearest neighbor to the size at which its image is read.

    Args:
        row: The image's row of the index.
        uri: Path or URI of the mask.
        classes: K.
        max_side: `data.max_side`, pixels.

    Returns:
        Labels 0..K and 255, (H, W).

    Raises:
        UserError: See `read_truth`.
    """
    mask = truth_of_row({**row, "mask_uri": uri}, classes)
    height, width = fitted_size(row["height"], row["width"], max_side)
    return resize_labels(mask, height, width)

"""Matches masks of training images that people drew or corrected (`data.corrected_masks`) to their images."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.images.decode import fitted_size
from mcis.datasets.images.label_masks import resize_labels
from mcis.datasets.sources.lists import map_paths
from mcis.platform.outputs.imported_files import match_files
from mcis.platform.outputs.read_index import truth_of_row

CORRECTED = "corrected"
"""Name of the column with the file of a corrected mask, and value of the column `cue` of such a mask."""


def with_corrected(rows: pa.Table, folder: Path | None, all_ids: Iterable[str] | None = None) -> pa.Table:
    """Adds a column `corrected` to rows of an index or a listing: the file of the image's corrected mask, or null.

    A mask has the name that `mcis export masks` gives it: the image's id without the suffix of an image file, and
    `.png`. It may also be named `<id>.png` or `<id>.jpg.png`, or after the image's file without its folders, if
    no other image of any split has that name.

    Args:
        rows: Rows with a column `image_id`.
        folder: The folder of masks, or None.
        all_ids: Ids of all images, see `match_files`.

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

    masks = match_files(rows["image_id"].to_pylist(), files, all_ids)
    unmatched = sorted(set(files.values()).difference(masks))
    if unmatched:
        raise UserError(
            f"{len(unmatched)} of {len(files)} masks in {folder} match no training image with a tag, nor a negative: "
            f"{join_shortened(unmatched)}",
            "masks named <image id>.png, as by `mcis export masks`, or after the image's file if no other image of any "
            "split has the same file name",
            "rename them, or move them out of the folder; tag their images, with none if they show none of the classes",
        )
    return rows.append_column(CORRECTED, pa.array(masks, pa.string()))


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

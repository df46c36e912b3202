"""Masks of training images that people drew or corrected (`data.corrected_masks`), matched to the images."""

import collections
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import fitted_size, resize_labels
from mcis.datasets.index import shown
from mcis.datasets.sources.lists import map_paths, relative_name
from mcis.platform.outputs.read_index import truth_of_row

CORRECTED = "corrected"
"""Cue of these masks, and the column of their files."""


def with_corrected(rows: pa.Table, folder: Path | None) -> pa.Table:
    """Rows of an index or a listing, and the file of each image's mask in a folder, or null, in a column `corrected`.

    A mask is named as `mcis export masks` names it, `<id>.png` or, of its image, `<id>.jpg.png`; or after the image's
    file, where one image has that.

    Raises:
        UserError: the folder is missing, or holds a mask that is of none of the images.
    """
    files = map_paths(folder, "corrected mask")
    if folder and not files:
        raise UserError(
            f"no PNG in {folder}", "corrected masks, <image id>.png", "name their folder by --corrected-masks"
        )
    ids = [relative_name(image_id) or "" for image_id in rows["image_id"].to_pylist()] if files else []
    paths = [PurePosixPath(name) for name in ids]
    alike = collections.Counter(path.stem for path in paths)
    of = files.get
    found = [of(str(p)) or of(f"{p}.jpg") or (of(p.name) or of(p.stem) if alike[p.stem] == 1 else None) for p in paths]
    if others := sorted(set(files.values()).difference(found)):
        raise UserError(
            f"{len(others)} of {len(files)} masks in {folder} are of no tagged training image: {shown(others)}",
            "<image id>.png, as `mcis export masks` names them, or the name of the image's file with .png",
            "rename them, or move them out of the folder",
        )
    return rows.append_column(CORRECTED, pa.array(found or [None] * len(rows), pa.string()))


def given_mask(row: dict[str, Any], uri: str, classes: int, max_side: int | None) -> NDArray[np.uint8]:
    """A true mask, labels 0..K and 255, by nearest neighbor at its image's size as read; errors as of `read_truth`."""
    mask = truth_of_row({**row, "mask_uri": uri}, classes)
    return resize_labels(mask, *fitted_size(row["height"], row["width"], max_side))

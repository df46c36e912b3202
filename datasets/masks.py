"""Ground-truth masks and saliency maps of images, read and checked against the image's size and the classes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE
from mcis.datasets.decode import RejectedImage, decode_mask, decode_saliency
from mcis.datasets.errors import UserError
from mcis.datasets.files import read_bytes


def read_truth(row: dict[str, Any], classes: int) -> NDArray[np.uint8]:
    """The ground-truth mask of an index row, (H, W).

    Raises:
        UserError: it is missing, unreadable, of another size than its image, or has a label above K.
    """
    uri, shape = row["mask_uri"], (row["height"], row["width"])
    try:
        truth = decode_mask(read_bytes(uri))
    except OSError as error:
        raise UserError(
            f"no ground-truth mask {uri} ({error})", "a mask for each scored image", "add it, or name no masks"
        ) from None
    except RejectedImage as error:
        raise UserError(f"the mask {uri} cannot be read: {error.reason}", "a palette PNG", "replace the file") from None
    if truth.shape != shape:
        raise UserError(
            f"the mask {uri} has {truth.shape[0]}x{truth.shape[1]} pixels (height x width)",
            f"{shape[0]}x{shape[1]} as its image {row['image_id']}",
            "replace the mask or the image",
        )
    labels = np.unique(truth[truth != IGNORE])
    if len(labels) and labels[-1] > classes:
        raise UserError(
            f"the mask {uri} has label {labels[-1]}", f"0..{classes} and 255", "mend the mask, or set data.classes"
        )
    return truth


def read_saliency(uri: str, shape: tuple[int, int]) -> np.ndarray:
    """A saliency map (H, W) uint8 of the image's size.

    Raises:
        UserError: it cannot be read or has another size.
    """
    try:
        saliency = decode_saliency(read_bytes(uri))
    except (OSError, ValueError) as error:
        raise UserError(f"the saliency map {uri} cannot be read ({error})", "a gray PNG", "replace the file") from None
    if saliency.shape != shape:
        raise UserError(
            f"the saliency map {uri} has {saliency.shape[0]}x{saliency.shape[1]} pixels (height x width)",
            f"{shape[0]}x{shape[1]} as its image",
            "make the map at the image's size",
        )
    return saliency

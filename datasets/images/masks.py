"""Reads ground-truth masks and saliency maps, and checks them against their image's size and the classes."""

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.classes import BACKGROUND, IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import PILLOW_MAX_PIXELS
from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.images.matlab import MAT_START, decode_mat_labels
from mcis.datasets.images.saliency_maps import decode_saliency
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import RELOCATE, read_decoded

SALIENCY_THRESHOLD = 128
"""Saliency, 0 to 255, from which scores count a pixel as salient."""


def decode_mask(data: bytes, *, max_pixels: int = PILLOW_MAX_PIXELS) -> np.ndarray:
    """Decodes a ground-truth mask, a PNG or a MATLAB file of SBD, to (H, W) uint8 labels.

    The content decides which of the two formats it is.

    Args:
        max_pixels: Largest width x height of a PNG.

    Raises:
        RejectedImage: See `decode_mat_labels` and `decode_labels`.
    """
    if data.startswith(MAT_START):
        return decode_mat_labels(data)
    return decode_labels(data, max_pixels=max_pixels)


def read_truth(uri: str, shape: tuple[int, int] | None, classes: int) -> NDArray[np.uint8]:
    """Reads a ground-truth mask, (H, W) uint8 labels.

    Args:
        uri: Path or URI of a palette PNG, or of a MATLAB file of SBD.
        shape: Height and width of its image, pixels. None: the size is not checked.
        classes: K, number of classes. Labels are 0..K and 255.

    Raises:
        UserError: The mask is missing, unreadable, of another size than its image, or has a label above K.
    """
    truth = _read("ground-truth mask", uri, decode_mask, "a palette PNG, or a MATLAB file of SBD", shape)
    tags_of_mask(truth, classes, uri)  # checks the labels
    return truth


def read_saliency(uri: str, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Reads a class-agnostic saliency map, (H, W) uint8: 0 is background, 255 is certainly an object.

    Args:
        shape: Height and width of its image, pixels.

    Raises:
        UserError: The map is missing, unreadable, or of another size than its image.
    """
    return _read("saliency map", uri, decode_saliency, "a gray PNG", shape)


def tags_of_mask(labels: NDArray[np.uint8], classes: int, uri: str) -> list[int]:
    """Returns the class indices that occur in a mask, ascending.

    Args:
        labels: (H, W); label k + 1 is class index k, BACKGROUND and IGNORE are no class.
        classes: K, number of classes.
        uri: Path or URI of the mask; used in messages.

    Raises:
        UserError: A label is above K and is not IGNORE.
    """
    pixel_counts = Image.fromarray(labels).histogram()  # several times as fast as numpy.unique, which sorts
    tags = [label - 1 for label, count in enumerate(pixel_counts) if count and label not in (BACKGROUND, IGNORE)]

    if tags and tags[-1] >= classes:
        raise UserError(
            f"the ground-truth mask {uri} has label {tags[-1] + 1}",
            f"labels of the {classes} classes: 0..{classes} and {IGNORE}",
            "correct the mask, or name the file of the classes that it was made with (data.classes)",
        )
    return tags


def _read(
    kind: str, uri: str, decode: Callable[..., NDArray[np.uint8]], expected: str, shape: tuple[int, int] | None
) -> NDArray[np.uint8]:
    """Reads and decodes a map and checks its size. `kind` names it in messages."""
    try:
        pixels = read_decoded(uri, functools.partial(decode, max_pixels=PILLOW_MAX_PIXELS))
    except OSError as error:
        found = f"the {kind} {uri} cannot be opened ({error_text(error)})"
        remedy = f"add the file, or remove it from the data set; {RELOCATE}"
        raise UserError(found, expected, remedy) from None
    except ValueError as error:  # RejectedImage is a ValueError
        raise UserError(f"the {kind} {uri} cannot be read: {error}", expected, "replace the file") from None

    if shape and pixels.shape != shape:
        raise UserError(
            f"the {kind} {uri} has {pixels.shape[0]}x{pixels.shape[1]} pixels (height x width)",
            f"{shape[0]}x{shape[1]}, the size of its image",
            f"replace the {kind} or the image",
        )
    return pixels

"""Files of ground-truth masks and saliency maps -> arrays, checked against their image's size and the classes."""

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.classes import BACKGROUND, IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import MAX_PIXELS, PILLOW_MAX_PIXELS, decode_labels, decode_saliency
from mcis.datasets.images.matlab import MAT_START, decode_mat_labels
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import read_decoded

_LABELS = "a palette PNG, or a MATLAB file of SBD"
SALIENCY_THRESHOLD = 128
"""Saliency, of 255, from which a pixel counts as salient in scores."""


def decode_mask(data: bytes, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Bytes of a ground-truth mask -> (H, W) uint8 labels, by their content: a MATLAB file of SBD, or a PNG;
    RejectedImage as of `decode_mat_labels` and `decode_labels`."""
    return decode_mat_labels(data) if data.startswith(MAT_START) else decode_labels(data, max_pixels=max_pixels)


def read_truth(uri: str, shape: tuple[int, int] | None, classes: int) -> NDArray[np.uint8]:
    """A ground-truth mask, labels (H, W) uint8.

    Args:
        uri: path or URI of a palette PNG, or of a MATLAB file of SBD.
        shape: height and width of its image, pixels; None = not compared.
        classes: K; labels are 0..K and 255.

    Raises:
        UserError: the mask is missing, unreadable, of another size than its image, or has a label above K.
    """
    truth = _read("ground-truth mask", uri, decode_mask, _LABELS, shape)
    tags_of_mask(truth, classes, uri)  # for its check of the labels
    return truth


def read_saliency(uri: str, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """A class-agnostic saliency map, (H, W) uint8: 0 is background, 255 certainly an object; UserError where the map is
    missing, unreadable, or not of its image's height and width, `shape`."""
    return _read("saliency map", uri, decode_saliency, "a gray PNG", shape)


def tags_of_mask(labels: NDArray[np.uint8], classes: int, uri: str) -> list[int]:
    """The class indices, ascending, of a mask's labels (H, W): k for label k + 1; 0 and 255 are no class. UserError for
    a label above K = `classes` that is not the ignored one."""
    pixels = Image.fromarray(labels).histogram()  # several times as fast as numpy.unique, which sorts
    tags = [label - 1 for label, count in enumerate(pixels) if count and label not in (BACKGROUND, IGNORE)]
    if tags and tags[-1] >= classes:
        raise UserError(
            f"the ground-truth mask {uri}: label {tags[-1] + 1}; expected 0..{classes} and {IGNORE}",
            f"labels of the {classes} classes",
            "correct the mask, or name the file of the classes that it was made with (`classes`)",
        )
    return tags


def _read(
    what: str, uri: str, decode: Callable[..., NDArray[np.uint8]], expected: str, shape: tuple[int, int] | None
) -> NDArray[np.uint8]:
    try:
        pixels = read_decoded(uri, functools.partial(decode, max_pixels=PILLOW_MAX_PIXELS))
    except OSError as error:
        raise UserError(f"no {what} {uri} ({error_text(error)})", expected, "add it, or do without") from None
    except ValueError as error:  # RejectedImage is one
        raise UserError(f"the {what} {uri} cannot be read: {error}", expected, "replace the file") from None
    if shape and pixels.shape != shape:
        raise UserError(
            f"the {what} {uri} has {pixels.shape[0]}x{pixels.shape[1]} pixels (height x width)",
            f"{shape[0]}x{shape[1]} as its image",
            f"replace the {what} or the image",
        )
    return pixels

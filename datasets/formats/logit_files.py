"""Reads logits of segmentation networks that other programs saved, such as AFA and ToCo: a dictionary per image.

The names of the keys are those that inference scripts of weakly supervised methods write.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.formats.pickled_arrays import read_pickled_arrays
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import read_bytes

LOGIT_KEYS = ("msc_seg", "msc_segs", "seg", "segs")
"""Keys of the logits. The first that a file has is read: those of several scales are preferred."""
SUFFIX = ".npy"
_MAX_BYTES = 2**30
"""Maximum size of a file, 1 GiB."""
_MAX_VALUES = 2**28
"""Maximum number of logits of an image, 1 GiB as float32."""


def read_logit_labels(file: str, shape: tuple[int, int], classes: int) -> NDArray[np.uint8]:
    """Reads logits and returns the label with the largest one at each pixel, (H, W) uint8 in 0..K.

    Logits of another size are interpolated bilinearly to the size of the image, with pixel areas aligned.

    Args:
        file: A dictionary of `numpy.save` with logits or probabilities (K + 1, h, w) or (1, K + 1, h, w), the
            background first, under one of LOGIT_KEYS.
        shape: Height H and width W of the image, pixels.
        classes: K.

    Raises:
        UserError: The file cannot be read, has none of the keys, or its values are no logits of these classes.
    """
    try:
        logits = _checked(read_pickled_arrays(read_bytes(file, _MAX_BYTES)), classes)
    except (OSError, ValueError) as error:  # RejectedPickle is a ValueError
        raise UserError(
            f"the logits {file} cannot be read: {error_text(error)}",
            f"a dictionary of `numpy.save` with logits ({classes + 1}, H, W) under {' or '.join(LOGIT_KEYS)}: the "
            f"background and the {classes} classes",
            "write the file again, or write label PNGs",
        ) from None
    values = torch.from_numpy(logits)
    if values.shape[1:] == shape:
        labels = values.argmax(dim=0).to(torch.uint8)
    else:
        labels = _interpolated_labels(values, shape)
    return labels.numpy()


def _interpolated_labels(logits: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Interpolates logits (K + 1, h, w) to (H, W) and returns the labels with the largest ones; ties go to the lower.

    It takes one class after the other, because all at the size of a photograph may not fit into memory.
    """
    largest = torch.full(shape, -torch.inf)
    labels = torch.zeros(shape, dtype=torch.uint8)
    for label, channel in enumerate(logits):
        values = functional.interpolate(channel[None, None], size=shape, mode="bilinear", align_corners=False)[0, 0]
        labels.masked_fill_(values > largest, label)
        torch.maximum(largest, values, out=largest)
    return labels


def _checked(content: dict[str | int, object], classes: int) -> NDArray[np.float32]:
    """Returns the logits (K + 1, h, w) of a file. Raises ValueError if it has none of these classes."""
    names = [name for name in LOGIT_KEYS if name in content]
    if not names:
        raise ValueError(f"the keys {join_shortened([str(key) for key in content])}")
    logits = content[names[0]]
    if not isinstance(logits, np.ndarray) or logits.dtype.kind != "f":
        raise ValueError(f"{names[0]} is no array of floating-point numbers")
    if logits.ndim == 4 and len(logits) == 1:
        logits = logits[0]
    if logits.ndim != 3 or len(logits) != classes + 1 or not logits.size or logits.size > _MAX_VALUES:
        raise ValueError(f"{names[0]} has the shape {logits.shape}")
    with np.errstate(over="ignore"):  # numbers that are too large become infinite
        values = logits.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{names[0]} has a value that is not a finite number of 32 bits")
    return values

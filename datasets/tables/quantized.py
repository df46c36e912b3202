"""Features of images in 8 bits, with one scale for each channel of an image."""

import math

import numpy as np
from numpy.typing import NDArray

_SCALE_BYTES = np.dtype(np.float32).itemsize
_MAX_STEPS = 127
"""Largest magnitude of a stored value, in steps of its channel's scale."""


def quantized_bytes(shape: tuple[int, ...]) -> int:
    """Returns the length of a row of `quantize` for features of the shape (C, H, W), bytes."""
    return shape[0] * _SCALE_BYTES + math.prod(shape)


def quantize(features: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounds features to int8.

    The scale of a channel of an image is its largest magnitude / 127, and its values are rounded to multiples of that.
    A channel of zeros has the scale 0.

    Args:
        features: Finite features of N images, (N, C, H, W).

    Returns:
        A row for each image, (N, `quantized_bytes`): the bytes of its C scales in float32, then those of its values in
        int8, channel by channel.
    """
    num_images = len(features)
    scales: NDArray[np.float32] = np.abs(features).max(axis=(2, 3), keepdims=True) / np.float32(_MAX_STEPS)
    steps = np.rint(features / np.where(scales > 0, scales, np.float32(1)))
    # The scale of a channel of subnormal numbers has few bits, so its values can exceed 127 steps.
    values: NDArray[np.int8] = steps.clip(-_MAX_STEPS, _MAX_STEPS).astype(np.int8)
    scale_bytes = scales.reshape(num_images, -1).view(np.uint8)
    value_bytes = values.reshape(num_images, -1).view(np.uint8)
    return np.concatenate([scale_bytes, value_bytes], axis=1)


def dequantize(rows: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns the features of rows of `quantize`, (N, C, H, W).

    Args:
        rows: Rows of N images.
        shape: (C, H, W).

    Raises:
        ValueError: Features of this shape have rows of another length.
    """
    num_scale_bytes = shape[0] * _SCALE_BYTES
    scales = rows[:, :num_scale_bytes].view(np.float32)
    values = rows[:, num_scale_bytes:].view(np.int8).reshape(len(rows), *shape)
    return values * scales[:, :, None, None]

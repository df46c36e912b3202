"""Decodes class-agnostic saliency maps."""

import numpy as np

from mcis.datasets.images.decode import (
    FORMATS,
    MAX_PIXELS,
    RejectedImage,
    black_is_zero,
    finite_values,
    gray_kind,
    is_deep_gray,
    opened,
    to_rgb,
)
from mcis.datasets.images.value_range import range_problem

_GRAY_TOLERANCE = 8
"""Largest difference between channels, 0 to 255, that still counts as gray. JPEG changes them by a few."""


def decode_saliency(data: bytes, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decodes a saliency map, (H, W) uint8: 0 is background, 255 is certainly an object.

    The map is gray of 1, 8 or 16 bits. Palette and RGB are accepted if every color is gray.

    Args:
        max_pixels: Largest width x height, checked before decoding.

    Raises:
        RejectedImage: The data is no image, is damaged, or has color or transparency, whose brightness has no meaning.
    """
    with opened(data, FORMATS, 1, max_pixels) as image:
        if image.has_transparency_data:
            raise RejectedImage(f"unsupported: a saliency map with transparency (mode {image.mode}); expected gray")
        if image.mode == "L":
            return np.array(image)

        if is_deep_gray(image):
            image = black_is_zero(image)
            values = finite_values(image)
            if range_problem(gray_kind(image), float(values.min()), float(values.max()), None):
                found = f"values from {values.min():g} to {values.max():g}"
                raise RejectedImage(f"unsupported: a saliency map with {found}; expected gray of 1, 8 or 16 bits")
        rgb = to_rgb(image)
        spread = int(np.ptp(rgb, axis=-1).max())
        if spread > _GRAY_TOLERANCE:
            raise RejectedImage(f"unsupported: a saliency map in color, channels differ by {spread}; expected gray")
        return rgb[..., 1].copy()

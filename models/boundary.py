"""Boundary regions of masks (Cheng et al., "Boundary IoU", CVPR 2021): the pixels of a label next to its contour."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

SHARE = 0.02
"""The width of a boundary region, of the image's diagonal: the authors' value."""


def boundary_width(height: int, width: int) -> int:
    """Width d of the boundary regions in an image of so many pixels: 2 % of its diagonal, rounded, at least 1."""
    return max(1, round(SHARE * math.hypot(height, width)))


def boundary_region(labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """The pixels within d rows and columns of one with another label, or of the outside of the image; (H, W) each.

    Those of label k are G_d ∩ G of the mask of k, section 4.1 of the paper, as the authors' code has it: a mask less
    what a (2d + 1) x (2d + 1) square leaves of it by erosion. Ignored pixels are a label of their own.
    """
    d = boundary_width(*labels.shape)
    region = np.ones(labels.shape, np.bool_)
    if min(labels.shape) > 2 * d:
        lowest, highest = (_over_windows(extreme, labels, 2 * d + 1) for extreme in (np.minimum, np.maximum))
        region[d:-d, d:-d] = lowest != highest
    return region


def _over_windows(extreme: Callable[..., NDArray[np.uint8]], labels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The extreme of each square window that lies within the image: (H, W) -> (H - side + 1, W - side + 1).

    Windows grow by doubling, so that a dimension takes log2(side) passes.
    """
    for _ in range(2):
        rows, length = labels, 1
        while 2 * length <= side:
            rows = extreme(rows[:-length], rows[length:])
            length *= 2
        windows = len(labels) - side + 1
        labels = extreme(rows[:windows], rows[side - length : side - length + windows]).T
    return labels

"""Turns label masks into objects for other tools: connected regions and their outlines as polygons."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from contourpy import FillType, contour_generator
from numpy.typing import NDArray
from scipy import ndimage

from mcis.datasets.classes import BACKGROUND, IGNORE

_NEARLY_ONE = 0.99
"""Level of contours that lead nearly through the centers of the border's pixels."""


class Region(NamedTuple):
    """A connected region of a label mask. It holds no pixels outside of its box, because a mask may have thousands.

    Attributes:
        label: Its label.
        pixels: Its pixels in the smallest box around them, (h, w).
        left: Column of the box in the mask.
        top: Row of the box in the mask.
    """

    label: int
    pixels: NDArray[np.bool_]
    left: int
    top: int

    @property
    def corner(self) -> NDArray[np.int64]:
        """x and y of the box's first pixel in the mask, (2,)."""
        return np.array([self.left, self.top])


def connected_regions(labels: NDArray[np.uint8], min_area: int = 1) -> Iterator[Region]:
    """Yields the regions of a label mask that are connected by 4 neighbors.

    Background and ignored pixels are left out.

    Args:
        labels: Label mask, (H, W).
        min_area: Smallest number of pixels of a region that is yielded.
    """
    present = set(np.unique(labels).tolist())
    for label in sorted(present - {BACKGROUND, IGNORE}):
        numbers, _ = ndimage.label(labels == label)
        areas = np.bincount(numbers.ravel())
        for number, box in enumerate(ndimage.find_objects(numbers), 1):
            if areas[number] < min_area:
                continue
            rows, columns = box
            yield Region(label, numbers[box] == number, columns.start, rows.start)


def region_outline(pixels: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns the corners of a polygon that is the region if it is filled together with its border.

    A hole is joined to the border on the left of its leftmost pixel, by a seam that is passed in both directions.

    Args:
        pixels: Pixels of a connected region, (H, W).

    Returns:
        X and y of at least three pixels in this array, (N, 2).
    """
    contours: Any = contour_generator(z=np.pad(pixels, 1).astype(float), fill_type=FillType.OuterOffset)
    (points,), (starts,) = contours.filled(_NEARLY_ONE, 2.0)
    loops = []
    for start, end in itertools.pairwise(starts):
        corners = np.rint(points[start : end - 1]) - 1
        loops.append(corners.astype(int).tolist())

    polygon = loops[0]
    for hole in sorted(loops[1:], key=min):
        x, y = min(hole)
        start = hole.index([x, y])
        outside = np.flatnonzero(~pixels[y, :x])
        seam = [int(outside[-1]) + 1 if len(outside) else 0, y]
        position = polygon.index(seam)
        polygon[position:position] = [seam, *hole[start:], *hole[:start], [x, y]]

    return _without_straight_points(np.array(polygon))


def _without_straight_points(points: NDArray[np.int64]) -> NDArray[np.int64]:
    """Removes points at which a polygon goes straight on, and repeats points if fewer than three remain."""
    steps = np.diff(points, axis=0, prepend=points[-1:])
    if steps.any():
        is_corner = (steps != np.roll(steps, -1, axis=0)).any(axis=1)
        points = points[is_corner]
    return np.resize(points, (max(3, len(points)), 2))

"""Locations of a feature map's positions in its image, as fractions of the image's sides, so for any image size."""

import math
from typing import NamedTuple


class Grid(NamedTuple):
    """Positions along one side of an image. Position i is at `first + i * step`; the image spans 0 to 1.

    Attributes:
        first: Location of the first position.
        step: Distance between two positions.
        num_positions: Number of positions.
    """

    first: float
    step: float
    num_positions: int

    @property
    def last(self) -> float:
        """Location of the last position."""
        return self.first + self.step * (self.num_positions - 1)

    def hflipped(self) -> "Grid":
        """Returns the grid of a map that was computed from the flipped image and then flipped back."""
        return self._replace(first=1 - self.last)

    def is_close(self, other: "Grid") -> bool:
        """Returns whether both grids have the same positions, up to rounding."""
        return (
            self.num_positions == other.num_positions
            and math.isclose(self.first, other.first, abs_tol=1e-9)
            and math.isclose(self.last, other.last, abs_tol=1e-9)
        )


def pixel_grid(count: int) -> Grid:
    """Returns the centers of `count` equal parts of a side, such as its pixels."""
    return Grid(0.5 / count, 1 / count, count)


class Grids(NamedTuple):
    """Positions of a map (..., h, w) along the height and the width of its image."""

    rows: Grid
    columns: Grid

    def hflipped(self) -> "Grids":
        """Returns the grids of a map that was computed from the horizontally flipped image and then flipped back."""
        return Grids(self.rows, self.columns.hflipped())


def pixel_grids(height: int, width: int) -> Grids:
    """Returns the centers of the pixels of an image (height, width)."""
    return Grids(pixel_grid(height), pixel_grid(width))


class Layout(NamedTuple):
    """Rule by which a layer places its positions in an image.

    A strided convolution or pooling with an odd kernel centers position i at pixel `stride * i`. Pooling of 2x2 pixels
    and patch embeddings center it at `stride * i + (stride - 1) / 2`.

    Attributes:
        stride: Input pixels per position.
        offset: Pixel at which position 0 is centered; 0 is the center of the first pixel. None: the image is divided
            into equal parts, each with a position at its center.
    """

    stride: int
    offset: float | None = 0.0

    def grid(self, side: int, count: int) -> Grid:
        """Returns the locations of `count` positions along a side of `side` pixels."""
        if self.offset is None:
            return pixel_grid(count)
        return Grid((self.offset + 0.5) / side, self.stride / side, count)

    def grids(self, image_shape: tuple[int, ...], map_shape: tuple[int, ...]) -> Grids:
        """Returns the positions of a map (..., h, w) in an image (..., height, width)."""
        rows = self.grid(image_shape[-2], map_shape[-2])
        columns = self.grid(image_shape[-1], map_shape[-1])
        return Grids(rows, columns)

    def padded_side(self, side: int) -> int:
        """Returns the smallest side >= `side` whose first and last positions are equally far from the image's edges."""
        margins = self.stride - 1 if self.offset is None else round(2 * self.offset)
        steps = (max(0, side - 1 - margins) + self.stride - 1) // self.stride
        return margins + 1 + self.stride * steps

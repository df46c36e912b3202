"""Where the positions of a feature map lie in an image, in fractions of its sides: the same at any size of it."""

import math
from typing import NamedTuple


class Grid(NamedTuple):
    """Positions along a side of an image: position i at first + i * step, where the image's edges are 0 and 1."""

    first: float
    step: float
    positions: int

    @property
    def last(self) -> float:
        """Where the last position lies."""
        return self.first + self.step * (self.positions - 1)

    def hflipped(self) -> "Grid":
        """The positions, in the image, of a map of its mirror image that was mirrored back."""
        return self._replace(first=1 - self.last)

    def is_close(self, other: "Grid") -> bool:
        """Whether the positions are the same, to rounding."""
        ends = (self.first, other.first), (self.last, other.last)
        return self.positions == other.positions and all(math.isclose(a, b, abs_tol=1e-9) for a, b in ends)


def pixel_grid(count: int) -> Grid:
    """The centers of a side's pixels, or of any equal parts of it."""
    return Grid(0.5 / count, 1 / count, count)


class Grids(NamedTuple):
    """Where the positions of a map (..., h, w) lie, along the height and the width of its image."""

    rows: Grid
    columns: Grid

    def hflipped(self) -> "Grids":
        """Those of a map of the mirror image (left and right exchanged) that was mirrored back."""
        return Grids(self.rows, self.columns.hflipped())


def pixel_grids(height: int, width: int) -> Grids:
    """The centers of the pixels of an image (height, width)."""
    return Grids(pixel_grid(height), pixel_grid(width))


class Layout(NamedTuple):
    """Where the positions of a layer lie in its image.

    A strided convolution or pooling with odd kernels centers position i at pixel stride * i. Pooling of 2x2 pixels, and
    patches, center it at stride * i + (stride - 1) / 2.

    Attributes:
        stride: input pixels per position.
        offset: pixel at which position 0 is centered, where pixel 0 is the first one's center; None where the image is
            divided into equal parts, each with a position at its center.
    """

    stride: int
    offset: float | None = 0.0

    def grid(self, side: int, count: int) -> Grid:
        """Where `count` positions lie along a side of `side` pixels."""
        if self.offset is None:
            return pixel_grid(count)
        return Grid((self.offset + 0.5) / side, self.stride / side, count)

    def grids(self, image: tuple[int, ...], shape: tuple[int, ...]) -> Grids:
        """Where the positions of a map of shape (..., h, w) lie in an image of shape (..., height, width)."""
        return Grids(self.grid(image[-2], shape[-2]), self.grid(image[-1], shape[-1]))

    def padded_side(self, side: int) -> int:
        """The least side, at least `side`, whose outermost positions are as far from both edges."""
        edges = self.stride - 1 if self.offset is None else round(2 * self.offset)
        return edges + 1 + self.stride * ((max(0, side - 1 - edges) + self.stride - 1) // self.stride)

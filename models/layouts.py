"""Where the positions of a layer lie in its image: stride and offset, in pixels -> grids in fractions of the sides."""

from typing import NamedTuple

from mcis.models.grids import Grid, pixels
from mcis.models.resampling import Grids


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
            return pixels(count)
        return Grid((self.offset + 0.5) / side, self.stride / side, count)

    def grids(self, image: tuple[int, int], shape: tuple[int, int]) -> Grids:
        """Where the positions of a map of `shape` (h, w) lie in an image of (height, width) pixels."""
        return Grids(*(self.grid(side, count) for side, count in zip(image, shape, strict=True)))

    def padded(self, side: int) -> int:
        """The least side, at least `side`, whose outermost positions are as far from both edges."""
        edges = self.stride - 1 if self.offset is None else round(2 * self.offset)
        return edges + 1 + self.stride * ((max(0, side - 1 - edges) + self.stride - 1) // self.stride)

"""Where the positions of a feature map lie in an image, in fractions of its side: the same at any size of it."""

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

    def mirrored(self) -> "Grid":
        """The positions, in the image, of a map of its mirror image that was mirrored back."""
        return self._replace(first=1 - self.last)

    def coincides(self, other: "Grid") -> bool:
        """Whether the positions are the same, to rounding."""
        ends = (self.first, other.first), (self.last, other.last)
        return self.positions == other.positions and all(math.isclose(a, b, abs_tol=1e-9) for a, b in ends)


def pixels(count: int) -> Grid:
    """The centers of a side's pixels, or of any equal parts of it."""
    return Grid(0.5 / count, 1 / count, count)

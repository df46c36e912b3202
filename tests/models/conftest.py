"""Fixtures for tests of several networks: measures where in the outputs a changed pixel shows up."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mcis.models.grids import Layout


@pytest.fixture
def dot_offsets() -> Callable[..., Tensor]:
    """Returns a function that measures how far the response to a dot is from the dot."""
    return measure_dot_offsets


def measure_dot_offsets(
    forward: Callable[[Tensor], Sequence[Tensor]], layouts: Sequence[Layout], side: int, stride: int
) -> Tensor:
    """Measures the distance between a dot and the center of the change that it causes, averaged over one stride.

    Args:
        forward: Maps images (1, 3, side, side) to outputs (1, C, h, w).
        layouts: Layout of each output.
        side: Side of the images in pixels.
        stride: Largest stride. The dot moves over this many pixels.

    Returns:
        Mean distances along rows and columns of each output in turn, in pixels.
    """
    empty = torch.zeros(1, 3, side, side)
    unchanged = forward(empty)
    distances = []
    for shift in range(0, stride, 2):
        first = side // 2 - stride // 2
        pixels = (first + shift, first + 3 * shift % stride)
        dotted = empty.clone()
        dotted[:, :, pixels[0], pixels[1]] = 1

        dot_distances = []
        for layout, changed, before in zip(layouts, forward(dotted), unchanged, strict=True):
            response = (changed - before)[0].double().square().sum(dim=0)
            response = response.where(response >= response.max() / 2, 0)  # a transformer changes at every position
            grids = layout.grids((side, side), response.shape)
            for axis, (grid, pixel) in enumerate(zip(grids, pixels, strict=True)):
                locations = torch.tensor([grid.first + n * grid.step for n in range(grid.num_positions)])
                weights = response.sum(dim=1 - axis)
                center = float((weights * locations).sum() / weights.sum()) * side - 0.5
                dot_distances.append(center - pixel)
        distances.append(dot_distances)
    return torch.tensor(distances).mean(dim=0)

"""What tests of several networks measure: where in the image a change of one pixel arrives."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mcis.models.grids import Layout


@pytest.fixture
def dot_offsets() -> Callable[..., Tensor]:
    """Measures how far the centers of what a dot changes are from the dot, on average over a stride, in pixels."""

    def measure(
        outputs: Callable[[Tensor], Sequence[Tensor]], layouts: Sequence[Layout], side: int, stride: int
    ) -> Tensor:
        """Rows and columns of each output (1, C, h, w) in turn, whose positions lie as its layout says."""
        empty, errors = torch.zeros(1, 3, side, side), []
        unchanged = outputs(empty)
        for shift in range(0, stride, 2):
            pixels = [side // 2 - stride // 2 + moved for moved in (shift, 3 * shift % stride)]
            dotted = empty.clone()
            dotted[:, :, pixels[0], pixels[1]] = 1
            off = []
            for layout, got, without in zip(layouts, outputs(dotted), unchanged, strict=True):
                change = (got - without)[0].double().square().sum(dim=0)
                change = change.where(change >= change.max() / 2, 0)  # a transformer's dot changes every position
                grids = layout.grids((side, side), change.shape)
                for axis, (grid, pixel) in enumerate(zip(grids, pixels, strict=True)):
                    places = torch.tensor([grid.first + n * grid.step for n in range(grid.positions)])
                    weights = change.sum(dim=1 - axis)
                    off.append(float((weights * places).sum() / weights.sum()) * side - 0.5 - pixel)
            errors.append(off)
        return torch.tensor(errors).mean(dim=0)

    return measure

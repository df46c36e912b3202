"""Values of a map at other positions of its image, as two matrix products, one for each side.

A map is resized by where its positions lie (`Grid`), not by its shape: a backbone whose position i is centered at pixel
s * i and one whose is at s * i + (s - 1) / 2 have maps of one shape that lie half a stride apart.
"""

import functools
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.models.grids import Grid, Grids

Kernel = Literal["bilinear", "bicubic"]
_CUBIC = -0.75  # the parameter of the cubic convolution, as torch and OpenCV have it


def resample(maps: Tensor, source: Grids, target: Grids, kernel: Kernel = "bilinear") -> Tensor:
    """Maps (..., h, w) at the positions `source` -> their values at the positions `target`, (..., h', w').

    Beyond the outermost positions their values are repeated. Maps that lie in memory channels last, as convolutions
    leave them, stay so.

    Args:
        kernel: as torch's `interpolate` has it, without smoothing where it shrinks.
    """
    if torch.compiler.is_exporting():
        assert kernel == "bilinear", "the only kernel of networks that are exported"
        return _resample_of_any_size(maps, source, target)
    rows, columns = (
        None if old.is_close(new) else _weights(old, new, kernel).to(maps)
        for old, new in zip(source, target, strict=True)
    )
    if maps.ndim == 4 and not maps.is_contiguous() and maps.is_contiguous(memory_format=torch.channels_last):
        last = maps.permute(0, 2, 3, 1)
        if rows is not None:
            last = (rows @ last.flatten(2)).unflatten(2, last.shape[2:])
        return (last if columns is None else columns @ last).permute(0, 3, 1, 2)
    if rows is not None:
        maps = rows @ maps
    return maps if columns is None else maps @ columns.T


def _resample_of_any_size(maps: Tensor, source: Grids, target: Grids) -> Tensor:
    """As `resample`, bilinearly, where sizes are symbols: neither Python nor numpy may compute with them."""
    rows, columns = (_bilinear_weights(*sides).to(maps.dtype) for sides in zip(source, target, strict=True))
    planes = maps.contiguous().flatten(0, -3)  # a matrix product of more dimensions views them by their sizes
    count = len(planes)
    resized = rows.expand(count, -1, -1).bmm(planes).bmm(columns.T.expand(count, -1, -1))
    return resized.unflatten(0, maps.shape[:-2])


def _bilinear_weights(source: Grid, target: Grid) -> Tensor:
    """As `_weights`: positions weigh by how near they are, up to the distance of a step."""
    centers = target.first + target.step * torch.arange(target.positions, dtype=torch.float64)
    at = ((centers - source.first) / source.step).clamp(0, source.positions - 1)
    return (1 - (at[:, None] - torch.arange(source.positions)).abs()).clamp(min=0)


@functools.lru_cache(maxsize=256)
def _weights(source: Grid, target: Grid, kernel: Kernel) -> Tensor:
    """Weights of the source's h positions in the value at each of the target's h', (h', h) float64."""
    centers = np.float64(target.first) + target.step * np.arange(target.positions, dtype=np.float64)
    at = (centers - source.first) / source.step
    weights = np.zeros((target.positions, source.positions))
    below = np.floor(at).astype(np.int64)
    for tap in (0, 1) if kernel == "bilinear" else (-1, 0, 1, 2):
        distance = np.abs(at - (below + tap))
        values = 1 - distance if kernel == "bilinear" else _cubic(distance)
        np.add.at(weights, (np.arange(target.positions), np.clip(below + tap, 0, source.positions - 1)), values)
    return torch.from_numpy(weights)


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC
    return np.where(distance <= 1, near, far)

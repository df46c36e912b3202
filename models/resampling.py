"""Resampling of maps to other positions of their image, as two matrix products, one per side.

A map is resampled by the locations of its positions (`Grid`), not by its shape. A backbone that centers position i at
pixel s * i and one that centers it at s * i + (s - 1) / 2 give maps of the same shape that are half a stride apart.
"""

import functools
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.models.grids import Grid, Grids

Kernel = Literal["bilinear", "bicubic"]
_CUBIC = -0.75
"""Parameter of the cubic convolution kernel, the same as in torch and OpenCV."""


def resample(maps: Tensor, source: Grids, target: Grids, kernel: Kernel = "bilinear") -> Tensor:
    """Interpolates maps (..., h, w) at positions `source` to positions `target`, (..., h', w').

    Beyond the outermost positions, their values are repeated. The result has the memory format of `maps`, so the
    channels-last outputs of convolutions stay channels-last.

    Args:
        kernel: Interpolation kernel of `torch.nn.functional.interpolate`, without antialiasing.
    """
    if torch.compiler.is_exporting():
        assert kernel == "bilinear", "exported networks use the bilinear kernel only"
        return _resample_symbolic(maps, source, target)

    rows = _interpolation_matrix(source.rows, target.rows, kernel, maps)
    columns = _interpolation_matrix(source.columns, target.columns, kernel, maps)
    if maps.ndim == 4 and not maps.is_contiguous() and maps.is_contiguous(memory_format=torch.channels_last):
        return _resample_channels_last(maps, rows, columns)

    if rows is not None:
        maps = rows @ maps
    if columns is not None:
        maps = maps @ columns.T
    return maps


def _interpolation_matrix(source: Grid, target: Grid, kernel: Kernel, maps: Tensor) -> Tensor | None:
    """Returns the weights (h', h) of one side with the dtype and device of `maps`. None: the positions are the same."""
    if source.is_close(target):
        return None
    return _weights(source, target, kernel).to(maps)


def _resample_channels_last(maps: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Multiplies channels-last maps (B, C, h, w) by the weights of both sides, in their memory order."""
    maps = maps.permute(0, 2, 3, 1)
    if rows is not None:
        maps = (rows @ maps.flatten(2)).unflatten(2, maps.shape[2:])
    if columns is not None:
        maps = columns @ maps
    return maps.permute(0, 3, 1, 2)


def _resample_symbolic(maps: Tensor, source: Grids, target: Grids) -> Tensor:
    """Resamples bilinearly with torch operations only, because the sizes are symbols during export."""
    rows = _bilinear_weights(source.rows, target.rows).to(maps.dtype)
    columns = _bilinear_weights(source.columns, target.columns).to(maps.dtype)

    planes = maps.contiguous().flatten(0, -3)  # matmul of more dimensions would view them by their sizes
    count = len(planes)
    resampled = rows.expand(count, -1, -1).bmm(planes).bmm(columns.T.expand(count, -1, -1))
    return resampled.unflatten(0, maps.shape[:-2])


def _bilinear_weights(source: Grid, target: Grid) -> Tensor:
    """Computes the bilinear weights of `_weights` with torch: 1 minus the distance in steps, at least 0."""
    centers = target.first + target.step * torch.arange(target.num_positions, dtype=torch.float64)
    coordinates = ((centers - source.first) / source.step).clamp(0, source.num_positions - 1)
    return (1 - (coordinates[:, None] - torch.arange(source.num_positions)).abs()).clamp(min=0)


@functools.lru_cache(maxsize=256)
def _weights(source: Grid, target: Grid, kernel: Kernel) -> Tensor:
    """Computes the weight of each of h source positions in each of h' target values, (h', h) float64."""
    centers = np.float64(target.first) + target.step * np.arange(target.num_positions, dtype=np.float64)
    coordinates = (centers - source.first) / source.step
    below = np.floor(coordinates).astype(np.int64)

    weights = np.zeros((target.num_positions, source.num_positions))
    taps = (0, 1) if kernel == "bilinear" else (-1, 0, 1, 2)
    for tap in taps:
        distance = np.abs(coordinates - (below + tap))
        values = 1 - distance if kernel == "bilinear" else _cubic(distance)
        neighbors = np.clip(below + tap, 0, source.num_positions - 1)
        np.add.at(weights, (np.arange(target.num_positions), neighbors), values)
    return torch.from_numpy(weights)


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Evaluates the cubic convolution kernel at distances in [0, 2]."""
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC
    return np.where(distance <= 1, near, far)

"""Random walk of maps over affinities between neighboring positions (Ahn and Kwak, CVPR 2018, section 3.3).

Affinities (..., D, h, w) lie in one plane per direction: plane d has, at (y, x), that of the positions (y, x) and
(y, x) + directions[d]; where the latter lies outside the map, nothing is meant. Half of the directions suffice, as
affinities are symmetric.
"""

import functools
import warnings
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def directions(radius: int) -> list[tuple[int, int]]:
    """Offsets (dy, dx) shorter than `radius` positions, one of each opposite two: 34 of radius 5."""
    return [
        (dy, dx)
        for dy in range(radius)
        for dx in range(1 - radius, radius)
        if dy * dy + dx * dx < radius * radius and (dy > 0 or dx > 0)
    ]


def pair_slices(shape: tuple[int, int], direction: tuple[int, int]) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Which positions of a map (h, w) have a partner in a direction, and which ones are the partners."""
    (h, w), (dy, dx) = shape, direction
    rows, partner_rows = slice(0, max(0, h - dy)), slice(dy, h)
    columns, partner_columns = slice(max(0, -dx), max(0, min(w, w - dx))), slice(max(0, dx), max(0, min(w, w + dx)))
    return (rows, columns), (partner_rows, partner_columns)


class _Structure(NamedTuple):
    """Where a step's weights stand in CSR, which the size of a map decides alone.

    Attributes:
        starts: where each row's entries begin, (hw + 1,) int32.
        columns: of each entry, int32.
        order: of each entry, its number among a position's own weights, then each direction's in both senses.
        rows: of each weight in that order, int64.
    """

    starts: Tensor
    columns: Tensor
    order: Tensor
    rows: Tensor


@functools.lru_cache(maxsize=16)
def _structure(h: int, w: int, radius: int) -> _Structure:
    index = np.arange(h * w, dtype=np.int32).reshape(h, w)
    rows, columns = [index.ravel()], [index.ravel()]
    for direction in directions(radius):
        here, there = pair_slices((h, w), direction)
        one, other = index[here].ravel(), index[there].ravel()
        rows += [one, other]
        columns += [other, one]
    row, column = np.concatenate(rows), np.concatenate(columns)
    order: NDArray[np.intp] = np.lexsort((column, row))
    ends = np.cumsum(np.bincount(row, minlength=h * w), dtype=np.int32)
    parts = np.concatenate([np.zeros(1, np.int32), ends]), column[order], order, row.astype(np.int64)
    return _Structure(*(torch.from_numpy(part) for part in parts))


def transition(affinities: Tensor, radius: int, beta: float) -> Tensor:
    """The walk's step as a sparse matrix (hw, hw) in CSR: new value of a position = mean over its neighbors' values.

    The weights are affinities to the power `beta`, a position's with itself is 1, and each row sums to 1.

    Args:
        affinities: (D, h, w) in [0, 1].
        radius: of `directions`.
        beta: makes low affinities count less.
    """
    h, w = affinities.shape[1:]
    starts, columns, order, rows = (part.to(affinities.device) for part in _structure(h, w, radius))
    values = [affinities.new_ones(h * w)]
    for plane, direction in zip(affinities, directions(radius), strict=True):
        here, _ = pair_slices((h, w), direction)
        values += [plane[here].reshape(-1).pow(beta)] * 2
    weight = torch.cat(values)
    weight = weight / weight.new_zeros(h * w).index_add_(0, rows, weight)[rows]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (invariant checks|CSR tensor support)")
        return torch.sparse_csr_tensor(starts, columns, weight[order], size=(h * w, h * w), check_invariants=False)


def random_walk(maps: Tensor, affinities: Tensor, *, radius: int, beta: float, steps: int) -> Tensor:
    """Maps (T, h, w) after `steps` steps of a walk over affinities (D, h, w), (T, h, w).

    A map's values stay within its range. Memory grows with hw and the square of the radius, never with (hw)^2.
    """
    step = transition(affinities, radius, beta)
    values = maps.flatten(1).T.contiguous()
    for _ in range(steps):
        values = step @ values
    return values.T.reshape(maps.shape)

"""Random walk of maps over affinities between neighboring positions (Ahn and Kwak, CVPR 2018, section 3.3).

Affinities have one plane per direction, (..., D, h, w): plane d contains at (y, x) the affinity between the positions
(y, x) and (y, x) + directions[d]. Values whose second position is outside the map are not read. Affinities are
symmetric, so half of the directions suffice.
"""

import functools
import warnings
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def directions(radius: int) -> list[tuple[int, int]]:
    """Returns the offsets (dy, dx) shorter than `radius`, one of each opposite pair: 34 for radius 5."""
    offsets = []
    for dy in range(radius):
        for dx in range(1 - radius, radius):
            is_near = dy * dy + dx * dx < radius * radius
            is_first_of_pair = dy > 0 or dx > 0
            if is_near and is_first_of_pair:
                offsets.append((dy, dx))
    return offsets


def pair_slices(shape: tuple[int, int], direction: tuple[int, int]) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Returns the slices of a map that select the pairs of positions in a direction.

    Args:
        shape: Height and width of the map.
        direction: Offset (dy, dx) of the second position, dy >= 0.

    Returns:
        Slices of rows and columns for the first positions, and for the second ones.
    """
    h, w = shape
    dy, dx = direction
    rows = slice(0, max(0, h - dy))
    columns = slice(max(0, -dx), max(0, min(w, w - dx)))
    second_rows = slice(dy, h)
    second_columns = slice(max(0, dx), max(0, min(w, w + dx)))
    return (rows, columns), (second_rows, second_columns)


class _Structure(NamedTuple):
    """Sparsity structure of a transition matrix in CSR format, which depends only on the size of the map.

    Weights are listed as those of each position with itself, then for each direction those from first to second
    positions and those from second to first.

    Attributes:
        row_starts: Index of the first entry of each row, (hw + 1,) int32.
        columns: Column of each entry, int32.
        order: Number of each entry's weight in the list.
        rows: Row of each weight in the list, int64.
    """

    row_starts: Tensor
    columns: Tensor
    order: Tensor
    rows: Tensor


@functools.lru_cache(maxsize=16)
def _structure(h: int, w: int, radius: int) -> _Structure:
    index = np.arange(h * w, dtype=np.int32).reshape(h, w)
    row_parts = [index.ravel()]
    column_parts = [index.ravel()]
    for direction in directions(radius):
        first_slices, second_slices = pair_slices((h, w), direction)
        first = index[first_slices].ravel()
        second = index[second_slices].ravel()
        row_parts += [first, second]
        column_parts += [second, first]

    rows = np.concatenate(row_parts)
    columns = np.concatenate(column_parts)
    order: NDArray[np.intp] = np.lexsort((columns, rows))
    row_ends = np.cumsum(np.bincount(rows, minlength=h * w), dtype=np.int32)
    return _Structure(
        row_starts=torch.from_numpy(np.concatenate([np.zeros(1, np.int32), row_ends])),
        columns=torch.from_numpy(columns[order]),
        order=torch.from_numpy(order),
        rows=torch.from_numpy(rows.astype(np.int64)),
    )


def transition(affinities: Tensor, radius: int, beta: float) -> Tensor:
    """Computes the matrix of a step, which replaces the value at a position by a mean over its neighbors.

    The weights are affinities to the power of `beta`; a position has weight 1 with itself. Each row sums to 1.

    Args:
        affinities: (D, h, w) in [0, 1].
        radius: Radius of `directions`.
        beta: Exponent; large values suppress low affinities.

    Returns:
        Sparse matrix in CSR format, (hw, hw).
    """
    h, w = affinities.shape[1:]
    row_starts, columns, order, rows = (part.to(affinities.device) for part in _structure(h, w, radius))

    weights = [affinities.new_ones(h * w)]
    for plane, direction in zip(affinities, directions(radius), strict=True):
        first_slices, _ = pair_slices((h, w), direction)
        powers = plane[first_slices].reshape(-1).pow(beta)
        weights += [powers, powers]
    weight = torch.cat(weights)
    row_sums = weight.new_zeros(h * w).index_add_(0, rows, weight)
    weight = weight / row_sums[rows]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (invariant checks|CSR tensor support)")
        return torch.sparse_csr_tensor(row_starts, columns, weight[order], size=(h * w, h * w), check_invariants=False)


def random_walk(maps: Tensor, affinities: Tensor, *, radius: int, beta: float, steps: int) -> Tensor:
    """Applies steps of a random walk to maps. The values of a map stay within its range.

    Memory grows with hw and the square of the radius, not with (hw)^2.

    Args:
        maps: (T, h, w).
        affinities: (D, h, w) in [0, 1].
        radius, beta: See `transition`.
        steps: Number of steps.

    Returns:
        Maps, (T, h, w).
    """
    step = transition(affinities, radius, beta)
    values = maps.flatten(1).T.contiguous()
    for _ in range(steps):
        values = step @ values
    return values.T.reshape(maps.shape)

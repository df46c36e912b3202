"""Attention and gates of a pair of images, and their reduction to a size that a page can show (Fig. 1 and 2b).

Localization never stores these matrices: it averages values over one affinity at a time (`multi_round`). Pictures of a
few pairs need the weights themselves.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mcis.models.coattention import AffinityForm, position_vectors
from mcis.models.grids import Grid, Grids


class CoarseAttention(NamedTuple):
    """Attention from some positions of an image to cells of its partner.

    Attributes:
        weights: Share of the attention that each cell gets, (h, w, h', w'); the shares of a position sum to 1.
        targets: Locations of the h x w positions in their image.
        cells: Locations of the centers of the h' x w' cells in the partner. Cells of one side are `step` wide.
    """

    weights: Tensor
    targets: Grids
    cells: Grids


def attention_weights(query: Tensor, partner: Tensor, form: AffinityForm = "bilinear") -> Tensor:
    """Computes the weights with which each position of an image averages the positions of its partner (Eq. 2, 3).

    Args:
        query: `affinity_query` of the image, (HW, C).
        partner: Features of its partner, (C, H', W').
        form: How vectors are compared.

    Returns:
        (HW, H'W'); row i is column i of A, whose entries sum to 1.
    """
    return torch.softmax(query @ position_vectors(partner[None], form)[0].T, dim=1)


def shared_gate(weights: Tensor, partner: Tensor, w_b: Tensor) -> Tensor:
    """Computes B, the gate that is high where an image shows what its partner shows, too (Eq. 6).

    W_B is linear, so it is applied before attention, which then averages one value per position. 1 - B is the
    contrastive co-attention of Eq. 7. Eq. 8 multiplies the features by it.

    Args:
        weights: `attention_weights` of the image, (HW, H'W').
        partner: Features of its partner, (C, H', W').
        w_b: W_B, (C,).

    Returns:
        (HW,), in [0, 1].
    """
    return torch.sigmoid(weights @ (w_b @ partner.flatten(1)))


def coarse_attention(weights: Tensor, target: Grids, partner: Grids, side: int) -> CoarseAttention:
    """Reduces attention to at most `side` positions and `side` cells along each side of the images.

    Positions of the image are left out at equal distances, so those that remain have their own attention. The
    positions of the partner are joined to square cells, whose shares are sums, so nothing is lost. Cells at the lower
    and right edge may contain fewer positions.

    Args:
        weights: `attention_weights`, (HW, H'W').
        target, partner: Locations of the positions of both images.
        side: Maximum number of positions along a side.
    """
    full = weights.unflatten(1, (partner.rows.num_positions, partner.columns.num_positions))
    full = full.unflatten(0, (target.rows.num_positions, target.columns.num_positions))
    row_stride = -(-target.rows.num_positions // side)
    column_stride = -(-target.columns.num_positions // side)
    chosen = full[row_stride // 2 :: row_stride, column_stride // 2 :: column_stride]

    cell_height = -(-partner.rows.num_positions // side)
    cell_width = -(-partner.columns.num_positions // side)
    joined = _joined(_joined(chosen, cell_height, dim=2), cell_width, dim=3)
    targets = Grids(_thinned(target.rows, row_stride), _thinned(target.columns, column_stride))
    cells = Grids(_cell_grid(partner.rows, cell_height), _cell_grid(partner.columns, cell_width))
    return CoarseAttention(joined, targets, cells)


def _joined(values: Tensor, size: int, dim: int) -> Tensor:
    """Sums of `size` consecutive entries along a dimension; the last sum may have fewer entries."""
    return torch.stack([part.sum(dim=dim) for part in values.split(size, dim=dim)], dim=dim)


def _thinned(grid: Grid, stride: int) -> Grid:
    """Every `stride`-th position, starting in the middle of the first `stride`."""
    first = stride // 2
    count = len(range(first, grid.num_positions, stride))
    return Grid(grid.first + first * grid.step, grid.step * stride, count)


def _cell_grid(grid: Grid, size: int) -> Grid:
    """Centers of cells of `size` positions."""
    return Grid(grid.first + (size - 1) / 2 * grid.step, grid.step * size, -(-grid.num_positions // size))

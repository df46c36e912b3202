"""Attention and gates of a pair against loops over Eq. 2, 3 and 6 in float64, and their reduction to cells."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcis.models.coattention import AffinityForm, affinity, coattend
from mcis.models.grids import Grid, Grids
from mcis.models.localization import affinity_query
from mcis.models.pair_attention import attention_weights, coarse_attention, shared_gate

side = st.integers(1, 4)
shapes = st.tuples(side, side)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([seed, len(shape)]).normal(size=shape))


@given(st.integers(0, 999), shapes, shapes, st.sampled_from([1.0, 0.25]))
def test_weights_and_gate_are_equations_2_3_and_6(
    seed: int, target: tuple[int, int], partner: tuple[int, int], scale: float
) -> None:
    channels = 3
    f_m = drawn(seed, channels, *target)
    f_n = drawn(seed + 1, channels, *partner)
    w_p = drawn(seed, channels, channels)
    w_b = drawn(seed, channels)
    weights = attention_weights(affinity_query(f_m, w_p, scale=scale), f_n)
    gate = shared_gate(weights, f_n, w_b)

    for i, (y, x) in enumerate(np.ndindex(*target)):
        entries = []
        for q, p in np.ndindex(*partner):
            entry = 0.0
            for a in range(channels):
                for b in range(channels):
                    entry += f_m[a, y, x].item() * w_p[a, b].item() * f_n[b, q, p].item()
            entries.append(math.exp(scale * entry))
        total = sum(entries)
        common = 0.0  # W_B F^{m & n} at this position
        for j, (q, p) in enumerate(np.ndindex(*partner)):
            assert weights[i, j].item() == pytest.approx(entries[j] / total, abs=1e-12)
            for a in range(channels):
                common += w_b[a].item() * f_n[a, q, p].item() * entries[j] / total
        assert gate[i].item() == pytest.approx(1 / (1 + math.exp(-common)), abs=1e-12)


@pytest.mark.parametrize("form", ["bilinear", "cosine", (2, 4)])
def test_averages_by_the_weights_are_the_co_attentive_features(form: AffinityForm) -> None:
    f_m, f_n, w_p = drawn(0, 6, 3, 5), drawn(1, 6, 4, 2), drawn(2, 6, 6)
    common = coattend(f_m[None], f_n[None], affinity(f_m[None], f_n[None], w_p, form=form))
    of_m = attention_weights(affinity_query(f_m, w_p, form=form), f_n, form) @ f_n.flatten(1).T
    of_n = attention_weights(affinity_query(f_n, w_p.T, form=form), f_m, form) @ f_m.flatten(1).T
    torch.testing.assert_close(of_m.T, common.m[0].flatten(1))
    torch.testing.assert_close(of_n.T, common.n[0].flatten(1))


@given(st.integers(0, 99), shapes, shapes, st.integers(1, 5))
def test_cells_are_sums_and_positions_keep_their_attention(
    seed: int, target: tuple[int, int], partner: tuple[int, int], side: int
) -> None:
    weights = torch.softmax(drawn(seed, math.prod(target), math.prod(partner)), dim=1)
    grids = Grids(Grid(0.1, 0.2, target[0]), Grid(0.05, 0.3, target[1]))
    cells = Grids(Grid(0.2, 0.1, partner[0]), Grid(0.0, 0.25, partner[1]))
    coarse = coarse_attention(weights, grids, cells, side)
    assert max(coarse.weights.shape) <= side
    torch.testing.assert_close(coarse.weights.sum(dim=(2, 3)), torch.ones(coarse.weights.shape[:2]).double())

    full = weights.reshape(*target, *partner)
    strides = [-(-count // side) for count in (*target, *partner)]
    for h, w, i, j in np.ndindex(*coarse.weights.shape):
        y = strides[0] // 2 + h * strides[0]
        x = strides[1] // 2 + w * strides[1]
        assert coarse.targets.rows.first + h * coarse.targets.rows.step == pytest.approx(0.1 + 0.2 * y)
        assert coarse.targets.columns.first + w * coarse.targets.columns.step == pytest.approx(0.05 + 0.3 * x)
        total = 0.0
        for q in range(i * strides[2], min((i + 1) * strides[2], partner[0])):
            for p in range(j * strides[3], min((j + 1) * strides[3], partner[1])):
                total += full[y, x, q, p].item()
        assert coarse.weights[h, w, i, j].item() == pytest.approx(total)
    assert coarse.cells.rows.first == pytest.approx(0.2 + 0.1 * (strides[2] - 1) / 2)
    assert coarse.cells.columns.step == pytest.approx(0.25 * strides[3])


def test_few_positions_are_kept_as_they_are() -> None:
    grids = Grids(Grid(0.1, 0.2, 2), Grid(0.1, 0.2, 3))
    weights = torch.softmax(drawn(0, 6, 6), dim=1)
    coarse = coarse_attention(weights, grids, grids, 16)
    assert (coarse.targets, coarse.cells) == (grids, grids)
    torch.testing.assert_close(coarse.weights.reshape(6, 6), weights)

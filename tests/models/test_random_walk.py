"""The random walk over affinities, against dense matrices in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.models.random_walk import directions, pair_slices, random_walk, transition


def drawn(radius: int, h: int, w: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(len(directions(radius)), h, w, generator=torch.Generator().manual_seed(seed))


def reference(affinities: NDArray[np.float64], radius: int, beta: float) -> NDArray[np.float64]:
    """The walk's step as a dense matrix, pair by pair."""
    _, h, w = affinities.shape
    matrix = np.eye(h * w)
    for plane, (dy, dx) in enumerate(directions(radius)):
        for y, x in np.ndindex(h, w):
            if 0 <= y + dy < h and 0 <= x + dx < w:
                one, other = y * w + x, (y + dy) * w + x + dx
                matrix[one, other] = matrix[other, one] = affinities[plane, y, x] ** beta
    return np.asarray(matrix / matrix.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("radius", [2, 3, 5, 8])
def test_directions_and_their_opposites_are_the_disc(radius: int) -> None:
    half = directions(radius)
    both = {*half, *((-dy, -dx) for dy, dx in half)}
    steps = range(-radius, radius + 1)
    disc = {(dy, dx) for dy in steps for dx in steps if 0 < math.hypot(dy, dx) < radius}
    assert both == disc
    assert len(both) == 2 * len(half), "no direction is there with its opposite"


@pytest.mark.parametrize("direction", [(0, 1), (1, -2), (2, 3), (3, 0), (4, -4)])
def test_slices_pair_each_position_with_its_partner(direction: tuple[int, int]) -> None:
    h, w = 3, 4
    positions = np.moveaxis(np.indices((h, w)), 0, -1)
    here, there = pair_slices((h, w), direction)
    np.testing.assert_array_equal(positions[here] + direction, positions[there])
    inside = positions + direction
    expected = ((inside >= 0) & (inside < (h, w))).all(axis=-1).sum()
    assert positions[here].shape[0] * positions[here].shape[1] == expected


@settings(max_examples=30)
@given(
    h=st.integers(1, 9), w=st.integers(1, 9), radius=st.integers(2, 5), beta=st.floats(0.5, 10), seed=st.integers(0, 99)
)
def test_a_step_is_the_dense_matrix(h: int, w: int, radius: int, beta: float, seed: int) -> None:
    affinities = drawn(radius, h, w, seed)
    step = transition(affinities, radius, beta).to_dense()
    np.testing.assert_allclose(step, reference(affinities.double().numpy(), radius, beta), atol=1e-6)


def test_a_walk_is_the_power_of_the_step() -> None:
    affinities, maps = drawn(5, 12, 9), torch.rand(3, 12, 9, generator=torch.Generator().manual_seed(1))
    walked = random_walk(maps, affinities, radius=5, beta=4, steps=64)
    matrix = np.linalg.matrix_power(reference(affinities.double().numpy(), 5, 4), 64)
    expected = (matrix @ maps.double().flatten(1).numpy().T).T.reshape(3, 12, 9)
    np.testing.assert_allclose(walked, expected, atol=1e-5)


def test_what_is_cut_off_keeps_its_values() -> None:
    """Nothing crosses where no affinity does, and within an area all values become one."""
    h, w, radius = 6, 10, 3
    affinities = torch.ones(len(directions(radius)), h, w)
    for plane, (_, dx) in enumerate(directions(radius)):
        for x in range(w):
            if (x < 4) != (x + dx < 4):
                affinities[plane, :, x] = 0
    maps = torch.rand(1, h, w, generator=torch.Generator().manual_seed(2))
    maps[..., 4:] += 5
    walked = random_walk(maps, affinities, radius=radius, beta=2, steps=500)
    assert walked[..., :4].max() < 1, "nothing of the right side"
    assert walked[..., 4:].min() > 5
    for side in (walked[..., :4], walked[..., 4:]):
        torch.testing.assert_close(side, side.mean().expand_as(side), atol=1e-4, rtol=0)

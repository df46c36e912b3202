"""The random walk over affinities, against dense matrices in float64."""

import itertools
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
    """The transition matrix of a step as a dense matrix, pair by pair."""
    _, h, w = affinities.shape
    matrix = np.eye(h * w)
    for plane, (dy, dx) in enumerate(directions(radius)):
        for y, x in np.ndindex(h, w):
            if 0 <= y + dy < h and 0 <= x + dx < w:
                first = y * w + x
                second = (y + dy) * w + x + dx
                weight = affinities[plane, y, x] ** beta
                matrix[first, second] = weight
                matrix[second, first] = weight
    return np.asarray(matrix / matrix.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("radius", [2, 3, 5, 8])
def test_directions_and_their_opposites_are_the_disc(radius: int) -> None:
    half = directions(radius)
    opposite = [(-dy, -dx) for dy, dx in half]
    steps = range(-radius, radius + 1)
    disc = {offset for offset in itertools.product(steps, steps) if 0 < math.hypot(*offset) < radius}
    assert {*half, *opposite} == disc
    assert len(disc) == 2 * len(half), "no direction is listed together with its opposite"


@pytest.mark.parametrize("direction", [(0, 1), (1, -2), (2, 3), (3, 0), (4, -4)])
def test_slices_pair_each_position_with_its_partner(direction: tuple[int, int]) -> None:
    shape = (3, 4)
    positions = np.moveaxis(np.indices(shape), 0, -1)
    first, second = pair_slices(shape, direction)
    np.testing.assert_array_equal(positions[first] + direction, positions[second])

    partners = positions + direction
    is_inside = ((partners >= 0) & (partners < shape)).all(axis=-1)
    assert positions[first].shape[0] * positions[first].shape[1] == is_inside.sum()


@settings(max_examples=30)
@given(
    h=st.integers(1, 9), w=st.integers(1, 9), radius=st.integers(2, 5), beta=st.floats(0.5, 10), seed=st.integers(0, 99)
)
def test_a_step_equals_the_dense_matrix(h: int, w: int, radius: int, beta: float, seed: int) -> None:
    affinities = drawn(radius, h, w, seed)
    step = transition(affinities, radius, beta).to_dense()
    np.testing.assert_allclose(step, reference(affinities.double().numpy(), radius, beta), atol=1e-6)


def test_a_walk_is_the_power_of_the_step() -> None:
    affinities = drawn(5, 12, 9)
    maps = torch.rand(3, 12, 9, generator=torch.Generator().manual_seed(1))
    walked = random_walk(maps, affinities, radius=5, beta=4, steps=64)
    matrix = np.linalg.matrix_power(reference(affinities.double().numpy(), 5, 4), 64)
    expected = (matrix @ maps.double().flatten(1).numpy().T).T.reshape(3, 12, 9)
    np.testing.assert_allclose(walked, expected, atol=1e-5)


def test_values_do_not_cross_borders_without_affinity() -> None:
    """Within each of the two areas all values converge to the same one."""
    radius = 3
    affinities = torch.ones(len(directions(radius)), 6, 10)
    for plane, (_, dx) in enumerate(directions(radius)):
        for x in range(10):
            if (x < 4) != (x + dx < 4):
                affinities[plane, :, x] = 0

    maps = torch.rand(1, 6, 10, generator=torch.Generator().manual_seed(2))
    maps[..., 4:] += 5
    walked = random_walk(maps, affinities, radius=radius, beta=2, steps=500)
    assert walked[..., :4].max() < 1, "nothing from the right side"
    assert walked[..., 4:].min() > 5
    for side in (walked[..., :4], walked[..., 4:]):
        torch.testing.assert_close(side, side.mean().expand_as(side), atol=1e-4, rtol=0)

"""Tests of resampling between positions, compared with kernels evaluated value by value and with torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from mcis.models.grids import Grid, Grids, Layout, pixel_grid, pixel_grids
from mcis.models.resampling import Kernel, resample

counts = st.integers(1, 7)
grids = st.builds(Grid, st.floats(-0.2, 0.6), st.floats(0.02, 0.5), counts)
kernels = st.sampled_from(["bilinear", "bicubic"])
seeds = st.integers(0, 2**32 - 1)
POINT = Grid(0.5, 1.0, 1)


def linear(t: float) -> float:
    """Evaluates the linear kernel."""
    return max(0.0, 1 - abs(t))


def cubic(t: float) -> float:
    """Evaluates the cubic convolution kernel with a = -0.75."""
    a = -0.75
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    if t < 2:
        return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
    return 0.0


def value_at(values: list[float], source: Grid, target: Grid, index: int, kernel: Kernel) -> float:
    """Interpolates one value of a line by the definition. Values beyond the ends are repeated."""
    center = target.first + index * target.step
    coordinate = (center - source.first) / source.step
    weight = cubic if kernel == "bicubic" else linear
    last = len(values) - 1
    taps = range(math.floor(coordinate) - 1, math.floor(coordinate) + 3)
    return sum(weight(coordinate - n) * values[min(max(n, 0), last)] for n in taps)


@given(seeds, grids, grids, kernels)
def test_rows_are_weighted_by_the_kernel(seed: int, source: Grid, target: Grid, kernel: Kernel) -> None:
    values = np.random.default_rng(seed).normal(size=source.num_positions)
    expected = [value_at(values.tolist(), source, target, n, kernel) for n in range(target.num_positions)]
    column = torch.from_numpy(values).view(1, -1, 1)
    resampled = resample(column, Grids(source, POINT), Grids(target, POINT), kernel)
    np.testing.assert_allclose(resampled.flatten(), expected, atol=1e-9)


@given(seeds, grids, grids, kernels)
def test_columns_are_weighted_by_the_kernel(seed: int, source: Grid, target: Grid, kernel: Kernel) -> None:
    values = np.random.default_rng(seed).normal(size=source.num_positions)
    expected = [value_at(values.tolist(), source, target, n, kernel) for n in range(target.num_positions)]
    row = torch.from_numpy(values).view(1, 1, -1)
    resampled = resample(row, Grids(POINT, source), Grids(POINT, target), kernel)
    np.testing.assert_allclose(resampled.flatten(), expected, atol=1e-9)


@given(counts, counts, counts, counts, kernels)
def test_equal_parts_are_resized_as_in_torch(h: int, w: int, height: int, width: int, kernel: Kernel) -> None:
    maps = torch.randn(2, 3, h, w, generator=torch.Generator().manual_seed(h * w), dtype=torch.float64)
    expected = functional.interpolate(maps, size=(height, width), mode=kernel)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        formatted = maps.contiguous(memory_format=memory_format)
        resized = resample(formatted, pixel_grids(h, w), pixel_grids(height, width), kernel)
        torch.testing.assert_close(resized, expected)
        if min(h, w, height, width) > 1:
            assert resized.is_contiguous(memory_format=memory_format)


@given(seeds, grids, grids, grids, grids)
def test_an_exported_network_resamples_the_same(
    seed: int, rows: Grid, columns: Grid, target_rows: Grid, target_columns: Grid
) -> None:
    """Also to the same positions. Maps may have any number of leading dimensions."""
    maps = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 3, rows.num_positions, columns.num_positions)))
    source = Grids(rows, columns)
    for target in (Grids(target_rows, target_columns), source):
        expected = resample(maps, source, target)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("torch.compiler.is_exporting", lambda: True)
            exported = resample(maps, source, target)
        torch.testing.assert_close(exported, expected, rtol=1e-9, atol=1e-9)


def test_maps_at_the_same_positions_are_returned_as_they_are() -> None:
    maps = torch.randn(2, 3, 4)
    assert resample(maps, pixel_grids(3, 4), pixel_grids(3, 4)) is maps


def pixel_of(grid: Grid, position: int, side: int) -> float:
    """Returns the pixel at which a position is centered, in an image side of `side` pixels."""
    return (grid.first + position * grid.step) * side - 0.5


def test_positions_without_offset_are_at_multiples_of_the_stride() -> None:
    grid = Layout(8).grid(96, 12)
    assert pixel_of(grid, 0, 96) == pytest.approx(0)
    assert pixel_of(grid, 3, 96) == pytest.approx(24)
    assert not grid.is_close(pixel_grid(12))


def test_positions_with_offset_are_in_the_middle_of_their_pixels() -> None:
    grid = Layout(8, 3.5).grid(96, 12)
    assert pixel_of(grid, 3, 96) == pytest.approx(27.5)
    assert grid.is_close(pixel_grid(12))


def test_positions_of_equal_parts_do_not_depend_on_the_stride() -> None:
    assert Layout(16, None).grid(75, 5) == pixel_grid(5)


def test_flipped_positions_are_equally_far_from_the_other_edge() -> None:
    grid = Layout(8).grid(96, 12)  # from pixel 0 to pixel 88
    assert pixel_of(grid.hflipped(), 0, 96) == pytest.approx(7)
    assert grid.hflipped().hflipped() == pytest.approx(grid)
    assert pixel_grid(5).hflipped().is_close(pixel_grid(5))


def test_a_padded_side_ends_on_a_position() -> None:
    assert [Layout(8).padded_side(side) for side in (1, 8, 9, 321, 322)] == [1, 9, 9, 321, 329]
    assert Layout(4).padded_side(6) == 9


@pytest.mark.parametrize("layout", [Layout(8, 3.5), Layout(8, None)])
def test_a_padded_side_is_a_multiple_of_the_stride(layout: Layout) -> None:
    assert [layout.padded_side(side) for side in (1, 8, 9, 321)] == [8, 8, 16, 328]

"""Resampling by where positions lie: against kernels evaluated value by value, and torch where both can say it."""

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


def cubic(t: float) -> float:
    """The cubic convolution kernel with a = -0.75."""
    a, t = -0.75, abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def value_at(values: list[float], source: Grid, target: Grid, index: int, kernel: Kernel) -> float:
    """One value of a line, by the definition."""
    center, last = target.first + index * target.step, len(values) - 1
    at = (center - source.first) / source.step
    taps = range(math.floor(at) - 1, math.floor(at) + 3)
    weigh = cubic if kernel == "bicubic" else lambda t: max(0.0, 1 - abs(t))
    return sum(weigh(at - n) * values[min(max(n, 0), last)] for n in taps)


@given(st.integers(0, 2**32 - 1), grids, grids, st.sampled_from(["bilinear", "bicubic"]))
def test_values_are_the_kernels(seed: int, source: Grid, target: Grid, kernel: Kernel) -> None:
    values = np.random.default_rng(seed).normal(size=source.positions)
    expected = [value_at(values.tolist(), source, target, n, kernel) for n in range(target.positions)]
    line = Grid(0.5, 1.0, 1)
    for shape, both in (((1, 1, -1), (line, source)), ((1, -1, 1), (source, line))):
        onto = Grids(line, target) if both[0] is line else Grids(target, line)
        got = resample(torch.from_numpy(values).view(shape), Grids(*both), onto, kernel)
        np.testing.assert_allclose(got.flatten(), expected, atol=1e-9)


@given(counts, counts, counts, counts, st.sampled_from(["bilinear", "bicubic"]))
def test_equal_parts_are_resized_as_torch_does(h: int, w: int, height: int, width: int, kernel: Kernel) -> None:
    maps = torch.randn(2, 3, h, w, generator=torch.Generator().manual_seed(h * w), dtype=torch.float64)
    expected = functional.interpolate(maps, size=(height, width), mode=kernel)
    for layout in (torch.contiguous_format, torch.channels_last):
        got = resample(maps.contiguous(memory_format=layout), pixel_grids(h, w), pixel_grids(height, width), kernel)
        torch.testing.assert_close(got, expected)
        assert min(h, w, height, width) == 1 or got.is_contiguous(memory_format=layout)


@given(st.integers(0, 2**32 - 1), grids, grids, grids, grids)
def test_an_exported_network_resamples_alike(seed: int, rows: Grid, columns: Grid, to_rows: Grid, to: Grid) -> None:
    """To the same positions as well, and maps of any number of leading dimensions."""
    maps = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 3, rows.positions, columns.positions)))
    for target in (Grids(to_rows, to), Grids(rows, columns)):
        wanted = resample(maps, Grids(rows, columns), target)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("torch.compiler.is_exporting", lambda: True)
            exported = resample(maps, Grids(rows, columns), target)
        torch.testing.assert_close(exported, wanted, rtol=1e-9, atol=1e-9)


def test_the_same_positions_are_left_alone() -> None:
    maps = torch.randn(2, 3, 4)
    assert resample(maps, pixel_grids(3, 4), pixel_grids(3, 4)) is maps


def test_positions_of_a_stride_are_at_its_multiples_or_in_the_middle_of_its_pixels() -> None:
    """Position 3 of stride 8 is centered at pixel 24, at 27.5 where pixels are pooled by twos."""
    assert Layout(8).grid(96, 12).first * 96 == pytest.approx(0.5)
    assert (Layout(8).grid(96, 12).first + 3 * Layout(8).grid(96, 12).step) * 96 - 0.5 == pytest.approx(24)
    middle = Layout(8, 3.5).grid(96, 12)
    assert (middle.first + 3 * middle.step) * 96 - 0.5 == pytest.approx(27.5)
    assert middle.is_close(pixel_grid(12))
    assert not middle.is_close(Layout(8).grid(96, 12))
    assert Layout(16, None).grid(75, 5) == pixel_grid(5)


def test_mirrored_positions_are_as_far_from_the_other_edge() -> None:
    grid = Layout(8).grid(96, 12)  # from pixel 0 to pixel 88
    assert grid.hflipped().first * 96 - 0.5 == pytest.approx(7)
    assert grid.hflipped().hflipped() == pytest.approx(grid)
    assert pixel_grid(5).hflipped().is_close(pixel_grid(5))


def test_a_padded_side_ends_on_a_position() -> None:
    assert [Layout(8).padded_side(side) for side in (1, 8, 9, 321, 322)] == [1, 9, 9, 321, 329]
    assert Layout(4).padded_side(6) == 9


@pytest.mark.parametrize("layout", [Layout(8, 3.5), Layout(8, None)])
def test_a_padded_side_is_made_of_whole_parts(layout: Layout) -> None:
    assert [layout.padded_side(side) for side in (1, 8, 9, 321)] == [8, 8, 16, 328]

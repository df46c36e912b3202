"""Tests of the search of nearest images: large classes are searched by cells, and parts give the same as the whole."""

import numpy as np
import pytest
from numpy.typing import NDArray

from mcis.datasets.sampling import nearest_images
from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.sampling.nearest_images import ClassMaps, rounded_unit_vectors
from mcis.datasets.tags import Tags

N = 600
RELATED = 5


def clustered_vectors(seed: int = 0) -> NDArray[np.float32]:
    """Vectors (N, 8) of 30 clusters."""
    rng = np.random.default_rng(seed)
    clusters = rng.normal(size=(30, 8))
    vectors = clusters[rng.integers(0, 30, N)] + 0.3 * rng.normal(size=(N, 8))
    return rounded_unit_vectors(vectors.astype(np.float32))


def drawn_tags(seed: int = 0) -> Tags:
    """Class 0 has all images, class 1 half, class 2 a tenth; class 3 none."""
    rng = np.random.default_rng(seed)
    matrix = rng.random((N, 4)) < [1, 0.5, 0.1, 0]
    return Tags.from_matrix(matrix)


def ordered_maps(max_candidates: int, seed: int = 0) -> tuple[ClassMaps, NDArray[np.float32]]:
    vectors = clustered_vectors()
    maps = ClassMaps.from_tags(drawn_tags(), seed, max_candidates=max_candidates, cell_images=20)
    if maps.has_large_class:
        maps = maps.with_cells(maps.find_cells(vectors, 0, len(maps.maps)))
    return maps, vectors


def find(max_candidates: int, seed: int = 0) -> NDArray[np.int64]:
    """Returns the nearest images of all maps, in the order of the maps' numbers."""
    maps, vectors = ordered_maps(max_candidates, seed)
    found = np.empty((len(maps.maps), RELATED), np.int64)
    found[maps.maps] = maps.find_nearest(vectors, 0, len(maps.maps), RELATED)
    return found


def recall(found: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    pairs = zip(found.tolist(), exact.tolist(), strict=True)
    return float(np.mean([len(set(row) & set(exact_row)) / RELATED for row, exact_row in pairs]))


def test_a_large_class_is_searched_among_its_nearest_cells() -> None:
    """Classes of up to 100 images are searched completely; the others nearly find the same, among fewer candidates."""
    tags = drawn_tags()
    exact = find(N)
    found = find(100)

    assert np.bincount(tags.values, minlength=4).tolist() == [600, 301, 60, 0]
    small = tags.values == 2
    np.testing.assert_array_equal(found[small], exact[small])
    assert 0.9 < recall(found[~small], exact[~small]) < 1
    assert 0.1 < recall(find(10)[~small], exact[~small]) < 0.7, "the candidates are as many as stated"


def test_images_have_the_class_and_occur_once() -> None:
    tags = drawn_tags()
    found = find(100)
    images = np.repeat(np.arange(N), np.diff(tags.start))
    for image, k, row in zip(images.tolist(), tags.values.tolist(), found.tolist(), strict=True):
        assert len({image, *row}) == 1 + RELATED
        assert tags.matrix(np.array(row))[:, k].all()


@pytest.mark.parametrize("max_candidates", [N, 100])
@pytest.mark.parametrize("size", [1, 7, 250])
def test_parts_give_the_same_as_the_whole(max_candidates: int, size: int) -> None:
    maps, vectors = ordered_maps(max_candidates)
    count = len(maps.maps)
    cells = []
    nearest = []
    for first in range(0, count, size):
        stop = min(first + size, count)
        cells.append(maps.find_cells(vectors, first, stop))
        nearest.append(maps.find_nearest(vectors.astype(np.float16), first, stop, RELATED))

    np.testing.assert_array_equal(np.concatenate(cells), maps.cells)
    np.testing.assert_array_equal(np.concatenate(nearest), maps.find_nearest(vectors, 0, count, RELATED))


def test_parts_draw_no_numbers_for_the_whole_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The centers of class 0, 30 of its 600 images, are drawn once."""
    num_drawn = 0

    def counted(purpose: DrawPurpose, seed: int, first: int, second: NDArray[np.int64]) -> NDArray[np.float64]:
        nonlocal num_drawn
        num_drawn += len(second)
        return uniforms(purpose, seed, first, second)

    maps, vectors = ordered_maps(100)
    draws = uniforms(DrawPurpose.NEAREST_CENTER, 0, 0, np.arange(N))[:, 0]
    np.testing.assert_array_equal(maps.centers[0], np.argsort(draws)[:30])
    assert [len(centers) for centers in maps.centers] == [30, 15, 0, 0]

    monkeypatch.setattr(nearest_images, "uniforms", counted)
    for first in range(0, N, 10):
        maps.find_cells(vectors, first, first + 10)
        maps.find_nearest(vectors, first, first + 10, RELATED)
    assert num_drawn < 60 * N / 2, "only those for the images of a cell"


def test_cells_depend_on_the_seed_alone() -> None:
    np.testing.assert_array_equal(find(100), find(100))
    assert (find(100) != find(100, seed=1)).any()
    np.testing.assert_array_equal(find(N), find(N, seed=1))


def test_a_class_of_equal_images_is_searched() -> None:
    """All images are in one cell, of which only some are candidates."""
    tags = Tags.from_matrix(np.ones((100, 1), bool))
    vectors = np.full((100, 2), 0.5, np.float32)
    maps = ClassMaps.from_tags(tags, 0, max_candidates=16, cell_images=10)
    maps = maps.with_cells(maps.find_cells(vectors, 0, 100))
    found = maps.find_nearest(vectors, 0, 100, 20)
    assert {len(set(row)) for row in found.tolist()} == {15, 16}


def test_half_precision_holds_rounded_vectors_exactly() -> None:
    vectors = rounded_unit_vectors(np.random.default_rng(0).normal(size=(1000, 50)).astype(np.float32))
    np.testing.assert_array_equal(vectors.astype(np.float16).astype(np.float32), vectors)
    units = rounded_unit_vectors(np.eye(3, dtype=np.float32))
    np.testing.assert_array_equal(units.astype(np.float16).astype(np.float32), units)

"""Tests of the search of nearest images in Ray tasks: the same images as in one process, also after a kill."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mcis.datasets.sampling.nearest_images import ClassMaps
from mcis.datasets.sampling.related_images import draw_related_images
from mcis.datasets.tags import Tags
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.outputs.relations import RELATED_TABLE, VECTORS, read_vectors
from mcis.platform.runs.files import write_table
from mcis.platform.stages.localization import nearest
from mcis.platform.stages.localization.nearest import find_nearest_images, write_unit_vectors

N = 300
R = 4


@pytest.fixture
def embedded(tmp_path: Path) -> Path:
    """A folder with the vectors of N images, in shards of 64."""
    vectors = np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)
    for first in range(0, N, 64):
        stop = min(first + 64, N)
        ids = [str(number) for number in range(first, stop)]
        table = pa.table({"image_id": ids, "vector": list(vectors[first:stop])})
        write_table(tmp_path / VECTORS / f"part-{first:08d}-{stop:08d}.parquet", table)
    return tmp_path


def drawn_tags() -> Tags:
    matrix = np.random.default_rng(1).random((N, 3)) < [0.9, 0.5, 0.1]
    matrix[:, 0] |= ~matrix.any(axis=1)
    return Tags.from_matrix(matrix)


def test_unit_vectors_are_the_rounded_vectors(embedded: Path) -> None:
    write_unit_vectors(embedded / VECTORS, embedded / "unit.npy", N)
    unit = np.load(embedded / "unit.npy", mmap_mode="r")
    assert unit.dtype == np.float16
    np.testing.assert_array_equal(unit.astype(np.float32), read_vectors(embedded / VECTORS))


@pytest.mark.parametrize("sizes", [{}, {"max_candidates": 60, "cell_images": 10}], ids=["complete", "cells"])
def test_tasks_find_the_same_as_one_process(
    ray_local: None, embedded: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    monkeypatch.setattr(nearest, "MAPS_PER_TASK", 70)
    monkeypatch.setattr(nearest, "_MAPS_PER_CELLS_TASK", 90)
    tags = drawn_tags()
    found = find_nearest_images(tags, 5, R, embedded, ComputeConfig(), **sizes)

    vectors = read_vectors(embedded / VECTORS)
    maps = ClassMaps.from_tags(tags, 5, **sizes)
    count = len(tags.values)
    if sizes:
        maps = maps.with_cells(maps.find_cells(vectors, 0, count))
    np.testing.assert_array_equal(found[maps.maps], maps.find_nearest(vectors, 0, count, R))
    if not sizes:
        is_source = np.zeros(N, bool)
        drawn = draw_related_images(tags, is_source, seed=5, related=R, related_by="nearest", vectors=vectors)
        np.testing.assert_array_equal(found, drawn.related)

    shards = sorted((embedded / RELATED_TABLE).iterdir())
    assert len(shards) == -(-count // 70)
    shards[2].unlink()
    np.testing.assert_array_equal(find_nearest_images(tags, 5, R, embedded, ComputeConfig(), **sizes), found)

"""Searches the nearest images of all maps in Ray tasks, which map the vectors of all images into memory."""

import functools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.sampling.nearest_images import CELL_IMAGES, MAX_CANDIDATES, ClassMaps, rounded_unit_vectors
from mcis.datasets.storage.folders import fetch_file, path_exists
from mcis.datasets.tags import Positions, Tags
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table
from mcis.platform.outputs.relations import RELATED_TABLE, VECTORS, read_related
from mcis.platform.runs.files import atomic_write, read_shards, read_table

MAPS_PER_TASK = 2**12
"""Number of maps whose related images a task searches. They have at most 2^28 pairs of images and candidates."""
_MAPS_PER_CELLS_TASK = 2**16
"""Number of maps whose cells a task finds."""
_UNIT_VECTORS = "unit_vectors.npy"
_CELLS = "cells"


def find_nearest_images(
    tags: Tags,
    seed: int,
    related: int,
    embedded: Path,
    compute: ComputeConfig,
    *,
    max_candidates: int = MAX_CANDIDATES,
    cell_images: int = CELL_IMAGES,
) -> Positions:
    """Returns the nearest images of all maps of N images, (T, R), the same as `nearest` of RELATED_IMAGE_RULES.

    After a kill only missing parts are searched.

    Args:
        tags: Tags of the images.
        seed: Seed of the random numbers.
        related: R.
        embedded: Folder with the table VECTORS. The table RELATED_TABLE and intermediate results are written to it.
        compute: The section `compute` of the configuration.
        max_candidates, cell_images: See `ClassMaps`.
    """
    vectors = embedded / _UNIT_VECTORS
    if not path_exists(vectors):
        write_unit_vectors(embedded / VECTORS, vectors, len(tags))

    maps = ClassMaps.from_tags(tags, seed, max_candidates=max_candidates, cell_images=cell_images)
    rows = pa.table({"number": np.arange(len(maps.maps))})
    if maps.has_large_class:
        worker = functools.partial(_find_cells, maps, vectors)
        cells = embedded / _CELLS
        map_table(rows, cells, worker=worker, label="cells", compute=compute, shard_rows=_MAPS_PER_CELLS_TASK)
        maps = maps.with_cells(read_table(cells)["cell"].to_numpy())

    worker = functools.partial(_find_nearest, maps, vectors, related)
    label = "nearest images"
    map_table(rows, embedded / RELATED_TABLE, worker=worker, label=label, compute=compute, shard_rows=MAPS_PER_TASK)
    return read_related(embedded / RELATED_TABLE, len(maps.maps), related)


def write_unit_vectors(folder: Path, file: Path, count: int) -> None:
    """Writes the rounded unit vectors of all images to a NumPy file, (N, C) float16, which holds them exactly.

    Args:
        folder: The table VECTORS.
        file: The file.
        count: N.
    """
    with atomic_write(file) as temporary, temporary.open("wb") as content:
        for number, shard in enumerate(read_shards(folder, ["vector"])):
            values = pc.list_flatten(shard["vector"]).to_numpy()
            vectors = rounded_unit_vectors(values.reshape(len(shard), -1).astype(np.float32)).astype(np.float16)
            if number == 0:
                header = {"descr": "<f2", "fortran_order": False, "shape": (count, vectors.shape[1])}
                np.lib.format.write_array_header_1_0(content, header)
            content.write(vectors.astype("<f2").tobytes())


def _open_vectors(file: Path) -> NDArray[np.float16]:
    """Returns the vectors of a file, memory-mapped: the processes of a machine share them."""
    return np.asarray(np.load(fetch_file(file), mmap_mode="r"))


def _find_cells(maps: ClassMaps, vectors: Path, rows: pa.Table) -> pa.Table:
    """Finds the cells of consecutive maps, in a column `cell`."""
    first = rows["number"][0].as_py()
    return pa.table({"cell": maps.find_cells(_open_vectors(vectors), first, first + len(rows))})


def _find_nearest(maps: ClassMaps, vectors: Path, related: int, rows: pa.Table) -> pa.Table:
    """Finds the nearest images of consecutive maps: the table RELATED_TABLE."""
    first = rows["number"][0].as_py()
    stop = first + len(rows)
    nearest = maps.find_nearest(_open_vectors(vectors), first, stop, related)
    values = pa.array(nearest.ravel().astype(np.int32))
    return pa.table({"map": maps.maps[first:stop], "related": pa.FixedSizeListArray.from_arrays(values, related)})

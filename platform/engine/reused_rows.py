"""Copies rows of earlier caches for images that they hold, so that added photographs alone are decoded and embedded."""

import math
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from mcis.datasets.tables.memory_mapped import CachedRows, cache_table
from mcis.platform.engine.mapping import Worker
from mcis.platform.runs.files import read_table, write_table

_IMAGES = "images.parquet"
"""File of a cache with the content hash of each row."""


class CachedRow(NamedTuple):
    """Where a cache holds an image.

    Attributes:
        folder: Folder of the cache.
        position: Row of the image.
    """

    folder: Path
    position: int


def record_images(folder: Path, rows: pa.Table) -> None:
    """Records in a cache which images its rows hold: the column `content_hash` of `rows`."""
    write_table(folder / _IMAGES, rows.select(["content_hash"]))


def count_images(folder: Path) -> float:
    """Returns the number of images in a finished cache; infinity if it has no record, for it then holds all."""
    return len(read_table(folder / _IMAGES)) if (folder / _IMAGES).exists() else math.inf


def find_rows(folders: list[Path], wanted: Set[str]) -> dict[str, CachedRow]:
    """Finds images in finished caches.

    Args:
        folders: Folders of caches with the same kind of rows. Those without a record of their images are left out.
        wanted: Content hashes of the images.

    Returns:
        Content hash -> place, for the images that some cache holds.
    """
    found: dict[str, CachedRow] = {}
    for folder in folders:
        if not (folder / _IMAGES).exists():
            continue
        hashes = read_table(folder / _IMAGES)["content_hash"].to_pylist()
        for position, content_hash in enumerate(hashes):
            if content_hash in wanted:
                found[content_hash] = CachedRow(folder, position)
    return found


class ReuseRows:
    """Maps rows of an index to a shard of a cache; images that other caches hold are copied from them.

    Args:
        make_worker: Makes the worker that computes the rows of the other images.
        shape: Shape of a row.
        held: Content hash -> place of the images that can be copied. A cache may be removed meanwhile; its images are
            then computed.
    """

    def __init__(self, make_worker: Callable[[], Worker], shape: tuple[int, ...], held: dict[str, CachedRow]):
        self.worker = make_worker()
        self.shape = shape
        self.held = held
        self.caches = {folder: CachedRows(folder, shape) for folder in {place.folder for place in held.values()}}

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Returns one row of the cache per row of the index."""
        places = [self.held.get(content_hash) for content_hash in rows["content_hash"].to_pylist()]
        cells = [self.caches[place.folder].row(place.position) if place else None for place in places]
        missing = [number for number, cell in enumerate(cells) if cell is None]
        if missing:
            computed = self.worker(rows.take(missing))["rows"].combine_chunks()
            arrays = computed.flatten().to_numpy().reshape(-1, *self.shape)
            for number, array in zip(missing, arrays, strict=True):
                cells[number] = array
        return cache_table(np.stack([cell for cell in cells if cell is not None]))

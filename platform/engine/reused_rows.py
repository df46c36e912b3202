"""Copies rows of earlier caches for images that they hold, so that added photographs alone are decoded and embedded."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.tables.memory_mapped import CachedRows, cache_table
from mcis.platform.engine.shard_mapper import Worker
from mcis.platform.runs.files import read_table, write_table

_IMAGES = "images.parquet"
"""File of a cache with the content hash of each row."""
_CACHE = "cache"
"""Column with the number of the earlier cache that holds an image, or null."""
_CACHE_ROW = "cache_row"
"""Column with the row of the image in that cache, or null."""


def record_images(folder: Path, rows: pa.Table) -> None:
    """Records in a cache which images its rows hold: the column `content_hash` of `rows`."""
    write_table(folder / _IMAGES, rows.select(["content_hash"]))


def count_images(folder: Path) -> int:
    """Returns the number of images in a finished cache."""
    return len(read_table(folder / _IMAGES))


def find_rows(folders: Sequence[Path], rows: pa.Table) -> pa.Table:
    """Finds images in finished caches.

    Args:
        folders: Folders of caches with the same kind of rows.
        rows: Rows of the images, with a column `content_hash`.

    Returns:
        The rows with the place of each image in two more columns, `cache` and `cache_row`; null if no cache holds it.
    """
    cache = pa.nulls(len(rows), pa.int32())
    cache_row = pa.nulls(len(rows), pa.int32())
    for number, folder in enumerate(folders):
        hashes = read_table(folder / _IMAGES)["content_hash"].combine_chunks()
        found = pc.index_in(rows["content_hash"].combine_chunks(), hashes)
        cache = pc.if_else(found.is_valid(), pa.scalar(number, pa.int32()), cache)
        cache_row = pc.coalesce(found, cache_row)
    return rows.append_column(_CACHE, cache).append_column(_CACHE_ROW, cache_row)


def num_found(rows: pa.Table) -> int:
    """Returns how many of the rows from `find_rows` an earlier cache holds."""
    return len(rows) - rows[_CACHE].null_count


class ReuseRows:
    """Maps rows from `find_rows` to a shard of a cache; images that other caches hold are copied from them.

    Args:
        make_worker: Makes the worker that computes the rows of the other images.
        shape: Shape of a row.
        folders: Folders of the other caches. One may be removed meanwhile; its images are then computed.
    """

    def __init__(self, make_worker: Callable[[], Worker], shape: tuple[int, ...], folders: Sequence[Path]):
        self.worker = make_worker()
        self.shape = shape
        self.caches = [CachedRows(folder, shape) for folder in folders]

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Returns one row of the cache per row of the index."""
        places = zip(rows[_CACHE].to_pylist(), rows[_CACHE_ROW].to_pylist(), strict=True)
        cells = [None if cache is None else self.caches[cache].row(row) for cache, row in places]
        missing = [number for number, cell in enumerate(cells) if cell is None]
        if missing:
            computed = self.worker(rows.take(missing))["rows"].combine_chunks()
            arrays = computed.flatten().to_numpy().reshape(-1, *self.shape)
            for number, array in zip(missing, arrays, strict=True):
                cells[number] = array
        return cache_table(np.stack([cell for cell in cells if cell is not None]))

"""Reading an image's rows from a folder of Parquet shards, as stages leave them."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cachetools
import pyarrow as pa
import pyarrow.parquet as pq

from mcis.datasets.errors import BadFile
from mcis.datasets.storage.folders import AGAIN, fetch_below, files_below, read_file

_T = TypeVar("_T")
SHARD_BYTES = 2**30
"""Bound of the decoded shards that a process keeps in memory, bytes."""


def read_parquet(file: Path, read: Callable[[Path], _T], *, fetch: bool = True) -> _T:
    """What `read` makes of a Parquet file of an output.

    Raises:
        BadFile: it is damaged or absent.
        UserError: it cannot be read at present, see `folders.read_file`.
    """
    expected = "a table as mcis wrote it"
    try:
        return read_file(file, read, expected, fetch=fetch)
    except FileNotFoundError:
        raise BadFile(f"{file} is missing", expected, AGAIN) from None


class Shards:
    """Reads rows by image from a folder of Parquet shards; can be pickled, as it opens a shard only when one is read.

    Decoded shards stay in memory, in each process as many as SHARD_BYTES holds, those least recently read given up
    first. Threads may read at once.

    Args:
        folder: of `part-*.parquet`; the rows of an image lie next to each other in one of them.
        columns: beside `image_id` that rows have; None = all.
    """

    def __init__(self, folder: Path, columns: Sequence[str] | None = None):
        self.folder = folder
        self.columns = None if columns is None else ("image_id", *columns)
        self.shard_of: dict[str, str] = {}
        self.written: dict[str, int] = {}
        fetch_below(folder, lambda name, _: fnmatch(name, "part-*.parquet"))
        for name, at in sorted(files_below(folder).items()):
            if not fnmatch(name, "part-*.parquet"):
                continue
            table = read_parquet(folder / name, functools.partial(pq.read_table, columns=["image_id"]), fetch=False)
            self.written[name] = at.changed  # another file of the same name is another shard
            self.shard_of |= dict.fromkeys(table["image_id"].to_pylist(), name)

    def rows(self, image_id: str) -> pa.Table | None:
        """The rows of one image, or None if the table has none."""
        name = self.shard_of.get(image_id)
        if name is None:
            return None
        shard = _read_shard(self.folder / name, self.columns, self.written[name])
        return shard.table.slice(*shard.rows[image_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shard_of)


class _Shard(NamedTuple):
    """A shard's rows, and by image where its rows begin and how many there are."""

    table: pa.Table
    rows: dict[str, tuple[int, int]]


@cachetools.cached(
    cachetools.LRUCache[Any, _Shard](SHARD_BYTES, getsizeof=lambda shard: shard.table.nbytes),
    condition=threading.Condition(),
)
def _read_shard(path: Path, columns: tuple[str, ...] | None, written: int) -> _Shard:
    """Reads a shard's file, once for all threads of the process; a shard larger than the bound is not kept.

    Args:
        columns: that are read; None = all.
        written: when the file was, which tells it from an earlier one of the same name.
    """
    wanted = None if columns is None else list(columns)
    table = read_parquet(path, functools.partial(pq.read_table, columns=wanted)).combine_chunks()
    rows: dict[str, tuple[int, int]] = {}
    for number, image_id in enumerate(table["image_id"].to_pylist()):
        begin, count = rows.get(image_id, (number, 0))
        rows[image_id] = begin, count + 1
    return _Shard(table, rows)

"""Reading an image's rows from a folder of Parquet shards, as stages leave them."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import cachetools
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mcis.datasets.errors import BadFile
from mcis.datasets.storage.folders import REPEAT_STAGE, fetch_below, files_below, read_file

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
        raise BadFile(f"{file} is missing", expected, REPEAT_STAGE) from None


class Shards:
    """Reads rows by image from a folder of Parquet shards; can be pickled, as it opens a shard only when one is read.

    Decoded shards stay in memory, in each process as many as SHARD_BYTES holds, those least recently read given up
    first. Threads may read at once.

    Args:
        folder: of `part-*.parquet`; the rows of an image lie in one of them.
        columns: beside `image_id` that rows have; None = all.
    """

    def __init__(self, folder: Path, columns: Sequence[str] | None = None):
        self.folder = folder
        self.columns = None if columns is None else ("image_id", *columns)
        self.shard_of: dict[str, tuple[str, int]] = {}
        fetch_below(folder, lambda name, _: fnmatch(name, "part-*.parquet"))
        for name, at in sorted(files_below(folder).items()):
            if fnmatch(name, "part-*.parquet"):
                read = functools.partial(pq.read_table, columns=["image_id"])
                images = read_parquet(folder / name, read, fetch=False)["image_id"].to_pylist()
                self.shard_of |= dict.fromkeys(images, (name, at.changed))  # a file that changed is another shard

    def rows(self, image_id: str) -> pa.Table:
        """The rows of one image; KeyError where the table has none, which is no key of `shard_of`."""
        name, changed = self.shard_of[image_id]
        table = _read_shard(self.folder / name, self.columns, changed)
        return table.filter(pc.equal(table["image_id"], image_id))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shard_of)


@cachetools.cached(
    cachetools.LRUCache[Any, pa.Table](SHARD_BYTES, getsizeof=lambda table: table.nbytes),
    condition=threading.Condition(),
)
def _read_shard(path: Path, columns: tuple[str, ...] | None, changed: int) -> pa.Table:
    """Reads a shard's file, once for all threads of the process; a shard larger than the bound is not kept.

    Args:
        columns: that are read; None = all.
        changed: when the file was, which tells it from an earlier one of the same name.
    """
    wanted = None if columns is None else list(columns)
    return read_parquet(path, functools.partial(pq.read_table, columns=wanted)).combine_chunks()

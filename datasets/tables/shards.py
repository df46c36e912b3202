"""Reads the rows of an image from a folder of Parquet shards that a stage wrote."""

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
"""Maximum size of the decoded shards that a process keeps in memory, bytes."""


def read_parquet(file: Path, read: Callable[[Path], _T], *, fetch: bool = True) -> _T:
    """Returns the result of `read` for a Parquet file of a stage output.

    Raises:
        BadFile: the file is damaged or missing.
        UserError: the file cannot be read at present, see `folders.read_file`.
    """
    expected = "a table written by mcis"
    try:
        return read_file(file, read, expected, fetch=fetch)
    except FileNotFoundError:
        raise BadFile(f"{file} is missing", expected, REPEAT_STAGE) from None


class Shards:
    """Reads rows by image from a folder of Parquet shards. Can be pickled, as shards are opened only when needed.

    Each process keeps up to SHARD_BYTES of decoded shards in memory and drops the least recently used first.
    Thread-safe.

    Args:
        folder: folder of `part-*.parquet`. All rows of an image are in one file.
        columns: columns to read in addition to `image_id`; None = all.
    """

    def __init__(self, folder: Path, columns: Sequence[str] | None = None):
        self.folder = folder
        self.columns = None if columns is None else ("image_id", *columns)
        self.shard_of: dict[str, tuple[str, int]] = {}

        fetch_below(folder, lambda name, _: fnmatch(name, "part-*.parquet"))
        read_ids = functools.partial(pq.read_table, columns=["image_id"])
        for name, stamp in sorted(files_below(folder).items()):
            if fnmatch(name, "part-*.parquet"):
                images = read_parquet(folder / name, read_ids, fetch=False)["image_id"].to_pylist()
                # The modification time is part of the key, so a changed file counts as another shard.
                self.shard_of |= dict.fromkeys(images, (name, stamp.changed))

    def rows(self, image_id: str) -> pa.Table:
        """Returns the rows of one image.

        Raises:
            KeyError: the table has no row of the image (it is not in `shard_of`).
        """
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
    """Reads the file of a shard, once for all threads of the process. Shards larger than SHARD_BYTES are not kept.

    Args:
        columns: columns to read; None = all.
        changed: modification time, which distinguishes the file from earlier ones of the same name.
    """
    wanted = None if columns is None else list(columns)
    return read_parquet(path, functools.partial(pq.read_table, columns=wanted)).combine_chunks()

"""Reads the rows of an image from a folder of Parquet shards that a stage wrote."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cachetools
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mcis.datasets.errors import BadFile
from mcis.datasets.storage.files import stamp
from mcis.datasets.storage.folders import REPEAT_STAGE, fetch_below, files_below, read_file
from mcis.datasets.storage.object_lists import Stamp
from mcis.datasets.tables.large_tables import text_hashes
from mcis.datasets.tables.spans import ShardSpans

_T = TypeVar("_T")
SHARD_BYTES = 2**28
"""Maximum size of the decoded shards that a process keeps in memory, bytes."""


def read_parquet(file: Path, read: Callable[[Path], _T], *, fetch: bool = True) -> _T:
    """Returns the result of `read` for a Parquet file of a stage output.

    Raises:
        BadFile: The file is damaged or missing.
        UserError: The file cannot be read at present, see `folders.read_file`.
    """
    expected = "a table written by mcis"
    try:
        return read_file(file, read, expected, fetch=fetch)
    except FileNotFoundError:
        raise BadFile(f"{file} is missing", expected, REPEAT_STAGE) from None


class _ShardsByName(NamedTuple):
    """The shard of each image of a table, in 12 bytes per image.

    Attributes:
        hashes: Hashes of the image ids (`text_hashes`), ascending, (N,).
        shards: Number of the shard of each, (N,).
    """

    hashes: NDArray[np.int64]
    shards: NDArray[np.int32]


class Shards:
    """Reads rows by image from a folder of Parquet shards. Can be pickled, as shards are opened only when needed.

    Each process keeps up to SHARD_BYTES of decoded shards in memory and drops the least recently used first.
    Thread-safe.

    Args:
        folder: Folder of `part-<first>-<last + 1>.parquet`, see `ShardSpans`. All rows of an image are in one file.
        columns: Columns to read in addition to `image_id`; None: all.
    """

    def __init__(self, folder: Path, columns: Sequence[str] | None = None):
        self.folder = folder
        self.columns = None if columns is None else ("image_id", *columns)
        stamps = files_below(folder)
        self.spans = ShardSpans(stamps)
        names = [self.spans.name(shard) for shard in range(len(self.spans))]
        self.stamps = np.array([stamps[name] for name in names], np.int64).reshape(-1, 2)

    def rows(self, image_id: str, position: int | None = None) -> pa.Table:
        """Returns the rows of one image.

        Args:
            position: Number of the image among those that the stage which wrote the table mapped. None: the image is
                searched by its id. Each process then reads the ids of all images once.

        Raises:
            KeyError: The table has no row of the image, or has it at another position.
        """
        shard = self._shard_by_name(image_id) if position is None else self.spans.shard_of(position)
        if shard is None:
            raise KeyError(image_id)

        # The stamp is part of the key, so a changed file counts as another shard.
        listed = Stamp(*self.stamps[shard].tolist())
        table = _read_shard(self.folder / self.spans.name(shard), self.columns, listed)
        rows = table.filter(pc.equal(table["image_id"], image_id))
        if not len(rows):
            raise KeyError(image_id)
        return rows

    def __contains__(self, image_id: str) -> bool:
        """Whether the table has rows of an image. Each process reads the ids of all images once."""
        return self._shard_by_name(image_id) is not None

    def __iter__(self) -> Iterator[str]:
        """Yields the ids of all images, in the order of the shards."""
        for ids in self._ids_of_shards():
            yield from dict.fromkeys(ids.to_pylist())

    def _ids_of_shards(self) -> Iterator[pa.ChunkedArray]:
        """Yields the column `image_id` of each shard."""
        names = {self.spans.name(shard) for shard in range(len(self.spans))}
        fetch_below(self.folder, lambda name, _: name in names)
        read_ids = functools.partial(pq.read_table, columns=["image_id"])
        for shard in range(len(self.spans)):
            yield read_parquet(self.folder / self.spans.name(shard), read_ids, fetch=False)["image_id"]

    @functools.cached_property
    def _by_name(self) -> _ShardsByName:
        hashes = [np.zeros(0, np.int64)]
        shards = [np.zeros(0, np.int32)]
        for shard, ids in enumerate(self._ids_of_shards()):
            hashes.append(np.unique(text_hashes(ids)))
            shards.append(np.full(len(hashes[-1]), shard, np.int32))
        all_hashes = np.concatenate(hashes)
        order = np.argsort(all_hashes, kind="stable")
        return _ShardsByName(all_hashes[order], np.concatenate(shards)[order])

    def _shard_by_name(self, image_id: str) -> int | None:
        """Returns the number of the shard of an image; None if the table has no row of it."""
        wanted = hash(image_id)
        place = int(np.searchsorted(self._by_name.hashes, wanted))
        if place == len(self._by_name.hashes) or self._by_name.hashes[place] != wanted:
            return None
        return int(self._by_name.shards[place])

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_by_name"}


@cachetools.cached(
    cachetools.LRUCache[Any, pa.Table](SHARD_BYTES, getsizeof=lambda table: table.nbytes),
    condition=threading.Condition(),
)
def _read_shard(path: Path, columns: tuple[str, ...] | None, listed: Stamp) -> pa.Table:
    """Reads the file of a shard, once for all threads of the process. Shards larger than SHARD_BYTES are not kept.

    A copy that has the listed stamp is read without a request to the bucket.

    Args:
        columns: Columns to read; None: all.
        listed: Stamp in the listing of the folder, which distinguishes the file from earlier ones of the same name.
    """
    wanted = None if columns is None else list(columns)
    is_current = stamp(str(path)) == listed
    read = functools.partial(pq.read_table, columns=wanted)
    return read_parquet(path, read, fetch=not is_current).combine_chunks()
